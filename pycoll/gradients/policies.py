"""Policies: how gradients become messages. Pure functions of values that all ranks know.

    bsp             all gradients in one message, after the backward pass
    wfbp            one message per gradient, sent when it is ready (wait-free backpropagation)
    fixed           neighbours merged up to ``bucket_bytes``, as DDP of torch and Horovod do
    mg_wfbp         neighbours merged so that the last message ends as early as possible
    bytescheduler   messages cut into parts of ``partition_bytes``; parts of front layers overtake
    dear            as fixed, with reduce_scatter during the backward pass, all_gather after it
    auto            the policy that is fastest in the simulation; see ``chooser``

mg_wfbp is exact. Let E(j) be the earliest end of messages for the first j gradients. Then E(j) is
the least of max(E(i), ready(j)) + cost(i..j) over all i, since ending the earlier messages sooner
never hurts. Among the i with E(i) <= ready(j) only the last can be best, so the search stops there.
With several dtypes, the model assumes that the messages of a group start together; they may start
sooner.

If each message also holds up the computing thread, fewer messages delay the coming gradients less.
So a later end of the messages so far may still give the shorter step. The search then keeps for
each j all ways that no other way beats in both delay and end. For a hundred gradients and more it
thins the ways out. For thousands of gradients it keeps only the soonest way, which takes n log n
steps for n gradients.

The policy bytescheduler turns its priorities into a fixed order in advance: ``by_priority``
simulates which part is sent next, with the times that all ranks have agreed on. So ranks need not
ask each other during a step. ``credit_bytes`` bounds the bytes that are committed at a time;
committed parts are no longer overtaken.

Sources: MG-WFBP, Shi, Chu and Li 2019; ByteScheduler, Peng et al. 2019; DeAR, Zhang et al. 2023.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pycoll.errors import InvalidArgumentError
from pycoll.gradients.communication_plan import (
    CommunicationPlan,
    Gradient,
    Message,
    Piece,
    Rate,
    Rates,
)

MIB = 1 << 20
AUTO = "auto"
#: The number of ways that mg_wfbp keeps over all gradients where messages hold up the thread.
WAYS = 4096
#: Parts of a gradient begin at multiples of this many bytes, which suits cache lines and dtypes.
GRAIN = 64

Group = range
"""Numbers of neighbouring gradients."""


@dataclass(frozen=True)
class Policy:
    """A policy by name, with its parameters; a policy ignores parameters that it does not use.

    Arguments, all sizes in bytes:
        ``name``: "bsp", "wfbp", "fixed", "mg_wfbp", "bytescheduler", "dear" or "auto".
        ``bucket_bytes``: the largest merged message of fixed and dear. A longer gradient is a
            message by itself. Policies that need measured costs use it in the timed steps.
        ``partition_bytes``: the length of the parts of bytescheduler.
        ``credit_bytes``: the bytes that bytescheduler commits at a time.
        ``merge_bytes``: bytescheduler merges neighbours up to this size before it cuts them.

    Errors: InvalidArgumentError for an unknown name and for a size that is not an integer above 0.

    Cost: none; a policy is a value that can be compared and hashed.

    >>> str(pycoll.optim.Policy("fixed", bucket_bytes=1 << 20))
    'fixed(bucket_bytes=1048576)'
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
    """Return a Policy as it is, or make one from a name. Else raise InvalidArgumentError."""
    if isinstance(given, Policy):
        return given
    if not isinstance(given, str):
        raise InvalidArgumentError(f"policy is {given!r}: expected a name or a pycoll.optim.Policy")
    return Policy(given)


def comm_plan_of(policy: Policy, gradients: Sequence[Gradient], rates: Rates) -> CommunicationPlan:
    """The messages of a step for any policy but auto. A pure function.

    Raises InvalidArgumentError unless ``gradients`` are in the order of their ``ready_s``.
    """
    late = [n for n in range(1, len(gradients)) if gradients[n].ready_s < gradients[n - 1].ready_s]
    if late:
        raise InvalidArgumentError(f"gradient {late[0]} is ready before the one in front of it")
    return POLICIES[policy.name](policy, gradients, rates)


# Merging


def _bsp(policy: Policy, gradients: Sequence[Gradient], rates: Rates) -> CommunicationPlan:
    groups = [range(len(gradients))] if gradients else []
    return CommunicationPlan(policy.name, _messages(groups, gradients))


def _wfbp(policy: Policy, gradients: Sequence[Gradient], rates: Rates) -> CommunicationPlan:
    groups = [range(n, n + 1) for n in range(len(gradients))]
    return CommunicationPlan(policy.name, _messages(groups, gradients))


def _fixed(policy: Policy, gradients: Sequence[Gradient], rates: Rates) -> CommunicationPlan:
    return CommunicationPlan(
        policy.name, _messages(_filled(gradients, policy.bucket_bytes), gradients)
    )


def _mg_wfbp(policy: Policy, gradients: Sequence[Gradient], rates: Rates) -> CommunicationPlan:
    return CommunicationPlan(policy.name, _messages(_best_merge(gradients, rates), gradients))


def _dear(policy: Policy, gradients: Sequence[Gradient], rates: Rates) -> CommunicationPlan:
    messages = _messages(_filled(gradients, policy.bucket_bytes), gradients)
    # The next forward pass first needs the gradients of its first layers, which are ready last.
    return CommunicationPlan(policy.name, messages, tuple(reversed(range(len(messages)))))


def _filled(gradients: Sequence[Gradient], bucket_bytes: int) -> list[Group]:
    """Merge neighbours up to ``bucket_bytes``; a longer gradient is a group by itself."""
    groups: list[Group] = []
    first = total = 0
    for number, gradient in enumerate(gradients):
        if number > first and total + gradient.nbytes > bucket_bytes:
            groups.append(range(first, number))
            first, total = number, 0
        total += gradient.nbytes
    return [*groups, range(first, len(gradients))] if gradients else groups


#: One way to reduce the first gradients: the seconds for which its messages hold up the thread, the
#: end of its last message, the first gradient of that message, and the way before that message.
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
    """Candidates for the first gradient of a last group that has up to ``kinds`` dtypes.

    A group that begins at gradient i waits for the link or for its last gradient j:

        end = max(E(i), ready(j) + held_up(i)) + alpha + beta (bytes(j) - bytes(i))

    Here alpha and the delay of the thread count once per dtype. Among the i that wait for the link,
    the least E(i) - beta bytes(i) is the best for every j. Among the other i it is the least
    held_up(i) - beta bytes(i). As ready(j) rises, each i moves once from the first set to the
    second. As j rises, an i whose group would have more than ``kinds`` dtypes is dropped for good.
    """

    def __init__(self, kinds: int, host_s: float) -> None:
        self.kinds, self._held_s = kinds, kinds * host_s
        # (The ready(j) from which i no longer waits for the link, i).
        self._by_start: list[tuple[float, int]] = []
        self._is_free: list[bool] = []
        #: Both sets as heaps of (value as above, held_up, -i).
        self._on_wire: list[tuple[float, float, int]] = []
        self._free: list[tuple[float, float, int]] = []

    def add(self, held_up: float, end: float, shift: float) -> None:
        """Add the next i: held_up and end of its way, and ``shift``, which is beta bytes(i)."""
        number = len(self._is_free)
        self._is_free.append(False)
        heapq.heappush(self._by_start, (end - (held_up + self._held_s), number))
        heapq.heappush(self._on_wire, (end - shift, held_up, -number))

    def best(
        self, ready_s: float, least: int, ways: Sequence[_Way], shifts: Sequence[float]
    ) -> Iterator[int]:
        """Yield the best i of each set, among those i that are at least ``least``."""
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
    """The way of ``_best_way`` that keeps only the soonest, for n gradients of k dtypes.

    Takes k n log n steps. Treating a group as one of more dtypes than it has only makes it longer.
    So for every number of dtypes the function searches the beginnings as far back as a group has no
    more dtypes than that. Among equal ends it takes the least held_up, then the shortest message.
    Among ends that are equal except for rounding, its choice may differ from that of a search
    through all beginnings.
    """
    alpha, beta, host_s = rates.all_reduce.alpha, rates.all_reduce.beta, rates.host_s
    ways: list[_Way] = [(0.0, 0.0, 0, None)]
    before = [0]  # bytes
    shifts: list[float] = []
    seen: dict[str, int] = {}  # the last gradient of each dtype, in ascending order
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
    """The way with the shortest step, if that is shorter than ``bound_s``, else None.

    The search keeps at most ``most`` ways for each number of gradients.
    """
    alpha, beta, host_s = rates.all_reduce.alpha, rates.all_reduce.beta, rates.host_s
    rest = sum(gradient.nbytes for gradient in gradients)
    last_s = gradients[-1].ready_s
    ways: list[list[_Way]] = [[(0.0, 0.0, 0, None)]]
    for last, gradient in enumerate(gradients):
        rest -= gradient.nbytes
        soonest: dict[float, _Way] = {}
        nbytes, kinds = 0, set()
        # The least held_up among ways that end before this group is sent. An earlier way with at
        # least as much held_up cannot be better.
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
    """The ways that no other way beats in both figures, by rising held_up and falling end.

    If there are more than ``most``: the last, the first, and some evenly spaced between them.
    """
    kept: list[_Way] = []
    for held_up in sorted(soonest):
        if not kept or soonest[held_up][1] < kept[-1][1]:
            kept.append(soonest[held_up])
    if len(kept) <= most:
        return kept
    return [kept[-1 - place * (len(kept) - 1) // max(1, most - 1)] for place in range(most)][::-1]


def _messages(groups: Sequence[Group], gradients: Sequence[Gradient]) -> tuple[Message, ...]:
    """One message per group and dtype."""
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


def _bytescheduler(
    policy: Policy, gradients: Sequence[Gradient], rates: Rates
) -> CommunicationPlan:
    whole = _messages(_filled(gradients, policy.merge_bytes), gradients)
    length = max(GRAIN, policy.partition_bytes // GRAIN * GRAIN)
    parts = [part for message in whole for part in _cut(message, length)]
    order = by_priority(parts, gradients, rates.all_reduce, policy.credit_bytes)
    return CommunicationPlan(policy.name, tuple(parts[number] for number in order))


def _cut(message: Message, length: int) -> list[Message]:
    """Cut a message into parts of up to ``length`` bytes, which may end inside gradients."""
    parts: list[Message] = []
    pieces: list[Piece] = []
    space = length
    for number, start, stop in message.pieces:
        at = start
        while stop - at > space:
            # A cut inside a gradient lies at a multiple of GRAIN.
            fits = space // GRAIN * GRAIN
            if fits:
                pieces.append(Piece(number, at, at + fits))
            parts.append(Message(tuple(pieces)))
            pieces, space, at = [], length, at + fits
        if stop > at or start == stop:
            pieces.append(Piece(number, at, stop))
        space -= stop - at
    return [*parts, Message(tuple(pieces))] if pieces else parts


def by_priority(
    parts: Sequence[Message], gradients: Sequence[Gradient], rate: Rate, credit_bytes: int
) -> list[int]:
    """The order of parts if, whenever credit is free, the part of the foremost layer is committed.

    A part takes credit when it is committed and returns it when it has been sent. A part that is
    longer than all credit is committed when no other part is.
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


Maker = Callable[[Policy, Sequence[Gradient], Rates], CommunicationPlan]

#: The function of each policy but auto, by name.
POLICIES: dict[str, Maker] = {
    "bsp": _bsp,
    "wfbp": _wfbp,
    "fixed": _fixed,
    "mg_wfbp": _mg_wfbp,
    "bytescheduler": _bytescheduler,
    "dear": _dear,
}
