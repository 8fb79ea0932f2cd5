"""``init(all_gather=)``: any function that gathers bytes is a launcher, and one that breaks its
contract is named on every rank that can be told."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from gathering import Gather, ThreadGather
from joining import World, all_well, run_all

import pycoll
from pycoll import errors
from pycoll.bootstrap.joining import join
from pycoll.bootstrap.rendezvous.callable_exchange import CallableExchange
from pycoll.config import Config

pytestmark = pytest.mark.usefixtures("nothing_is_left")

ROOT = Path(__file__).resolve().parents[2]


def attempt(gathers: list[Gather], limit_s: float = 20.0, sizes: Any = None) -> list[Any]:
    """What ``join`` gave or raised on each rank, all ranks at once."""
    size = len(gathers)
    config = Config(init_timeout_s=limit_s)
    with World() as world:
        jobs = [
            functools.partial(
                join,
                config,
                rank=rank,
                size=sizes[rank] if sizes else size,
                all_gather=gather,
                factories=world.factories,
            )
            for rank, gather in enumerate(gathers)
        ]
        results = run_all(jobs)
        if all(not isinstance(result, BaseException) for result in results):
            world.check()
    return results


def spoiled(
    size: int, at: int, call: int, change: Any, limit_s: float = 20.0
) -> tuple[list[Any], float]:
    """Results where the reply of ``call`` (from 0) on rank ``at`` goes through ``change``, and the
    seconds that all took."""
    engine = ThreadGather(size)
    calls = iter(range(100))
    right = engine.of(at)

    def all_gather(blob: bytes) -> Any:
        number = next(calls)
        reply = right(blob)
        return change(reply) if number == call else reply

    gathers = [all_gather if rank == at else engine.of(rank) for rank in range(size)]
    begin = time.monotonic()
    results = attempt(gathers, limit_s)
    seconds = time.monotonic() - begin
    engine.end()
    return results, seconds


# Ranks that meet


@pytest.mark.usefixtures("as_processes")
@pytest.mark.parametrize("size", range(1, 9))
def test_ranks_meet_by_a_function(size: int) -> None:
    engine = ThreadGather(size)
    joined = all_well(attempt([engine.of(rank) for rank in range(size)]))
    assert [(one.rank, one.size, one.source) for one in joined] == [
        (rank, size, "all_gather") for rank in range(size)
    ]
    counts = {len(calls) for calls in engine.calls}
    assert counts == ({0} if size == 1 else {2})
    assert max((len(blob) for calls in engine.calls for blob in calls), default=0) < 4096


@pytest.mark.parametrize("size", [2, 5])
def test_rounds_stay_within_the_contract(size: int) -> None:
    """Threads of one process need sockets, so all rounds run."""
    engine = ThreadGather(size)
    all_well(attempt([engine.of(rank) for rank in range(size)]))
    assert {len(calls) for calls in engine.calls} == {4}


def test_two_jobs_that_meet_at_the_same_time_do_not_mix() -> None:
    engines = [ThreadGather(3), ThreadGather(3)]
    results: list[Any] = [None, None]

    def one(number: int) -> None:
        results[number] = attempt([engines[number].of(rank) for rank in range(3)])

    threads = [threading.Thread(target=one, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for result in results:
        assert [one.rank for one in all_well(result)] == [0, 1, 2]


def test_replies_may_be_other_kinds_of_bytes() -> None:
    engine = ThreadGather(3)

    def as_kind(rank: int, kind: Any) -> Gather:
        inner = engine.of(rank)
        return lambda blob: kind(inner(blob))

    gathers = [
        as_kind(0, tuple),
        as_kind(1, lambda reply: [bytearray(one) for one in reply]),
        as_kind(2, lambda reply: [memoryview(one) for one in reply]),
    ]
    assert len(all_well(attempt(gathers))) == 3


def started(kind: str, size: int, transports: str = "shm,tcp") -> list[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYCOLL_")}
    env |= {"PYCOLL_INIT_TIMEOUT_S": "60", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests/support")])
    done = subprocess.run(
        [sys.executable, "-m", "gathering", kind, str(size), transports],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(done.stdout.splitlines())


@pytest.mark.parametrize(
    ("kind", "size", "transports"),
    [("pipes", 1, "shm"), ("pipes", 3, "tcp"), ("pipes", 8, "shm,tcp"), ("manager", 4, "shm,tcp")],
)
def test_processes_meet_over_what_they_have(kind: str, size: int, transports: str) -> None:
    total = [size * place + sum(range(size)) for place in range(5)]
    assert started(kind, size, transports) == [f"{rank} of {size}: {total}" for rank in range(size)]


# Arguments


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ({"all_gather": 3, "rank": 0, "size": 2}, "all_gather is a int: expected a function"),
        ({"all_gather": list}, "all_gather= is given without rank= and size=: give all three"),
        ({"all_gather": list, "rank": 0}, "rank=0 is given without size"),
        ({"all_gather": list, "size": 2}, "size=2 is given without rank"),
        ({"all_gather": list, "rank": 2, "size": 2}, "rank=2 is out of range"),
        ({"all_gather": list, "rank": 0, "size": 2, "address": "h:1"}, "two ways to meet"),
        ({"all_gather": list, "comm": object()}, "comm= already says rank, size and where"),
        ({"all_gather": list, "rank": 0, "size": 2, "secret": "short"}, "secret has 5 characters"),
    ],
)
def test_arguments_that_contradict_each_other(words: dict[str, Any], text: str) -> None:
    with pytest.raises(errors.InvalidArgumentError) as caught:
        pycoll.init(**words)
    assert text in str(caught.value)
    assert not pycoll.is_initialized()


@pytest.mark.usefixtures("as_processes")
def test_a_secret_guards_the_connections_too() -> None:
    """The engine's bytes may be read by others; ranks with different secrets do not connect."""
    engine = ThreadGather(2)
    config = Config(init_timeout_s=5.0)
    with World() as world:
        jobs = [
            functools.partial(
                join,
                config,
                rank=rank,
                size=2,
                secret=f"the secret number {rank}",
                all_gather=engine.of(rank),
                factories=world.factories,
            )
            for rank in range(2)
        ]
        results = run_all(jobs)
    assert all(isinstance(result, errors.PycollError) for result in results), results


# Replies that break the contract


def _swap(reply: list[bytes]) -> list[bytes]:
    return [reply[1], reply[0], *reply[2:]]


def _flip(place: int) -> Any:
    def change(reply: list[bytes]) -> list[bytes]:
        changed = bytearray(reply[place])
        changed[-1] ^= 1
        return [*reply[:place], bytes(changed), *reply[place + 1 :]]

    return change


WRONG = {
    "none": (lambda reply: None, "all_gather returned a NoneType in round"),
    "text": (lambda reply: b"".join(reply).hex(), "returned a str in round"),
    "one bytes": (lambda reply: reply[0], "returned a bytes in round"),
    "a dict": (lambda reply: dict(enumerate(reply)), "returned a dict in round"),
    "too few": (lambda reply: reply[:-1], "returned 2 entries in round"),
    "too many": (lambda reply: [*reply, b""], "returned 4 entries in round"),
    "nothing": (lambda reply: [], "returned 0 entries in round"),
    "texts": (lambda reply: [one.hex() for one in reply], r"returned a str at \[0\] in round"),
    "a hole": (lambda reply: [*reply[:2], None], r"returned a NoneType at \[2\] in round"),
    "numbers": (lambda reply: [1, 2, 3], r"returned a int at \[0\]"),
    "own changed": (_flip(1), r"returned \[1\] with bytes that no rank gave it"),
    "other changed": (_flip(2), r"returned \[2\] with bytes that no rank gave it"),
    "cut off": (lambda reply: [one[:20] for one in reply], r"\[0\] with bytes that no rank gave"),
    "empty": (lambda reply: [b""] * 3, r"returned \[0\] with bytes that no rank gave it"),
    "another order": (_swap, r"returned the bytes of rank 1 at \[0\]"),
    "own for all": (lambda reply: [reply[1]] * 3, r"returned the bytes of rank 1 at \[0\]"),
}


@pytest.mark.parametrize("call", [0, 2])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_reply_is_named_and_told(name: str, call: int) -> None:
    """The rank that got it raises; the others hear of it in their next round."""
    change, text = WRONG[name]
    results, seconds = spoiled(3, at=1, call=call, change=change)
    assert seconds < 10, "ranks waited for their deadline"
    assert isinstance(results[1], errors.InvalidArgumentError)
    with pytest.raises(errors.InvalidArgumentError, match=text):
        raise results[1]
    assert f"round {call + 1} of joining on rank 1 of 3" in str(results[1])
    assert "expected a list of 3 bytes, one per rank in rank order" in str(results[1])
    for rank in (0, 2):
        assert isinstance(results[rank], errors.TransportError), results[rank]
        assert results[rank].rank == 1
        assert "rank 1 broke off while the ranks were joining: all_gather" in str(results[rank])


def test_a_reply_of_an_earlier_round_is_named() -> None:
    kept: list[Any] = []

    def change(reply: list[bytes]) -> list[bytes]:
        return [bytes(one) for one in kept[0]]

    engine = ThreadGather(2)
    right = engine.of(1)

    def all_gather(blob: bytes) -> Any:
        reply = right(blob)
        kept.append(reply)
        return kept[0]

    results = attempt([engine.of(0), all_gather])
    engine.end()
    assert isinstance(results[1], errors.InvalidArgumentError)
    assert "returned [0] of round 1 of rank 0 in round 2 of joining" in str(results[1])
    assert isinstance(results[0], errors.TransportError)


def test_a_wrong_last_reply_raises_though_the_others_are_done() -> None:
    """No round follows in which the others could hear of it, so they are told in no time."""
    results, seconds = spoiled(2, at=1, call=3, change=lambda reply: reply[:1])
    assert seconds < 10
    assert isinstance(results[1], errors.InvalidArgumentError)
    assert "returned 1 entries in round 4" in str(results[1])


def test_ranks_that_disagree_about_the_size_hear_both_numbers() -> None:
    engine = ThreadGather(3)
    results = attempt([engine.of(rank) for rank in range(3)], sizes=[3, 3, 4])
    engine.end()
    texts = [str(result) for result in results]
    assert all(isinstance(result, errors.InvalidArgumentError) for result in results), results
    assert texts[0] == (
        "rank 2 joins with size=4 and rank 0 with size=3: give all ranks the same size"
    )
    assert texts[2] == (
        "rank 0 joins with size=3 and rank 2 with size=4: give all ranks the same size"
    )


def test_two_processes_with_one_rank_are_named() -> None:
    engine = ThreadGather(2)
    config = Config(init_timeout_s=10.0)
    with World() as world:
        results = run_all(
            [
                functools.partial(
                    join,
                    config,
                    rank=0,
                    size=2,
                    all_gather=engine.of(place),
                    factories=world.factories,
                )
                for place in range(2)
            ]
        )
    engine.end()
    for result in results:
        assert isinstance(result, errors.InvalidArgumentError)
        assert "two processes claim rank 0" in str(result)


# Functions that raise or hang


class EngineError(Exception):
    pass


@pytest.mark.parametrize("call", [0, 1, 3])
def test_an_exception_of_the_function_is_named(call: int) -> None:
    def change(reply: Any) -> Any:
        raise EngineError("the driver is gone")

    results, seconds = spoiled(2, at=0, call=call, change=change, limit_s=2.0)
    assert seconds < 6
    assert isinstance(results[0], errors.TransportError)
    assert str(results[0]) == (
        f"all_gather raised EngineError in round {call + 1} of joining on rank 0 of 2: the driver "
        "is gone"
    )
    assert isinstance(results[0].__cause__, EngineError)
    if call < 3:
        assert isinstance(results[1], errors.TimeoutError)
    else:
        assert results[1].rank == 1


def test_errors_of_pycoll_and_exits_stay_as_they_are() -> None:
    for raised in (errors.PeerLostError("rank 1 is gone"), SystemExit(3)):

        def all_gather(blob: bytes, raised: BaseException = raised) -> Any:
            raise raised

        (result,) = run_all(
            [functools.partial(join, Config(), rank=0, size=2, all_gather=all_gather)]
        )
        assert result is raised


def test_a_function_that_hangs_ends_at_the_deadline_and_is_not_taken_again() -> None:
    release = threading.Event()

    def all_gather(blob: bytes) -> Any:
        release.wait(60)
        return [blob, blob]

    config = Config(init_timeout_s=0.5)
    begin = time.monotonic()
    with pytest.raises(errors.TimeoutError) as caught:
        join(config, rank=0, size=2, all_gather=all_gather)
    assert 0.4 < time.monotonic() - begin < 3
    assert str(caught.value) == (
        "init waited 0.5 s: all_gather has not returned in round 1 of joining on rank 0 of 2, so "
        "one of the other ranks did not call it or failed (PYCOLL_INIT_TIMEOUT_S sets the limit)"
    )
    with pytest.raises(errors.InvalidArgumentError, match="still runs a call of an attempt"):
        join(config, rank=0, size=2, all_gather=all_gather)
    release.set()
    until = time.monotonic() + 10
    while True:
        try:
            join(config, rank=0, size=2, all_gather=all_gather)
        except errors.InvalidArgumentError as error:
            if "still runs" not in str(error):
                assert "returned the bytes of rank 0 at [1]" in str(error)
                return
        assert time.monotonic() < until
        time.sleep(0.02)


def test_the_deadline_holds_for_all_rounds_together() -> None:
    """Each call is shorter than the limit, and all of them are longer."""

    def all_gather(blob: bytes, inner: Any) -> Any:
        time.sleep(0.4)
        return inner(blob)

    engine = ThreadGather(2)
    gathers = [functools.partial(all_gather, inner=engine.of(rank)) for rank in range(2)]
    begin = time.monotonic()
    results = attempt(gathers, limit_s=1.0)
    assert time.monotonic() - begin < 4
    assert all(isinstance(result, errors.TimeoutError) for result in results), results
    engine.end()


def test_a_rank_that_cannot_join_tells_the_others_at_once() -> None:
    """Its limit of open files is too low, so it never comes to the first round by itself."""
    from pycoll.bootstrap.deadline import Deadline

    engine = ThreadGather(2)

    def one(rank: int) -> Any:
        exchange = CallableExchange(engine.of(rank), rank, 2, Deadline(5.0))
        try:
            if rank == 1:
                exchange.alarm("rank 1 may open 3 more files")
                return None
            return exchange.all_gather(b"identity")
        finally:
            exchange.close()

    results = run_all([functools.partial(one, rank) for rank in range(2)])
    assert isinstance(results[0], errors.TransportError)
    assert "rank 1 may open 3 more files" in str(results[0])


def test_the_function_runs_in_the_caller_s_context_always_in_one_thread() -> None:
    import contextvars

    place: contextvars.ContextVar[str] = contextvars.ContextVar("place", default="elsewhere")
    seen: list[tuple[str, int]] = []
    engine = ThreadGather(2)
    inner = engine.of(0)

    def all_gather(blob: bytes) -> Any:
        seen.append((place.get(), threading.get_ident()))
        return inner(blob)

    place.set("here")
    context = contextvars.copy_context()
    config = Config(init_timeout_s=10.0)
    with World() as world:
        jobs: list[Any] = [
            functools.partial(
                context.run,
                functools.partial(
                    join,
                    config,
                    rank=0,
                    size=2,
                    all_gather=all_gather,
                    factories=world.factories,
                ),
            ),
            functools.partial(
                join,
                config,
                rank=1,
                size=2,
                all_gather=engine.of(1),
                factories=world.factories,
            ),
        ]
        all_well(run_all(jobs))
    assert {one for one, _ in seen} == {"here"}
    assert len({thread for _, thread in seen}) == 1
