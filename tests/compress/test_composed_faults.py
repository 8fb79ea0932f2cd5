"""Random faults in the exchanges of codecs whose collectives are sequences of others, by seed.

A stand-in of a communicator runs the exchanges between threads. One exchange raises PeerLostError
on drawn ranks, and all later ones on every rank. Each rank then has the bits of a call without
faults, or the error and the Feedback of before the call. Only where the last exchange fails while
the caller waits for it, the Feedback is that behind the call, without the new Q.
"""

from __future__ import annotations

import functools
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest
from harness import TIMEOUT_S, world_in_threads

import pycoll
from pycoll.compress import Custom, Feedback, PowerSGD, RandomK, Threshold, TopK
from pycoll.errors import PeerLostError

Array = Any
SEED = int(os.environ.get("TEST_SEED", "20261128"))
SEEDS = 200
HALVES = Custom(
    lambda x: x.astype(np.float16).tobytes(), lambda b, n: np.frombuffer(b, np.float16), "halves"
)
CODECS = [TopK(0.2), Threshold(1.0), RandomK(0.3, 1), PowerSGD(2), HALVES]
#: By number of ranks: the hosts that they are on.
HOSTS = {
    2: ([(0, 1)], [(0,), (1,)]),
    3: ([(0, 1, 2)], [(0,), (1,), (2,)], [(0, 2), (1,)]),
    4: ([(0, 1, 2, 3)], [(0, 1), (2, 3)], [(0, 1, 2), (3,)]),
}
SHAPES = ([(40, 30)], [(1,), (0,)], [(1500,), (7,), (12, 9)], [(30, 4, 10), (3000,)])


class Fault(NamedTuple):
    """Exchange ``number`` fails on ``ranks``; with ``late``, if nobody waits yet, at the wait."""

    number: int
    ranks: frozenset[int]
    late: bool


class Meeting:
    """What the ranks have given to the exchanges of one call."""

    def __init__(self, size: int, fault: Fault | None = None) -> None:
        self.size, self.fault = size, fault
        self._given: dict[int, dict[int, Array]] = {}
        self._changed = threading.Condition()

    def give(self, number: int, rank: int, x: Any) -> None:
        with self._changed:
            self._given.setdefault(number, {})[rank] = np.array(x)
            self._changed.notify_all()

    def taken(self, number: int) -> list[Array]:
        """What all ranks have given, in their order."""
        with self._changed:
            given = self._given.setdefault(number, {})
            assert self._changed.wait_for(lambda: len(given) == self.size, TIMEOUT_S)
            return [given[rank] for rank in range(self.size)]


class StandInWork:
    """The Work of an exchange."""

    def __init__(self, receive: Callable[[], Array]) -> None:
        self._receive = receive

    def wait(self, timeout: float | None = None) -> Array:
        return self._receive()


class StandInComm:
    """One rank's end of the exchanges that codecs make."""

    failure = None

    def __init__(self, meeting: Meeting, rank: int, hosts: Sequence[tuple[int, ...]]) -> None:
        self._meeting = meeting
        self.rank, self.size, self.hosts = rank, meeting.size, hosts
        #: The number of exchanges so far.
        self.count = 0

    def all_to_all(self, x: Any, lengths: Any = None) -> Array:
        def combined(lines: list[Array]) -> Array:
            if lengths is None:
                return np.stack([line[self.rank] for line in lines])
            ends = np.cumsum(lengths, axis=1)
            begins = ends - np.array(lengths)
            return np.concatenate(
                [line[begins[r, self.rank] : ends[r, self.rank]] for r, line in enumerate(lines)]
            )

        return self._exchange(x, combined)

    def all_gather(self, x: Any, lengths: Any = None, async_op: bool = False) -> Any:
        return self._exchange(x, np.concatenate, async_op)

    def all_reduce(
        self, x: Any, op: str = "sum", async_op: bool = False, deterministic: Any = None
    ) -> Any:
        def combined(lines: list[Array]) -> Array:
            total = functools.reduce(np.add, lines)
            return total / total.dtype.type(self.size) if op == "avg" else total

        return self._exchange(x, combined, async_op)

    def _exchange(
        self, x: Any, combined: Callable[[list[Array]], Array], async_op: bool = False
    ) -> Any:
        number, fault = self.count, self._meeting.fault
        self.count += 1
        lost = PeerLostError("a rank is lost", rank=(self.rank + 1) % self.size)
        if fault is not None and number > fault.number:
            raise lost
        self._meeting.give(number, self.rank, x)
        fails = fault is not None and number == fault.number and self.rank in fault.ranks
        if fails and not (async_op and fault is not None and fault.late):
            raise lost

        def receive() -> Array:
            if fails:
                raise lost
            return combined(self._meeting.taken(number))

        return StandInWork(receive) if async_op else receive()


class Call(NamedTuple):
    """A call on all ranks."""

    codec: Any
    op: str
    hosts: Sequence[tuple[int, ...]]

    @property
    def size(self) -> int:
        return sum(map(len, self.hosts))


#: How a call ended on a rank, "done", or where it raised, "call" or "wait"; with bits or the error.
Outcome = tuple[str, Any]


def called(
    pool: ThreadPoolExecutor,
    call: Call,
    xs: list[list[Array]],
    feedbacks: list[Feedback],
    fault: Fault | None = None,
) -> tuple[list[Outcome], int]:
    """How each rank ended, and the number of exchanges."""
    meeting = Meeting(call.size, fault)
    comms = [StandInComm(meeting, rank, call.hosts) for rank in range(call.size)]

    def one(comm: StandInComm) -> Outcome:
        words = {"feedback": feedbacks[comm.rank], "deterministic": True, "async_op": True}
        where = "call"
        try:
            work = call.codec.all_reduce(comm, xs[comm.rank], call.op, **words)
            where = "wait"
            return "done", [array.tobytes() for array in work.wait()]
        except PeerLostError as error:
            return where, error

    found = list(pool.map(one, comms))
    return found, max(comm.count for comm in comms)


def arrays(draw: random.Random, size: int, shapes: Sequence[tuple[int, ...]]) -> list[list[Array]]:
    dice = np.random.default_rng(draw.randrange(2**32))
    return [[dice.standard_normal(one).astype(np.float32) for one in shapes] for _ in range(size)]


def held(feedback: Feedback) -> dict[str, Any]:
    """All that a Feedback keeps, in bits."""
    return {
        name: {number: array.tobytes() for number, array in one.items()}
        if isinstance(one, dict)
        else one
        for name, one in feedback.state_dict().items()
    }


def copied(feedbacks: list[Feedback], momentum: float) -> list[Feedback]:
    made = []
    for one in feedbacks:
        made.append(Feedback(momentum=momentum))
        made[-1].load_state_dict(one.state_dict())
    return made


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(max(HOSTS)) as made:
        yield made


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_a_fault_leaves_the_bits_or_the_feedback_of_before(
    codec: Any, pool: ThreadPoolExecutor
) -> None:
    ends = {"done": 0, "call": 0, "wait": 0}
    for number in range(SEEDS):
        seed = f"{SEED} {codec!r} {number}"
        draw = random.Random(seed)
        size = draw.choice(list(HOSTS))
        call = Call(codec, draw.choice(("sum", "avg")), draw.choice(HOSTS[size]))
        shapes, momentum = draw.choice(SHAPES), draw.choice((0.0, 0.5))
        feedbacks = [Feedback(momentum=momentum) for _ in range(size)]
        for _ in range(draw.randrange(1, 3)):
            called(pool, call, arrays(draw, size, shapes), feedbacks)
        xs, before = arrays(draw, size, shapes), [held(one) for one in feedbacks]
        oracles = copied(feedbacks, momentum)
        wanted, count = called(pool, call, xs, oracles)
        assert [where for where, _ in wanted] == ["done"] * size, seed
        after = [held(one) for one in oracles]
        ranks = frozenset(draw.sample(range(size), draw.randrange(1, size + 1)))
        fault = Fault(draw.randrange(count), ranks, draw.random() < 0.5)
        found, _ = called(pool, call, xs, feedbacks, fault)
        for rank, (where, told) in enumerate(found):
            ends[where] += 1
            why, left = (seed, fault, rank, where), held(feedbacks[rank])
            if where == "done":
                assert told == wanted[rank][1] and left == after[rank], why
            elif where == "call":
                assert told.operation == "all_reduce" and left == before[rank], why
            else:
                assert fault.number == count - 1, why
                assert left == {**after[rank], "factors": before[rank]["factors"]}, why
        if all(where == "call" for where, _ in found):
            again, _ = called(pool, call, xs, feedbacks)
            assert again == wanted and [held(one) for one in feedbacks] == after, seed
    print(f"seed {SEED}: {codec!r} ended {ends}")
    assert all(ends.values()), ends


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_the_stand_in_has_the_bits_of_a_communicator(codec: Any, pool: ThreadPoolExecutor) -> None:
    for op in ("sum", "avg"):
        xs = arrays(random.Random(SEED), 3, [(40, 30), (999,)])
        kept, feedbacks = ([Feedback() for _ in xs] for _ in range(2))

        def real(
            comm: pycoll.Communicator, op: str = op, xs: Any = xs, kept: Any = kept
        ) -> list[bytes]:
            words = {"feedback": kept[comm.rank], "deterministic": True}
            found = comm.all_reduce(xs[comm.rank], op, compress=codec, **words)
            return [one.tobytes() for one in found]

        for _ in range(2):
            wanted = world_in_threads(3).run(real)
            found, _ = called(pool, Call(codec, op, HOSTS[3][0]), xs, feedbacks)
            assert [bits for _, bits in found] == wanted
            assert [held(one) for one in feedbacks] == [held(one) for one in kept]
