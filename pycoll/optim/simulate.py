"""How long a step takes with an agenda: the events played through, one channel for all messages.

    backward pass   |--g0--|h|--g1--|----g2----|h|
    channel                  |==m0==|            |==m1==|
    forward pass                                 |......|--layer of g2--|--g1--|--g0--|

A message is handed over when the backward pass has all of it and those in front of it have gone,
which holds the backward pass up (h). It starts when the one before it has ended, and what is
computed while it is on its way takes longer, where both share cores or memory. A layer of the next
forward pass starts when the one before it has ended and its gradient is reduced, and its parameter
has made a step of its own; where the optimizer steps once for all, the forward pass starts when
everything is reduced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pycoll.optim.agenda import Agenda, Gradient, Rates


class Outcome(NamedTuple):
    """Seconds: of every gradient's end, of the step, and of the step without what was computed.

    What messages, and waiting for single gradients, take from the computing thread counts as not
    hidden.
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
    thread = _Thread(1.0 - rates.slowed)
    ends = _ends(agenda, gradients, rates, thread)
    done = [gradient.ready_s for gradient in gradients]
    for message, end in zip(agenda.messages, ends, strict=True):
        for piece in message.pieces:
            done[piece.gradient] = max(done[piece.gradient], end)
    computed = backward_s
    if forward_s is None:
        thread.wait(max(done))
    else:
        for number in reversed(range(len(gradients))):
            thread.wait(done[number])
            thread.work(rates.await_s + forward_s[number])
        computed += sum(forward_s)
    return Outcome(tuple(done), thread.now_s, thread.now_s - computed)


class _Thread:
    """The thread that computes: by when it has done what, beside a channel."""

    def __init__(self, speed: float) -> None:
        """``speed``: of computing while the channel is busy, against that while it is not."""
        self.now_s = 0.0
        self._speed = speed
        #: When the channel is busy, in order, and how many of these times are over.
        self._busy: list[tuple[float, float]] = []
        self._over = 0

    def beside(self, begin_s: float, end_s: float) -> None:
        """The channel is busy from then on, which is not in the past, until then."""
        self._busy.append((begin_s, end_s))

    def wait(self, until_s: float) -> None:
        """Do nothing until then."""
        self.now_s = max(self.now_s, until_s)

    def work(self, seconds: float) -> None:
        """Do what takes so long while the channel is not busy."""
        while self._over < len(self._busy):
            begin_s, end_s = self._busy[self._over]
            alone = max(0.0, begin_s - self.now_s)
            if seconds <= alone:
                break
            inside = max(0.0, end_s - max(begin_s, self.now_s))
            if seconds - alone < inside * self._speed:
                self.now_s += alone + (seconds - alone) / self._speed
                return
            if inside > 0:
                seconds -= alone + inside * self._speed
                self.now_s = end_s
            self._over += 1
        self.now_s += seconds


def _ends(
    agenda: Agenda, gradients: Sequence[Gradient], rates: Rates, thread: _Thread
) -> list[float]:
    """When each message has been reduced; the thread is free for the forward pass then."""
    rate = rates.all_reduce if agenda.gathers is None else rates.reduce_scatter
    backward_s = max(gradient.ready_s for gradient in gradients)
    free = computed = 0.0
    ends = []

    def sent(ready_s: float, seconds: float) -> float:
        """The end of the next message."""
        nonlocal free, computed
        thread.work(max(0.0, ready_s - computed) + rates.host_s)
        computed = max(computed, ready_s)
        begin = max(free, thread.now_s)
        free = begin + seconds
        thread.beside(begin, free)
        return free

    for message in agenda.messages:
        ends.append(sent(message.ready_s(gradients), rate.seconds(message.nbytes)))
    for number in agenda.gathers or ():
        seconds = rates.all_gather.seconds(agenda.messages[number].nbytes)
        ends[number] = sent(backward_s, seconds)
    thread.work(backward_s - computed)
    return ends
