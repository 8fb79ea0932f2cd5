"""Finding one's place: from launchers' variables, from arguments, and refusing what contradicts."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from harness import free_port
from joining import SECRET

from pycoll import errors
from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.dial import (
    Candidate,
    Route,
    UnreachableError,
    dial,
    order_candidates,
    probe,
    rails_of,
    routes_to,
)
from pycoll.bootstrap.discovery import discover as discover_module
from pycoll.bootstrap.discovery.discover import Placement, discover, inside_job
from pycoll.bootstrap.discovery.host import machine_identity, process_token
from pycoll.bootstrap.discovery.identity import (
    Identity,
    choose_transport,
    session_key,
    socket_count,
)
from pycoll.bootstrap.discovery.network import (
    HOST_LOST_S,
    Interface,
    listen_at,
    listen_tcp,
    parse_address,
    tcp_socket,
    watch_host,
)
from pycoll.bootstrap.rendezvous.frames import PULSE_S
from pycoll.config import Config

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-node-17@1",
}
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALNRANKS": "3", "PMI_FD": "9"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_NNODES": "1",
}
TORCHRUN = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "node",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "abc",
    "TORCHELASTIC_RESTART_COUNT": "1",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
HOROVODRUN = {
    "HOROVOD_RANK": "1",
    "HOROVOD_SIZE": "2",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "4712",
}
PYCOLL_RUN = {
    "PYCOLL_RANK": "1",
    "PYCOLL_SIZE": "2",
    "PYCOLL_ADDRESS": "127.0.0.1:4711",
    "PYCOLL_SECRET": SECRET,
    "PYCOLL_JOB_ID": "run-1",
    "PYCOLL_STORE": "launcher",
}


def find(env: dict[str, str], **arguments: Any) -> Placement:
    return discover(Config.read(env), env, **arguments)


@pytest.fixture(autouse=True)
def hydra_s_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discover_module, "_ancestor", lambda names: "4711@99")


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, Placement(0, 1, "nothing found", "solo")),
        (OPEN_MPI, Placement(1, 4, "Open MPI", "unix", "ompi prterun-node-17@1")),
        (HYDRA, Placement(2, 3, "MPICH", "unix", "hydra 4711@99")),
        (HOROVODRUN, Placement(1, 2, "horovodrun", "unix", "horovod 10.0.0.1:4712")),
        (SLURM, Placement(5, 8, "srun", "unix", "slurm 77.0")),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "6"}, Placement(5, 6, "srun", "unix", "slurm 77.0")),
        (TORCHRUN, Placement(0, 2, "torchrun", "torch", "abc/1", "node:29500", launcher=True)),
        (
            PYCOLL_RUN,
            Placement(
                1, 2, "pycoll run", "store", "run-1", "127.0.0.1:4711", SECRET.encode(), True
            ),
        ),
    ],
)
def test_each_launcher_s_variables_give_a_place(env: dict[str, str], expected: Placement) -> None:
    assert find(env) == expected
    assert inside_job(env) == (env != {})


@pytest.mark.parametrize(
    ("env", "source"),
    [
        (SLURM | OPEN_MPI, "Open MPI"),
        (SLURM | HYDRA, "MPICH"),
        (SLURM | TORCHRUN, "torchrun"),
        (OPEN_MPI | TORCHRUN, "torchrun"),
        (SLURM | HOROVODRUN, "horovodrun"),
        (OPEN_MPI | SLURM | TORCHRUN | PYCOLL_RUN, "pycoll run"),
    ],
)
def test_the_inner_launcher_wins(env: dict[str, str], source: str) -> None:
    assert find(env).source == source


def test_slurm_s_own_pmi_is_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discover_module, "_ancestor", lambda names: None)
    assert find(SLURM | {"PMI_RANK": "5", "PMI_SIZE": "8"}).source == "srun"


def test_a_batch_script_is_no_rank() -> None:
    # Slurm sets rank and size there too; the step number says that nobody else runs.
    assert find(SLURM | {"SLURM_STEP_ID": str(0xFFFFFFFB)}).way == "solo"
    without_step = {k: v for k, v in SLURM.items() if k != "SLURM_STEP_ID"}
    assert find(without_step).way == "solo"
    assert not inside_job(without_step)


@pytest.mark.parametrize(
    ("env", "launcher"),
    [
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "Open MPI"),
        (HYDRA | {"MPI_LOCALNRANKS": "1", "PMI_FD": "none"}, "MPICH"),
        (SLURM | {"SLURM_NNODES": "2"}, "srun"),
        (HOROVODRUN | {"HOROVOD_LOCAL_SIZE": "1"}, "horovodrun"),
    ],
)
def test_several_hosts_need_an_address_and_a_secret(env: dict[str, str], launcher: str) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="PYCOLL_ADDRESS") as caught:
        find(env)
    assert launcher in str(caught.value)
    assert "PYCOLL_SECRET" in str(caught.value)
    assert ("mpi4py" in str(caught.value)) == (launcher in ("Open MPI", "MPICH"))
    assert ("srun --mpi=pmix" in str(caught.value)) == (launcher == "srun")
    placement = find(env | {"PYCOLL_ADDRESS": "node:4711", "PYCOLL_SECRET": SECRET})
    assert (placement.way, placement.address, placement.launcher) == ("store", "node:4711", False)
    assert (placement.rank, placement.source) == (find(env | SAME_HOST[launcher]).rank, launcher)


PMIX = {"PMIX_RANK": "1", "PMIX_SERVER_URI41": "prterun-node-17@0.0;tcp4://127.0.0.1:38131"}
TWO_HOSTS = {
    "Open MPI": OPEN_MPI | PMIX | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
    "MPICH": HYDRA | {"MPI_LOCALNRANKS": "1"},
    "srun": SLURM | {"SLURM_NNODES": "2"},
}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (TWO_HOSTS["MPICH"], ("MPICH", "pmi", "9")),
        (TWO_HOSTS["Open MPI"], ("Open MPI", "pmix", "")),
        # mpirun inside a rank of Hydra hands on the outer rank's socket.
        (TWO_HOSTS["Open MPI"] | {"PMI_FD": "9"}, ("Open MPI", "pmix", "")),
        (TWO_HOSTS["srun"] | {"PMI_FD": "11"}, ("srun", "pmi", "11")),
        (TWO_HOSTS["srun"] | PMIX, ("srun", "pmix", "")),
    ],
)
def test_launchers_of_several_hosts_offer_an_exchange(
    env: dict[str, str], expected: tuple[str, str, str]
) -> None:
    placement = find(env)
    assert (placement.source, placement.way, placement.address) == expected
    assert inside_job(env)
    # An address comes first, the socket of one host before the launcher's exchange.
    assert find(env | {"PYCOLL_ADDRESS": "node:4711", "PYCOLL_SECRET": SECRET}).way == "store"
    assert find(env | SAME_HOST[expected[0]]).way == "unix"


def test_a_process_manager_without_a_name_offers_its_socket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(discover_module, "_ancestor", lambda names: None)
    env = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "7"}
    assert find(env) == Placement(1, 2, "PMI", "pmi", "", "7")
    assert find(env | {"PMI_RANK": "0", "PMI_SIZE": "1"}).way == "solo"


class StandInMpi:
    """The parts of mpi4py.MPI that tell whether its world can be used."""

    THREAD_MULTIPLE = 3

    def __init__(self, rank: int, size: int, **answers: Any) -> None:
        self.COMM_WORLD = self
        self._answers = {"Get_rank": rank, "Get_size": size, "Is_initialized": True, **answers}

    def __getattr__(self, name: str) -> Any:
        default = {"Query_thread": 3, "Is_finalized": False, "Is_thread_main": False}
        return lambda: (default | self._answers)[name]


@pytest.mark.parametrize(
    ("mpi", "way"),
    [
        (StandInMpi(2, 3), "mpi"),
        (StandInMpi(2, 3, Query_thread=1, Is_thread_main=True), "mpi"),
        (StandInMpi(2, 3, Query_thread=1), "pmi"),
        (StandInMpi(2, 3, Is_initialized=False), "pmi"),
        (StandInMpi(2, 3, Is_finalized=True), "pmi"),
        (StandInMpi(0, 1), "pmi"),  # an MPI that does not know this launcher
    ],
)
def test_an_mpi_that_runs_is_the_exchange_between_hosts(
    mpi: StandInMpi, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    placement = find(TWO_HOSTS["MPICH"])
    assert (placement.way, placement.comm) == (way, mpi if way == "mpi" else None)
    assert find(HYDRA).way == "unix"


def test_a_rank_that_only_a_port_tells_is_not_alone() -> None:
    with pytest.raises(errors.InvalidArgumentError, match="start without -pmi-port"):
        find({"PMI_PORT": "node:4711", "PMI_ID": "1"})


SAME_HOST = {
    "horovodrun": HOROVODRUN,
    "Open MPI": {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
    "MPICH": {"MPI_LOCALNRANKS": "3"},
    "srun": {"SLURM_NNODES": "1"},
}


def test_explicit_arguments_win_over_a_launcher() -> None:
    placement = find(PYCOLL_RUN, rank=0, size=3, address="node:1", secret="s" * 16)
    assert placement == Placement(
        0, 3, "arguments", "store", "run-1", "node:1", b"s" * 16, launcher=False
    )
    assert find(OPEN_MPI, rank=0, size=1).way == "solo"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"size": 2}, "size=2 is given without rank"),
        ({"rank": 0}, "rank=0 is given without size"),
        ({"rank": 2, "size": 2}, "rank=2 is out of range: size=2 allows 0 to 1"),
        ({"rank": -1, "size": 2}, "rank=-1 is out of range"),
        ({"rank": 0, "size": 0}, "size=0: expected 1 to 4096"),
        ({"rank": "0", "size": 2}, "rank='0': expected a whole number"),
        ({"rank": 0, "size": 2.0}, "size=2.0: expected a whole number"),
        ({"rank": 0, "size": 2}, "without an address"),
        ({"rank": 0, "size": 2, "address": "node:1"}, "without a secret"),
        ({"rank": 0, "size": 2, "address": "node:1", "secret": "short"}, "at least 16"),
        ({"rank": 0, "size": 2, "address": "node:1", "secret": 7}, "secret is a int"),
        ({"address": "node:1"}, "without rank and size"),
        ({"comm": object()}, "comm is a object: expected a communicator of mpi4py"),
        ({"comm": object(), "rank": 1}, "comm= already says"),
    ],
)
def test_bad_arguments_are_named_with_their_values(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(errors.InvalidArgumentError) as caught:
        find({}, **arguments)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"PYCOLL_SIZE": "2"}, "PYCOLL_SIZE=2 is given without PYCOLL_RANK"),
        ({"PYCOLL_RANK": "2", "PYCOLL_SIZE": "2"}, "PYCOLL_RANK=2 is out of range"),
        ({"PYCOLL_RANK": "0", "PYCOLL_SIZE": "2"}, "without an address"),
        ({"PYCOLL_ADDRESS": "node:1"}, "without rank and size"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "4"}, "rank of Open MPI=4 is out of range"),
    ],
)
def test_bad_variables_are_named_with_their_values(env: dict[str, str], text: str) -> None:
    with pytest.raises(errors.InvalidArgumentError) as caught:
        find(env)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("node:1", ("node", 1)),
        ("10.0.0.1:65535", ("10.0.0.1", 65535)),
        ("[fd00::2]:80", ("fd00::2", 80)),
    ],
)
def test_addresses_parse(text: str, pair: tuple[str, int]) -> None:
    assert parse_address(text) == pair


@pytest.mark.parametrize(
    "text", ["node", "node:", ":80", "node:0", "node:65536", "node:http", "fd00::2:80", "node:-1"]
)
def test_malformed_addresses_are_shown(text: str) -> None:
    with pytest.raises(errors.InvalidArgumentError) as caught:
        parse_address(text)
    assert repr(text) in str(caught.value)


def test_a_name_is_listened_for_on_all_addresses() -> None:
    # On Debian a host's own name means 127.0.1.1, where no other host could connect.
    with listen_at("this-host", free_port()) as sock:
        assert sock.getsockname()[0] in ("::", "0.0.0.0")
    with listen_at("localhost", free_port()) as sock:
        assert sock.getsockname()[0] == "127.0.0.1"
    # An address that another machine translates for this one.
    with listen_at("198.51.100.7", free_port()) as sock:
        assert sock.getsockname()[0] in ("::", "0.0.0.0")


MINE = [
    Interface("lo", "127.0.0.1", "127.0.0.0/8"),
    Interface("eth0", "10.1.0.5", "10.1.0.0/16"),
    Interface("docker0", "172.17.0.1", "172.17.0.0/16"),
]
LOOPBACK = Candidate("127.0.0.1", "127.0.0.0/8", 1)
BRIDGE = Candidate("172.17.0.1", "172.17.0.0/16", 1)
FAR = Candidate("192.168.7.9", "192.168.7.0/24", 1)
NEAR = Candidate("10.1.0.6", "10.1.0.0/16", 1)
V6 = Candidate("fd00::6", "fd00::/64", 1)


def test_between_machines_shared_and_loopback_addresses_are_left_out() -> None:
    assert order_candidates(MINE, [LOOPBACK, BRIDGE, FAR, V6, NEAR], False) == [NEAR, FAR, V6]


def test_on_one_machine_loopback_comes_first() -> None:
    assert order_candidates(MINE, [NEAR, BRIDGE, LOOPBACK], True) == [LOOPBACK, NEAR, BRIDGE]


def test_every_pair_of_addresses_in_one_network_is_a_route() -> None:
    near, far = Candidate("10.1.0.6", "10.1.0.0/16", 1), Candidate("10.9.0.6", "10.9.0.0/16", 1)
    twin = Interface("eth1", "10.1.0.9", "10.1.0.0/16")
    assert routes_to([near, far], MINE) == [Route(near, MINE[1]), Route(far)]
    both = routes_to([near], [*MINE, twin])
    assert both == [Route(near, MINE[1], True), Route(near, twin, True)]
    assert str(both[1]) == "10.1.0.6:1 from eth1"


def _route(ours: str, theirs: str, our_speed: int, their_speed: int) -> Route:
    target = Candidate("10.1.0.6", "10.1.0.0/16", 1, theirs, their_speed)
    return Route(target, Interface(ours, "10.1.0.5", "10.1.0.0/16", our_speed))


def test_rails_share_no_interface_and_are_equally_fast() -> None:
    first, second = _route("ib0", "ib0", 100, 100), _route("ib1", "ib1", 100, 100)
    crossed, slow = _route("ib0", "ib1", 100, 100), _route("eth0", "eth0", 10, 10)
    throttled, unknown = _route("ib2", "ib2", 100, 10), _route("tun0", "tun0", 0, 0)
    assert rails_of([slow, first, crossed, unknown, throttled, second]) == [first, second]
    assert rails_of([unknown, _route("tun1", "tun1", 0, 0)]) == [
        unknown,
        _route("tun1", "tun1", 0, 0),
    ]
    assert rails_of([Route(V6), Route(FAR)]) == [Route(V6)], "it may be one interface"
    assert rails_of([]) == []


def test_a_probe_finds_the_open_ways_and_waits_for_no_other() -> None:
    network = "127.0.0.0/8"
    with listen_tcp("127.0.0.1") as one, listen_tcp("127.0.0.1") as other:
        ports = [one.getsockname()[1], free_port(), other.getsockname()[1]]
        routes = [Route(Candidate("127.0.0.1", network, port)) for port in ports]
        # An address of a test network, which nobody answers for.
        routes.insert(0, Route(Candidate("192.0.2.1", "192.0.2.0/24", 9)))
        deadline = Deadline(10)
        assert probe(routes) == [routes[1], routes[3]]
        assert deadline.remaining() > 9.8
        assert probe(routes[:1]) == []


@contextlib.contextmanager
def silent_address() -> Iterator[Candidate]:
    """An address that never answers: a listener whose queue is full drops what comes."""
    with listen_tcp("127.0.0.1") as full, contextlib.ExitStack() as undo:
        full.listen(0)
        for _ in range(4):
            sock = undo.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(full.getsockname())
        yield Candidate("127.0.0.1", "127.0.0.0/8", full.getsockname()[1])


def test_a_silent_address_does_not_hold_up_one_that_answers() -> None:
    with listen_tcp("127.0.0.1") as listener, silent_address() as hole:
        good = Candidate("127.0.0.1", "127.0.0.0/8", listener.getsockname()[1])
        deadline = Deadline(10)
        sock, route = dial([Route(hole), Route(good)], lambda sock, limit: None, deadline)
        sock.close()
        assert route.target == good
        assert deadline.remaining() > 8


def test_dialling_ends_once_another_rank_is_known_to_be_lost() -> None:
    calls = []

    def check() -> None:
        calls.append(1)
        if len(calls) > 2:
            raise errors.PeerLostError("host far is gone", ranks=[3])

    with silent_address() as hole:
        deadline = Deadline(60)
        with pytest.raises(errors.PeerLostError, match="host far is gone"):
            dial([Route(hole)], lambda sock, limit: None, deadline, check)
        assert deadline.remaining() > 40


def test_the_loss_of_a_host_is_noticed_within_5_s() -> None:
    """Its network says nothing. The first pulse that is not acknowledged leaves up to ``PULSE_S``
    later; without pulses the kernel probes."""
    with listen_tcp("127.0.0.1") as listener, tcp_socket("127.0.0.1") as near:
        near.connect(listener.getsockname())
        watch_host(near)

        def seconds(option: int) -> int:
            return near.getsockopt(socket.IPPROTO_TCP, option)

        probes = seconds(socket.TCP_KEEPINTVL) * seconds(socket.TCP_KEEPCNT)
        assert near.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert 0 < seconds(socket.TCP_USER_TIMEOUT) / 1000 == HOST_LOST_S
        assert PULSE_S + HOST_LOST_S <= 4.5
        assert seconds(socket.TCP_KEEPIDLE) + probes <= 4.5


def test_failed_candidates_are_listed_with_their_reasons() -> None:
    candidates = [Candidate("127.0.0.1", "127.0.0.0/8", free_port()) for _ in range(2)]
    deadline = Deadline(10)
    with pytest.raises(UnreachableError) as caught:
        dial([Route(c) for c in candidates], lambda sock, limit: None, deadline)
    for candidate in candidates:
        assert f"127.0.0.1:{candidate.port} (Connection refused)" in str(caught.value)
    assert deadline.remaining() > 8, "a refusal is an answer, not a reason to wait"


def test_the_choice_of_a_pair_is_symmetric() -> None:
    configs = [
        Config(transports=transports, host_id=host, tcp_sockets=sockets)
        for transports in (("shm",), ("tcp",), ("shm", "tcp"))
        for host in (None, "a")
        for sockets in (1, 3)
    ]
    identities = [Identity.mine(config) for config in configs]
    kinds = set()
    for a in identities:
        assert Identity.from_bytes(a.to_bytes()) == a
        for b in identities:
            kinds.add(choose_transport(a, b))
            assert choose_transport(a, b) == choose_transport(b, a)
            assert socket_count(a, b) == socket_count(b, a) == min(a.tcp_sockets, b.tcp_sockets)
    assert kinds == {"shm", "tcp", None}


def test_every_rank_s_nonce_the_secret_and_the_name_change_the_key() -> None:
    ranks = [Identity.mine(Config()) for _ in range(3)]
    other = [ranks[0], ranks[1], Identity.mine(Config())]
    keys = {
        session_key(b"secret", "world", ranks),
        session_key(b"Secret", "world", ranks),
        session_key(b"secret", "world/1", ranks),
        session_key(b"secret", "world", other),
        session_key(b"secret", "world", ranks[::-1]),
    }
    assert len(keys) == 5
    assert session_key(b"secret", "world", ranks) in keys


def test_a_fork_is_another_process_on_the_same_machine() -> None:
    import os

    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, f"{process_token()} {machine_identity()}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    token, machine = os.read(reader, 1000).decode().split()
    os.close(reader)
    os.close(writer)
    assert token != process_token() == process_token()
    assert machine == machine_identity()
