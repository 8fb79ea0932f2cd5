"""Processes of one host share memory by way of one of them, or all are told why not."""

from __future__ import annotations

import errno
import os
import re
import socket
import time
from typing import Any

import pytest
from joining import World, all_well, connect_all

from pycoll import errors
from pycoll.bootstrap import local_rendezvous
from pycoll.bootstrap.rendezvous.exchange import MemoryExchange
from pycoll.bootstrap.shared_memory import Neighbours
from pycoll.config import Config

pytestmark = pytest.mark.usefixtures("nothing_is_left", "as_processes")


def test_descriptors_of_many_ranks_come_in_several_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local_rendezvous, "_RANKS_PER_MESSAGE", 2)
    with World() as world:
        all_well(connect_all([Config(init_timeout_s=30)] * 6, world))
        world.check()
        assert [sorted(made.peers) for made in world.made if made.rank == 5] == [[0, 1, 2, 3, 4]]


def test_processes_of_one_host_need_two_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[int] = []
    gather = MemoryExchange.all_gather

    def counted(self: Any, blob: bytes) -> list[bytes]:
        rounds.append(self.rank)
        return gather(self, blob)

    monkeypatch.setattr(MemoryExchange, "all_gather", counted)
    with World() as world:
        all_well(connect_all([Config(init_timeout_s=30)] * 3, world))
        assert sorted(rounds) == [0, 0, 1, 1, 2, 2]
        rounds.clear()
        configs = [Config(init_timeout_s=30, host_id=str(host)) for host in (0, 0, 1)]
        all_well(connect_all(configs, world))
        assert sorted(rounds) == [0] * 4 + [1] * 4 + [2] * 4


def test_too_many_descriptors_on_their_way_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.send_fds
    refused: list[int] = []

    def send_fds(sock: socket.socket, buffers: Any, fds: Any, *rest: Any) -> int:
        if len(fds) > local_rendezvous.DESCRIPTORS and len(refused) < 5:
            refused.append(len(fds))
            raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))
        return real(sock, buffers, fds, *rest)

    monkeypatch.setattr(socket, "send_fds", send_fds)
    with World() as world:
        all_well(connect_all([Config(init_timeout_s=30)] * 4, world))
        world.check()
    assert refused == [9] * 5


def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    meet = Neighbours.meet

    def stay_away(self: Any, *arguments: Any) -> None:
        if self._rank != 2:
            meet(self, *arguments)

    monkeypatch.setattr(Neighbours, "meet", stay_away)
    with World() as world:
        results = connect_all([Config(init_timeout_s=1)] * 3, world)
    assert all(isinstance(result, errors.PycollError) for result in results)
    text = r"rank 0 \(.*\) waited 0\.\d+ s in vain for connections from rank 2"
    assert re.match(text, str(results[0])), results


def test_a_rendezvous_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    meet = Neighbours.meet

    def shut(self: Any, *arguments: Any) -> None:
        if self._rank == 0:
            self._ends.local_address.close()
        else:
            time.sleep(0.2)  # until the door is shut
            meet(self, *arguments)

    monkeypatch.setattr(Neighbours, "meet", shut)
    started = time.monotonic()
    with World() as world:
        results = connect_all([Config(init_timeout_s=20)] * 3, world)
    assert time.monotonic() - started < 5, "somebody waited for a deadline"
    for result in results:
        assert isinstance(result, errors.TransportError)
        assert "cannot reach rank 0 (" in str(result)
        assert ") over shm: its unix socket: Connection refused" in str(result)


@pytest.mark.parametrize("broken", [0, 2])
def test_a_rank_without_memory_fails_all_and_nobody_waits(broken: int) -> None:
    world = World()
    real = world.factories["shm"]

    def make(rank: int, size: int) -> Any:
        if rank == broken:
            raise errors.TransportError("no memory for segments")
        return real(rank, size)

    world.factories["shm"] = make
    started = time.monotonic()
    with world:
        results = connect_all([Config(init_timeout_s=20)] * 3, world)
    assert time.monotonic() - started < 5, "somebody waited for a deadline"
    for rank, result in enumerate(results):
        assert isinstance(result, errors.TransportError)
        assert "no memory for segments" in str(result)
        assert rank == broken or result.ranks == (broken,)


def test_memory_that_nobody_shares_may_be_refused() -> None:
    world = World()

    def make(rank: int, size: int) -> Any:
        raise errors.TransportError("no memory for segments")

    world.factories["shm"] = make
    configs = [Config(init_timeout_s=30, host_id=str(host)) for host in range(2)]
    with world:
        for connected in all_well(connect_all(configs, world)):
            assert len(connected.transports) == 1
        world.check()


def test_lost_descriptors_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.recv_fds

    def recv_fds(sock: socket.socket, size: int, most: int, flags: int = 0) -> Any:
        data, fds, told, address = real(sock, size, most, flags)
        for fd in fds[3:]:
            os.close(fd)
        return data, fds[:3], told | socket.MSG_CTRUNC if len(fds) > 3 else told, address

    monkeypatch.setattr(socket, "recv_fds", recv_fds)
    with World() as world:
        results = connect_all([Config(init_timeout_s=20)] * 3, world)
    for result in results:
        assert isinstance(result, errors.TransportError)
        assert re.search(r"rank [12] got no shared memory from rank 0 \(", str(result))
        assert "some of its descriptors were lost; is the limit of open files" in str(result)
