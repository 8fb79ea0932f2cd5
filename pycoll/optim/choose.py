"""The policy auto: every candidate played through, the fastest taken, and why in words.

A pure function of values that all ranks have agreed on, so all choose alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pycoll.optim.agenda import Agenda, Gradient, Rate, Rates
from pycoll.optim.policies import AUTO, MIB, Policy, agenda_of
from pycoll.optim.simulate import simulate
from pycoll.select import bytes_text, seconds_text

#: Of how much less a share must not be hidden where the next forward pass is to wait for gradients
#: one by one: that way has the more that simulations do not know of.
SINGLY_GAIN_MIN = 0.1
#: Of equally fast ones the first is taken.
MERGING = (
    Policy("mg_wfbp"),
    *(Policy("fixed", bucket_bytes=n * MIB) for n in (4, 25)),
    Policy("wfbp"),
    Policy("bsp"),
)
#: Worth a try where layers of the next forward pass wait for their own gradients only.
OVERTAKING = (
    *(
        Policy("bytescheduler", partition_bytes=n * MIB, credit_bytes=n * MIB, merge_bytes=merge)
        for n in (1, 4, 16)
        for merge in (1, MIB)
    ),
    *(Policy("dear", bucket_bytes=n * MIB) for n in (4, 25)),
)


class Decision(NamedTuple):
    """An agenda, and why it is this one. ``singly``: whether the next forward pass is to wait for
    gradients one by one, where it can."""

    agenda: Agenda
    why: str
    singly: bool = True


class _Tried(NamedTuple):
    """A candidate, played through."""

    exposed_s: float
    place: int
    name: str
    agenda: Agenda
    singly: bool


def decide(
    policy: Policy,
    gradients: Sequence[Gradient],
    rates: Rates,
    forward_s: Sequence[float] | None = None,
) -> Decision:
    """The agenda of a policy, or for auto the one with the shortest step; see ``simulate``.

    Where the forward pass could wait for gradients one by one, which takes time by itself, auto
    also weighs to wait for all of them at once, and does so in a draw.
    """
    if policy.name != AUTO:
        agenda = agenda_of(policy, gradients, rates)
        return Decision(agenda, _text(f"{policy}, as asked for", agenda, gradients, rates, []))
    tried = sorted(_tried(gradients, rates, forward_s), key=lambda one: one[:2])
    best = tried[0]
    at_once = next((one for one in tried if not one.singly), best)
    if best.exposed_s > (1 - SINGLY_GAIN_MIN) * at_once.exposed_s:
        best = at_once
    wide = max(len(one.name) for one in tried)
    others = [f"  {one.name:<{wide}} {seconds_text(one.exposed_s)} not hidden" for one in tried]
    head = f"auto takes {best.name}: the least communication that is not hidden, as simulated"
    why = _text(head, best.agenda, gradients, rates, others)
    return Decision(best.agenda, why, best.singly)


def _tried(
    gradients: Sequence[Gradient], rates: Rates, forward_s: Sequence[float] | None
) -> list[_Tried]:
    """Every candidate, played through."""
    found: list[_Tried] = []
    for policy in MERGING if forward_s is None else (*MERGING, *OVERTAKING):
        agenda = agenda_of(policy, gradients, rates)
        exposed_s = simulate(agenda, gradients, rates, forward_s).exposed_s
        found.append(_Tried(exposed_s, len(found), str(policy), agenda, True))
    # If it takes nothing to wait one by one, to wait for all at once cannot be faster.
    for policy in MERGING if forward_s is not None and rates.await_s > 0 else ():
        agenda = agenda_of(policy, gradients, rates)
        exposed_s = simulate(agenda, gradients, rates).exposed_s
        found.append(_Tried(exposed_s, len(found), f"{policy}, all at once", agenda, False))
    return found


def _text(
    head: str,
    agenda: Agenda,
    gradients: Sequence[Gradient],
    rates: Rates,
    more: Sequence[str],
) -> str:
    nbytes = sum(one.nbytes for one in gradients)
    ready_s = max((one.ready_s for one in gradients), default=0.0)
    lines = [
        head,
        f"  {len(agenda.messages)} messages of {len(gradients)} gradients, {bytes_text(nbytes)}, "
        f"the last of which is there after {seconds_text(ready_s)}",
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
