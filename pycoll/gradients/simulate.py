"""Simulate the time of a step with a communication plan: a graph of tasks on resources.

    backward pass   |--g0--|h|--g1--|----g2----|h|
    link out, in             |==m0==|            |==m1==|
    forward pass                                 |......|--layer of g2--|--g1--|--g0--|

The computing thread starts a message when the backward pass has produced all of it and all messages
in front of it have been started; this holds the backward pass up (h). The message then passes its
stages. Each stage occupies resources and begins when these are free: a message of an all_reduce
occupies the link in both directions. A message to servers has two legs, to the servers and back:

    link out           |==m1==|==m2==|
    servers' cores       |-m1-| |-m2-|
    link in                |==m1==|==m2==|

Its segments come back while others of it still go out, and it leaves each resource to the message
behind it. Where servers need whole parts, a stage begins when the one before it has ended
(``Stage.behind_s``).

Computing is slower during a message, where both share cores or memory. A layer of the next forward
pass starts when the layer before it has ended, its gradient is reduced, and its parameter has
stepped. Where the optimizer steps once for all parameters, it does so when all gradients are
reduced, and the forward pass follows. A message of ``Rates.holding`` stops the computing thread
until its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pycoll.gradients.communication_plan import (
    HOST,
    IN,
    OUT,
    SERVER,
    CommunicationPlan,
    Gradient,
    Rates,
    Stage,
)
from pycoll.gradients.points import Transfer, transfer_of

_RESOURCES = (OUT, IN, SERVER, HOST)


class Outcome(NamedTuple):
    """The outcome of a simulated step, in seconds.

    ``done_s``: when each gradient is reduced. ``step_s``: the length of the step. ``exposed_s``:
    the length of the step minus the time of the passes alone. It includes the time that messages,
    and waiting for single gradients, take from the computing thread.
    """

    done_s: tuple[float, ...]
    step_s: float
    exposed_s: float


class Step:
    """The constants of all simulated steps with the same gradients, rates and forward pass.

    ``forward_s``: the forward time of the layer of each gradient, where each layer waits for its
    own gradient only. None where the step waits for all gradients.
    """

    def __init__(
        self,
        gradients: Sequence[Gradient],
        rates: Rates,
        forward_s: Sequence[float] | None = None,
    ) -> None:
        self.rates = rates
        self.ready_s = [gradient.ready_s for gradient in gradients]
        self.backward_s = max(self.ready_s, default=0.0)
        beta = rates.optimizer.beta
        self.stepping_s = rates.optimizer.seconds(sum(one.nbytes for one in gradients))
        #: The time of the passes and of the optimizer alone.
        self.computed_s = self.backward_s + self.stepping_s + sum(forward_s or ())
        #: The time of each layer of the forward pass, with the step of its parameter.
        self.layers_s: list[float] | None = None
        if forward_s is not None:
            self.layers_s = [
                rates.await_s + one + beta * gradient.nbytes
                for one, gradient in zip(forward_s, gradients, strict=True)
            ]
        self.whole = {name: _ways(rates.stages(name)) for name in rates.architectures}
        self.scattered, self.gathered = (
            _ways((Stage(rate),)) for rate in (rates.reduce_scatter, rates.all_gather)
        )


def simulate(
    comm_plan: CommunicationPlan,
    gradients: Sequence[Gradient],
    rates: Rates,
    forward_s: Sequence[float] | None = None,
) -> Outcome:
    """Simulate one step; ``forward_s`` as of ``Step``."""
    transfers = [transfer_of(message, gradients) for message in comm_plan.messages]
    return play(transfers, comm_plan.gathers, Step(gradients, rates, forward_s))


def play(transfers: Sequence[Transfer], gathers: Sequence[int] | None, step: Step) -> Outcome:
    """Simulate a step with these transfers, in this order; ``gathers`` as in the plan."""
    if not step.ready_s:
        return Outcome((), 0.0, 0.0)
    thread = _Thread(1.0 - step.rates.slowed)
    ends = _ends(transfers, gathers, step, thread)
    done = step.ready_s.copy()
    for transfer, end in zip(transfers, ends, strict=True):
        for number in transfer.numbers:
            done[number] = end if end > done[number] else done[number]
    if step.layers_s is None:
        thread.wait(max(done))
        thread.work(step.stepping_s)
    else:
        thread.pass_forward(done, step.layers_s)
    return Outcome(tuple(done), thread.now_s, thread.now_s - step.computed_s)


class _Thread:
    """The clock of the computing thread, which is slower while messages are under way."""

    def __init__(self, speed: float) -> None:
        """``speed``: the speed of computing while a message is under way, 1 while none is."""
        self.now_s = 0.0
        self._speed = speed
        #: The (begin, end) intervals with a message under way, in order, and how many are over.
        self._busy: list[tuple[float, float]] = []
        self._over = 0

    def mark_busy(self, begin_s: float, end_s: float) -> None:
        """Mark the link busy from ``begin_s``, which is not in the past, to ``end_s``.

        Intervals come in the order of their begin. They may overlap.
        """
        if self._speed == 1.0:
            return
        if self._busy:
            begin_s = max(begin_s, self._busy[-1][1])
        if begin_s < end_s:
            self._busy.append((begin_s, end_s))

    def wait(self, until_s: float) -> None:
        """Stay idle until ``until_s``."""
        self.now_s = max(self.now_s, until_s)

    def pass_forward(self, done_s: Sequence[float], layers_s: Sequence[float]) -> None:
        """Compute the layers from the last to the first, each when its gradient is done."""
        if self._over == len(self._busy):
            now_s = self.now_s
            for done, layer_s in zip(reversed(done_s), reversed(layers_s), strict=True):
                now_s = (done if done > now_s else now_s) + layer_s
            self.now_s = now_s
            return
        for done, layer_s in zip(reversed(done_s), reversed(layers_s), strict=True):
            self.wait(done)
            self.work(layer_s)

    def work(self, seconds: float) -> None:
        """Compute for ``seconds``, counted at full speed (no message under way)."""
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
    transfers: Sequence[Transfer], gathers: Sequence[int] | None, step: Step, thread: _Thread
) -> list[float]:
    """When each message has been reduced. Leaves ``thread`` at the end of the backward pass."""
    rates = step.rates
    stages = step.whole if gathers is None else dict.fromkeys(step.whole, step.scattered)
    free = [0.0] * len(_RESOURCES)
    host_s, slows, holding = rates.host_s, rates.slowed > 0.0, rates.holding
    computed = 0.0
    ends = [0.0] * len(transfers)
    sent = [
        (number, ready_s, nbytes, stages[architecture], architecture in holding)
        for number, (ready_s, nbytes, architecture, _) in enumerate(transfers)
    ]
    for number in gathers or ():
        sent.append((number, step.backward_s, transfers[number].nbytes, step.gathered, False))
    for number, ready_s, nbytes, ways, holds in sent:
        seconds = host_s
        if ready_s > computed:
            seconds += ready_s - computed
            computed = ready_s
        thread.work(seconds)
        first, begin, end = None, thread.now_s, thread.now_s
        for alpha, beta, resource, others, behind_s in ways:
            least = 0.0
            if behind_s is None:
                begin = end
            else:
                # The first and the last segment come behind_s after the stage before had them.
                begin, least = begin + behind_s, end + behind_s
            begin = free[resource] if free[resource] > begin else begin
            for other in others:
                begin = free[other] if free[other] > begin else begin
            if first is None:
                first = begin
            end = begin + alpha + beta * nbytes
            end = free[resource] = least if least > end else end
            for other in others:
                free[other] = end
        ends[number] = end
        if slows and first is not None:
            thread.mark_busy(first, end)
        if holds:
            thread.wait(end)
    thread.work(step.backward_s - computed)
    return ends


#: A stage as plain numbers: alpha, beta, the place of its first resource in _RESOURCES, those of
#: the others, and behind_s.
_Way = tuple[float, float, int, tuple[int, ...], float | None]


def _ways(stages: Sequence[Stage]) -> tuple[_Way, ...]:
    found: list[_Way] = []
    for stage in stages:
        first, *others = (_RESOURCES.index(one) for one in stage.resources)
        # The first stage is behind none.
        found.append((*stage.rate, first, tuple(others), stage.behind_s if found else None))
    return tuple(found)
