"""Connecting: every pair of ranks gets the right medium, or every rank raises and says why."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import re
import socket
import threading
import time
from typing import Any

import pytest
from harness import free_port
from joining import (
    SECRET,
    FakeShm,
    FakeTcp,
    World,
    all_well,
    connect_all,
    join_all,
    run_all,
)

from pycoll import errors
from pycoll.bootstrap import connect as connect_module
from pycoll.bootstrap import links
from pycoll.bootstrap.connect import ROUNDS, connect, sit_out
from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.discovery.network import interfaces
from pycoll.bootstrap.handshake import Purpose
from pycoll.bootstrap.joining import Joined, join_group, join_threads
from pycoll.bootstrap.rendezvous.exchange import MemoryExchange, ParentExchange
from pycoll.bootstrap.unreachable import unreachable
from pycoll.config import Config

pytestmark = pytest.mark.usefixtures("nothing_is_left")


@pytest.mark.parametrize("size", range(1, 10))
@pytest.mark.parametrize("transports", [("shm", "tcp"), ("tcp",)])
def test_threads_are_connected_pair_by_pair(size: int, transports: tuple[str, ...]) -> None:
    with World() as world:
        joined = join_threads(
            size, Config(transports=transports, init_timeout_s=30), world.factories
        )
        assert [j.rank for j in joined] == list(range(size))
        kind = FakeShm if "shm" in transports else FakeTcp
        for j in joined:
            assert (j.size, j.hosts, len(j.names)) == (size, [0] * size, size)
            assert [type(t) for t in j.transports] == ([kind] if size > 1 else [])
            for transport in j.transports:
                assert sorted(transport.peers) == [r for r in range(size) if r != j.rank]
                if isinstance(transport, FakeShm):
                    assert {p[2] for p in transport.peers.values()} == {-1}
        world.check()


def test_all_ranks_know_the_most_oversubscribed_host(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = [0, 1, 1, 1, 1, 1]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    configs = [Config(host_id=f"host {h}", init_timeout_s=30) for h in hosts]
    with World() as world:
        results = all_well(connect_all(configs, world))
        assert [result.oversubscription for result in results] == [2.5] * 6
        assert [j.oversubscription for j in join_threads(1, Config(), world.factories)] == [1.0]


@pytest.mark.parametrize("size", [2, 3, 5, 9])
@pytest.mark.usefixtures("as_processes")
def test_processes_of_one_host_pass_descriptors_and_keep_a_liveness_socket(size: int) -> None:
    with World() as world:
        all_well(connect_all([Config(init_timeout_s=30)] * size, world))
        world.check()
        for transport in world.made:
            assert isinstance(transport, FakeShm)
            for _, _, liveness, pid in transport.peers.values():
                assert pid == os.getpid()
                # Nothing was left unread on the socket, and the peer still holds its end.
                with pytest.raises(BlockingIOError), socket.socket(fileno=os.dup(liveness)) as sock:
                    sock.recv(1)


@pytest.mark.usefixtures("as_processes")
def test_ranks_of_two_hosts_use_shm_inside_and_tcp_between() -> None:
    hosts = [0, 1, 1, 0, 2]
    configs = [Config(host_id=f"host {h}", init_timeout_s=30, tcp_sockets=1 + h) for h in hosts]
    with World() as world:
        results = all_well(connect_all(configs, world))
        world.check()
        for rank, connected in enumerate(results):
            assert connected.hosts == hosts
            for transport in connected.transports:
                for peer, way in transport.peers.items():
                    assert isinstance(transport, FakeShm) == (hosts[peer] == hosts[rank])
                    if isinstance(transport, FakeTcp):
                        assert len(way) == 1 + min(hosts[peer], hosts[rank])


def test_an_shm_world_opens_no_network_port(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> socket.socket:
        raise AssertionError("a network port was opened")

    monkeypatch.setattr(links, "listen_in_range", refuse)
    with World() as world:
        join_threads(3, Config(init_timeout_s=10), world.factories)
        world.check()


def test_a_tcp_world_on_one_host_listens_on_loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts: list[str | None] = []
    real = links.listen_in_range
    monkeypatch.setattr(
        links, "listen_in_range", lambda host, ports: hosts.append(host) or real(host, ports)
    )
    with World() as world:
        join_threads(3, Config(transports=("tcp",), init_timeout_s=10), world.factories)
    assert set(hosts) == {"127.0.0.1"}


def test_ports_come_from_the_given_range() -> None:
    first = 20000 + os.getpid() % 20000
    ports = (first, first + 9)
    config = Config(transports=("tcp",), port_range=ports, init_timeout_s=10)
    with World() as world:
        join_threads(4, config, world.factories)
        for transport in world.made:
            assert isinstance(transport, FakeTcp)
            for peer, sockets in transport.peers.items():
                listening = sockets[0].getpeername() if peer < transport.rank else None
                assert listening is None or ports[0] <= listening[1] <= ports[1]


def test_a_range_without_a_free_port_is_told_to_all() -> None:
    with socket.socket() as taken, World() as world:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = Config(transports=("tcp",), port_range=(port, port), init_timeout_s=5)
        results = connect_all([config] * 3, world)
        for result in results:
            assert isinstance(result, errors.TransportError)
            assert f"PYCOLL_PORT_RANGE={port}-{port}" in str(result)


def test_an_unknown_interface_is_told_to_all() -> None:
    config = Config(transports=("tcp",), interfaces=("nic7",), init_timeout_s=5)
    with World() as world:
        for result in connect_all([config] * 2, world):
            assert isinstance(result, errors.InvalidArgumentError)
            assert "PYCOLL_INTERFACES names 'nic7'" in str(result)
            assert "lo" in str(result)


def test_interfaces_restrict_where_tcp_goes() -> None:
    config = Config(transports=("tcp",), interfaces=("lo",), init_timeout_s=10)
    with World() as world:
        join_threads(3, config, world.factories)
        world.check()
        for transport in world.made:
            assert isinstance(transport, FakeTcp)
            assert all(
                "127.0.0.1" in text or "::1" in text for text in transport.addresses.values()
            )


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ([{"transports": ("shm",)}, {"transports": ("tcp",)}], "one host"),
        ([{"transports": ("shm",), "host_id": "a"}, {"host_id": "b"}], "different hosts"),
    ],
)
def test_no_transport_in_common_is_an_error_on_both_sides(
    settings: list[dict[str, Any]], where: str
) -> None:
    with World() as world:
        results = connect_all([Config(init_timeout_s=5, **s) for s in settings], world)
        for peer, result in zip((1, 0), results, strict=True):
            assert isinstance(result, errors.InvalidArgumentError)
            assert f"on {where}: no transport is left" in str(result)
            assert result.rank == peer


def test_a_transport_that_cannot_be_made_fails_all_ranks() -> None:
    def broken(rank: int, size: int) -> Any:
        if rank == 1:
            raise errors.TransportError("no memory for segments")
        return FakeTcp(rank, size)

    world = World()
    world.factories["tcp"] = broken
    config = Config(transports=("tcp",), init_timeout_s=5)
    results = connect_all([config] * 3, world)
    for rank, result in enumerate(results):
        assert isinstance(result, errors.TransportError)
        assert "no memory for segments" in str(result)
        assert rank == 1 or result.ranks == (1,)


@pytest.mark.parametrize("stored", [False, True])
def test_an_unreachable_peer_is_named_with_address_and_reason(
    stored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = links.Links._listen_tcp
    port = free_port()

    def closed_port(self: Any, keeper: Any) -> Any:
        offered = real(self, keeper)
        return [c._replace(port=port) for c in offered] if self._rank == 0 else offered

    monkeypatch.setattr(links.Links, "_listen_tcp", closed_port)
    started = time.monotonic()
    with World() as world:
        if stored:
            where = f"127.0.0.1:{free_port()}"
            results = join_all(
                world, 3, address=where, secret=SECRET, timeout=20, transports=("tcp",)
            )
        else:
            results = connect_all([Config(transports=("tcp",), init_timeout_s=20)] * 3, world)
    # Nobody waits for a deadline: the failure is told at once.
    assert time.monotonic() - started < 5
    for result in results:
        assert isinstance(result, errors.TransportError)
        assert re.match(r"rank [12] \(.*\) cannot reach rank 0 \(", str(result))
        assert f"127.0.0.1:{port} (Connection refused)" in str(result)
        assert str(result).endswith(
            "reachable pairs of ranks (+ yes, - no):\n   0 1 2\n 0   - -\n 1 -   +\n 2 - +"
        )
        assert result.rank == 0


def test_the_matrix_of_a_large_world_is_left_out_but_not_the_pairs() -> None:
    names = [f"host:{rank}" for rank in range(40)]
    error = unreachable(names, [{}, *({0: "over tcp: tried it"} for _ in range(39))])
    assert str(error).count("cannot reach rank 0 (host:0) over tcp: tried it") == 8
    assert "and 31 more pairs" in str(error)
    assert "\n" not in str(error)


def test_a_peer_that_never_connects_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    dial, finish = links.Links.dial, links.Links.finish

    def forget(self: Any, *arguments: Any) -> Any:
        return {} if self._rank == 2 else dial(self, *arguments)

    def pretend(self: Any, *arguments: Any) -> Any:
        return [] if self._rank == 2 else finish(self, *arguments)

    monkeypatch.setattr(links.Links, "dial", forget)
    monkeypatch.setattr(links.Links, "finish", pretend)
    with World() as world:
        results = connect_all([Config(transports=("tcp",), init_timeout_s=1)] * 3, world)
    text = r"rank [01] \(.*\) waited 0\.\d+ s in vain for connections from rank 2"
    assert all(isinstance(result, errors.PycollError) for result in results)
    assert any(re.match(text, str(result)) for result in results[:2]), results


@pytest.mark.usefixtures("as_processes")
@pytest.mark.parametrize("transports", [("shm",), ("tcp",)])
@pytest.mark.parametrize("seed", [1, 2])
def test_strangers_at_the_data_ports_do_not_disturb(
    transports: tuple[str, ...], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    print("seed", seed)
    prng = random.Random(seed)
    attacked: list[threading.Thread] = []
    stop = threading.Event()

    def attack(family: int, address: Any, seed: int) -> None:
        own = random.Random(seed)
        while not stop.is_set():
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as sock:
                sock.settimeout(1)
                sock.connect(address)
                sock.sendall(own.randbytes(own.choice([1, 119, 120, 300])))

    real = links.Admission.listen

    def listen(self: Any, listener: socket.socket, purpose: Purpose) -> None:
        real(self, listener, purpose)
        arguments = (listener.family, listener.getsockname(), prng.getrandbits(32))
        attacked.append(threading.Thread(target=attack, args=arguments, daemon=True))
        attacked[-1].start()

    monkeypatch.setattr(links.Admission, "listen", listen)
    try:
        with World() as world:
            all_well(connect_all([Config(transports=transports, init_timeout_s=30)] * 4, world))
            world.check()
        assert len(attacked) == {"shm": 1, "tcp": 3}[transports[0]]
    finally:
        stop.set()
        for thread in attacked:
            thread.join()


def test_a_group_of_a_parent_connects_while_another_sits_out() -> None:
    size, members = 5, [3, 0, 4]
    parents = MemoryExchange.make(size, Deadline(30))

    def one(parent: MemoryExchange) -> Joined | None:
        if parent.rank not in members:
            sit_out(parent.all_gather)
            return None
        rank = members.index(parent.rank)
        config = Config(init_timeout_s=30)
        return join_group(parent.all_gather, members, rank, "world/1", config, world.factories)

    with World() as world:
        results = all_well(run_all([functools.partial(one, parent) for parent in parents]))
        world.check()
        assert [r.rank for r in results if r is not None] == [1, 0, 2]
        assert all(r is None or r.size == 3 for r in results)


def test_connect_takes_the_same_number_of_rounds_on_failure() -> None:
    rounds: list[int] = []

    def gather(blob: bytes) -> list[bytes]:
        rounds.append(1)
        return [blob]

    connect(ParentExchange(gather, [0], 0), Config(), factories={})
    assert len(rounds) == ROUNDS
    parents = MemoryExchange.make(2, Deadline(10))
    counts = [0, 0]

    def one(parent: MemoryExchange) -> None:
        def counted(blob: bytes) -> list[bytes]:
            counts[parent.rank] += 1
            return parent.all_gather(blob)

        exchange = ParentExchange(counted, [0, 1], parent.rank)
        only = ("shm",) if parent.rank else ("tcp",)
        connect(exchange, Config(transports=only, init_timeout_s=5), factories={})

    results = run_all([functools.partial(one, parent) for parent in parents])
    assert all(isinstance(result, errors.InvalidArgumentError) for result in results)
    assert counts == [ROUNDS, ROUNDS]


def test_the_native_transports_take_what_connect_hands_over() -> None:
    factories = connect_module.native_factories()
    for transports in (("shm", "tcp"), ("tcp",)):
        joined = join_threads(4, Config(transports=transports, init_timeout_s=30), factories)
        kind = type(factories[transports[0]](0, 1))
        assert all([type(t) for t in j.transports] == [kind] for j in joined)


@pytest.mark.parametrize("transports", [("shm",), ("tcp",)])
def test_native_transports_are_released_when_another_rank_fails(
    transports: tuple[str, ...],
) -> None:
    native = connect_module.native_factories()

    def one_fails(kind: str) -> Any:
        def make(rank: int, size: int) -> Any:
            if rank == 2:
                raise errors.TransportError("no memory for segments")
            return native[kind](rank, size)

        return make

    factories = {kind: one_fails(kind) for kind in native}
    with pytest.raises(errors.TransportError, match="no memory for segments"):
        join_threads(4, Config(transports=transports, init_timeout_s=10), factories)


def test_this_machine_has_a_loopback_interface() -> None:
    assert any(i.loopback and i.name == "lo" for i in interfaces())
    assert all(i.name == "lo" for i in interfaces(["lo"]))
