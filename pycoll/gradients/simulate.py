"""Simulate the time of a step with a communication plan, with one channel for all messages.

    backward pass   |--g0--|h|--g1--|----g2----|h|
    channel                  |==m0==|            |==m1==|
    forward pass                                 |......|--layer of g2--|--g1--|--g0--|

The computing thread starts a message when the backward pass has produced all of it and all messages
in front of it have been started; this holds the backward pass up (h). The transfer begins when the
transfer before it has ended. Computing is slower during a transfer, where both share cores or
memory. A layer of the next forward pass starts when the layer before it has ended, its gradient is
reduced, and its parameter has stepped. Where the optimizer steps once for all parameters, the
forward pass starts when all gradients are reduced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pycoll.gradients.communication_plan import CommunicationPlan, Gradient, Rates


class Outcome(NamedTuple):
    """The outcome of a simulated step, in seconds.

    ``done_s``: when each gradient is reduced. ``step_s``: the length of the step. ``exposed_s``:
    the length of the step minus the time of the passes alone. It includes the time that messages,
    and waiting for single gradients, take from the computing thread.
    """

    done_s: tuple[float, ...]
    step_s: float
    exposed_s: float


def simulate(
    comm_plan: CommunicationPlan,
    gradients: Sequence[Gradient],
    rates: Rates,
    forward_s: Sequence[float] | None = None,
) -> Outcome:
    """Simulate one step.

    ``forward_s``: the forward time of the layer of each gradient, where each layer waits for its
    own gradient only. None where the step waits for all gradients.
    """
    if not gradients:
        return Outcome((), 0.0, 0.0)
    backward_s = max(gradient.ready_s for gradient in gradients)
    thread = _Thread(1.0 - rates.slowed)
    ends = _ends(comm_plan, gradients, rates, thread)
    done = [gradient.ready_s for gradient in gradients]
    for message, end in zip(comm_plan.messages, ends, strict=True):
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
    """The clock of the computing thread, which is slower while the channel is busy."""

    def __init__(self, speed: float) -> None:
        """``speed``: the speed of computing while the channel is busy, 1 while it is not."""
        self.now_s = 0.0
        self._speed = speed
        #: The (begin, end) intervals in which the channel is busy, in order, and how many are over.
        self._busy: list[tuple[float, float]] = []
        self._over = 0

    def overlapped(self, begin_s: float, end_s: float) -> None:
        """Mark the channel busy from ``begin_s``, which is not in the past, to ``end_s``."""
        self._busy.append((begin_s, end_s))

    def wait(self, until_s: float) -> None:
        """Stay idle until ``until_s``."""
        self.now_s = max(self.now_s, until_s)

    def work(self, seconds: float) -> None:
        """Compute for ``seconds``, counted at full speed (the channel not busy)."""
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
    comm_plan: CommunicationPlan, gradients: Sequence[Gradient], rates: Rates, thread: _Thread
) -> list[float]:
    """When each message has been reduced. Leaves ``thread`` at the end of the backward pass."""
    rate = rates.all_reduce if comm_plan.gathers is None else rates.reduce_scatter
    backward_s = max(gradient.ready_s for gradient in gradients)
    free = computed = 0.0
    ends = []

    def sent(ready_s: float, seconds: float) -> float:
        """Send the next message and return the end of its transfer."""
        nonlocal free, computed
        thread.work(max(0.0, ready_s - computed) + rates.host_s)
        computed = max(computed, ready_s)
        begin = max(free, thread.now_s)
        free = begin + seconds
        thread.overlapped(begin, free)
        return free

    for message in comm_plan.messages:
        ends.append(sent(message.ready_s(gradients), rate.seconds(message.nbytes)))
    for number in comm_plan.gathers or ():
        seconds = rates.all_gather.seconds(comm_plan.messages[number].nbytes)
        ends[number] = sent(backward_s, seconds)
    thread.work(backward_s - computed)
    return ends
