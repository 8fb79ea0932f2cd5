"""Steps that wait for the next forward pass, so that gradients may still travel while it begins.

    backward pass | step() |            forward pass             |
    m3 m2 m1 m0 -------------------->   m0's parameters are reduced and stepped when it is called,
                                        then m1's, ...

``step()`` sends what is left and returns. A module's parameters are stepped by a hook in front of
its forward function; whoever reads one otherwise makes it step as well (awaited.py). What nobody
reads is stepped when the next gradient comes. So a program sees the values and gradients that it
would see if ``step()`` had waited, whenever it looks.

Compiled code would not see steps that are to come. Before torch.compile compiles a first frame in
this process, whatever it is of, all are done, and from then on ``step()`` does them at once.

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

from pycoll.optim.scheduler import TIMED_STEPS
from pycoll.torch.awaited import (
    await_step,
    can_be_awaited,
    finish_own,
    own_parameters,
    stepped,
)
from pycoll.torch.compiling import has_compiled, listen
from pycoll.torch.scheduled import ScheduledGradients

Groups = list[dict[str, Any]]
#: Of the steps that auto has timed: in one parameters step singly, though nothing has to be waited
#: for, and in the next one all at once. Both do what was done before, in the first.
_SINGLY, _AT_ONCE = 1, 2


class _Waiting:
    """A parameter whose step is to come: its gradient's memory, and which group it is of."""

    def __init__(
        self, overlap: Overlap, parameter: torch.Tensor, group: int, grad: torch.Tensor, note: Any
    ) -> None:
        self._overlap, self._parameter = overlap, parameter
        self.group, self.grad, self.note = group, grad, note
        #: What zero_grad() said meanwhile: the gradient becomes None, or zeros.
        self.gone = self.zeroed = False

    def finish(self, beside: Sequence[torch.Tensor] = ()) -> None:
        """Step the parameter now, and those of ``beside`` that wait too."""
        self._overlap.finish([self._parameter, *beside])

    def drop_gradient(self) -> None:
        """The gradient becomes None after the step."""
        self.gone = True

    def give_up(self) -> None:
        """Neither this step is to come nor any other of the optimizer."""
        self._overlap.give_up()


class Overlap:
    """The steps to come of one optimizer; any thread may finish them.

    ``step_groups(groups)`` lets the optimizer step the parameters of these groups and no others.
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
        #: The timed step that is under way, its time outside of waits, and its waiting parameters.
        self._timed: int | None = None
        self._spent_s = [0.0] * TIMED_STEPS
        self._counted = 0
        gradients.before_step = self.finish
        #: None where steps do not wait any more, since there is compiled code.
        self._hooks: list[RemovableHandle] | None = None
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
        """Step ``groups`` later, by the gradients that are under way now.

        What has no gradient under way, or is no plain parameter, is stepped at once; and so is all
        where auto has found that this is faster.
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
        """Wait for these parameters' gradients, or for all, and step them.

        Raises what the wait for gradients raises; then all steps to come are given up, and
        parameters keep the values that they have.
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
        """Do what is to come; later steps are done at once."""
        with self._lock:
            hooks, self._hooks = self._hooks, None
            for hook in hooks or ():
                hook.remove()
            if hooks is not None:
                _warn_of_compiled_code()
        self.finish()

    @property
    def can_wait(self) -> bool:
        """Whether there is no compiled code that would not see steps to come."""
        return self._hooks is not None

    def give_up(self) -> None:
        """No step is to come any more; parameters keep the values that they have."""
        with self._lock:
            for parameter, one in self._waiting.items():
                stepped(parameter)
                parameter.grad = None if one.gone else one.grad
            self._waiting.clear()

    def zero(self, to_none: bool) -> None:
        """Gradients are None or zeros once they have been stepped by."""
        with self._lock:
            for one in self._waiting.values():
                one.gone, one.zeroed = one.gone or to_none, one.zeroed or not to_none

    @property
    def waiting(self) -> set[torch.Tensor]:
        """The parameters whose step is to come."""
        return set(self._waiting)

    @contextlib.contextmanager
    def _timing(self) -> Iterator[None]:
        """A step begins; what is measured is Python's share, so messages end before."""
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
        """What is done here belongs to the step that is timed, if any is."""
        begin_s = time.perf_counter()
        yield
        if self._timed is not None:
            self._spent_s[self._timed] += time.perf_counter() - begin_s

    def _await(self, parameter: torch.Tensor, group: int, notes: dict[torch.Tensor, Any]) -> bool:
        if parameter not in notes or not can_be_awaited(parameter):
            return False
        grad = parameter.grad
        assert grad is not None, "what has been given to the scheduler is there"
        one = _Waiting(self, parameter, group, grad, notes[parameter])
        self._waiting[parameter] = one
        # A backward pass must not add to memory that is under way.
        parameter.grad = None
        await_step(parameter, one)
        return True

    def _step_waiting(self, found: dict[torch.Tensor, _Waiting]) -> None:
        fresh = {}
        groups: Groups = [{**options, "params": []} for options in self._options]
        for parameter, one in found.items():
            # Not None if a graph from before the step has come back in between.
            fresh[parameter], parameter.grad = parameter.grad, one.grad
            self._gradients.receive(parameter, one.note)
            groups[one.group]["params"].append(parameter)
        self._step(groups)
        for parameter, one in found.items():
            _leave_gradient(parameter, one, fresh[parameter])
            del self._waiting[parameter]
            stepped(parameter)

    def _step(self, groups: Groups) -> None:
        some = [group for group in groups if group["params"]]
        self._stepping = True
        try:
            if some:
                self._step_groups(some)
        finally:
            self._stepping = False

    def _close(self) -> None:
        """With the last parameter's step, that of the scheduler ends."""
        if not self._waiting:
            self._gradients.complete()


def _warn_of_compiled_code() -> None:
    warnings.warn(
        "torch.compile compiles code of this process, which would not wait for steps that are to "
        "come: with model=, step() does them at once from now on",
        stacklevel=2,
    )


def _leave_gradient(parameter: torch.Tensor, one: _Waiting, fresh: torch.Tensor | None) -> None:
    """What the program finds as the gradient after the step."""
    assert parameter.grad is not None
    if one.gone:
        parameter.grad = fresh
        return
    if one.zeroed:
        parameter.grad.zero_()
    if fresh is not None:
        parameter.grad.add_(fresh)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """A group's figures as they are now; learning rates may be tensors that change in place."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name != "params"
    }


@contextlib.contextmanager
def _as_in_step() -> Iterator[None]:
    """Whatever surrounds the reader of a parameter is not to change what a step does."""
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        torch._C.DisableTorchFunctionSubclass(),
    ):
        yield
