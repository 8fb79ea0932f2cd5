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
So a later end of the messages so far may still give the shorter step. A way is one division of the
first j gradients into messages. The search keeps, for each j, the ways that no other way beats in
both delay and end. Where there are many, it keeps some of them. For more than WAYS / WAYS_MIN
gradients it keeps only the soonest way, which takes n log n steps for n gradients.

With two architectures, the cost of a group is that of the cheaper one, so the search stays exact.

The policy bytescheduler turns its priorities into a fixed order in advance: ``by_priority``
simulates which part is sent next, with the times that all ranks have agreed on. So ranks need not
ask each other during a step. ``credit_bytes`` bounds the bytes that are committed at a time;
committed parts are no longer overtaken.

Every policy but auto returns a point (``points``) for an architecture that the caller names.

Sources: MG-WFBP, Shi, Chu and Li 2019; ByteScheduler, Peng et al. 2019; DeAR, Zhang et al. 2023.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pycoll.errors import InvalidArgumentError
from pycoll.gradients.communication_plan import A2A, CommunicationPlan, Gradient, Rate, Rates
from pycoll.gradients.points import Group, Point, plan_of

MIB = 1 << 20
AUTO = "auto"
#: The number of ways that mg_wfbp keeps over all gradients where messages hold up the thread.
WAYS = 512
#: Fewer ways for each gradient than this are not worth their time.
WAYS_MIN = 8

#: The architectures among which a group chooses, each with the cost of one message.
_Costs = Sequence[tuple[str, Rate]]


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


def comm_plan_of(
    policy: Policy, gradients: Sequence[Gradient], rates: Rates, architecture: str = A2A
) -> CommunicationPlan:
    """The messages of a step for any policy but auto. A pure function.

    Raises InvalidArgumentError unless ``gradients`` are in the order of their ``ready_s`` and
    ``rates`` have the architecture.
    """
    return plan_of(
        policy.name, point_of(policy, gradients, rates, (architecture,)), gradients, rates
    )


def point_of(
    policy: Policy, gradients: Sequence[Gradient], rates: Rates, architectures: tuple[str, ...]
) -> Point:
    """The point of any policy but auto. mg_wfbp picks an architecture for each group, from several.

    Any other policy uses the first architecture. Errors are those of ``comm_plan_of``.
    """
    late = [n for n in range(1, len(gradients)) if gradients[n].ready_s < gradients[n - 1].ready_s]
    if late:
        raise InvalidArgumentError(f"gradient {late[0]} is ready before the one in front of it")
    strange = [one for one in architectures if one not in rates.architectures]
    if strange:
        words = ", ".join(rates.architectures)
        raise InvalidArgumentError(
            f"architecture is {strange[0]!r}: these rates have {words}; "
            "Rates(push_pull=...) describes servers"
        )
    if policy.name == "dear" and architectures[0] != A2A:
        raise InvalidArgumentError(
            f"policy is 'dear' and architecture is {architectures[0]!r}: it cuts an all_reduce in "
            f"halves, so it needs {A2A!r}"
        )
    return POLICIES[policy.name](policy, gradients, rates, architectures)


# Merging

Maker = Callable[[Policy, Sequence[Gradient], Rates, tuple[str, ...]], Point]


def _bsp(policy: Policy, gradients: Sequence[Gradient], rates: Rates, by: tuple[str, ...]) -> Point:
    return Point((Group(0, len(gradients), by[0]),) if gradients else ())


def _wfbp(
    policy: Policy, gradients: Sequence[Gradient], rates: Rates, by: tuple[str, ...]
) -> Point:
    return Point(tuple(Group(n, n + 1, by[0]) for n in range(len(gradients))))


def _fixed_point(
    policy: Policy, gradients: Sequence[Gradient], rates: Rates, by: tuple[str, ...]
) -> Point:
    return Point(tuple(_fill_buckets(gradients, policy.bucket_bytes, Group(0, 0, by[0]))))


def _mg_wfbp(
    policy: Policy, gradients: Sequence[Gradient], rates: Rates, by: tuple[str, ...]
) -> Point:
    costs = [(one, rates.busy(one)) for one in by]
    return Point(tuple(_best_merge(gradients, costs, rates.host_s)))


def _dear(
    policy: Policy, gradients: Sequence[Gradient], rates: Rates, by: tuple[str, ...]
) -> Point:
    return Point(tuple(_fill_buckets(gradients, policy.bucket_bytes, Group(0, 0))), halves=True)


def _bytescheduler(
    policy: Policy, gradients: Sequence[Gradient], rates: Rates, by: tuple[str, ...]
) -> Point:
    like = Group(0, 0, by[0], policy.partition_bytes)
    groups = tuple(_fill_buckets(gradients, policy.merge_bytes, like))
    return Point(groups, credit_bytes=policy.credit_bytes)


def _fill_buckets(gradients: Sequence[Gradient], bucket_bytes: int, like: Group) -> list[Group]:
    """Merge neighbours up to ``bucket_bytes``; a longer gradient is a group by itself.

    ``like``: a group with the other attributes.
    """
    _, _, architecture, part_bytes = like
    groups: list[Group] = []
    first = total = 0
    for number, gradient in enumerate(gradients):
        nbytes = gradient.nbytes
        if number > first and total + nbytes > bucket_bytes:
            groups.append(Group(first, number, architecture, part_bytes))
            first, total = number, 0
        total += nbytes
    if gradients:
        groups.append(Group(first, len(gradients), architecture, part_bytes))
    return groups


#: One way to reduce the first gradients, as five values. The first two are the seconds for which
#: its messages hold up the thread, and the end of its last message. The next two are the first
#: gradient and the architecture of that message, as its place in the list of costs. The last one is
#: the way before that message.
_Way = tuple[float, float, int, int, Any]
_START: _Way = (0.0, 0.0, 0, 0, None)


def _best_merge(gradients: Sequence[Gradient], costs: _Costs, host_s: float) -> list[Group]:
    if not gradients:
        return []
    kinds = len({one.kind for one in gradients})
    nbytes = sum(one.nbytes for one in gradients)
    held_up = kinds * host_s
    took_s, by = _cheapest(costs, kinds, nbytes)
    as_one: _Way = (held_up, gradients[-1].ready_s + held_up + took_s, 0, by, _START)
    last_s = gradients[-1].ready_s

    def step_s(way: _Way) -> float:
        return max(way[1], last_s + way[0])

    soonest = _soonest_way(gradients, costs, host_s)
    best = min(soonest, as_one, key=step_s)
    most = WAYS // len(gradients)
    if host_s > 0 and most >= WAYS_MIN:
        best = _best_way(gradients, costs, host_s, most, step_s(best)) or best
    way: _Way = best
    groups: list[Group] = []
    stop = len(gradients)
    while way[4] is not None:
        groups.append(Group(way[2], stop, costs[way[3]][0]))
        stop, way = way[2], way[4]
    return groups[::-1]


def _cheapest(costs: _Costs, kinds: int, nbytes: int) -> tuple[float, int]:
    """The least time of a group, and the place of its architecture in the list of costs."""
    return min(
        (kinds * rate.alpha + rate.beta * nbytes, place) for place, (_, rate) in enumerate(costs)
    )


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


def _soonest_way(gradients: Sequence[Gradient], costs: _Costs, host_s: float) -> _Way:
    """The way of ``_best_way`` that keeps only the soonest, for n gradients of k dtypes.

    Takes k n log n steps. Treating a group as one of more dtypes than it has only makes it longer.
    So for every number of dtypes the function searches the beginnings as far back as a group has no
    more dtypes than that. Among equal ends it takes the least held_up, then the shortest message.
    Among ends that are equal except for rounding, its choice may differ from that of a search
    through all beginnings.
    """
    ways: list[_Way] = [_START]
    before = [0]  # bytes
    seen: dict[str, int] = {}  # the last gradient of each dtype, in ascending order
    kinds = len({one.kind for one in gradients})
    shifts: list[list[float]] = [[] for _ in costs]
    every = [[_Beginnings(number, host_s) for number in range(1, kinds + 1)] for _ in costs]
    for last, gradient in enumerate(gradients):
        before.append(before[last] + gradient.nbytes)
        seen.pop(gradient.kind, None)
        seen[gradient.kind] = last
        latest = [*reversed(seen.values()), -1]
        found = []
        for by, (_, (alpha, beta)) in enumerate(costs):
            shifts[by].append(beta * before[last])
            for one in every[by]:
                one.add(*ways[last][:2], shifts[by][last])
            for one in every[by][: len(seen)]:
                for first in one.best(gradient.ready_s, latest[one.kinds] + 1, ways, shifts[by]):
                    way = ways[first]
                    held_up = way[0] + one.kinds * host_s
                    start = max(way[1], gradient.ready_s + held_up)
                    end = start + one.kinds * alpha + beta * (before[-1] - before[first])
                    found.append((end, held_up, -first, by))
        end, held_up, minus, by = min(found)
        ways.append((held_up, end, -minus, by, ways[-minus]))
    return ways[-1]


def _best_way(
    gradients: Sequence[Gradient], costs: _Costs, host_s: float, most: int, bound_s: float
) -> _Way | None:
    """The way with the shortest step, if that is shorter than ``bound_s``, else None.

    The search keeps at most ``most`` ways for each number of gradients.
    """
    beta = min(rate.beta for _, rate in costs)
    rest = sum(gradient.nbytes for gradient in gradients)
    last_s = gradients[-1].ready_s
    ways: list[list[_Way]] = [[_START]]
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
            took_s, by = _cheapest(costs, len(kinds), nbytes)
            for way in ways[first]:
                if way[0] >= limit:
                    break
                held_up = way[0] + len(kinds) * host_s
                sent = gradient.ready_s + held_up
                end = max(way[1], sent) + took_s
                if end + beta * rest < bound_s and last_s + held_up < bound_s:
                    known = soonest.get(held_up)
                    if known is None or end < known[1]:
                        soonest[held_up] = (held_up, end, first, by, way)
                if way[1] <= sent:
                    limit = way[0]
            if limit == 0:
                break
        ways.append(_best_ways(soonest, most))
    return min(ways[-1], key=lambda way: max(way[1], last_s + way[0]), default=None)


def _best_ways(soonest: dict[float, _Way], most: int) -> list[_Way]:
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


#: The function of each policy but auto, by name.
POLICIES: dict[str, Maker] = {
    "bsp": _bsp,
    "wfbp": _wfbp,
    "fixed": _fixed_point,
    "mg_wfbp": _mg_wfbp,
    "bytescheduler": _bytescheduler,
    "dear": _dear,
}
