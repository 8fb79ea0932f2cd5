"""The classes that DistributedOptimizer puts in front of an optimizer's own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from pycoll.optim.policies import Policy
from pycoll.torch.compression import Compressor
from pycoll.torch.gradients import Gradients, Settings
from pycoll.torch.ops import Adasum, ReduceOp
from pycoll.torch.overlap import Groups, Overlap
from pycoll.torch.process_sets import ProcessSet
from pycoll.torch.reducing import grouped_allreduce_
from pycoll.torch.scheduled import ScheduledGradients


def default_names(group: int, parameters: Sequence[torch.Tensor]) -> list[str]:
    """The names of a group's parameters where the program gives none: as Horovod's."""
    return [f"allreduce.noname.{group}.{place}" for place in range(len(parameters))]


#: Attributes of Horovod's optimizers that are steps of its own way to reduce gradients.
_ITS_OWN = {
    *("_allreduce_grad_async", "_grouped_allreduce_grad_async", "_sparse_allreduce_grad_async"),
    *("_grad_accs", "_group_counts", "_make_hook", "_p_to_group", "_register_hooks"),
    *("_starting_models", "find_duplicates"),
}


class Distributed:
    """What every wrapped optimizer has: Horovod's attributes, tied to the ranks of this world."""

    _settings: Settings
    #: The names of its parameters, and those that the program gave for others too.
    _names: dict[torch.Tensor, str]
    _names_given: dict[torch.Tensor, str]
    #: Parameters that needed no gradient when they came, so that nothing reduces theirs.
    _frozen: list[torch.Tensor]
    #: As DistributedOptimizer was given them.
    _groups: Any
    _passes: int
    _synchronized: bool
    #: False within skip_synchronize().
    _should_synchronize: bool

    def __reduce_ex__(self, protocol: Any) -> Any:
        """TypeError: neither copied nor pickled would it know its ranks and parameters."""
        raise TypeError(
            f"a DistributedOptimizer ({type(self).__name__}) cannot be copied or pickled: its "
            "gradients are tied to the ranks of this world; take optimizer.state_dict(), and load "
            "it into one that is wrapped anew"
        )

    def __getattr__(self, name: str) -> Any:
        """What the optimizer's class has by ``__getattr__``; AttributeError names what is not."""
        if name in _ITS_OWN:
            raise AttributeError(
                f"{type(self).__name__} has no {name!r}, which is a part of how Horovod reduces "
                "gradients: use synchronize(), explain() and the arguments of DistributedOptimizer"
            )
        own: Any = getattr(super(), "__getattr__", None)
        if own is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return own(name)

    @property
    def op(self) -> ReduceOp:
        """How gradients are combined."""
        return self._settings.op

    @property
    def gradient_predivide_factor(self) -> float:
        """What gradients are divided by before they are added."""
        return self._settings.predivide

    @property
    def sparse_as_dense(self) -> bool:
        """Whether sparse gradients travel as dense ones."""
        return self._settings.sparse_as_dense

    @property
    def process_set(self) -> ProcessSet:
        """The ranks whose gradients are reduced."""
        return self._settings.process_set

    @property
    def backward_passes_per_step(self) -> int:
        """How many backward passes there are before a step; can be set."""
        return self._passes

    @backward_passes_per_step.setter
    def backward_passes_per_step(self, passes: int) -> None:
        self.set_backward_passes_per_step(passes)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """How many backward passes there are before the next step."""
        if passes <= 0:
            raise ValueError(f"backward_passes_per_step is {passes}: expected at least 1")
        self._passes = passes

    @property
    def _compression(self) -> Compressor:
        return self._settings.compression

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        """The name of each parameter, of those too that named_parameters has beside its own."""
        return {**self._names_given, **self._names}

    @property
    def _requires_update(self) -> set[torch.Tensor]:
        """The parameters whose gradients are reduced."""
        return set(self._names) - set(self._frozen)

    @property
    def _handles(self) -> dict[Any, Any]:
        """What is under way, by parameter, or by group as a tuple."""
        return {}

    @property
    def _allreduce_delay(self) -> dict[torch.Tensor, int]:
        """How many backward passes each gradient is short of being reduced."""
        return dict.fromkeys(self._parameter_names, self._passes)


class Wrapped(Distributed):
    """Steps by the gradients of all ranks."""

    _gradients: Gradients | ScheduledGradients | None
    _policy: Policy | None

    @property
    def _handles(self) -> dict[Any, Any]:
        if self._gradients is None:
            return {}
        found = self._gradients.under_way.items()
        return {
            key[0] if self._groups is None and isinstance(key, tuple) else key: one
            for key, one in found
        }

    @property
    def _allreduce_delay(self) -> dict[torch.Tensor, int]:
        counts = {} if self._gradients is None else self._gradients.counts
        return {p: self._passes - counts.get(p, 0) for p in self._parameter_names}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the optimizer does, on all ranks alike; each new gradient is reduced by itself.

        Names are those of named_parameters, or of the group. ValueError for an optimizer with a
        policy, whose messages are made for the parameters that it began with, and for names that
        another parameter has.
        """
        if self._policy is not None:
            raise ValueError(
                f"add_param_group beside policy {self._policy}, which has made its messages of the "
                "parameters that there were: make the optimizer anew, or leave the policy out"
            )
        super().add_param_group(param_group)  # type: ignore[misc]  # as in step
        groups = self.param_groups
        try:
            named = self._named(len(groups) - 1, groups[-1])
        except ValueError:
            groups.pop()
            raise
        self._names.update(named)
        self._frozen += [p for p in named if not p.requires_grad]
        if isinstance(self._gradients, Gradients):
            self._gradients.include(named)

    def _named(self, number: int, group: dict[str, Any]) -> dict[torch.Tensor, str]:
        own = group.get("param_names") or default_names(number, group["params"])
        pairs = zip(group["params"], own, strict=True)
        named = {p: self._names_given.get(p, name) for p, name in pairs}
        taken = set(self._names.values())
        twice = [name for name in named.values() if name in taken]
        if twice:
            raise ValueError(f"the group has {twice[0]!r}, which another parameter is called")
        return named

    def _check_all_reduced(self) -> None:
        """ValueError for a gradient that this rank would step by alone."""
        if self._gradients is None:
            return
        for parameter in self._frozen:
            if parameter.requires_grad and parameter.grad is not None:
                raise ValueError(
                    f"the gradient of {self._names[parameter]!r} is not reduced, since it needed "
                    "none when it came to the DistributedOptimizer: let it need one then, or leave "
                    "it out and pass it to add_param_group when it does"
                )
        groups = self.param_groups
        if sum(len(group["params"]) for group in groups) == len(self._names):
            return
        for number, group in enumerate(groups):
            for place, parameter in enumerate(group["params"]):
                if parameter not in self._names and parameter.grad is not None:
                    raise ValueError(
                        f"the gradient of parameter {place} of param_groups[{number}] is not "
                        "reduced, since it did not come by the DistributedOptimizer's own "
                        "add_param_group: use that one"
                    )

    def synchronize(self) -> None:
        """Wait until all gradients are reduced; step() does so itself.

        ValueError for a gradient that none of the ranks reduces; see add_param_group.
        """
        self._check_all_reduced()
        if self._gradients is not None:
            self._gradients.synchronize()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within this, step() takes gradients as they are: for use after synchronize()."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def explain(self) -> str:
        """What is sent in a step, and why."""
        if isinstance(self._gradients, ScheduledGradients):
            return self._gradients.explain()
        if self._gradients is None:
            return "nothing: there is no other rank"
        return "each gradient or group by itself, when all ranks have it"

    def set_backward_passes_per_step(self, passes: int) -> None:
        """How many backward passes there are before the next step."""
        super().set_backward_passes_per_step(passes)
        if self._gradients is not None:
            self._gradients.passes = passes

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronize, then step as the optimizer does.

        With a closure, the gradients that it computes are reduced each time it is called.
        """
        if not self._should_synchronize:
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
        self._check_all_reduced()
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
        if not self._overlap.can_wait:
            when = "at once, since torch.compile compiles code of this process"
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
        at_once = self._synchronized or not self._should_synchronize
        if closure is not None or at_once or any(hooks):
            self._overlap.finish()
            return super().step(closure)
        self._check_all_reduced()
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


class AdasumWrapped(Distributed):
    """Steps on each rank's own gradients, then combines what the steps changed by Adasum."""

    def synchronize(self) -> None:
        """Nothing: step() does it all."""

    def skip_synchronize(self) -> Any:
        """AssertionError: with Adasum, steps and synchronization are one."""
        raise AssertionError("skip_synchronize() cannot be used with op=hvd.Adasum")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step as the optimizer does, and replace the change by the Adasum of all ranks'."""
        groups = self.param_groups
        parameters = [p for group in groups for p in group["params"] if p.requires_grad]
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
