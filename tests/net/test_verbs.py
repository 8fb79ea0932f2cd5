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
from pycoll.bootstrap.exchange import MemoryExchange
from pycoll.bootstrap.identity import Identity, choose_transport
from pycoll.bootstrap.verbs import Port, choose_port, ports
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
) -> None:
    """As the kernel shows a port; ``gids`` are addresses and their types."""
    port = root / device / "ports" / str(number)
    (port / "gids").mkdir(parents=True)
    (port / "gid_attrs/types").mkdir(parents=True)
    (port / "state").write_text(state + "\n")
    (port / "link_layer").write_text(layer + "\n")
    for index, (gid, kind) in enumerate(gids):
        (port / "gids" / str(index)).write_text(gid + "\n")
        if kind:
            (port / "gid_attrs/types" / str(index)).write_text(kind + "\n")


def test_no_sysfs_means_no_ports(tmp_path: Path) -> None:
    assert ports(tmp_path / "absent") == []


def test_the_best_address_of_each_active_port_counts(tmp_path: Path) -> None:
    v1, v2 = "IB/RoCE v1", "RoCE v2"
    table = [(LINK_LOCAL, v1), (LINK_LOCAL, v2), (IPV6, v1), (IPV6, v2), (IPV4, v1), (IPV4, v2)]
    make_port(tmp_path, "mlx5_10", 1, [(LINK_LOCAL, v2)])
    make_port(tmp_path, "mlx5_9", 1, [*table, (EMPTY, "")])
    make_port(tmp_path, "mlx5_9", 2, [(LINK_LOCAL, v2), (IPV6, v2)])
    make_port(tmp_path, "mlx5_11", 1, [(IPV4, v2)], state="1: DOWN")
    make_port(tmp_path, "mlx5_12", 1, [(IPV4, v1)])
    make_port(tmp_path, "mlx5_13", 1, [(LINK_LOCAL, "IB/RoCE v1")], layer="InfiniBand")
    assert ports(tmp_path) == [
        Port("mlx5_9", 1, 5, IPV4, "RoCE IPv4"),
        Port("mlx5_9", 2, 1, IPV6, "RoCE IPv6"),
        Port("mlx5_10", 1, 0, LINK_LOCAL, "RoCE link-local"),
        Port("mlx5_13", 1, 0, LINK_LOCAL, "InfiniBand fe80:0000:0000:0000"),
    ]


def test_ranks_of_one_host_take_turns_among_the_allowed_ports(tmp_path: Path) -> None:
    for device in ("mlx5_0", "mlx5_1", "mlx5_2"):
        make_port(tmp_path, device, 1, [(IPV4, "RoCE v2")])

    def chosen(local_rank: int, *allowed: str) -> str:
        config = Config(verbs_devices=allowed)
        return choose_port(config, local_rank, tmp_path).device

    assert [chosen(rank) for rank in range(4)] == ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_0"]
    assert [chosen(r, "mlx5_2", "mlx5_0:1") for r in range(3)] == ["mlx5_0", "mlx5_2", "mlx5_0"]
    with pytest.raises(errors.TransportError) as refused:
        chosen(0, "mlx5_0:2", "rxe")
    assert "PYCOLL_VERBS_DEVICES allows mlx5_0:2, rxe" in str(refused.value)
    assert "mlx5_1:1 (RoCE IPv4)" in str(refused.value)


def test_verbs_join_what_is_on_one_network_and_allowed_by_both() -> None:
    def identity(network: str, *transports: str, host: str | None = None) -> Identity:
        return Identity.mine(Config(transports=transports, host_id=host), "", network)

    roce = identity("RoCE IPv4", "verbs", "tcp", host="a")
    assert choose_transport(roce, identity("RoCE IPv4", "verbs", "tcp", host="b")) == "verbs"
    assert choose_transport(roce, identity("RoCE IPv6", "verbs", "tcp", host="b")) == "tcp"
    assert choose_transport(roce, identity("RoCE IPv4", "tcp", host="b")) == "tcp"
    assert choose_transport(roce, identity("", "verbs", host="b")) is None
    here = identity("RoCE IPv4", "shm", "verbs", host="a")
    assert choose_transport(here, here) == "shm"
    assert Identity.from_bytes(roce.to_bytes()) == roce


class FakeVerbs:
    """Makes addresses that name both ends, and keeps what the peers gave.

    Of the device "full" nobody gets a pair, of "narrow" only rank 0.
    """

    def __init__(self, rank: int, size: int, device: str, port: int, index: int) -> None:
        assert (port, index) == (1, 0)
        self.rank, self.device = rank, device
        self.peers: dict[int, tuple[bytes, socket.socket, str]] = {}
        self.forgotten: list[int] = []

    def forget(self, peer: int) -> None:
        self.forgotten.append(peer)

    def prepare(self, peer: int) -> bytes:
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
    monkeypatch.setattr(connecting, "_verbs_port", lambda config: (port, ""))
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
    monkeypatch.setattr(connecting, "_verbs_port", lambda config: (None, "no RDMA port to use"))
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


def own_port(config: Config) -> tuple[Port | None, str]:
    """In place of what sysfs says: the device that the settings name."""
    (name,) = config.verbs_devices
    return (Port(name, 1, 0, IPV4, "RoCE IPv4"), "") if name else (None, "no RDMA port to use")


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
    monkeypatch.setattr(connecting, "_verbs_port", own_port)
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
    monkeypatch.setattr(connecting, "_verbs_port", own_port)
    with World() as world:
        outcomes = join_three(world, [], ["a", "narrow", "a"], "verbs")
        for outcome in outcomes:
            assert isinstance(outcome, errors.TransportError)
            assert "verbs: narrow gives no memory for 2" in str(outcome)
