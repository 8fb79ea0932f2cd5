"""RDMA ports found in a sysfs that tests write, and how pairs of ranks come to use them."""

from __future__ import annotations

import functools
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from joining import World, all_well, run_all

from pycoll import errors
from pycoll.bootstrap import connect as connecting
from pycoll.bootstrap.connect import connect
from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.discovery.identity import Identity, choose_transport
from pycoll.bootstrap.discovery.rails import Port, match
from pycoll.bootstrap.discovery.verbs import choose_ports, ports
from pycoll.bootstrap.rendezvous.exchange import MemoryExchange
from pycoll.config import Config

LINK_LOCAL = "fe80:0000:0000:0000:5054:00ff:fe12:3456"
IPV4 = "0000:0000:0000:0000:0000:ffff:0a4d:0001"
IPV6 = "2001:0db8:0000:0000:0000:0000:0000:0001"
EMPTY = "0000:0000:0000:0000:0000:0000:0000:0000"


def make_port(
    root: Path,
    device: str,
    number: int,
    gids: list[tuple[str, str]],
    layer: str = "Ethernet",
    state: str = "4: ACTIVE",
    rate: str = "100 Gb/sec (4X EDR)",
) -> None:
    """As the kernel shows a port; ``gids`` are addresses and their types."""
    port = root / device / "ports" / str(number)
    (port / "gids").mkdir(parents=True)
    (port / "gid_attrs/types").mkdir(parents=True)
    (port / "state").write_text(state + "\n")
    (port / "link_layer").write_text(layer + "\n")
    (port / "rate").write_text(rate + "\n")
    for index, (gid, kind) in enumerate(gids):
        (port / "gids" / str(index)).write_text(gid + "\n")
        if kind:
            (port / "gid_attrs/types" / str(index)).write_text(kind + "\n")


def test_no_sysfs_means_no_ports(tmp_path: Path) -> None:
    assert ports(tmp_path / "absent") == []


def test_the_best_address_of_each_active_port_counts(tmp_path: Path) -> None:
    v1, v2 = "IB/RoCE v1", "RoCE v2"
    table = [(LINK_LOCAL, v1), (LINK_LOCAL, v2), (IPV6, v1), (IPV6, v2), (IPV4, v1), (IPV4, v2)]
    make_port(tmp_path, "mlx5_10", 1, [(LINK_LOCAL, v2)], rate="")
    make_port(tmp_path, "mlx5_9", 1, [*table, (EMPTY, "")])
    make_port(tmp_path, "mlx5_9", 2, [(LINK_LOCAL, v2), (IPV6, v2)])
    make_port(tmp_path, "mlx5_11", 1, [(IPV4, v2)], state="1: DOWN")
    make_port(tmp_path, "mlx5_12", 1, [(IPV4, v1)])
    make_port(tmp_path, "mlx5_13", 1, [(LINK_LOCAL, "IB/RoCE v1")], layer="InfiniBand")
    assert ports(tmp_path) == [
        Port("mlx5_9", 1, 5, IPV4, "RoCE IPv4", 100),
        Port("mlx5_9", 2, 1, IPV6, "RoCE IPv6", 100),
        Port("mlx5_10", 1, 0, LINK_LOCAL, "RoCE link-local", 0),
        Port("mlx5_13", 1, 0, LINK_LOCAL, "InfiniBand fe80:0000:0000:0000", 100),
    ]


def test_ranks_of_one_host_begin_with_different_ports_of_the_allowed(tmp_path: Path) -> None:
    for device in ("mlx5_0", "mlx5_1", "mlx5_2"):
        make_port(tmp_path, device, 1, [(IPV4, "RoCE v2")])

    def chosen(local_rank: int, *allowed: str) -> str:
        config = Config(verbs_devices=allowed)
        return "".join(port.device[-1] for port in choose_ports(config, local_rank, tmp_path))

    assert [chosen(rank) for rank in range(4)] == ["012", "120", "201", "012"]
    assert [chosen(rank, "mlx5_2", "mlx5_0:1") for rank in range(3)] == ["02", "20", "02"]
    with pytest.raises(errors.TransportError) as refused:
        chosen(0, "mlx5_0:2", "rxe")
    assert "PYCOLL_VERBS_DEVICES allows mlx5_0:2, rxe" in str(refused.value)
    assert "mlx5_1:1 (RoCE IPv4)" in str(refused.value)


def test_a_slow_port_next_to_faster_ones_is_used_only_if_named(tmp_path: Path) -> None:
    """It would hold up the others; one of another network does not."""
    make_port(tmp_path, "a0", 1, [(IPV4, "RoCE v2")], rate="25 Gb/sec (1X EDR)")
    make_port(tmp_path, "a1", 1, [(IPV4, "RoCE v2")])
    make_port(tmp_path, "a2", 1, [(IPV4, "RoCE v2")], rate="56 Gb/sec (4X FDR)")
    make_port(tmp_path, "a3", 1, [(IPV6, "RoCE v2")], rate="25 Gb/sec (1X EDR)")
    make_port(tmp_path, "a4", 1, [(IPV4, "RoCE v2")], rate="unknown")
    assert [port.device for port in choose_ports(Config(), 0, tmp_path)] == ["a1", "a2", "a3", "a4"]
    named = Config(verbs_devices=("a0", "a1"))
    assert [port.device for port in choose_ports(named, 0, tmp_path)] == ["a0", "a1"]


def some_ports(*words: str) -> list[Port]:
    """From texts like "mlx5_0 10.0.1.7": a device and the last bytes of its address."""
    made = []
    for word in words:
        device, address = word.split(" ")
        digits = "".join(f"{int(byte):02x}" for byte in address.split("."))
        gid = f"0000:0000:0000:0000:0000:ffff:{digits[:4]}:{digits[4:]}"
        made.append(Port(device, 1, 0, gid, "RoCE IPv4"))
    return made


FOUR = some_ports("a0 10.0.0.1", "a1 10.0.0.2", "a2 10.0.0.3", "a3 10.0.0.4")


@pytest.mark.parametrize(
    ("lower", "higher", "most", "rails"),
    [
        (FOUR, FOUR, 4, [(0, 0), (1, 1), (2, 2), (3, 3)]),
        # The order is the lower rank's; ports of one name meet.
        (FOUR, FOUR[1:] + FOUR[:1], 4, [(0, 3), (1, 0), (2, 1), (3, 2)]),
        (FOUR, FOUR[2:] + FOUR[:2], 2, [(0, 2), (1, 3)]),
        (FOUR, FOUR, 3, [(0, 0), (1, 1)]),
        (FOUR, FOUR, 1, [(0, 0)]),
        # As many as the end with fewer has, and no three.
        (FOUR, FOUR[2:3], 4, [(2, 0)]),
        (FOUR[:3], FOUR, 4, [(0, 0), (1, 1)]),
        # Networks that are apart: what the addresses say comes before the names.
        (
            some_ports("a0 10.0.0.1", "a1 10.0.1.1"),
            some_ports("a0 10.0.1.2", "a1 10.0.0.2"),
            4,
            [(0, 1), (1, 0)],
        ),
        # Other names: in order.
        (FOUR[:2], some_ports("b0 10.0.0.8", "b1 10.0.0.9"), 4, [(0, 0), (1, 1)]),
        (FOUR, [], 4, []),
        ([], FOUR, 4, []),
    ],
)
def test_rails_are_pairs_of_ports(
    lower: list[Port], higher: list[Port], most: int, rails: list[tuple[int, int]]
) -> None:
    assert match(lower, higher, most) == rails


def test_rails_are_on_one_network_that_both_are_on() -> None:
    ib = Port("ib0", 1, 0, LINK_LOCAL, "InfiniBand fe80:0000:0000:0000")
    assert match([ib, *FOUR], [*FOUR, ib], 4) == [(0, 4)]
    assert match([ib, *FOUR], FOUR, 4) == [(1, 0), (2, 1), (3, 2), (4, 3)]
    assert match([ib], FOUR, 4) == []


def test_verbs_join_what_is_on_one_network_and_allowed_by_both() -> None:
    def identity(network: str, *transports: str, host: str | None = None) -> Identity:
        ports = tuple(Port("a", 1, 0, IPV4, one) for one in network.split(", ") if one)
        return Identity.mine(Config(transports=transports, host_id=host), ports)

    roce = identity("RoCE IPv4", "verbs", "tcp", host="a")
    assert choose_transport(roce, identity("RoCE IPv4", "verbs", "tcp", host="b")) == "verbs"
    assert choose_transport(roce, identity("RoCE IPv6", "verbs", "tcp", host="b")) == "tcp"
    two = identity("RoCE IPv6, RoCE IPv4", "verbs", "tcp", host="b")
    assert choose_transport(roce, two) == choose_transport(two, roce) == "verbs"
    assert choose_transport(roce, identity("RoCE IPv4", "tcp", host="b")) == "tcp"
    assert choose_transport(roce, identity("", "verbs", host="b")) is None
    here = identity("RoCE IPv4", "shm", "verbs", host="a")
    assert choose_transport(here, here) == "shm"
    assert Identity.from_bytes(two.to_bytes()) == two


class FakeVerbs:
    """Makes addresses that name both ends, and keeps what the peers gave.

    Of the device "full" nobody gets a pair, of "narrow" only rank 0.
    """

    def __init__(self, rank: int, size: int, ports: list[tuple[str, int, int]]) -> None:
        assert all(port[1:] == (1, 0) for port in ports)
        self.rank, self.device, self.ports = rank, ports[0][0], [port[0] for port in ports]
        self.peers: dict[int, tuple[bytes, socket.socket, str]] = {}
        self.rails: dict[int, list[str]] = {}
        self.forgotten: list[int] = []

    def forget(self, peer: int) -> None:
        self.forgotten.append(peer)

    def prepare(self, peer: int, rails: list[int]) -> bytes:
        self.rails[peer] = [self.ports[place] for place in rails]
        if self.device == "full" or (self.device == "narrow" and peer > 0):
            raise errors.TransportError(f"verbs: {self.device} gives no memory for {peer}")
        return f"{self.device} of {self.rank} for {peer} \xff".encode("latin-1")

    def attach(self, peer: int, address: bytes, liveness: int, name: str) -> None:
        self.peers[peer] = (address, socket.socket(fileno=liveness), name)


def with_verbs(world: World, made: list[FakeVerbs]) -> dict[str, Callable[..., Any]]:
    lock = threading.Lock()

    def make(*words: Any) -> FakeVerbs:
        one = FakeVerbs(*words)
        with lock:
            made.append(one)
        return one

    return world.factories | {"verbs": make}


def test_addresses_reach_the_peer_that_they_are_for(
    monkeypatch: pytest.MonkeyPatch, nothing_is_left: None
) -> None:
    """Every pair also has one socket, whose ends belong together and carry nothing."""
    port = Port("mlx5_0", 1, 0, IPV4, "RoCE IPv4")
    monkeypatch.setattr(connecting, "_verbs_ports", lambda config: ((port,), ""))
    made: list[FakeVerbs] = []
    with World() as world:
        exchanges = MemoryExchange.make(3, Deadline(20))
        config = Config(transports=("verbs",), init_timeout_s=20)
        factories = with_verbs(world, made)
        jobs = [functools.partial(connect, e, config, factories=factories) for e in exchanges]
        connected = all_well(run_all(jobs))
        assert [len(one.transports) for one in connected] == [1, 1, 1]
        by_rank = sorted(made, key=lambda one: one.rank)
        for one in by_rank:
            assert sorted(one.peers) == [p for p in range(3) if p != one.rank]
            for peer, (address, sock, name) in one.peers.items():
                assert address == f"mlx5_0 of {peer} for {one.rank} \xff".encode("latin-1")
                assert name.startswith(f"rank {peer} (")
                other = by_rank[peer].peers[one.rank][1]
                assert sock.getsockname() == other.getpeername()
                with pytest.raises(BlockingIOError):
                    sock.recv(1)
        for one in by_rank:
            for _, sock, _ in one.peers.values():
                sock.close()


def test_a_rank_without_a_port_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connecting, "_verbs_ports", lambda config: ((), "no RDMA port to use"))
    with World() as world:
        exchanges = MemoryExchange.make(2, Deadline(20))
        config = Config(transports=("verbs",), init_timeout_s=20)
        factories = with_verbs(world, [])
        jobs = [functools.partial(connect, e, config, factories=factories) for e in exchanges]
        for rank, outcome in enumerate(run_all(jobs)):
            assert isinstance(outcome, errors.InvalidArgumentError)
            assert f"On rank {rank}: no RDMA port to use" in str(outcome)
            assert "no transport is left" in str(outcome)


def join_three(
    world: World, made: list[FakeVerbs], devices: list[str], *transports: str
) -> list[connecting.Connected | BaseException]:
    """Three ranks with these devices; an empty name is of a rank that finds none."""
    exchanges = MemoryExchange.make(3, Deadline(20))
    factories = with_verbs(world, made)
    jobs = []
    for exchange, device in zip(exchanges, devices, strict=True):
        config = Config(
            transports=transports, verbs_devices=(device,), tcp_sockets=2, init_timeout_s=20
        )
        jobs.append(functools.partial(connect, exchange, config, factories=factories))
    return run_all(jobs)


def own_ports(config: Config) -> tuple[tuple[Port, ...], str]:
    """In place of what sysfs says: the devices that the settings name, joined by "+"."""
    (names,) = config.verbs_devices
    ports = tuple(Port(name, 1, 0, IPV4, "RoCE IPv4") for name in names.split("+") if name)
    return ports, "" if ports else "no RDMA port to use"


def test_both_ends_number_rails_alike_and_open_no_other_ports(
    monkeypatch: pytest.MonkeyPatch, nothing_is_left: None
) -> None:
    monkeypatch.setattr(connecting, "_verbs_ports", own_ports)
    made: list[FakeVerbs] = []
    with World() as world:
        all_well(join_three(world, made, ["a+b", "b+a+x+y", "z"], "verbs"))
        by_rank = sorted(made, key=lambda one: one.rank)
        assert [one.rails for one in by_rank] == [
            {1: ["a", "b"], 2: ["a"]},
            {0: ["a", "b"], 2: ["b"]},
            {0: ["z"], 1: ["z"]},
        ]
        assert [one.ports for one in by_rank] == [["a", "b"], ["b", "a"], ["z"]]
        for one in made:
            for _, sock, _ in one.peers.values():
                sock.close()


@pytest.mark.parametrize(
    ("devices", "paired", "warning"),
    [
        (["a", "a", "a"], {0: [1, 2], 1: [0, 2], 2: [0, 1]}, None),
        (["a", "a", ""], {0: [1], 1: [0]}, "rank 2 (HOST): no RDMA port to use"),
        (["a", "", ""], {}, "rank 1 (HOST): no RDMA port to use; and 1 ranks more"),
        (["full", "a", "a"], {1: [2], 2: [1]}, "rank 0 (HOST): verbs: full gives no memory for 1"),
        (
            ["a", "narrow", "a"],
            {0: [1, 2], 1: [0], 2: [0]},
            "rank 1 (HOST): verbs: narrow gives no memory for 2",
        ),
    ],
)
def test_pairs_without_verbs_fall_back_on_tcp_with_one_warning(
    monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder,
    nothing_is_left: None,
    devices: list[str],
    paired: dict[int, list[int]],
    warning: str | None,
) -> None:
    """Ranks 0, 1, 2; ``paired`` says who has verbs with whom, all others use two tcp sockets."""
    monkeypatch.setattr(connecting, "_verbs_ports", own_ports)
    made: list[FakeVerbs] = []
    with World() as world:
        connected = all_well(join_three(world, made, devices, "verbs", "tcp"))
        for rank, one in enumerate(connected):
            verbs = [t for t in one.transports if isinstance(t, FakeVerbs)]
            tcp = [t for t in one.transports if not isinstance(t, FakeVerbs)]
            by_verbs = sorted(peer for t in verbs for peer in t.peers)
            assert by_verbs == paired.get(rank, [])
            assert sorted(by_verbs + [peer for t in tcp for peer in t.peers]) == [
                peer for peer in range(3) if peer != rank
            ]
            assert all(len(sockets) == 2 for t in tcp for sockets in t.peers.values())
            for t in verbs:
                assert not set(t.forgotten) & set(t.peers)
        texts = [str(one.message) for one in recwarn if "verbs" in str(one.message)]
        name = connected[0].names[0]
        expected = [] if warning is None else [warning.replace("HOST", name)]
        assert texts == [f"tcp is used instead of verbs: {one}" for one in expected]
        for one in made:
            for _, sock, _ in one.peers.values():
                sock.close()


def test_where_only_verbs_is_allowed_a_device_that_fails_is_an_error_for_all(
    monkeypatch: pytest.MonkeyPatch, nothing_is_left: None
) -> None:
    monkeypatch.setattr(connecting, "_verbs_ports", own_ports)
    with World() as world:
        outcomes = join_three(world, [], ["a", "narrow", "a"], "verbs")
        for outcome in outcomes:
            assert isinstance(outcome, errors.TransportError)
            assert "verbs: narrow gives no memory for 2" in str(outcome)
