"""Helpers for the tests of joining: transports that only hold descriptors, worlds of threads."""

from __future__ import annotations

import fcntl
import functools
import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pycoll.bootstrap.connect import connect
from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.joining import Joined, join
from pycoll.bootstrap.rendezvous.exchange import MemoryExchange
from pycoll.config import Config

T = TypeVar("T")

SECRET = "correct horse battery staple"

#: Threads get this long; every test that would hang fails by it.
HANG_S = 60.0


class FakeShm:
    """A segment that holds its owner's rank, a doorbell, both ends of a lifeline; keeps what peers
    hand over.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self._segment = os.memfd_create("fake")
        os.write(self._segment, struct.pack("<i", rank))
        self._doorbell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._inbox, self._lifeline = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for sock in (self._inbox, self._lifeline):
            sock.setblocking(False)
        self.peers: dict[int, tuple[int, int, int, int]] = {}

    def segment_fd(self) -> int:
        return self._segment

    def doorbell_fd(self) -> int:
        return self._doorbell

    def lifeline_fd(self) -> int:
        return self._lifeline.fileno()

    def inbox_fd(self) -> int:
        return self._inbox.fileno()

    def liveness_fd(self, peer: int) -> int:
        return self.peers[peer][2]

    def attach(self, peer: int, segment: int, doorbell: int, liveness: int, pid: int) -> None:
        assert peer not in self.peers
        self.peers[peer] = (segment, doorbell, liveness, pid)

    def close(self) -> None:
        for fd in [self._segment, self._doorbell, *(f for p in self.peers.values() for f in p[:3])]:
            if fd >= 0:
                os.close(fd)
        self._inbox.close()
        self._lifeline.close()
        self.peers.clear()
        self._segment = self._doorbell = -1

    def check(self) -> None:
        """Each peer's segment says its owner; ring everyone's bell."""
        for peer, (segment, doorbell, _, _) in self.peers.items():
            assert os.pread(segment, 4, 0) == struct.pack("<i", peer)
            os.eventfd_write(doorbell, 1)


class FakeTcp:
    """Keeps the sockets."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.peers: dict[int, list[socket.socket]] = {}
        self.addresses: dict[int, str] = {}

    def attach(self, peer: int, fds: list[int], address: str) -> None:
        assert peer not in self.peers
        self.peers[peer] = [socket.socket(fileno=fd) for fd in fds]
        self.addresses[peer] = address

    def close(self) -> None:
        for sockets in self.peers.values():
            for sock in sockets:
                sock.close()
        self.peers.clear()

    def send(self) -> None:
        for peer, sockets in self.peers.items():
            for index, sock in enumerate(sockets):
                sock.settimeout(5)
                sock.sendall(struct.pack("<iii", self.rank, peer, index))

    def check(self) -> None:
        """Assert that the first bytes on socket i came from the peer's socket i."""
        for peer, sockets in self.peers.items():
            for index, sock in enumerate(sockets):
                assert sock.recv(12) == struct.pack("<iii", peer, self.rank, index)


class World:
    """Fake transports that close themselves; pass ``factories`` to ``connect``."""

    def __init__(self) -> None:
        self.made: list[FakeShm | FakeTcp] = []
        self._lock = threading.Lock()
        self.factories: dict[str, Callable[[int, int], Any]] = {"shm": self._shm, "tcp": self._tcp}

    def __enter__(self) -> World:
        return self

    def __exit__(self, *unused: object) -> None:
        for transport in self.made:
            transport.close()

    def _shm(self, rank: int, size: int) -> FakeShm:
        made = FakeShm(rank, size)
        with self._lock:
            self.made.append(made)
        return made

    def _tcp(self, rank: int, size: int) -> FakeTcp:
        made = FakeTcp(rank, size)
        with self._lock:
            self.made.append(made)
        return made

    def check(self) -> None:
        """Every descriptor that was handed over leads to the right peer."""
        for transport in self.made:
            if isinstance(transport, FakeTcp):
                transport.send()
        for transport in self.made:
            transport.check()


def run_all(jobs: Sequence[Callable[[], T]]) -> list[T | BaseException]:
    """Each job in a thread of its own; results or exceptions, in order."""
    results: list[Any] = [AssertionError("still running")] * len(jobs)

    def run(index: int) -> None:
        try:
            results[index] = jobs[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
        assert not thread.is_alive(), "a rank hangs"
    return results


def all_well(results: Sequence[T | BaseException]) -> list[T]:
    """The results; raises the first exception among them."""
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


def footprint() -> tuple[int, int]:
    """Threads and descriptors of this process."""
    return threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))


def connect_all(configs: list[Config], world: World) -> list[Any]:
    exchanges = MemoryExchange.make(len(configs), Deadline(configs[0].init_timeout_s))
    return run_all(
        [
            functools.partial(connect, exchange, config, factories=world.factories)
            for exchange, config in zip(exchanges, configs, strict=True)
        ]
    )


def join_all(worlds: World, ranks: int, **arguments: Any) -> list[Joined | BaseException]:
    transports = arguments.pop("transports", ("shm", "tcp"))
    config = Config(init_timeout_s=arguments.pop("timeout", 10.0), transports=transports)
    return run_all(
        [
            functools.partial(
                join, config, rank=rank, size=ranks, factories=worlds.factories, **arguments
            )
            for rank in range(ranks)
        ]
    )


class FolderStore:
    """What TorchStoreExchange needs of a store of torch's, in files: for processes that would take
    long to import torch."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def _path(self, key: str) -> Path:
        return self._folder / key.replace("/", "_")

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._path(key).exists() for key in keys)

    def get(self, key: str) -> bytes:
        return self._path(key).read_bytes()

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else value
        written = self._folder / f".{os.getpid()}-{threading.get_ident()}"
        written.write_bytes(data)
        written.replace(self._path(key))

    def add(self, key: str, amount: int) -> int:
        with open(self._folder / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            value = int(self.get(key) if self.check([key]) else b"0") + amount
            self.set(key, str(value))
            return value
