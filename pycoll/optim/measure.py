"""What messages cost on a communicator: measured, and alike on all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pycoll.arrays import empty
from pycoll.optim.agenda import Rate, Rates
from pycoll.rows import shares

LENGTHS = (4 << 10, 64 << 10, 1 << 20, 8 << 20)
REPEATS = 5
#: Messages beside a computation, and how long it is between them: some 30 us, as of a small layer.
MESSAGES = 16
WORK_BYTES = 64 << 10
WORK_REPEATS = 8
#: Between their values, in elements: no two are on a cache line.
SPACING = 64
#: How long a wire is kept busy before its rate counts, and with how many messages at most.
SUSTAINED_S = 0.02
SUSTAINED_MAX = 4096
#: Long messages beside a computation: as many as take so long, at most so many, and how often.
BESIDE_S = 0.025
MESSAGES_BESIDE = 8
REPEATS_BESIDE = 3
#: Longer messages are left out where they would take longer than this.
PATIENCE_S = 0.05


def measure(comm: Any, deterministic: bool | None = True) -> Rates:
    """The rates of all_reduce, reduce_scatter and all_gather, as ``comm`` runs them beside a thread
    that computes, and what messages take from that.

    Every rank calls, with nothing else under way on ``comm``. The slowest rank counts, and the
    result has the same bits everywhere. Takes a second, or two where ranks outnumber cores; raises
    what ``comm`` raises.
    """
    memory = empty(LENGTHS[-1] // 4, np.float32)
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

    start_s = _start_s(comm, memory, deterministic)

    def beside(rate: Rate) -> Rate:
        return rate._replace(alpha=max(rate.alpha, start_s))

    rate = _rate(comm, memory, all_reduce)
    return Rates(
        beside(rate),
        beside(_rate(comm, memory, reduce_scatter)),
        beside(_rate(comm, memory, all_gather)),
        _host_s(comm, memory, deterministic),
        _slowed(comm, memory, rate, deterministic),
    )


def _rate(comm: Any, memory: Any, make: Callable[[Any], Callable[[], Any]]) -> Rate:
    lengths: list[int] = []
    seconds: list[float] = []
    for nbytes in LENGTHS:
        # The seconds are all ranks', so all leave at the same length.
        if seconds and seconds[-1] * nbytes / lengths[-1] > PATIENCE_S:
            break
        lengths.append(nbytes)
        seconds.append(_seconds(comm, make(memory[: nbytes // 4])))
    return fitted(lengths, seconds)


def _slowed(comm: Any, memory: Any, rate: Rate, deterministic: bool | None) -> float:
    """How much of a computation is lost while long messages are on their way beside it, from 0 to
    1; the middle one of several times, on the rank where it is most.

    Both take about as long by themselves. Together they take as long as one of them where nothing
    is lost, and as long as one after the other where everything is. There are many messages, since
    a wire that has been idle may take the first bytes faster than it carries them.
    """
    nbytes = max((n for n in LENGTHS if rate.seconds(n) <= PATIENCE_S), default=LENGTHS[0])
    message = memory[: nbytes // 4]
    count = round(min(MESSAGES_BESIDE, max(1.0, BESIDE_S / rate.seconds(nbytes))))
    work = np.zeros(WORK_BYTES // 4, np.float32)

    def compute(times: int) -> None:
        for _ in range(times):
            np.add(work, 1, out=work)

    def both(times: int) -> None:
        works = _started(comm, message, count, deterministic)
        compute(times)
        for one in works:
            one.wait()

    compute(1)
    times = max(1, round(count * rate.seconds(nbytes) / _took(lambda: compute(16)) * 16))
    found = []
    for _ in range(REPEATS_BESIDE + 1):
        together = _took(lambda: both(times))
        alone, on_its_way = _took(lambda: compute(times)), _took(lambda: both(0))
        lost = together - max(alone, on_its_way)
        found.append(min(1.0, max(0.0, lost / min(alone, on_its_way))))
    # The first time prepares what the others find.
    return _middle(comm, found[1:])


def _took(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _started(comm: Any, part: Any, count: int, deterministic: bool | None) -> list[Any]:
    """So many messages, which run one after the other, since they are in the same memory."""
    words = {"async_op": True, "deterministic": deterministic}
    return [comm.all_reduce(part, out=part, **words) for _ in range(count)]


def _start_s(comm: Any, memory: Any, deterministic: bool | None) -> float:
    """What a message takes, however short, while this thread computes and does not wait for it; the
    middle one of several times, on the rank where it is longest. Whoever carries it has to get a
    core, here and on each peer."""
    one = memory[:1]
    work = np.zeros(WORK_BYTES // 4, np.float32)
    found = []
    for _ in range(REPEATS + 1):
        begin = time.perf_counter()
        works = _started(comm, one, MESSAGES, deterministic)
        while not works[-1].done():
            np.add(work, 1, out=work)
        found.append((time.perf_counter() - begin) / MESSAGES)
        for each in works:
            each.wait()
    # The first time prepares what the others find.
    return _middle(comm, found[1:])


def _host_s(comm: Any, memory: Any, deterministic: bool | None) -> float:
    """What a message takes from a computation beside which it is sent: the middle one of several
    times, on the rank where it is longest.

    All of it counts: to hand it over, to wake whoever runs it and to share a core with that, and to
    ask for its end once it is there. The computation is as without messages otherwise.
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

    def beside() -> float:
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
        found.append((beside() - without) / len(messages))
    # The first time prepares what the others find.
    return _middle(comm, [max(0.0, float(np.median(found[1:])))])


def _seconds(comm: Any, call: Callable[[], Any]) -> float:
    """The middle one of several times, on the rank where it is longest; when a wire carries them
    for so long that what it takes faster after a pause is over."""
    # The first call prepares what the others find.
    first = _middle(comm, [_took(call) for _ in range(REPEATS + 1)][1:])
    count = round(min(SUSTAINED_MAX, SUSTAINED_S / first)) if first > 0 else 0
    if count < REPEATS:
        return first
    took = [_took(call) for _ in range(count)]
    return _middle(comm, took[count // 2 :])


def _middle(comm: Any, took: Sequence[float]) -> float:
    """The middle one of these times, on the rank where that is longest."""
    return float(comm.all_reduce(np.array([float(np.median(took))]), "max")[0])


def fitted(lengths: Sequence[int], seconds: Sequence[float]) -> Rate:
    """The line with the least relative errors; neither of its figures is negative.

    Plain arithmetic in a fixed order: libraries' solvers may differ in bits between machines.
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
