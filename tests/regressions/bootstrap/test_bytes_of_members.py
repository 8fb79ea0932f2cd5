"""A member that held the secret ended the store's thread with JSON of its own, since the thread
named the exceptions that it expected; all others then waited until their deadline."""

from __future__ import annotations

import functools
import json
import random
import struct
import time
from collections.abc import Callable
from typing import Any

import pytest
from harness import free_port
from joining import SECRET, World, run_all

from pycoll import errors
from pycoll.bootstrap.connect import connect
from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.discovery.network import listen_tcp, resolve
from pycoll.bootstrap.rendezvous.exchange import MemoryExchange
from pycoll.bootstrap.rendezvous.frames import GATHER_HEAD, HEAD, SHARE_HEAD, Kind, frame
from pycoll.bootstrap.rendezvous.store import join_store
from pycoll.bootstrap.rendezvous.store_connection import StoreAddress, StoreConnection
from pycoll.bootstrap.rendezvous.store_server import StoreServer
from pycoll.config import Config

DEEP = b"[" * 3000
HELLO = json.dumps({"size": 3, "name": "evil:1"}).encode()
GATHER = GATHER_HEAD.pack(0, 60_000, 60_000)
#: What a member may send instead of its greeting, or behind it.
GREETINGS = {
    "deep": DEEP,
    "infinite": b'{"size": 1e999, "name": "x"}',
    "no number": b'{"size": "3", "name": "x"}',
    "a truth": b'{"size": true, "name": "x"}',
    "huge": b'{"size": 1' + b"0" * 3000 + b', "name": "x"}',
    "a list": b"[3]",
    "too much": b'{"size": 3, "name": "x", "more": 1}',
    "unprintable": b'{"size": 3, "name": "\\u001b[2J"}',
    "no text": b"\xff\xfe\x00",
    "long": b" " * 5000,
}
FOLLOWS = {
    "an unknown kind": frame(Kind.HELLO, HELLO) + HEAD.pack(0, 99),
    "a second greeting": frame(Kind.HELLO, HELLO) * 2,
    "4 GiB announced": frame(Kind.HELLO, HELLO) + HEAD.pack(0xFFFFFFFF, Kind.GATHER),
    "half a head": frame(Kind.HELLO, HELLO) + frame(Kind.GATHER, b"123"),
    "a later round": frame(Kind.HELLO, HELLO)
    + frame(Kind.GATHER, GATHER_HEAD.pack(7, 60_000, 60_000)),
    "two rounds at once": frame(Kind.HELLO, HELLO)
    + frame(Kind.GATHER, GATHER)
    + frame(Kind.GATHER, GATHER_HEAD.pack(1, 60_000, 60_000)),
    "no text in an alarm": frame(Kind.HELLO, HELLO) + frame(Kind.ALARM, b"\xff"),
    "leaving with bytes": frame(Kind.HELLO, HELLO) + frame(Kind.LEAVE, b"x"),
    "a result": frame(Kind.HELLO, HELLO) + frame(Kind.RESULT, b""),
    "a share of a rank": frame(Kind.HELLO, HELLO) + frame(Kind.SHARE, SHARE_HEAD.pack(9, 9)),
    "a loss without a share": frame(Kind.HELLO, HELLO) + frame(Kind.LOST, b"x"),
}


def admitted(port: int, first: bytes, rank: int = 2) -> StoreConnection:
    """A member that is admitted and then says what ``first`` holds."""
    store = StoreAddress("here", resolve("127.0.0.1", port), launcher=True)
    connection = StoreConnection(store, SECRET.encode(), "j", rank, Deadline(20))
    connection.send(first)
    return connection


def told_to_honest(first: bytes) -> list[Any]:
    """What rank 0, which came before, and rank 1, which comes later, make of it long before their
    deadline of 20 s; then the same store serves three honest ranks, so its thread lives."""
    listener = listen_tcp("127.0.0.1")
    port = listener.getsockname()[1]
    server = StoreServer(listener, 3, SECRET.encode(), "j", "the launcher")
    server.start()

    def honest(rank: int, after_s: float = 0.0) -> list[bytes]:
        time.sleep(after_s)
        address = f"127.0.0.1:{port}"
        key = SECRET.encode()
        exchange = join_store(address, key, "j", rank, 3, Deadline(20), launcher=True)
        try:
            return exchange.all_gather(bytes([rank]))
        finally:
            exchange.close()

    def hostile() -> None:
        time.sleep(0.1)
        raw = admitted(port, first)
        raw.sock.settimeout(20)
        assert raw.sock.recv(4096), "the culprit is told as well"
        raw.sock.close()

    try:
        jobs: list[Callable[[], Any]] = [
            functools.partial(honest, rank, 0.25 * rank) for rank in range(2)
        ]
        begin = time.monotonic()
        *told, culprit = run_all([*jobs, hostile])
        assert culprit is None
        assert time.monotonic() - begin < 15, "the others waited for their deadline"
        again = run_all([functools.partial(honest, rank) for rank in range(3)])
        assert again == [[b"\0", b"\1", b"\2"]] * 3
        return told
    finally:
        server.close()


@pytest.mark.parametrize("what", GREETINGS)
def test_a_greeting_that_cannot_be_read_is_told_to_all(what: str) -> None:
    for error in told_to_honest(frame(Kind.HELLO, GREETINGS[what])):
        assert isinstance(error, errors.TransportError), error
        assert list(error.ranks) == [2]
        assert "rank 2 sent unreadable data to the store of the launcher" in str(error)


@pytest.mark.parametrize("what", FOLLOWS)
def test_a_frame_out_of_place_is_told_to_all_with_its_sender(what: str) -> None:
    for error in told_to_honest(FOLLOWS[what]):
        assert isinstance(error, errors.TransportError), error
        assert "rank 2 (evil:1) sent unreadable data to the store of the launcher" in str(error)


def test_no_random_bytes_end_the_store() -> None:
    """One store for all of them: its last meeting is as good as its first."""
    listener = listen_tcp("127.0.0.1")
    port = listener.getsockname()[1]
    server = StoreServer(listener, 3, SECRET.encode(), "j", "the launcher")
    server.start()
    good = [*FOLLOWS.values(), *(frame(Kind.HELLO, one) for one in GREETINGS.values())]
    try:
        for seed in range(150):
            prng = random.Random(seed)
            data = bytearray(prng.choice(good))
            for _ in range(prng.randrange(4)):
                data[prng.randrange(len(data))] = prng.randrange(256)
            if prng.random() < 0.3:
                data[:4] = struct.pack("<I", prng.choice([0, 1, 2**31, 2**32 - 1]))
            if prng.random() < 0.3:
                del data[prng.randrange(len(data)) :]
            admitted(port, bytes(data), rank=prng.randrange(5)).sock.close()
            assert server._loop._thread.is_alive(), f"seed {seed}"
    finally:
        server.close()


@pytest.mark.parametrize("blob", [DEEP, b"{}", b"1e999", b'{"size": 1e999}', b"\xff"])
def test_an_identity_that_cannot_be_read_is_named_by_all_ranks(blob: bytes) -> None:
    assert_named(0, blob, "rank 1 sent unreadable data: ")


ENDPOINTS = [
    DEEP,
    b"[]",
    b'{"tcp": 1e999}',
    b'{"tcp": [["127.0.0.1", "n", 1e999, "lo", 0]]}',
    b'{"tcp": [["nowhere", "n", 4711, "lo", 0]]}',
    b'{"descriptors": [1, 1e999]}',
    b'{"unreached": {"x": "y"}}',
    b'{"surprise": 1}',
]


@pytest.mark.parametrize("blob", ENDPOINTS)
def test_an_endpoint_that_cannot_be_read_is_named_by_all_ranks(blob: bytes) -> None:
    assert_named(1, blob, "rank 1 failed to join: sent unreadable data: ")


def assert_named(number: int, blob: bytes, told: str) -> None:
    """All of 3 ranks, the culprit too, where rank 1 tells ``blob`` in the round ``number``."""
    exchanges = MemoryExchange.make(3, Deadline(20))
    honest, rounds = exchanges[1].all_gather, iter(range(100))

    def gather(mine: bytes) -> list[bytes]:
        return honest(blob if next(rounds) == number else mine)

    exchanges[1].all_gather = gather  # type: ignore[method-assign]
    with World() as world:
        config = Config(transports=("tcp",), init_timeout_s=20)
        jobs = [
            functools.partial(connect, one, config, factories=world.factories) for one in exchanges
        ]
        for error in run_all(jobs):
            assert isinstance(error, errors.TransportError), error
            assert told in str(error)


def test_a_store_that_answers_nonsense_is_named() -> None:
    """Here the store is the one that cannot be trusted."""
    port = free_port()
    listener = listen_tcp("127.0.0.1", port)
    server = StoreServer(listener, 1, SECRET.encode(), "j", "the launcher")
    server._greet = lambda member, size, name: server._send(  # type: ignore[method-assign]
        member, frame(Kind.FAIL, DEEP)
    )
    server.start()
    try:
        key = SECRET.encode()
        exchange = join_store(f"127.0.0.1:{port}", key, "j", 0, 1, Deadline(20), launcher=True)
        with pytest.raises(errors.TransportError, match="sent rank 0 unreadable data: its JSO"):
            exchange.all_gather(b"")
        exchange.abandon()
    finally:
        server.close()
