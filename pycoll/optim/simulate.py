"""How long a step takes with an agenda: the events played through, one channel for all messages.

    backward pass   |--g0--|h|--g1--|----g2----|h|
    channel                  |==m0==|            |==m1==|
    forward pass                                 |......|--layer of g2--|--g1--|--g0--|

A message is handed over when the backward pass has all of it and those in front of it have gone,
which holds the backward pass up (h). It starts when the one before it has ended. A layer of
the next forward pass starts when the one before it has ended and its gradient is reduced; where the
optimizer steps once for all, the forward pass starts when everything is reduced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pycoll.optim.agenda import Agenda, Gradient, Rates


class Outcome(NamedTuple):
    """Seconds: of every gradient's end, of the step, and of the step without what was computed.

    What messages take from the computing thread counts as not hidden.
    """

    done_s: tuple[float, ...]
    step_s: float
    exposed_s: float


def simulate(
    agenda: Agenda,
    gradients: Sequence[Gradient],
    rates: Rates,
    forward_s: Sequence[float] | None = None,
) -> Outcome:
    """``forward_s``: the times of the layers of all gradients, where each waits for its own
    gradient only; None where the step waits for all gradients."""
    if not gradients:
        return Outcome((), 0.0, 0.0)
    backward_s = max(gradient.ready_s for gradient in gradients)
    ends, free_s = _ends(agenda, gradients, rates, backward_s)
    done = [gradient.ready_s for gradient in gradients]
    for message, end in zip(agenda.messages, ends, strict=True):
        for piece in message.pieces:
            done[piece.gradient] = max(done[piece.gradient], end)
    now, computed = free_s, backward_s
    if forward_s is None:
        now = max(now, *done)
    else:
        for number in reversed(range(len(gradients))):
            now = max(now, done[number]) + forward_s[number]
        computed += sum(forward_s)
    return Outcome(tuple(done), now, now - computed)


def _ends(
    agenda: Agenda, gradients: Sequence[Gradient], rates: Rates, backward_s: float
) -> tuple[list[float], float]:
    """When each message has been reduced, and when the thread is free for the forward pass."""
    rate = rates.all_reduce if agenda.gathers is None else rates.reduce_scatter
    free = ready = held_up = 0.0
    ends = []
    for message in agenda.messages:
        ready = max(ready, message.ready_s(gradients))
        held_up += rates.host_s
        free = max(free, ready + held_up) + rate.seconds(message.nbytes)
        ends.append(free)
    for number in agenda.gathers or ():
        held_up += rates.host_s
        nbytes = agenda.messages[number].nbytes
        free = max(free, backward_s + held_up) + rates.all_gather.seconds(nbytes)
        ends[number] = free
    return ends, backward_s + held_up
