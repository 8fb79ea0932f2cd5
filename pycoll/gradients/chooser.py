"""The policy auto: simulate every candidate policy, choose the fastest, and explain the choice.

The choice is a pure function of values that are equal on all ranks, so all ranks choose alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pycoll.cost.selection import bytes_text, seconds_text
from pycoll.gradients.communication_plan import CommunicationPlan, Gradient, Rate, Rates
from pycoll.gradients.policies import AUTO, MIB, Policy, comm_plan_of
from pycoll.gradients.simulate import simulate

#: The least relative reduction of exposed communication for which the next forward pass waits for
#: gradients one by one. Waiting one by one has more costs that the simulation does not model.
SINGLY_GAIN_MIN = 0.1
#: Candidates that merge neighbours. Among equally fast candidates the chooser takes the first.
MERGING = (
    Policy("mg_wfbp"),
    *(Policy("fixed", bucket_bytes=n * MIB) for n in (4, 25)),
    Policy("wfbp"),
    Policy("bsp"),
)
#: Candidates that gain only where each layer of the next forward pass waits for its own gradients.
OVERTAKING = (
    *(
        Policy("bytescheduler", partition_bytes=n * MIB, credit_bytes=n * MIB, merge_bytes=merge)
        for n in (1, 4, 16)
        for merge in (1, MIB)
    ),
    *(Policy("dear", bucket_bytes=n * MIB) for n in (4, 25)),
)


class Decision(NamedTuple):
    """A communication plan and, as text, the reason for its choice.

    ``singly``: whether the next forward pass waits for gradients one by one, where it can.
    """

    comm_plan: CommunicationPlan
    why: str
    singly: bool = True


class _Tried(NamedTuple):
    """A simulated candidate. ``place``: its position in the list of candidates."""

    exposed_s: float
    place: int
    name: str
    comm_plan: CommunicationPlan
    singly: bool


def decide(
    policy: Policy,
    gradients: Sequence[Gradient],
    rates: Rates,
    forward_s: Sequence[float] | None = None,
) -> Decision:
    """The communication plan of a policy; for auto the plan with the least exposed communication.

    ``simulate`` predicts the exposed communication. ``forward_s``: as of ``simulate``. Where the
    forward pass can wait for gradients one by one, auto also simulates waiting for all of them at
    once, since waiting one by one takes time itself. Waiting at once wins unless waiting one by
    one is better by at least SINGLY_GAIN_MIN.
    """
    if policy.name != AUTO:
        comm_plan = comm_plan_of(policy, gradients, rates)
        return Decision(
            comm_plan, _text(f"{policy}, as asked for", comm_plan, gradients, rates, [])
        )
    tried = sorted(_tried(gradients, rates, forward_s), key=lambda one: one[:2])
    best = tried[0]
    at_once = next((one for one in tried if not one.singly), best)
    if best.exposed_s > (1 - SINGLY_GAIN_MIN) * at_once.exposed_s:
        best = at_once
    wide = max(len(one.name) for one in tried)
    others = [f"  {one.name:<{wide}} {seconds_text(one.exposed_s)} not hidden" for one in tried]
    head = f"auto takes {best.name}: the least communication that is not hidden, as simulated"
    why = _text(head, best.comm_plan, gradients, rates, others)
    return Decision(best.comm_plan, why, best.singly)


def _tried(
    gradients: Sequence[Gradient], rates: Rates, forward_s: Sequence[float] | None
) -> list[_Tried]:
    """Simulate every candidate."""
    found: list[_Tried] = []
    for policy in MERGING if forward_s is None else (*MERGING, *OVERTAKING):
        comm_plan = comm_plan_of(policy, gradients, rates)
        exposed_s = simulate(comm_plan, gradients, rates, forward_s).exposed_s
        found.append(_Tried(exposed_s, len(found), str(policy), comm_plan, True))
    # If waiting one by one costs nothing, waiting for all at once cannot be faster.
    for policy in MERGING if forward_s is not None and rates.await_s > 0 else ():
        comm_plan = comm_plan_of(policy, gradients, rates)
        exposed_s = simulate(comm_plan, gradients, rates).exposed_s
        found.append(_Tried(exposed_s, len(found), f"{policy}, all at once", comm_plan, False))
    return found


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
