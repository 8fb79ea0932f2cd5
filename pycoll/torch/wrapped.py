"""The classes that DistributedOptimizer puts in front of an optimizer's own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pycoll.torch.gradients import Gradients, Settings
from pycoll.torch.ops import Adasum
from pycoll.torch.overlap import Groups, Overlap
from pycoll.torch.reducing import grouped_allreduce_
from pycoll.torch.scheduled import ScheduledGradients


class Wrapped:
    """Steps by the gradients of all ranks."""

    _gradients: Gradients | ScheduledGradients | None
    _settings: Settings
    _synchronized: bool
    _skips: bool

    def synchronize(self) -> None:
        """Wait until all gradients are reduced; step() does so itself."""
        if self._gradients is not None:
            self._gradients.synchronize()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within this, step() takes gradients as they are: for use after synchronize()."""
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    def explain(self) -> str:
        """What is sent in a step, and why."""
        if isinstance(self._gradients, ScheduledGradients):
            return self._gradients.explain()
        if self._gradients is None:
            return "nothing: there is no other rank"
        return "each gradient or group by itself, when all ranks have it"

    def set_backward_passes_per_step(self, passes: int) -> None:
        """How many backward passes there are before the next step."""
        if passes <= 0:
            raise ValueError(f"backward_passes_per_step is {passes}: expected at least 1")
        if self._gradients is not None:
            self._gradients.passes = passes

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronize, then step as the optimizer does.

        With a closure, the gradients that it computes are reduced each time it is called.
        """
        if self._skips:
            self._check_skipped()
        elif closure is not None:
            closure = self._reducing(closure)
        else:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() after "
                    "optimizer.synchronize(): all gradients are reduced again",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = False
        return super().step(closure)  # type: ignore[misc]  # of the class that is behind this one

    def zero_grad(self, *args: Any, **words: Any) -> None:
        """As the optimizer does. AssertionError while gradients are being reduced."""
        if self._gradients is not None and self._gradients.under_way:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() and before "
                "optimizer.step() or optimizer.synchronize(), while gradients are being reduced"
            )
        super().zero_grad(*args, **words)  # type: ignore[misc]  # as in step

    def load_state_dict(self, *args: Any, **words: Any) -> Any:
        """As the optimizer does; passes that were counted are forgotten."""
        if self._gradients is not None:
            self._gradients.reset()
        self._synchronized = False
        return super().load_state_dict(*args, **words)  # type: ignore[misc]  # as in step

    def _check_skipped(self) -> None:
        if self._gradients is not None and self._gradients.under_way:
            raise RuntimeError(
                "optimizer.step() within skip_synchronize() while gradients are being reduced: "
                "call optimizer.synchronize() before"
            )

    def _reducing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def evaluate() -> Any:
            loss = closure()
            self.synchronize()
            return loss

        return evaluate


class OverlappedWrapped(Wrapped):
    """Its steps wait for the next forward pass where they can; see overlap.py."""

    _overlap: Overlap

    @property
    def state(self) -> Any:
        """The optimizer's own, by parameter; whoever looks sees whole steps."""
        self._overlap.finish()
        return vars(self)["state"]

    @state.setter
    def state(self, value: Any) -> None:
        vars(self)["state"] = value

    def explain(self) -> str:
        """What is sent in a step, and why."""
        gradients = self._gradients
        at_once = isinstance(gradients, ScheduledGradients) and not gradients.waits_singly
        when = "at once" if at_once else "when the next forward pass needs them"
        return f"parameters step {when}\n{super().explain()}"

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Send what is left; parameters step when they are read next.

        With a closure, hooks of the optimizer, or gradients that were synchronized before, all
        step at once.
        """
        hooks = (
            vars(self).get("_optimizer_step_pre_hooks"),
            vars(self).get("_optimizer_step_post_hooks"),
        )
        if closure is not None or self._skips or self._synchronized or any(hooks):
            self._overlap.finish()
            return super().step(closure)
        return self._overlap.defer(vars(self)["param_groups"])

    def synchronize(self) -> None:
        """Wait until all gradients are reduced, and steps are done."""
        self._overlap.finish()
        super().synchronize()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the optimizer does; gradients whose step is to come are zeroed after it."""
        self._overlap.zero(set_to_none)
        waiting = self._overlap.waiting
        groups = [
            {**group, "params": [p for p in group["params"] if p not in waiting]}
            for group in vars(self)["param_groups"]
        ]
        with self._only(groups):
            super().zero_grad(set_to_none)

    def load_state_dict(self, *args: Any, **words: Any) -> Any:
        """As the optimizer does, after steps to come; passes that were counted are forgotten."""
        self._overlap.finish()
        return super().load_state_dict(*args, **words)

    def step_groups(self, groups: Groups) -> None:
        """The optimizer's own step, of these groups' parameters."""
        with self._only(groups):
            super(Wrapped, self).step()  # type: ignore[misc]  # of the class behind Wrapped

    @contextmanager
    def _only(self, groups: Groups) -> Iterator[None]:
        every, self.param_groups = vars(self)["param_groups"], groups
        try:
            yield
        finally:
            self.param_groups = every


class AdasumWrapped:
    """Steps on each rank's own gradients, then combines what the steps changed by Adasum."""

    _settings: Settings
    _parameter_names: dict[torch.Tensor, str]

    def synchronize(self) -> None:
        """Nothing: step() does it all."""

    def skip_synchronize(self) -> Any:
        """AssertionError: with Adasum, steps and synchronization are one."""
        raise AssertionError("skip_synchronize() cannot be used with op=hvd.Adasum")

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Gradients add up until step(), however many passes there are."""
        if passes <= 0:
            raise ValueError(f"backward_passes_per_step is {passes}: expected at least 1")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step as the optimizer does, and replace the change by the Adasum of all ranks'."""
        parameters = [p for p in self._parameter_names if p.requires_grad]
        before = [p.detach().clone() for p in parameters]
        loss = super().step(closure)  # type: ignore[misc]  # of the class that is behind this one
        compression = self._settings.compression
        pairs = [
            compression.compress(p.detach() - old)
            for p, old in zip(parameters, before, strict=True)
        ]
        grouped_allreduce_([small for small, _ in pairs], op=Adasum, name="adasum.step")
        for p, old, (small, note) in zip(parameters, before, pairs, strict=True):
            p.detach().copy_(old + compression.decompress(small, note))
        return loss
