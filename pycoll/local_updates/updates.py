"""LocalUpdates: local SGD, SlowMo and DiLoCo as functions of parameters and a state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pycoll.compress import Codec, Feedback
from pycoll.errors import InvalidArgumentError
from pycoll.gradients.structures import leaves, rebuilt
from pycoll.local_updates.array_values import (
    check,
    convert_like,
    copy_of,
    mix_values,
    ranges,
    widen,
)
from pycoll.local_updates.levelling import Met, meet
from pycoll.local_updates.local_state import LocalState, Pending
from pycoll.local_updates.outer_step import Outer, outer_of
from pycoll.local_updates.schedules import Schedule, schedule_of
from pycoll.types import real, whole

_NAN = float("nan")


@dataclass(frozen=True)
class LocalUpdates:
    """Average the parameters of all ranks every few inner steps, for arrays of any framework.

    Each rank changes its parameters by inner steps, without messages. A round has ``every`` inner
    steps. In each round every fragment of the parameters is synchronised once. All methods return
    new values and change none of their arguments. ``LocalSGD``, ``SlowMo`` and ``DiLoCo`` wrap an
    optimizer of torch and call them.

    Arguments:
        ``every``: the inner steps of a round, or a ``PostLocal`` or ``AdaComm``.
        ``outer``: the outer step, a dict with ``lr``, ``momentum`` and ``nesterov``. The common
            parameters a become a - lr v. v is the velocity of a - mean(x), for the parameters x of
            the ranks. None is rate 1 without momentum: mean(x) itself. With
            ``in_inner_rate`` the velocity has the unit of gradients, as in SlowMo.
        ``fragments``: into how many neighbouring parts the parameters are cut. Fragment f of F is
            sent (f + 1) every / F steps after the begin of the round, so messages are smaller.
        ``delay``: the inner steps that run while a fragment is under way, below every / F.
        ``mix``: the share of a rank's own values that stays in x when a fragment is applied: x
            becomes mix x + (1 - mix) a, from 0 to 1.
        ``compress``: None, or a codec of ``pycoll.compress`` for the averages of a - x. It needs an
            outer step other than the average itself, and parameters in host memory; ``Custom``
            takes no float64. The state keeps the values that a codec leaves out, and adds them to
            the next change. It also keeps the last Q of ``PowerSGD``, which ``resume`` gives to
            ranks that are behind.

    Errors: InvalidArgumentError names the argument, its value and its bounds.

    Cost: an all-reduce of the parameters per round, of 4 bytes per element for 16-bit types. Memory
    for one copy of the parameters, one more with momentum, one more with a codec, and
    one of a fragment with ``delay``; none where ``outer`` is None and ``delay`` is 0. Copies of
    16-bit parameters are float32.

    Source: Stich 2019 (arXiv 1805.09767) for local SGD, Douillard et al. 2024 (arXiv 2311.08105)
    for DiLoCo, and 2025 (arXiv 2501.18512) for fragments, delay and mix.

    >>> updates = pycoll.optim.LocalUpdates(every=2)
    >>> weights, state = updates.begin(np.zeros(2), comm)
    >>> for step in range(4):
    ...     weights = weights - 0.5 * np.full(2, comm.rank)
    ...     weights, state = updates.advance(weights, state)
    >>> weights  # on 3 ranks
    array([-2., -2.])
    """

    every: int | Schedule
    outer: Mapping[str, Any] | Outer | None = None
    fragments: int = 1
    delay: int = 0
    mix: float = 0.0
    compress: Codec | None = None

    def __post_init__(self) -> None:
        schedule = schedule_of(self.every)
        whole("fragments", self.fragments, 1)
        whole("delay", self.delay, 0)
        if not 0 <= real("mix", self.mix, "a number from 0 to 1") <= 1:
            raise InvalidArgumentError(f"mix is {self.mix!r}: expected a number from 0 to 1")
        shortest = schedule.shortest
        if self.fragments > shortest:
            raise InvalidArgumentError(
                f"fragments is {self.fragments} and a round has {shortest} steps: expected at most "
                "one fragment per step; take fewer fragments or a longer round"
            )
        between = shortest // self.fragments
        if self.delay >= between:
            raise InvalidArgumentError(
                f"delay is {self.delay} and fragments are {between} steps apart ({shortest} steps, "
                f"{self.fragments} fragments): expected less, so that one ends before the next"
            )
        object.__setattr__(self, "outer", outer_of(self.outer))
        self._check_codec()

    def _check_codec(self) -> None:
        if self.compress is None:
            return
        if not isinstance(self.compress, Codec):
            raise InvalidArgumentError(
                f"compress is {self.compress!r}: expected a codec of pycoll.compress, or None"
            )
        if self._outer.averages:
            raise InvalidArgumentError(
                f"compress is {self.compress!r} and the outer step is the average itself: a codec "
                "would round the parameters; pass outer with another rate or a momentum"
            )

    def begin(self, params: Any, comm: Any = None) -> tuple[Any, LocalState]:
        """Make the first state; all ranks take the parameters of rank 0.

        A rank that joins others, which call ``resume`` at that time, takes their parameters and
        state instead.

        Arguments: ``params``, an array or a structure of arrays, as ``average_gradients`` takes
        them; ``comm``, the communicator, by default the world.

        Result: the parameters and the state.

        Blocking and collective. Errors: InvalidArgumentError for arrays that are not floating-point
        and for more fragments than arrays. MismatchError names the first difference between the
        arguments, the arrays' names, shapes and dtypes of the ranks. Others are those of
        all_reduce.

        Cost: a broadcast of the parameters.
        """
        return self.resume(params, self._first_state(), comm)

    def resume(self, params: Any, state: LocalState, comm: Any = None) -> tuple[Any, LocalState]:
        """Go on with a state that was loaded, or over a new communicator after a failure.

        Ranks with fewer synchronisations or steps than the most advanced one take its parameters
        and state; the others keep theirs, local steps included. A fragment that was under way is
        sent again.

        Arguments: as those of ``begin``; ``state``, by ``LocalState.load`` or from before a
        failure.

        Result, errors: as those of ``begin``. Blocking and collective.

        Cost: two small messages; a broadcast of parameters and state where a rank is behind.
        """
        named = list(leaves(params, "params"))
        met = self.meet(named, state, comm)
        return rebuilt(params, iter(met.arrays)), met.state

    def advance(
        self, params: Any, state: LocalState, *, loss: float | None = None, lr: Any = None
    ) -> tuple[Any, LocalState]:
        """Count an inner step, and synchronise what is due after it.

        Arguments: ``params``, after the inner step; ``state``, of the step before; ``loss``, this
        rank's loss in this step, which ``AdaComm`` needs; ``lr``, the inner learning rate, which
        only SlowMo needs, one number or one per array.

        Result: the parameters and the state. ``state.synchronized`` says whether this step
        completed a round.

        Collective at the end of a round and where a fragment is sent or applied, which is after the
        same steps on all ranks; otherwise local. Errors: those of all_reduce. After an error
        the arguments are unchanged: call ``resume`` with them over a communicator of the ranks that
        are left, then ``advance`` again.

        Cost: that of the class, where something is due; otherwise no message.
        """
        named = list(leaves(params, "params"))
        noted = self.note_step([one for _, one in named], state, loss, lr)
        arrays, after = self.caught_up([one for _, one in named], noted)
        return rebuilt(params, iter(arrays)), after

    def finish(self, params: Any, state: LocalState) -> tuple[Any, LocalState]:
        """End the round now, so that all ranks have the same parameters; for evaluation or the end.

        Each fragment that has inner steps since it was sent last is synchronised with ``mix`` 0.

        Arguments, result: those of ``advance``. Blocking and collective. Errors: those of
        ``advance``.

        Cost: that of a round.
        """
        named = list(leaves(params, "params"))
        arrays, after = self.finish_round([one for _, one in named], state)
        return rebuilt(params, iter(arrays)), after

    def reduces_gradients(self, state: LocalState) -> bool:
        """Whether the next step is one of the first steps of ``PostLocal``."""
        return state.step < self._schedule.gradient_steps

    def gradients(self, gradients: Any, state: LocalState) -> Any:
        """The gradients to step by: averaged in the first steps of ``PostLocal``, else as given.

        Arguments: ``gradients``, a structure of arrays; ``state``.

        Result: a structure like ``gradients``. Blocking, and collective in the steps that
        average. Errors: those of all_reduce.

        Cost: an all-reduce of the gradients in these steps.
        """
        if not self.reduces_gradients(state):
            return gradients
        given = [one for _, one in leaves(gradients, "gradients")]
        averages = state.comm.all_reduce(given, "avg", deterministic=True)
        return rebuilt(gradients, iter(averages))

    @property
    def starts_with_gradients(self) -> bool:
        """Whether the first steps average gradients."""
        return self._schedule.gradient_steps > 0

    def needs_loss(self, state: LocalState) -> bool:
        """Whether ``advance`` needs the loss of the next step."""
        return self._schedule.needs_loss and not self.reduces_gradients(state)

    # For the wrapper of torch's optimizers, which keeps lists of arrays and the state in between.

    def meet(
        self,
        named: Sequence[tuple[str, Any]],
        state: LocalState | None,
        comm: Any,
        extra: Any = None,
    ) -> Met:
        """Meet the other ranks; see ``levelling.meet``. A state of None is the first one."""
        if comm is None:
            import pycoll

            comm = pycoll.world()
        facts = check(named)
        if self.fragments > len(facts):
            raise InvalidArgumentError(
                f"fragments is {self.fragments} and there are {len(facts)} parameters: expected at "
                "most as many fragments as parameters"
            )
        given = self._first_state() if state is None else state.without_work()
        arrays = [one for _, one in named]
        facts = [*self._facts(), *facts]
        met = meet(arrays, given, comm, facts, extra)
        found = met.state
        if found.anchors is None and not self._outer.averages:
            found = self._with_anchors(met.arrays, found)
        if found.pending is not None:
            found = self._send_pending(found)
        return met._replace(state=found)

    def note_step(
        self, arrays: Sequence[Any], state: LocalState, loss: float | None, lr: Any
    ) -> LocalState:
        """The state after an inner step, before anything is synchronised."""
        if state.comm is None:
            raise InvalidArgumentError(
                "state was loaded and has met no ranks: call resume(params, state) first"
            )
        rates = self._rates(state, lr, len(arrays))
        start = self._schedule.gradient_steps
        if state.step < start:
            after = replace(state, step=state.step + 1, begun=state.step + 1, rates=rates)
            after = replace(after, last_sent=(after.step,) * self.fragments, ended=after.step)
            return self._with_anchors(arrays, after) if after.step == start else after
        losses = state.losses
        if self._schedule.needs_loss:
            if loss is None:
                raise InvalidArgumentError(
                    f"loss is None and every is {self.every}: pass the loss of each step"
                )
            losses = (losses[0] + float(loss), losses[1] + 1)
        return replace(state, step=state.step + 1, losses=losses, rates=rates)

    def caught_up(self, arrays: Sequence[Any], state: LocalState) -> tuple[list[Any], LocalState]:
        """Where these are due: apply the fragment, send the next one, begin the next round."""
        now = list(arrays)
        if state.step < self._schedule.gradient_steps:
            return now, state
        while True:
            if state.pending is not None and state.step >= state.pending.due:
                now, state = self._apply_pending(now, state, self.mix)
            elif state.fragment == self.fragments:
                state = self._next_round(state)
            elif state.pending is None and state.step >= self._due(state):
                state = self._send_fragment(now, state, state.fragment, self.delay)
            else:
                return now, state

    def finish_round(
        self, arrays: Sequence[Any], state: LocalState
    ) -> tuple[list[Any], LocalState]:
        """End the round; see ``finish``."""
        now = list(arrays)
        if state.comm is None:
            raise InvalidArgumentError(
                "state was loaded and has met no ranks: call resume(params, state) first"
            )
        if state.step < self._schedule.gradient_steps:
            return now, state
        if state.pending is not None:
            now, state = self._apply_pending(now, state, self.mix)
        for fragment, last in enumerate(state.last_sent):
            if state.step > last or (self.mix and state.anchors is None):
                now, state = self._apply_pending(
                    now, self._send_fragment(now, state, fragment, 0), 0
                )
            elif self.mix and state.anchors is not None:
                for number in self._range(now, fragment):
                    now[number] = mix_values(now[number], state.anchors[number], 0)
        state = replace(state, ended=state.step)
        if state.step == state.begun:
            return now, state
        return now, self._next_round(replace(state, fragment=self.fragments), short=True)

    # Parts of a synchronisation

    @property
    def _schedule(self) -> Schedule:
        return schedule_of(self.every)

    @property
    def _outer(self) -> Outer:
        return outer_of(self.outer)

    def _facts(self) -> list[Any]:
        outer = self._outer
        return [
            ["schedule", *self._schedule.facts()],
            ["outer", outer.lr, outer.momentum, outer.nesterov, outer.in_inner_rate],
            *([name, getattr(self, name)] for name in ("fragments", "delay", "mix")),
            ["compress", repr(self.compress)],
        ]

    def _first_state(self) -> LocalState:
        return LocalState(round=self._schedule.first_round(), last_sent=(0,) * self.fragments)

    def _with_anchors(self, arrays: Sequence[Any], state: LocalState) -> LocalState:
        """The state with copies of these parameters as the common ones, where it needs any."""
        if self._outer.averages or state.step < self._schedule.gradient_steps:
            return state
        anchors = tuple(_wide_copy(one) for one in arrays)
        return replace(state, anchors=anchors, velocities=(None,) * len(anchors))

    def _rates(self, state: LocalState, lr: Any, count: int) -> tuple[float, ...]:
        if not self._outer.in_inner_rate:
            return ()
        if lr is None:
            raise InvalidArgumentError("lr is None: SlowMo needs the inner learning rate")
        given = [float(one) for one in lr] if isinstance(lr, list | tuple) else [float(lr)] * count
        # A rate of 0 moves nothing, so the change of a round has the unit of the rate before.
        before = state.rates or (1.0,) * count
        return tuple(now or then for now, then in zip(given, before, strict=True))

    def _due(self, state: LocalState) -> int:
        """The step after which the next fragment is sent."""
        return state.begun + (state.fragment + 1) * state.round.steps // self.fragments

    def _range(self, arrays: Sequence[Any], fragment: int) -> range:
        counts = [int(np.prod(one.shape)) if hasattr(one, "shape") else 1 for one in arrays]
        return ranges(counts, self.fragments)[fragment]

    def _send_fragment(
        self, arrays: Sequence[Any], state: LocalState, fragment: int, delay: int
    ) -> LocalState:
        """Send a fragment; return the state that has it under way."""
        share: list[Any] = [None] * len(arrays)
        for number in self._range(arrays, fragment):
            one = arrays[number]
            if state.anchors is not None:
                share[number] = state.anchors[number] - widen(one)
            else:
                share[number] = _wide_copy(one) if delay else widen(one)
        last_sent = list(state.last_sent)
        last_sent[fragment] = state.step
        return self._send_pending(
            replace(
                state,
                fragment=max(state.fragment, fragment + 1),
                last_sent=tuple(last_sent),
                pending=Pending(fragment, state.step + delay, tuple(share)),
            )
        )

    def _send_pending(self, state: LocalState) -> LocalState:
        """The state whose pending fragment is under way on its communicator."""
        pending = state.pending
        assert pending is not None
        given = [one for one in pending.sent if one is not None]
        feedback = self._feedback(state, pending)
        work = state.comm.all_reduce(
            given,
            "avg",
            deterministic=True,
            async_op=True,
            compress=self.compress,
            feedback=feedback,
        )
        return replace(state, pending=pending._replace(work=work, feedback=feedback))

    def _feedback(self, state: LocalState, pending: Pending) -> Feedback | None:
        """A Feedback with copies of the fragment's residuals; None without a codec."""
        if self.compress is None:
            return None
        feedback = Feedback()
        # RandomK draws its places from it: equal on all ranks, and when a fragment is sent again.
        feedback.step = pending.due
        numbers = [number for number, one in enumerate(pending.sent) if one is not None]
        for place, number in enumerate(numbers):
            held = state.residuals[number] if state.residuals else None
            if held is not None:
                feedback.residuals.memory(held.shape, place, held.dtype)[...] = held
            factor = state.factors[number] if state.factors else None
            if factor is not None:
                feedback.factors[place] = factor
        return feedback

    def _apply_pending(
        self, arrays: Sequence[Any], state: LocalState, mix: float
    ) -> tuple[list[Any], LocalState]:
        """Wait for the pending fragment and apply it; all of it, or nothing after an error."""
        pending = state.pending
        assert pending is not None
        averages = iter(pending.work.wait())
        now = list(arrays)
        anchors = None if state.anchors is None else list(state.anchors)
        velocities = list(state.velocities)
        for number, sent in enumerate(pending.sent):
            if sent is None:
                continue
            common = next(averages)
            if anchors is not None:
                rate = state.rates[number] if state.rates else 1.0
                moved = self._outer.step(anchors[number], common, velocities[number], rate)
                like = anchors[number]
                common = anchors[number] = convert_like(moved[0], like)
                velocities[number] = None if moved[1] is None else convert_like(moved[1], like)
            now[number] = mix_values(now[number], common, mix)
        state = _with_residuals(state, pending)
        ended = state.step if pending.fragment == self.fragments - 1 else state.ended
        return now, replace(
            state,
            progress=state.progress + 1,
            ended=ended,
            anchors=None if anchors is None else tuple(anchors),
            velocities=tuple(velocities),
            pending=None,
        )

    def _next_round(self, state: LocalState, short: bool = False) -> LocalState:
        """The state at the begin of the next round; ranks average their losses first."""
        total, count = state.losses
        loss, following = _NAN, state.round
        if self._schedule.needs_loss and count:
            mine = np.array([total / count], np.float64)
            loss = float(state.comm.all_reduce(mine, "avg", deterministic=True)[0])
        if count or not self._schedule.needs_loss:
            steps = state.step - self._schedule.gradient_steps
            following = self._schedule.following(steps, loss, state.round)
        begun = state.step if short else state.begun + state.round.steps
        return replace(
            state,
            progress=state.progress + 1,
            begun=begun,
            round=following,
            fragment=0,
            losses=(0.0, 0),
        )


def _with_residuals(state: LocalState, pending: Pending) -> LocalState:
    """The state with the codec's residuals of a fragment that has been averaged."""
    if pending.feedback is None:
        return state
    held = list(state.residuals) or [None] * len(pending.sent)
    factors = list(state.factors) or [None] * len(pending.sent)
    numbers = [number for number, one in enumerate(pending.sent) if one is not None]
    found = pending.feedback.residual
    found = [found] if len(numbers) == 1 else found
    for place, (number, one) in enumerate(zip(numbers, found, strict=True)):
        held[number] = one
        factors[number] = pending.feedback.factors.get(place)
    return replace(state, residuals=tuple(held), factors=tuple(factors))


def _wide_copy(array: Any) -> Any:
    """A copy of a parameter, float32 for 16-bit types."""
    wide = widen(array)
    return copy_of(array) if wide is array else wide
