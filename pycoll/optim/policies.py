"""Policies: how gradients become messages. Pure functions of what all ranks know.

    bsp             all in one message, after the backward pass
    wfbp            each gradient by itself, as soon as it is there (wait-free backpropagation)
    fixed           neighbours together, up to ``bucket_bytes``, as torch's DDP and Horovod do
    mg_wfbp         neighbours together so that the last message ends as early as it can
    bytescheduler   cut in parts of ``partition_bytes``; parts of front layers overtake others
    dear            as fixed, but reduce_scatter beside the backward pass and all_gather afterwards
    auto            the one that the simulation finds the fastest; see ``choose``

mg_wfbp is exact: with E(j) the earliest end of messages for the first j gradients, E(j) is the
least of max(E(i), ready(j)) + cost(i..j) over all i, since to end the earlier messages sooner never
hurts. Of those i with E(i) <= ready(j) only the last can be best, so the search stops there. (With
several kinds of gradients, messages of a group are taken to start together, which they may do
sooner.) Where each message holds up the thread that computes, fewer messages may be worth a later
end so far, for what they do to the gradients to come: then of each j all ways are kept that no
other one beats in both. For a hundred gradients and more they are thinned out, and for thousands
the soonest alone is kept, which takes n log n steps for n gradients.

The priorities of bytescheduler become an order beforehand: which part goes next is played through
with the times that all ranks have agreed on. So ranks need not ask each other while they run.
``credit_bytes`` is what may be committed at a time; within it nothing is overtaken any more.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pycoll.errors import InvalidArgumentError
from pycoll.optim.agenda import Agenda, Gradient, Message, Piece, Rate, Rates

MIB = 1 << 20
AUTO = "auto"
#: Ways that mg_wfbp keeps of all gradients together where messages hold up the thread.
WAYS = 4096
#: Parts of a gradient begin at multiples of this, which suits all types and cache lines.
GRAIN = 64

Group = range
"""Numbers of neighbouring gradients."""


@dataclass(frozen=True)
class Policy:
    """A policy's name, and its figures; what it has no use for is ignored.

    ``merge_bytes``: bytescheduler joins neighbours up to so many bytes before it cuts them.

    Raises InvalidArgumentError for an unknown name, and figures that are not above 0.
    """

    name: str = AUTO
    bucket_bytes: int = 25 * MIB
    partition_bytes: int = 4 * MIB
    credit_bytes: int = 8 * MIB
    merge_bytes: int = 1

    def __post_init__(self) -> None:
        if self.name not in (*POLICIES, AUTO):
            words = ", ".join((*POLICIES, AUTO))
            raise InvalidArgumentError(f"policy is {self.name!r}: expected one of {words}")
        for word in ("bucket_bytes", "partition_bytes", "credit_bytes", "merge_bytes"):
            value = getattr(self, word)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidArgumentError(f"{word} is {value!r}: expected a number above 0")

    def __str__(self) -> str:
        figures = {
            "fixed": ("bucket_bytes",),
            "dear": ("bucket_bytes",),
            "bytescheduler": ("partition_bytes", "credit_bytes", "merge_bytes"),
        }.get(self.name, ())
        words = ", ".join(f"{word}={getattr(self, word)}" for word in figures)
        return f"{self.name}({words})" if words else self.name


def policy_of(given: Any) -> Policy:
    """A Policy, or one by its name. Raises InvalidArgumentError for anything else."""
    if isinstance(given, Policy):
        return given
    if not isinstance(given, str):
        raise InvalidArgumentError(f"policy is {given!r}: expected a name or a pycoll.optim.Policy")
    return Policy(given)


def agenda_of(policy: Policy, gradients: Sequence[Gradient], rates: Rates) -> Agenda:
    """The messages of a step. ``gradients`` come in the order of their ``ready_s``.

    A pure function; ``policy`` is any but auto.
    """
    late = [n for n in range(1, len(gradients)) if gradients[n].ready_s < gradients[n - 1].ready_s]
    if late:
        raise InvalidArgumentError(f"gradient {late[0]} is ready before the one in front of it")
    return POLICIES[policy.name](policy, gradients, rates)


# Merging


def _bsp(policy: Policy, gradients: Sequence[Gradient], rates: Rates) -> Agenda:
    groups = [range(len(gradients))] if gradients else []
    return Agenda(policy.name, _messages(groups, gradients))


def _wfbp(policy: Policy, gradients: Sequence[Gradient], rates: Rates) -> Agenda:
    groups = [range(n, n + 1) for n in range(len(gradients))]
    return Agenda(policy.name, _messages(groups, gradients))


def _fixed(policy: Policy, gradients: Sequence[Gradient], rates: Rates) -> Agenda:
    return Agenda(policy.name, _messages(_filled(gradients, policy.bucket_bytes), gradients))


def _mg_wfbp(policy: Policy, gradients: Sequence[Gradient], rates: Rates) -> Agenda:
    return Agenda(policy.name, _messages(_best_merge(gradients, rates), gradients))


def _dear(policy: Policy, gradients: Sequence[Gradient], rates: Rates) -> Agenda:
    messages = _messages(_filled(gradients, policy.bucket_bytes), gradients)
    # The forward pass needs the gradients of its first layers, which came last, first.
    return Agenda(policy.name, messages, tuple(reversed(range(len(messages)))))


def _filled(gradients: Sequence[Gradient], bucket_bytes: int) -> list[Group]:
    """Neighbours together while they fit; what is longer is by itself."""
    groups: list[Group] = []
    first = total = 0
    for number, gradient in enumerate(gradients):
        if number > first and total + gradient.nbytes > bucket_bytes:
            groups.append(range(first, number))
            first, total = number, 0
        total += gradient.nbytes
    return [*groups, range(first, len(gradients))] if gradients else groups


#: How long messages hold the thread up, when the last one ends, where it begins, and the way up
#: to there: one way to reduce the gradients up to some number.
_Way = tuple[float, float, int, Any]


def _best_merge(gradients: Sequence[Gradient], rates: Rates) -> list[Group]:
    if not gradients:
        return []
    kinds = len({one.kind for one in gradients})
    nbytes = sum(one.nbytes for one in gradients)
    held_up = kinds * rates.host_s
    end = gradients[-1].ready_s + held_up + kinds * rates.all_reduce.alpha
    as_one: _Way = (held_up, end + rates.all_reduce.beta * nbytes, 0, (0.0, 0.0, 0, None))
    last_s = gradients[-1].ready_s

    def step_s(way: _Way) -> float:
        return max(way[1], last_s + way[0])

    soonest = _soonest_way(gradients, rates)
    best = min(soonest, as_one, key=step_s)
    most = WAYS // len(gradients)
    if rates.host_s > 0 and most > 1:
        best = _best_way(gradients, rates, most, step_s(best)) or best
    way: _Way | None = best
    groups: list[Group] = []
    stop = len(gradients)
    while way is not None and way[3] is not None:
        groups.append(range(way[2], stop))
        stop, way = way[2], way[3]
    return groups[::-1]


class _Beginnings:
    """Where the last of some messages may begin whose gradients are of up to ``kinds`` kinds.

    A group that begins at gradient i waits for the wire or for its last gradient j:

        end = max(E(i), ready(j) + held_up(i)) + alpha + beta (bytes(j) - bytes(i))

    with alpha and what holds up counted once for each kind. So of those i that wait for the wire,
    the least E(i) - beta bytes(i) is the best for every j, and of the others the least held_up(i) -
    beta bytes(i). As ready(j) rises, each i goes once from the first to the others; as j does,
    those that are too far back for so few kinds go for good.
    """

    def __init__(self, kinds: int, host_s: float) -> None:
        self.kinds, self._held_s = kinds, kinds * host_s
        self._by_start: list[tuple[float, int]] = []  # when each i no longer waits for the wire
        self._is_free: list[bool] = []
        #: Both by their values as above, held_up, -i.
        self._on_wire: list[tuple[float, float, int]] = []
        self._free: list[tuple[float, float, int]] = []

    def add(self, held_up: float, end: float, shift: float) -> None:
        """The next i, by its way's figures and beta bytes(i)."""
        number = len(self._is_free)
        self._is_free.append(False)
        heapq.heappush(self._by_start, (end - (held_up + self._held_s), number))
        heapq.heappush(self._on_wire, (end - shift, held_up, -number))

    def best(
        self, ready_s: float, least: int, ways: Sequence[_Way], shifts: Sequence[float]
    ) -> Iterator[int]:
        """Of those from ``least`` on the best that waits, and the best that does not."""
        while self._by_start and self._by_start[0][0] <= ready_s:
            number = heapq.heappop(self._by_start)[1]
            self._is_free[number] = True
            held_up = ways[number][0]
            heapq.heappush(self._free, (held_up - shifts[number], held_up, -number))
        while self._on_wire and (
            -self._on_wire[0][2] < least or self._is_free[-self._on_wire[0][2]]
        ):
            heapq.heappop(self._on_wire)
        while self._free and -self._free[0][2] < least:
            heapq.heappop(self._free)
        for heap in (self._free, self._on_wire):
            if heap:
                yield -heap[0][2]


def _soonest_way(gradients: Sequence[Gradient], rates: Rates) -> _Way:
    """That of ``_best_way`` which keeps the soonest alone, in k n log n steps for n gradients of k
    kinds.

    To take a group for one of more kinds than it has only makes it longer, so the beginnings for
    every number of kinds are looked through as far back as there are no more. Of equal ends the
    least held_up, then the shortest message, is taken; what is equal but for rounding may be taken
    otherwise than by the search through all beginnings.
    """
    alpha, beta, host_s = rates.all_reduce.alpha, rates.all_reduce.beta, rates.host_s
    ways: list[_Way] = [(0.0, 0.0, 0, None)]
    before = [0]  # bytes
    shifts: list[float] = []
    seen: dict[str, int] = {}  # kinds, with the last gradient of each; the latest is the last one
    kinds = len({one.kind for one in gradients})
    every = [_Beginnings(number, host_s) for number in range(1, kinds + 1)]
    for last, gradient in enumerate(gradients):
        shifts.append(beta * before[last])
        for one in every:
            one.add(*ways[last][:2], shifts[last])
        before.append(before[last] + gradient.nbytes)
        seen.pop(gradient.kind, None)
        seen[gradient.kind] = last
        latest = [*reversed(seen.values()), -1]
        found = []
        for one in every[: len(seen)]:
            for first in one.best(gradient.ready_s, latest[one.kinds] + 1, ways, shifts):
                way = ways[first]
                held_up = way[0] + one.kinds * host_s
                start = max(way[1], gradient.ready_s + held_up)
                end = start + one.kinds * alpha + beta * (before[-1] - before[first])
                found.append((end, held_up, -first))
        end, held_up, minus = min(found)
        ways.append((held_up, end, -minus, ways[-minus]))
    return ways[-1]


def _best_way(
    gradients: Sequence[Gradient], rates: Rates, most: int, bound_s: float
) -> _Way | None:
    """The way to reduce all with the shortest step, if that is shorter than ``bound_s``; of each
    number of gradients ``most`` ways are kept."""
    alpha, beta, host_s = rates.all_reduce.alpha, rates.all_reduce.beta, rates.host_s
    rest = sum(gradient.nbytes for gradient in gradients)
    last_s = gradients[-1].ready_s
    ways: list[list[_Way]] = [[(0.0, 0.0, 0, None)]]
    for last, gradient in enumerate(gradients):
        rest -= gradient.nbytes
        soonest: dict[float, _Way] = {}
        nbytes, kinds = 0, set()
        # Of those that are not waited for, the least; no earlier way with as much can be better.
        limit = float("inf")
        for first in range(last, -1, -1):
            nbytes += gradients[first].nbytes
            kinds.add(gradients[first].kind)
            for way in ways[first]:
                if way[0] >= limit:
                    break
                held_up = way[0] + len(kinds) * host_s
                sent = gradient.ready_s + held_up
                end = max(way[1], sent) + len(kinds) * alpha + beta * nbytes
                if end + beta * rest < bound_s and last_s + held_up < bound_s:
                    known = soonest.get(held_up)
                    if known is None or end < known[1]:
                        soonest[held_up] = (held_up, end, first, way)
                if way[1] <= sent:
                    limit = way[0]
            if limit == 0:
                break
        ways.append(_kept(soonest, most))
    return min(ways[-1], key=lambda way: max(way[1], last_s + way[0]), default=None)


def _kept(soonest: dict[float, _Way], most: int) -> list[_Way]:
    """Those that no other one beats in both, in the order of rising held_up and falling ends; of
    too many the last, the first and some between."""
    kept: list[_Way] = []
    for held_up in sorted(soonest):
        if not kept or soonest[held_up][1] < kept[-1][1]:
            kept.append(soonest[held_up])
    if len(kept) <= most:
        return kept
    return [kept[-1 - place * (len(kept) - 1) // max(1, most - 1)] for place in range(most)][::-1]


def _messages(groups: Sequence[Group], gradients: Sequence[Gradient]) -> tuple[Message, ...]:
    """Each group as a message per kind."""
    return tuple(
        Message(tuple(Piece(n, 0, gradients[n].nbytes) for n in numbers))
        for group in groups
        for numbers in _by_kind(group, gradients)
    )


def _by_kind(group: Group, gradients: Sequence[Gradient]) -> list[list[int]]:
    found: dict[str, list[int]] = {}
    for number in group:
        found.setdefault(gradients[number].kind, []).append(number)
    return list(found.values())


# Partitioning


def _bytescheduler(policy: Policy, gradients: Sequence[Gradient], rates: Rates) -> Agenda:
    whole = _messages(_filled(gradients, policy.merge_bytes), gradients)
    length = max(GRAIN, policy.partition_bytes // GRAIN * GRAIN)
    parts = [part for message in whole for part in _cut(message, length)]
    order = by_priority(parts, gradients, rates.all_reduce, policy.credit_bytes)
    return Agenda(policy.name, tuple(parts[number] for number in order))


def _cut(message: Message, length: int) -> list[Message]:
    """A message in parts of up to ``length`` bytes, which may end inside gradients."""
    parts: list[Message] = []
    pieces: list[Piece] = []
    room = length
    for number, start, stop in message.pieces:
        at = start
        while stop - at > room:
            # Only a multiple of GRAIN may be a cut inside a gradient.
            fits = room // GRAIN * GRAIN
            if fits:
                pieces.append(Piece(number, at, at + fits))
            parts.append(Message(tuple(pieces)))
            pieces, room, at = [], length, at + fits
        if stop > at or start == stop:
            pieces.append(Piece(number, at, stop))
        room -= stop - at
    return [*parts, Message(tuple(pieces))] if pieces else parts


def by_priority(
    parts: Sequence[Message], gradients: Sequence[Gradient], rate: Rate, credit_bytes: int
) -> list[int]:
    """The order in which parts go if, whenever there is credit, the foremost layer's is committed.

    Credit is taken when a part is committed and comes back when it has been sent; a part that is
    longer than all credit goes when nothing else is committed.
    """
    ready = [part.ready_s(gradients) for part in parts]
    arrivals = deque(sorted(range(len(parts)), key=lambda n: (ready[n], n)))
    waiting: list[tuple[int, int]] = []
    committed: deque[tuple[float, int]] = deque()
    order: list[int] = []
    now = free = 0.0
    used = 0
    while arrivals or waiting:
        while arrivals and ready[arrivals[0]] <= now:
            number = arrivals.popleft()
            foremost = max(piece.gradient for piece in parts[number].pieces)
            heapq.heappush(waiting, (-foremost, number))
        while committed and committed[0][0] <= now:
            used -= committed.popleft()[1]
        if waiting:
            nbytes = parts[waiting[0][1]].nbytes
            if not committed or used + nbytes <= credit_bytes:
                number = heapq.heappop(waiting)[1]
                free = max(free, now) + rate.seconds(nbytes)
                committed.append((free, nbytes))
                used += nbytes
                order.append(number)
                continue
        coming = [ready[arrivals[0]]] if arrivals else []
        now = min([*coming, *(end for end, _ in list(committed)[:1])])
    return order


Maker = Callable[[Policy, Sequence[Gradient], Rates], Agenda]

#: All that makes messages, by name.
POLICIES: dict[str, Maker] = {
    "bsp": _bsp,
    "wfbp": _wfbp,
    "fixed": _fixed,
    "mg_wfbp": _mg_wfbp,
    "bytescheduler": _bytescheduler,
    "dear": _dear,
}
