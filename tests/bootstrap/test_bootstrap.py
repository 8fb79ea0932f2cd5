"""Meeting: all ranks find each other, or every one that came raises and names who is at fault."""

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
    World,
    all_well,
    join_all,
    run_all,
)

from pycoll import errors
from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.discovery.network import listen_tcp
from pycoll.bootstrap.joining import join
from pycoll.bootstrap.rendezvous.exchange import MemoryExchange
from pycoll.bootstrap.rendezvous.store import join_store, join_unix
from pycoll.bootstrap.rendezvous.store_server import StoreServer
from pycoll.config import Config

pytestmark = pytest.mark.usefixtures("nothing_is_left")


@pytest.mark.usefixtures("as_processes")
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_ranks_meet_at_an_explicit_address(host: str) -> None:
    with World() as world:
        joined = all_well(
            join_all(world, 3, address=f"{host}:{free_port()}", secret=SECRET, timeout=20)
        )
        world.check()
        assert [(j.rank, j.size, j.source) for j in joined] == [
            (r, 3, "arguments") for r in range(3)
        ]


def test_the_same_address_serves_again_after_all_have_left() -> None:
    address = f"127.0.0.1:{free_port()}"
    for _ in range(3):
        with World() as world:
            all_well(join_all(world, 2, address=address, secret=SECRET))


def test_a_rank_that_never_arrives_is_named_on_every_rank() -> None:
    arguments = {"size": 4, "address": f"127.0.0.1:{free_port()}", "secret": SECRET}
    config = Config(init_timeout_s=1.0)
    started = time.monotonic()
    results = run_all(
        [functools.partial(join, config, rank=rank, factories={}, **arguments) for rank in (0, 2)]
    )
    assert time.monotonic() - started < 3
    for result in results:
        assert isinstance(result, errors.TimeoutError)
        assert isinstance(result, TimeoutError)
        assert result.ranks == (1, 3)
        assert "waited 1 s for ranks 1 and 3 of 4" in str(result)
        assert "PYCOLL_INIT_TIMEOUT_S" in str(result)


def test_a_missing_rank_0_is_named_with_the_address() -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(errors.TimeoutError) as caught:
        join(Config(init_timeout_s=0.5), rank=1, size=2, address=address, secret=SECRET)
    assert caught.value.ranks == (0,)
    assert address in str(caught.value)
    assert "refused" in str(caught.value)


def test_two_ranks_with_one_number_are_named_on_all_sides() -> None:
    arguments = {"size": 3, "address": f"127.0.0.1:{free_port()}", "secret": SECRET}
    config = Config(init_timeout_s=5)
    results = run_all(
        [functools.partial(join, config, rank=r, factories={}, **arguments) for r in (0, 1, 1)]
    )
    for result in results:
        assert isinstance(result, errors.InvalidArgumentError)
        assert "two processes claim rank 1" in str(result)
        assert f":{os.getpid()}" in str(result)


def test_two_ranks_0_are_named_on_all_sides() -> None:
    arguments = {"size": 3, "address": f"127.0.0.1:{free_port()}", "secret": SECRET}
    config = Config(init_timeout_s=8)
    results = run_all(
        [functools.partial(join, config, rank=r, factories={}, **arguments) for r in (0, 0, 1)]
    )
    for result in results:
        assert isinstance(result, errors.InvalidArgumentError), result
        assert "two processes claim rank 0" in str(result)


def test_ranks_that_disagree_about_the_size_hear_of_it() -> None:
    arguments = {"address": f"127.0.0.1:{free_port()}", "secret": SECRET}
    config = Config(init_timeout_s=5)
    results = run_all(
        [
            functools.partial(join, config, rank=0, size=2, factories={}, **arguments),
            functools.partial(join, config, rank=1, size=3, factories={}, **arguments),
        ]
    )
    for result in results:
        assert isinstance(result, errors.InvalidArgumentError)
        assert "rank 1 " in str(result)
        assert "says 3" in str(result)
        assert "expects 2" in str(result)


def test_a_wrong_secret_is_refused_and_told_on_both_sides() -> None:
    arguments = {"size": 2, "address": f"127.0.0.1:{free_port()}"}
    config = Config(init_timeout_s=1.5)
    results = run_all(
        [
            functools.partial(join, config, rank=0, secret=SECRET, **arguments),
            functools.partial(join, config, rank=1, secret=SECRET + "!", **arguments),
        ]
    )
    assert isinstance(results[1], errors.InvalidArgumentError)
    assert "secrets differ" in str(results[1])
    assert isinstance(results[0], errors.TimeoutError)
    assert results[0].ranks == (1,)
    assert "turned away: 127.0.0.1:" in str(results[0])
    assert SECRET not in str(results)


def test_another_job_at_the_address_is_told_apart() -> None:
    arguments = {"size": 2, "address": f"127.0.0.1:{free_port()}", "secret": SECRET}
    configs = [Config(init_timeout_s=1.5, job_id=f"job {r}") for r in range(2)]
    results = run_all([functools.partial(join, configs[r], rank=r, **arguments) for r in range(2)])
    assert isinstance(results[1], errors.InvalidArgumentError)
    assert "another job" in str(results[1])
    assert isinstance(results[0], errors.TimeoutError)


def test_a_port_in_use_is_named() -> None:
    with listen_tcp("127.0.0.1") as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(errors.TransportError) as caught:
            join(Config(init_timeout_s=2), rank=0, size=2, address=address, secret=SECRET)
    assert f"address='{address}'" in str(caught.value)
    assert "port is in use" in str(caught.value)


def test_another_service_at_the_address_is_recognised() -> None:
    with listen_tcp("127.0.0.1") as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"

        def greet() -> None:
            sock, _ = other.accept()
            with sock, contextlib.suppress(ConnectionError):
                sock.sendall(b"220 mail.example.org ESMTP ready, please speak first".ljust(64))
                sock.recv(1)

        greeter = threading.Thread(target=greet)
        greeter.start()
        with pytest.raises(errors.TransportError, match="not pycoll"):
            join(Config(init_timeout_s=5), rank=1, size=2, address=address, secret=SECRET)
        greeter.join()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("host", ["no-such-host.invalid", "such..host", "x" * 300, "\xf6" * 300])
def test_an_address_that_does_not_resolve_is_named(host: str, rank: int) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=f"'{re.escape(host)}' does not resolve"):
        join(Config(init_timeout_s=5), rank=rank, size=2, address=f"{host}:4711", secret=SECRET)


def test_strangers_at_the_store_do_not_disturb() -> None:
    address = "127.0.0.1", free_port()
    stop = threading.Event()

    def attack(seed: int) -> None:
        prng = random.Random(seed)
        while not stop.is_set():
            with contextlib.suppress(OSError), socket.create_connection(address, 1) as sock:
                sock.sendall(prng.randbytes(prng.choice([1, 64, 120, 4000])))
            time.sleep(0.001)

    attackers = [threading.Thread(target=attack, args=(n,)) for n in range(2)]
    for thread in attackers:
        thread.start()
    try:
        with World() as world:
            all_well(
                join_all(world, 4, address=f"127.0.0.1:{address[1]}", secret=SECRET, timeout=30)
            )
            world.check()
    finally:
        stop.set()
        for thread in attackers:
            thread.join()


def test_a_rank_that_ends_while_joining_is_named_to_the_others() -> None:
    port, deadline = free_port(), Deadline(10)

    def one(rank: int) -> list[bytes]:
        store = join_store(f"127.0.0.1:{port}", SECRET.encode(), "", rank, 3, deadline)
        try:
            store.all_gather(b"first")
            if rank == 2:
                return []
            return store.all_gather(b"second")
        finally:
            store.abandon()

    results = run_all([functools.partial(one, rank) for rank in range(3)])
    for result in results[:2]:
        assert isinstance(result, errors.PeerLostError), result
        assert result.rank == 2
        assert f"rank 2 ({socket.gethostname()}:{os.getpid()}) ended" in str(result)


def test_the_end_of_rank_0_is_told_to_the_others() -> None:
    port, deadline = free_port(), Deadline(10)

    def one(rank: int) -> list[bytes]:
        store = join_store(f"127.0.0.1:{port}", SECRET.encode(), "", rank, 2, deadline)
        try:
            store.all_gather(b"first")
            if rank == 0:
                return []
            return store.all_gather(b"second")
        finally:
            store.abandon()

    results = run_all([functools.partial(one, rank) for rank in range(2)])
    assert isinstance(results[1], errors.PeerLostError)
    assert results[1].rank == 0


def test_large_blobs_pass_through_the_store() -> None:
    port, deadline = free_port(), Deadline(30)
    blobs = [random.Random(rank).randbytes(3_000_000 + rank) for rank in range(3)]

    def one(rank: int) -> list[bytes]:
        store = join_store(f"127.0.0.1:{port}", SECRET.encode(), "", rank, 3, deadline)
        try:
            return store.all_gather(blobs[rank])
        finally:
            store.close()

    assert all_well(run_all([functools.partial(one, rank) for rank in range(3)])) == [blobs] * 3


def test_a_launcher_s_store_serves_one_meeting_after_the_other() -> None:
    listener = listen_tcp("127.0.0.1")
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    server = StoreServer(listener, 2, SECRET.encode(), "j", "the launcher")
    server.start()
    config = Config(
        size=2,
        address=address,
        secret=SECRET.encode(),
        job_id="j",
        store="launcher",
        init_timeout_s=10,
    )
    try:
        for _ in range(3):
            with World() as world:
                ranks = [config._replace(rank=rank) for rank in range(2)]
                joined = all_well(
                    run_all([functools.partial(join, c, factories=world.factories) for c in ranks])
                )
                assert [j.source for j in joined] == ["pycoll run"] * 2
                world.check()
    finally:
        server.close()


def test_ranks_that_cannot_come_are_told_to_those_that_join() -> None:
    """To a rank that waits, and to ranks that come later or again."""
    listener = listen_tcp("127.0.0.1")
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    key, deadline = SECRET.encode(), Deadline(60)
    server = StoreServer(listener, 4, key, "j", "the launcher")
    server.start()

    def one(rank: int, after_s: float) -> list[bytes]:
        time.sleep(after_s)
        store = join_store(address, key, "j", rank, 4, deadline, launcher=True)
        try:
            return store.all_gather(b"")
        finally:
            store.abandon()

    def lose() -> None:
        time.sleep(0.3)
        server.lose([2, 3], "host far is gone")

    try:
        waiting, late, _ = run_all(
            [functools.partial(one, 0, 0.0), functools.partial(one, 1, 0.6), lose]
        )
        (again,) = run_all([functools.partial(one, 0, 0.0)])
    finally:
        server.close()
    for error in (waiting, late, again):
        assert isinstance(error, errors.PeerLostError), error
        assert error.ranks == (2, 3) and str(error) == "host far is gone"
    assert deadline.remaining() > 30


def test_ranks_of_one_host_meet_at_a_unix_socket() -> None:
    job, deadline = f"test {os.getpid()}", Deadline(10)

    def one(rank: int) -> list[bytes]:
        # Rank 0 comes last: the others keep trying.
        time.sleep(0.2 if rank == 0 else 0)
        store = join_unix(job, rank, 3, deadline)
        try:
            return store.all_gather(b"%d" % rank)
        finally:
            store.close()

    for _ in range(2):
        results = all_well(run_all([functools.partial(one, rank) for rank in range(3)]))
        assert results == [[b"0", b"1", b"2"]] * 3


def test_two_ranks_0_at_a_unix_socket_are_named() -> None:
    job, deadline = f"test twice {os.getpid()}", Deadline(8)

    def one(rank: int) -> None:
        store = join_unix(job, rank, 2, deadline)
        try:
            store.all_gather(b"")
        finally:
            store.abandon()

    results = run_all([functools.partial(one, 0), functools.partial(one, 0)])
    for result in results:
        assert isinstance(result, errors.InvalidArgumentError), result
        assert "two processes claim rank 0" in str(result)


def test_another_user_s_process_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    from pycoll.bootstrap.rendezvous import store, store_connection

    job, real = f"test user {os.getpid()}", store.peer_of
    for module in (store, store_connection):
        monkeypatch.setattr(module, "peer_of", lambda sock: (real(sock)[0], os.geteuid() + 1))

    def one(rank: int) -> Any:
        return join_unix(job, rank, 2, Deadline(1.0))

    results = run_all([functools.partial(one, rank) for rank in range(2)])
    # Rank 0 looks at its own socket first, and serves nobody after that.
    assert isinstance(results[0], errors.TransportError)
    assert f"user {os.geteuid() + 1}" in str(results[0])
    assert isinstance(results[1], errors.PycollError)


def test_threads_that_break_off_do_not_leave_the_others_waiting() -> None:
    exchanges = MemoryExchange.make(3, Deadline(30))
    exchanges[2].abandon()
    started = time.monotonic()
    results = run_all([functools.partial(e.all_gather, b"") for e in exchanges[:2]])
    assert time.monotonic() - started < 5
    assert all(isinstance(r, errors.PeerLostError) and r.rank == 2 for r in results)
