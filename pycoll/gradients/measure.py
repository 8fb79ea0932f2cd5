"""Measure the cost of messages on a communicator; all ranks get the same figures."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from pycoll.arrays.registry import empty
from pycoll.arrays.rows import shares
from pycoll.compress import Codec, Feedback
from pycoll.gradients.communication_plan import IN, OUT, Rate, Rates, Stage

#: The message lengths that are timed, in bytes, and the number of timed runs of each.
LENGTHS = (4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 8 << 20)
REPEATS = 5
#: The number of short messages sent during a computation. Before each message the computation adds
#: WORK_REPEATS times over WORK_BYTES, about as much work as a small layer.
MESSAGES = 16
WORK_BYTES = 64 << 10
WORK_REPEATS = 8
#: The distance between the values of short messages, in elements: no two share a cache line.
SPACING = 64
#: Messages of a length are sent in batches of these seconds, of at most this many messages. The
#: first batch does not count, since an idle link takes the first bytes faster.
SUSTAINED_S = 0.012
SUSTAINED_MAX = 4096
BATCHES = 4
#: Messages take turns in memory of this length, as gradients of a step do: more than caches hold.
#: There are at most this many turns, so that short messages stay in caches.
COLD_BYTES = 64 << 20
TURNS_MAX = 64
#: Long messages sent during a computation: the seconds that they take together, the limit on their
#: number, and the number of timed runs.
OVERLAP_S = 0.025
OVERLAP_MESSAGES = 8
OVERLAP_REPEATS = 3
#: Messages that would take more than this many seconds are not measured, except that two lengths
#: always are: one length alone does not tell what a byte costs.
PATIENCE_S = 0.15
#: Messages to servers that are under way together. They need as much memory as there is for turns.
UNDER_WAY = 8

#: The legs of a message to servers.
_Legs = tuple[Stage, Stage]


def measure(
    comm: Any,
    deterministic: bool | None = True,
    push_pull_by: Sequence[str] = (),
    accelerated: bool = False,
    codecs: Sequence[tuple[str, Codec]] = (),
) -> Rates:
    """Measure all_reduce, reduce_scatter and all_gather on ``comm`` while a thread computes.

    ``push_pull_by``: algorithms of the architecture "ps", to be measured as well, one message at a
    time and several under way together. The fastest one for long messages gives the rates.
    ``accelerated``: whether a device computes, so that messages take nothing from computing.
    ``codecs``: pairs of an architecture and a codec, to be measured as well, with feedback.

    Also measures what messages take from that thread. Collective: every rank calls, with no other
    operation under way on ``comm``. The slowest rank determines each figure, and the result has the
    same bits on all ranks. Takes seconds, more where ranks outnumber cores. Raises what ``comm``
    raises.
    """
    memory = empty(COLD_BYTES // 4, np.float32)
    memory[...] = 0

    def all_reduce(part: Any) -> Callable[[], Any]:
        return lambda: comm.all_reduce(part, out=part, deterministic=deterministic)

    def reduce_scatter(part: Any) -> Callable[[], Any]:
        mine = np.empty(shares(len(part), comm.size)[comm.rank], np.float32)
        return lambda: comm.reduce_scatter(part, out=mine, deterministic=deterministic)

    def all_gather(part: Any) -> Callable[[], Any]:
        lengths = shares(len(part), comm.size)
        mine = np.zeros(lengths[comm.rank], np.float32)
        return lambda: comm.all_gather(mine, lengths=lengths, out=part)

    start_s = 0.0 if accelerated else _start_s(comm, memory, deterministic)

    def with_start_cost(rate: Rate) -> Rate:
        return rate._replace(alpha=max(rate.alpha, start_s))

    rate = _rate(comm, memory, all_reduce)
    served = {name: _legs(comm, memory, name, deterministic) for name in push_pull_by}
    best = min(served, key=lambda name: served[name][0].rate.seconds(LENGTHS[-1]), default="")
    legs = tuple(leg._replace(rate=with_start_cost(leg.rate)) for leg in served.get(best, ()))
    return Rates(
        with_start_cost(rate),
        with_start_cost(_rate(comm, memory, reduce_scatter)),
        with_start_cost(_rate(comm, memory, all_gather)),
        0.0 if accelerated else _host_s(comm, memory, deterministic),
        0.0 if accelerated else _slowdown(comm, memory, rate, deterministic),
        push_pull=legs,
        push_pull_by=best,
        holding=() if accelerated else held_up(codecs),
        coded=tuple((name, with_start_cost(_coded_rate(comm, codec))) for name, codec in codecs),
    )


def held_up(codecs: Iterable[tuple[str, Codec]]) -> tuple[str, ...]:
    """The architectures whose codecs run in the thread that starts a message."""
    return tuple(name for name, codec in codecs if codec.native() is None)


def _coded_rate(comm: Any, codec: Codec) -> Rate:
    """The cost of a sum with a codec and feedback, by the bytes of its values."""
    # Sparse codecs take longer where many values are equal.
    memory = np.random.default_rng(comm.rank).standard_normal(LENGTHS[-1] // 4).astype(np.float32)
    target = np.empty_like(memory)

    def coded_call(part: Any) -> Callable[[], Any]:
        words: dict[str, Any] = {"compress": codec, "feedback": Feedback()}
        return lambda: comm.all_reduce(part, "sum", out=target[: len(part)], **words)

    return _rate(comm, memory, coded_call)


def _legs(comm: Any, memory: Any, algorithm: str, deterministic: bool | None) -> _Legs:
    """The legs of a message to servers, to them and back.

    Many messages under way together end one leg apart, so their mean time is the rate of a leg. A
    message alone takes longer by the time in which its first segment comes back.
    """
    words = {"algorithm": algorithm, "deterministic": deterministic, "async_op": True}

    def start(part: Any) -> Callable[[], Any]:
        return lambda: comm.all_reduce(part, out=part, **words)

    lengths, each_s = _times(comm, memory, start, UNDER_WAY)
    _, alone_s = _times(comm, memory, start, 1)
    later_s = [one - each for one, each in zip(alone_s, each_s, strict=False)]
    rate = fit_rate(lengths, each_s)
    return Stage(rate, (OUT,)), Stage(rate, (IN,), max(0.0, statistics.median(later_s)))


def _rate(comm: Any, memory: Any, make: Callable[[Any], Callable[[], Any]]) -> Rate:
    return fit_rate(*_times(comm, memory, make))


def _times(
    comm: Any, memory: Any, make: Callable[[Any], Callable[[], Any]], under_way: int = 0
) -> tuple[list[int], list[float]]:
    """The lengths of messages and the seconds of each, among many.

    ``make``: makes a call for a part of ``memory``. ``under_way``: 0 where the call returns at the
    end of its message; otherwise it returns a Work, and so many are under way at a time.
    """
    lengths: list[int] = []
    seconds: list[float] = []
    for nbytes in LENGTHS:
        # The seconds are equal on all ranks, so all ranks stop at the same length.
        if len(seconds) > 1 and seconds[-1] * nbytes / lengths[-1] > PATIENCE_S:
            break
        lengths.append(nbytes)
        works: deque[Any] = deque()
        call = _in_turns(memory, nbytes // 4, make)
        if under_way:
            call = partial(_start, call, works, under_way)
        seconds.append(_seconds(comm, call, works))
    # A short message takes no longer than a long one, unless something else held it up.
    for place in reversed(range(len(seconds) - 1)):
        seconds[place] = min(seconds[place : place + 2])
    return lengths, seconds


def _start(call: Callable[[], Any], works: deque[Any], under_way: int) -> None:
    """Start a message, and wait for the oldest one if so many are under way."""
    works.append(call())
    if len(works) >= under_way:
        works.popleft().wait()


def _in_turns(
    memory: Any, count: int, make: Callable[[Any], Callable[[], Any]]
) -> Callable[[], Any]:
    """A call that each time takes another part of ``memory``, of ``count`` elements."""
    turns = min(TURNS_MAX, len(memory) // count)
    calls = itertools.cycle([make(memory[n * count :][:count]) for n in range(turns)])
    return lambda: next(calls)()  # noqa: PLW0108  # the next call, not always the same one


def _slowdown(comm: Any, memory: Any, rate: Rate, deterministic: bool | None) -> float:
    """The share of a computation that is lost while long messages are under way, from 0 to 1.

    It is the median of several runs, on the rank where that is largest. The computation and the
    messages take about equally long alone. Run together, they take as long as one of them if
    nothing is lost, and as long as both in sequence if everything is lost. The function sends many
    messages, since an idle link may accept the first bytes faster than its sustained rate.
    """
    nbytes = max((n for n in LENGTHS if rate.seconds(n) <= PATIENCE_S), default=LENGTHS[0])
    message = memory[: nbytes // 4]
    count = round(min(OVERLAP_MESSAGES, max(1.0, OVERLAP_S / rate.seconds(nbytes))))
    work = np.zeros(WORK_BYTES // 4, np.float32)

    def compute(times: int) -> None:
        for _ in range(times):
            np.add(work, 1, out=work)

    def both(times: int) -> None:
        works = _start_messages(comm, message, count, deterministic)
        compute(times)
        for one in works:
            one.wait()

    compute(1)
    times = max(1, round(count * rate.seconds(nbytes) / _took(lambda: compute(16)) * 16))
    found = []
    for _ in range(OVERLAP_REPEATS + 1):
        together = _took(lambda: both(times))
        alone, on_its_way = _took(lambda: compute(times)), _took(lambda: both(0))
        lost = together - max(alone, on_its_way)
        found.append(min(1.0, max(0.0, lost / min(alone, on_its_way))))
    # The first run includes one-time preparation and does not count.
    return _middle(comm, found[1:])


def _took(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _start_messages(comm: Any, part: Any, count: int, deterministic: bool | None) -> list[Any]:
    """Start ``count`` messages. They run one after the other, since they use the same memory."""
    words = {"async_op": True, "deterministic": deterministic}
    return [comm.all_reduce(part, out=part, **words) for _ in range(count)]


def _start_s(comm: Any, memory: Any, deterministic: bool | None) -> float:
    """The seconds of a message of one element while this thread computes and does not wait for it.

    It is the median of several runs, on the rank where that is longest. It includes the time until
    the progress thread gets a core, here and on each peer.
    """
    one = memory[:1]
    work = np.zeros(WORK_BYTES // 4, np.float32)
    found = []
    for _ in range(REPEATS + 1):
        begin = time.perf_counter()
        works = _start_messages(comm, one, MESSAGES, deterministic)
        while not works[-1].done():
            np.add(work, 1, out=work)
        found.append((time.perf_counter() - begin) / MESSAGES)
        for each in works:
            each.wait()
    # The first run includes one-time preparation and does not count.
    return _middle(comm, found[1:])


def _host_s(comm: Any, memory: Any, deterministic: bool | None) -> float:
    """The seconds that a message takes from a computation during which it is sent.

    It is the median of several runs, on the rank where that is longest. It includes the start of
    the operation, the wake-up of the progress thread and the core shared with that thread. It also
    includes the query for the end of the operation. The computation is otherwise the same as
    without messages.
    """
    messages = [memory[n * SPACING :][:1] for n in range(MESSAGES)]
    work = np.zeros(WORK_BYTES // 4, np.float32)

    def compute() -> None:
        for _ in range(WORK_REPEATS):
            np.add(work, 1, out=work)

    def alone() -> float:
        begin = time.perf_counter()
        for _ in messages:
            compute()
        return time.perf_counter() - begin

    def time_overlapped() -> float:
        begin = time.perf_counter()
        works = []
        for one in messages:
            compute()
            works.append(comm.all_reduce(one, out=one, async_op=True, deterministic=deterministic))
        sent = time.perf_counter()
        works[-1].wait()
        last = time.perf_counter()
        for one in works:
            one.wait()
        return time.perf_counter() - last + sent - begin

    found = []
    for _ in range(REPEATS + 1):
        without = alone()
        found.append((time_overlapped() - without) / len(messages))
    # The first run includes one-time preparation and does not count.
    return _middle(comm, [max(0.0, float(np.median(found[1:])))])


def _seconds(comm: Any, call: Callable[[], Any], works: deque[Any] | None = None) -> float:
    """The seconds of a call among many, on the rank where that is longest.

    It is a mean, since over a link most calls may return early and few wait for all bytes in front
    of them. Of the batches the median counts. ``works``: the messages that calls leave under way; a
    batch ends with the last of them.
    """

    def run(count: int) -> None:
        for _ in range(count):
            call()
        while works:
            works.popleft().wait()

    def batch(count: int) -> float:
        return _took(lambda: run(count)) / count

    # The first call includes one-time preparation and does not count.
    batch(1)
    first = _middle(comm, [batch(REPEATS)])
    count = round(min(SUSTAINED_MAX, SUSTAINED_S / first)) if first > 0 else 0
    if count < REPEATS:
        return first
    return _middle(comm, [batch(count) for _ in range(BATCHES)][1:])


def _middle(comm: Any, took: Sequence[float]) -> float:
    """The median of these times, on the rank where that is longest."""
    return float(comm.all_reduce(np.array([float(np.median(took))]), "max")[0])


def fit_rate(lengths: Sequence[int], seconds: Sequence[float]) -> Rate:
    """Fit a line with the least squares of relative errors; alpha and beta are not negative.

    The arithmetic runs in a fixed order, since library solvers may differ in bits between hosts.
    """
    ones = slopes = squares = right = right_slopes = 0.0
    for nbytes, took in zip(lengths, seconds, strict=True):
        one, slope = 1 / took, nbytes / took
        ones += one * one
        slopes += one * slope
        squares += slope * slope
        right += one
        right_slopes += slope
    determinant = ones * squares - slopes * slopes
    if len(lengths) == 1 or determinant <= 0:
        return Rate(seconds[0], 0.0)
    alpha = (right * squares - right_slopes * slopes) / determinant
    beta = (ones * right_slopes - slopes * right) / determinant
    if alpha < 0:
        return Rate(0.0, right_slopes / squares)
    return Rate(alpha, beta) if beta >= 0 else Rate(right / ones, 0.0)
