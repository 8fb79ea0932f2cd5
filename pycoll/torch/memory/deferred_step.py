"""Defer optimizer steps to the next forward pass, so that it overlaps the reduction of gradients.

    backward pass | step() |            forward pass             |
    m3 m2 m1 m0 -------------------->   m0's parameters are reduced and stepped when it is called,
                                        then m1's, ...

``step()`` sends the remaining messages and returns. A hook before the forward function of a module
steps the parameters of that module. Any other read of a parameter also steps it first
(deferred_parameter.py). Parameters that the program does not read step when the next gradient is
ready. So a program always sees the values and gradients that it would see if ``step()`` had waited.

Compiled code would not see deferred steps. Before torch.compile compiles the first frame in the
process, of any code, all deferred steps are finished. From then on ``step()`` steps at once.

The optimizer steps some parameters at a time, with the options (learning rates and so on) that it
had at ``step()``. Optimizers of torch treat every parameter by itself, so the bits are the same.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from pycoll.config import Config
from pycoll.gradients.scheduler import TIMED_STEPS
from pycoll.torch.memory.compiling import has_compiled, listen
from pycoll.torch.memory.deferred_parameter import (
    DEFERRED,
    as_parameters,
    await_step,
    can_be_deferred,
    finish_own,
    own_parameters,
    restore_class,
)
from pycoll.torch.optimizers.policy_gradients import ScheduledGradients

Groups = list[dict[str, Any]]
#: The numbers of two timed steps of auto. In one, parameters step one by one although all gradients
#: are there; in the other they step all at once. Step 0, which includes one-time preparation, does
#: not count.
_SINGLY, _AT_ONCE = 1, 2


class _Waiting:
    """A deferred parameter: the memory of its gradient, and the number of its group."""

    def __init__(
        self,
        steps: DeferredSteps,
        parameter: torch.Tensor,
        group: int,
        grad: torch.Tensor,
        note: Any,
    ) -> None:
        self._steps, self._parameter = steps, parameter
        self.group, self.grad, self.note = group, grad, note
        #: Whether zero_grad() was called meanwhile: after the step the gradient becomes None, or
        #: zeros.
        self.gone = self.zeroed = False

    def finish(self, others: Sequence[torch.Tensor] = ()) -> None:
        """Step the parameter now, and those of ``others`` that are deferred."""
        self._steps.finish([self._parameter, *others])

    def drop_gradient(self) -> None:
        """Make the gradient None after the step."""
        self.gone = True

    def give_up(self) -> None:
        """Drop all deferred steps of the optimizer."""
        self._steps.give_up()


class DeferredSteps:
    """The deferred steps of one optimizer; any thread may finish them.

    ``step_groups(groups)`` makes the optimizer step exactly the parameters of these groups.
    """

    def __init__(
        self,
        gradients: ScheduledGradients,
        model: torch.nn.Module,
        step_groups: Callable[[Groups], None],
    ) -> None:
        self._gradients = gradients
        self._step_groups = step_groups
        self._lock = threading.RLock()
        self._stepping = False
        self._waiting: dict[torch.Tensor, _Waiting] = {}
        self._options: Groups = []
        #: The number of the timed step under way, None outside of timed steps.
        self._timed: int | None = None
        #: The seconds of each timed step that this class spends, waits for messages excluded.
        self._spent_s = [0.0] * TIMED_STEPS
        #: The number of parameters that were deferred last.
        self._counted = 0
        gradients.before_step = self.finish
        #: None where steps are not deferred: the feature is off, or the process has compiled code.
        self._hooks: list[RemovableHandle] | None = None
        #: Why steps are not deferred, where they are not.
        self.obstacle = "torch.compile compiles code of this process"
        if not Config.read().deferred_steps:
            self.obstacle = "PYCOLL_DEFERRED_STEPS is 0"
            return
        if not DEFERRED.is_open():
            self.obstacle = f"the self-test fails with torch {torch.__version__}"
            if DEFERRED.is_too_old():
                self.obstacle = f"torch {torch.__version__} is older than the tested versions"
            return
        if has_compiled():
            _warn_of_compiled_code()
            return
        self._hooks = [
            module.register_forward_pre_hook(finish_own)
            for module in model.modules()
            if any(p in gradients.counts for p in own_parameters(module))
        ]
        listen(self.end_waiting)

    def defer(self, groups: Groups) -> None:
        """Defer the step of ``groups``, by the gradients that are being reduced now.

        Parameters without a gradient under way, and those of a class other than Parameter, step at
        once. All parameters step at once where auto has found that this is faster.
        """
        notes = self._gradients.flush()
        if self._hooks is not None:
            listen(self.end_waiting)
        with self._lock, self._timing():
            singly = self.can_wait and self._timed != _AT_ONCE and self._gradients.waits_singly
            if not singly:
                self._gradients.complete()
            self._options = [_options(group) for group in groups]
            at_once: Groups = []
            for number, group in enumerate(groups):
                mine = group["params"]
                left = [p for p in mine if not (singly and self._await(p, number, notes))]
                for parameter in left:
                    if parameter in notes:
                        self._gradients.receive(parameter, notes[parameter])
                at_once.append({**group, "params": left})
            self._step(at_once)
            self._counted = len(self._waiting) or self._counted
            self._close()

    def finish(self, parameters: Iterable[torch.Tensor] | None = None) -> None:
        """Wait for the gradients of these parameters, by default of all deferred ones, and step.

        Raises what the wait for gradients raises. In that case all deferred steps are dropped, and
        parameters keep their current values.
        """
        with self._lock:
            if self._stepping:
                return
            chosen = self._waiting if parameters is None else parameters
            found = {p: self._waiting[p] for p in chosen if p in self._waiting}
            if not found:
                return
            with self._spending():
                try:
                    with _as_in_step():
                        self._step_waiting(found)
                except BaseException:
                    self.give_up()
                    raise
                self._close()

    def end_waiting(self) -> None:
        """Finish the deferred steps and defer no step from now on."""
        with self._lock:
            hooks, self._hooks = self._hooks, None
            for hook in hooks or ():
                hook.remove()
            if hooks is not None:
                _warn_of_compiled_code()
        self.finish()

    @property
    def can_wait(self) -> bool:
        """Whether steps may be deferred: the feature is on, and there is no compiled code."""
        return self._hooks is not None

    def give_up(self) -> None:
        """Drop all deferred steps; parameters keep their current values."""
        with self._lock:
            for parameter, one in self._waiting.items():
                restore_class(parameter)
                parameter.grad = None if one.gone else one.grad
            self._waiting.clear()

    def zero(self, to_none: bool) -> None:
        """Make the gradients of deferred parameters None or zeros after their steps."""
        with self._lock:
            for one in self._waiting.values():
                one.gone, one.zeroed = one.gone or to_none, one.zeroed or not to_none

    @property
    def waiting(self) -> set[torch.Tensor]:
        """The deferred parameters."""
        return set(self._waiting)

    @contextlib.contextmanager
    def _timing(self) -> Iterator[None]:
        """Begin a step. A timed step first waits for all messages, so that only Python is timed."""
        self._timed = self._gradients.timed_step
        if self._timed is not None:
            self._gradients.await_messages()
            self._spent_s[self._timed] = 0.0
        with self._spending():
            yield
        if self._timed == _AT_ONCE:
            more_s = self._spent_s[_SINGLY] - self._spent_s[_AT_ONCE]
            self._gradients.note_awaiting(max(0.0, more_s) / max(1, self._counted))

    @contextlib.contextmanager
    def _spending(self) -> Iterator[None]:
        """Add the time of the ``with`` block to the timed step under way, if there is one."""
        begin_s = time.perf_counter()
        yield
        if self._timed is not None:
            self._spent_s[self._timed] += time.perf_counter() - begin_s

    def _await(self, parameter: torch.Tensor, group: int, notes: dict[torch.Tensor, Any]) -> bool:
        if parameter not in notes or not can_be_deferred(parameter):
            return False
        grad = parameter.grad
        assert grad is not None, "a parameter whose gradient is under way has a gradient"
        one = _Waiting(self, parameter, group, grad, notes[parameter])
        self._waiting[parameter] = one
        # A backward pass must not add to memory that a message is still using.
        parameter.grad = None
        await_step(parameter, one)
        return True

    def _step_waiting(self, found: dict[torch.Tensor, _Waiting]) -> None:
        fresh = {}
        groups: Groups = [{**options, "params": []} for options in self._options]
        for parameter, one in found.items():
            # Not None if a backward pass of a graph from before the step ran in between.
            fresh[parameter], parameter.grad = parameter.grad, one.grad
            self._gradients.receive(parameter, one.note)
            groups[one.group]["params"].append(parameter)
        self._step(groups)
        for parameter, one in found.items():
            _leave_gradient(parameter, one, fresh[parameter])
            del self._waiting[parameter]
            restore_class(parameter)

    def _step(self, groups: Groups) -> None:
        some = [group for group in groups if group["params"]]
        self._stepping = True
        try:
            if some:
                self._step_groups(some)
        finally:
            self._stepping = False

    def _close(self) -> None:
        """End the step of the scheduler if no parameter is deferred any more."""
        if not self._waiting:
            self._gradients.complete()


def _warn_of_compiled_code() -> None:
    warnings.warn(
        "torch.compile compiles code of this process, which would not wait for deferred steps: "
        "with model=, step() steps all parameters at once from now on",
        stacklevel=2,
    )


def _leave_gradient(parameter: torch.Tensor, one: _Waiting, fresh: torch.Tensor | None) -> None:
    """Set the gradient that the program finds after the step."""
    assert parameter.grad is not None
    if one.gone:
        parameter.grad = fresh
        return
    if one.zeroed:
        parameter.grad.zero_()
    if fresh is not None:
        parameter.grad.add_(fresh)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """A copy of a group's options; learning rates may be tensors that change in place."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name != "params"
    }


@contextlib.contextmanager
def _as_in_step() -> Iterator[None]:
    """Run a step independently of the autograd, autocast and inference modes of the reader."""
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        as_parameters(),
    ):
        yield
