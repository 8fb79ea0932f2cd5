"""The policy auto: search for the point with the shortest step, and explain the choice.

Every candidate is a named policy with an architecture. The search starts from the best of them and
may leave all of them behind. The choice is a pure function of values that are equal on all ranks,
so all ranks choose alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pycoll.cost.selection import bytes_text, seconds_text
from pycoll.errors import InvalidArgumentError
from pycoll.gradients.communication_plan import (
    A2A,
    ARCHITECTURES,
    CODED_KIND,
    PS,
    CommunicationPlan,
    Gradient,
    Rate,
    Rates,
    label_of,
)
from pycoll.gradients.points import Group, Point, plan_of
from pycoll.gradients.policies import AUTO, MIB, Policy, point_of
from pycoll.gradients.search import BUDGET, Scene, search

#: The least relative reduction of exposed communication for which the next forward pass waits for
#: gradients one by one. Waiting one by one has more costs that the simulation does not model.
SINGLY_GAIN_MIN = 0.1
#: The least relative reduction of exposed communication for which auto leaves the named policies.
SEARCH_GAIN_MIN = 0.01
#: Candidates that cut all gradients into more parts than this are left out, the default apart.
PARTS_MAX = 256
#: Candidates that merge neighbours. Among equally fast candidates the chooser takes the first.
MERGING = (
    Policy("mg_wfbp"),
    *(Policy("fixed", bucket_bytes=n * MIB) for n in (4, 25)),
    Policy("wfbp"),
    Policy("bsp"),
)
#: Candidates that gain where each layer of the next forward pass waits for its own gradients, or
#: where the parts of a message pass its stages one after the other. They gain nothing elsewhere.
OVERTAKING = (
    *(
        Policy("bytescheduler", partition_bytes=n * MIB, credit_bytes=n * MIB, merge_bytes=MIB)
        for n in (1, 4, 16)
    ),
    Policy("bytescheduler"),
    *(Policy("dear", bucket_bytes=n * MIB) for n in (4, 25)),
)


class Decision(NamedTuple):
    """A communication plan and, as text, the reason for its choice.

    ``singly``: whether the next forward pass waits for gradients one by one, where it can.
    ``exposed_s``: its communication that is not hidden, as simulated.
    """

    comm_plan: CommunicationPlan
    why: str
    singly: bool = True
    exposed_s: float = 0.0


class _Tried(NamedTuple):
    """A simulated candidate. ``place``: its position in the list of candidates."""

    exposed_s: float
    place: int
    name: str
    policy: str
    point: Point
    singly: bool


def decide(
    policy: Policy,
    gradients: Sequence[Gradient],
    rates: Rates,
    forward_s: Sequence[float] | None = None,
    architecture: str = AUTO,
) -> Decision:
    """The communication plan of a policy; for auto the plan with the least exposed communication.

    ``simulate`` predicts the exposed communication. ``forward_s``: as of ``simulate``.
    ``architecture``: "a2a", "ps", one with a codec, or "auto" for the better of those that
    ``rates`` have. With "a2a" each message may also take one of the codecs of ``rates``.

    The forward pass may be able to wait for gradients one by one, which takes time itself. Then
    auto also simulates a wait for all of them at once. Waiting at once wins unless waiting one by
    one is better by at least SINGLY_GAIN_MIN. Raises InvalidArgumentError for an architecture that
    ``rates`` do not have.
    """
    by = _architectures(policy, gradients, rates, architecture)
    scenes = [Scene(gradients, rates, forward_s, by)]
    # If waiting one by one costs nothing, waiting for all at once cannot be faster.
    if policy.name == AUTO and forward_s is not None and rates.await_s > 0:
        scenes.append(Scene(gradients, rates, None, by))
    tried: list[_Tried] = []
    points: dict[tuple[Policy, tuple[str, ...]], Point] = {}
    for scene in scenes:
        budget = BUDGET // len(scenes)
        tried += _try_points(policy, scene, points, budget, len(tried))
    tried.sort(key=lambda one: one[:2])
    best = tried[0]
    at_once = next((one for one in tried if not one.singly), best)
    if best.exposed_s > (1 - SINGLY_GAIN_MIN) * at_once.exposed_s:
        best = at_once
    comm_plan = plan_of(best.policy, best.point, gradients, rates)
    wide = max(len(one.name) for one in tried)
    others = [f"  {one.name:<{wide}} {seconds_text(one.exposed_s)} not hidden" for one in tried]
    head = f"auto takes {best.name}: the least communication that is not hidden, as simulated"
    if policy.name != AUTO:
        head, others = f"{policy}, as asked for", others if len(tried) > 1 else []
        if len(tried) > 1:
            used = dict.fromkeys(group.architecture for group in best.point.groups)
            head += f", by {' and '.join(used)}" if used else ""
    why = _text(head, comm_plan, gradients, rates, others)
    return Decision(comm_plan, why, best.singly, best.exposed_s)


def _architectures(
    policy: Policy, gradients: Sequence[Gradient], rates: Rates, architecture: str
) -> tuple[str, ...]:
    able = rates.architectures
    if policy.name == "dear" or all(one.kind != CODED_KIND for one in gradients):
        able = tuple(one for one in able if not label_of(one))
    if architecture == AUTO:
        return (A2A,) if policy.name == "dear" else able
    if architecture == A2A:
        return (A2A, *(one for one in able if label_of(one)))
    if architecture not in (*ARCHITECTURES, *rates.architectures):
        words = ", ".join(dict.fromkeys((*ARCHITECTURES, *rates.architectures, AUTO)))
        raise InvalidArgumentError(f"architecture is {architecture!r}: expected one of {words}")
    return (architecture,)


def _try_points(
    policy: Policy,
    scene: Scene,
    points: dict[tuple[Policy, tuple[str, ...]], Point],
    budget: int,
    place: int,
) -> list[_Tried]:
    """Simulate the candidates; for auto, search from them as well.

    ``points``: the points of candidates that are known, to be extended. ``place``: the number of
    candidates in front of these.
    """
    found: list[_Tried] = []
    # The caller tries candidates that wait for all gradients at once after all others.
    at_once = place > 0

    def try_point(name: str, made_by: str, point: Point) -> None:
        words = f"{name}, all at once" if at_once else name
        number = place + len(found)
        exposed_s = scene.exposed_s(point)
        found.append(_Tried(exposed_s, number, words, made_by, point, not at_once))

    several = len(scene.architectures) > 1
    for one in _candidates(policy, scene):
        if policy.name == AUTO and one.name == "dear" and A2A not in scene.architectures:
            continue
        able = [name for name in scene.architectures if name == A2A or one.name != "dear"]
        # For dear with servers alone, point_of raises the error that names the reason.
        ways: list[tuple[str, ...]] = [(name,) for name in able or scene.architectures]
        if several and (one.name == "mg_wfbp" or (scene.rates.coded and len(ways) > 1)):
            ways.append(tuple(scene.architectures))
        for by in ways:
            if (one, by) not in points:
                point = point_of(one, scene.gradients, scene.rates, by)
                mixes = len(by) > 1 and one.name != "mg_wfbp"
                points[one, by] = _each_its_best(scene, point) if mixes else point
            word = by[0] if len(by) == 1 else "both" if len(by) == 2 else "any"
            try_point(f"{one} by {word}" if several else str(one), one.name, points[one, by])
    if policy.name == AUTO and not _is_exact(scene):
        least_s = min(one.exposed_s for one in found)
        best = search(scene, [one.point for one in found], budget)
        if best is not None and best.exposed_s < (1 - SEARCH_GAIN_MIN) * least_s:
            try_point("a plan of its own", AUTO, best.point)
    return found


def _each_its_best(scene: Scene, point: Point) -> Point:
    """The point whose groups have the architectures in which their messages take the least time."""

    def best(group: Group) -> str:
        nbytes = scene.nbytes(group)
        length = min(nbytes, group.part_bytes or nbytes)
        rates = scene.rates
        return min(scene.architectures, key=lambda one: rates.busy(one).seconds(length))

    return point._replace(
        groups=tuple(one._replace(architecture=best(one)) for one in point.groups)
    )


def _candidates(policy: Policy, scene: Scene) -> tuple[Policy, ...]:
    if policy.name != AUTO:
        return (policy,)
    staged = any(
        stage.behind_s is None
        for name in scene.architectures
        for stage in scene.rates.stages(name)[1:]
    )
    if scene.forward_s is None and not staged:
        return MERGING
    nbytes = sum(one.nbytes for one in scene.gradients)
    least = min(nbytes // PARTS_MAX, Policy.partition_bytes)
    cut = [one for one in OVERTAKING if one.name == "dear" or one.partition_bytes >= least]
    return (*MERGING, *cut)


def _is_exact(scene: Scene) -> bool:
    """Whether no point is better than that of mg_wfbp, so that a search cannot gain anything."""
    rates, kinds = scene.rates, {one.kind for one in scene.gradients}
    one_stage = all(len(rates.stages(name)) == 1 for name in scene.architectures)
    holds = rates.slowed != 0.0 or rates.host_s != 0.0 or bool(rates.holding)
    at_once = scene.forward_s is None and not holds
    return at_once and one_stage and len(kinds) < 2


def _text(
    head: str,
    comm_plan: CommunicationPlan,
    gradients: Sequence[Gradient],
    rates: Rates,
    more: Sequence[str],
) -> str:
    nbytes = sum(one.nbytes for one in gradients)
    ready_s = max((one.ready_s for one in gradients), default=0.0)
    lines = [
        head,
        f"  {len(comm_plan.messages)} messages of {len(gradients)} gradients, "
        f"{bytes_text(nbytes)}, the last of which is there after {seconds_text(ready_s)}",
        f"  all_reduce takes {_rate_text(rates.all_reduce)}, "
        f"reduce_scatter {_rate_text(rates.reduce_scatter)}, "
        f"all_gather {_rate_text(rates.all_gather)}",
        f"  each message takes {seconds_text(rates.host_s)} from the thread that computes",
    ]
    if rates.push_pull:
        count = sum(message.architecture == PS for message in comm_plan.messages)
        by = f" by {rates.push_pull_by}" if rates.push_pull_by else ""
        lines.append(
            f"  a message to servers takes {_rate_text(rates.busy(PS))} of each link, and "
            f"{seconds_text(rates.alone_s(PS, 0))} without any bytes{by}; {count} messages do so"
        )
    for name, rate in rates.coded:
        coded = [one.nbytes for one in comm_plan.messages if one.architecture == name]
        lines.append(
            f"  a message as {label_of(name)} takes {_rate_text(rate)}; {len(coded)} messages with "
            f"{bytes_text(sum(coded))} of values do so"
            + (", and hold up the thread that computes" if name in rates.holding else "")
        )
    if rates.await_s > 0:
        lines.append(
            f"  to wait for a gradient by itself takes {seconds_text(rates.await_s)} from the next "
            "forward pass"
        )
    if rates.slowed > 0:
        lines.append(f"  while one is on its way, {rates.slowed:.0%} of computing is lost")
    return "\n".join([*lines, *more])


def _rate_text(rate: Rate) -> str:
    per_byte = f" + n / {1e-9 / rate.beta:.3g} GB/s" if rate.beta > 0 else ""
    return seconds_text(rate.alpha) + per_byte
