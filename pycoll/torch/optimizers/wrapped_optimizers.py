"""The classes that DistributedOptimizer places before an optimizer's class in its bases."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from pycoll.gradients.policies import Policy
from pycoll.torch.compression import Compressor
from pycoll.torch.horovod.process_sets import ProcessSet
from pycoll.torch.horovod.reducing_calls import grouped_allreduce_
from pycoll.torch.horovod.scaled_ops import Adasum, ReduceOp
from pycoll.torch.memory.deferred_step import DeferredSteps, Groups
from pycoll.torch.optimizers.coded_state import ENTRY, with_residuals_of, without_residuals
from pycoll.torch.optimizers.gradients import Gradients, Settings
from pycoll.torch.optimizers.policy_gradients import ScheduledGradients
from pycoll.torch.optimizers.stored_steps import StoredGradients


def default_names(group: int, parameters: Sequence[torch.Tensor]) -> list[str]:
    """Names for the parameters of a group where the program gives none, as in Horovod."""
    return [f"allreduce.noname.{group}.{place}" for place in range(len(parameters))]


def wrapped_by(optimizer: torch.optim.Optimizer, mixin: type) -> Any:
    """A new object of a class derived from the optimizer's; it shares all attributes."""
    base = type(optimizer)
    made: Any = type(base.__name__, (mixin, base), {"__module__": base.__module__})
    wrapped = made.__new__(made)
    # A learning-rate scheduler may have set ``step`` on the instance. That function would step the
    # bare optimizer, without a reduction.
    own = {name: value for name, value in vars(optimizer).items() if name != "step"}
    vars(wrapped).update(own)
    return wrapped


#: Attributes of Horovod's optimizers that belong to its implementation and have no equivalent here.
_ITS_OWN = {
    *("_allreduce_grad_async", "_grouped_allreduce_grad_async", "_sparse_allreduce_grad_async"),
    *("_grad_accs", "_group_counts", "_make_hook", "_p_to_group", "_register_hooks"),
    *("_starting_models", "find_duplicates"),
}


class Distributed:
    """Base of all wrapped optimizers: the attributes of Horovod's, tied to the ranks of a world."""

    _settings: Settings
    #: The names of the optimizer's parameters.
    _names: dict[torch.Tensor, str]
    #: All names that the program gave, including those of other parameters.
    _names_given: dict[torch.Tensor, str]
    #: Parameters that needed no gradient when they were added, so their gradients are not reduced.
    _frozen: list[torch.Tensor]
    #: The argument ``groups`` of DistributedOptimizer.
    _groups: Any
    _passes: int
    _synchronized: bool
    #: False within skip_synchronize().
    _should_synchronize: bool

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise TypeError: a copy would have lost its ranks and parameters."""
        raise TypeError(
            f"a DistributedOptimizer ({type(self).__name__}) cannot be copied or pickled: its "
            "gradients are tied to the ranks of this world; take optimizer.state_dict(), and load "
            "it into one that is wrapped anew"
        )

    def __getattr__(self, name: str) -> Any:
        """Delegate to ``__getattr__`` of the optimizer's class; AttributeError names the rest."""
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
        """The reduction that combines gradients."""
        return self._settings.op

    @property
    def gradient_predivide_factor(self) -> float:
        """The factor by which gradients are divided before they are added."""
        return self._settings.predivide

    @property
    def sparse_as_dense(self) -> bool:
        """Whether sparse gradients are reduced as dense ones."""
        return self._settings.sparse_as_dense

    @property
    def process_set(self) -> ProcessSet:
        """The ranks whose gradients are reduced."""
        return self._settings.process_set

    @property
    def architecture(self) -> str | None:
        """The architecture that was given; to set it raises ValueError, since it is fixed."""
        return self._settings.architecture

    @architecture.setter
    def architecture(self, given: Any) -> None:
        raise ValueError(
            f"architecture is {self._settings.architecture!r} for all steps of this optimizer and "
            f"cannot become {given!r}: make a new DistributedOptimizer"
        )

    @property
    def backward_passes_per_step(self) -> int:
        """The number of backward passes before a step; can be set."""
        return self._passes

    @backward_passes_per_step.setter
    def backward_passes_per_step(self, passes: int) -> None:
        self.set_backward_passes_per_step(passes)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes before a step. ValueError unless it is at least 1."""
        if passes <= 0:
            raise ValueError(f"backward_passes_per_step is {passes}: expected at least 1")
        self._passes = passes

    @property
    def _compression(self) -> Compressor:
        return self._settings.compression

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        """The name of each parameter, including parameters that only named_parameters has."""
        return {**self._names_given, **self._names}

    @property
    def _requires_update(self) -> set[torch.Tensor]:
        """The parameters whose gradients are reduced."""
        return set(self._names) - set(self._frozen)

    @property
    def _handles(self) -> dict[Any, Any]:
        """The reductions under way, by parameter, or by group as a tuple."""
        return {}

    @property
    def _allreduce_delay(self) -> dict[torch.Tensor, int]:
        """The number of backward passes that each gradient still needs before it is reduced."""
        return dict.fromkeys(self._parameter_names, self._passes)


class Wrapped(Distributed):
    """An optimizer that steps by the gradients of all ranks."""

    _gradients: Gradients | ScheduledGradients | StoredGradients | None
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
        """Add a group as the optimizer does; each new gradient is reduced in a bucket of its own.

        All ranks must add the same group. Names come from named_parameters, or from the group.
        Raises ValueError for an optimizer with a policy, since its messages are made for its first
        parameters, and for a name that another parameter has.
        """
        if self._policy is not None:
            raise ValueError(
                f"add_param_group with policy {self._policy}: its messages are made for the first "
                "parameters of the optimizer; make the optimizer anew, or leave the policy out"
            )
        super().add_param_group(param_group)  # type: ignore[misc]  # as in step
        groups = self.param_groups
        try:
            named = self._names_of_group(len(groups) - 1, groups[-1])
        except ValueError:
            groups.pop()
            raise
        self._names.update(named)
        self._frozen += [p for p in named if not p.requires_grad]
        if isinstance(self._gradients, Gradients):
            self._gradients.include(named)

    def _names_of_group(self, number: int, group: dict[str, Any]) -> dict[torch.Tensor, str]:
        own = group.get("param_names") or default_names(number, group["params"])
        pairs = zip(group["params"], own, strict=True)
        named = {p: self._names_given.get(p, name) for p, name in pairs}
        taken = set(self._names.values())
        twice = [name for name in named.values() if name in taken]
        if twice:
            raise ValueError(f"the group has the name {twice[0]!r}, which another parameter has")
        return named

    def _check_all_reduced(self) -> None:
        """Raise ValueError for a gradient that exists but is not reduced."""
        if self._gradients is None:
            return
        for parameter in self._frozen:
            if parameter.requires_grad and parameter.grad is not None:
                raise ValueError(
                    f"the gradient of {self._names[parameter]!r} is not reduced, since its "
                    "requires_grad was False when the DistributedOptimizer got it: set it before, "
                    "or leave the parameter out and pass it to add_param_group later"
                )
        groups = self.param_groups
        if sum(len(group["params"]) for group in groups) == len(self._names):
            return
        for number, group in enumerate(groups):
            for place, parameter in enumerate(group["params"]):
                if parameter not in self._names and parameter.grad is not None:
                    raise ValueError(
                        f"the gradient of parameter {place} of param_groups[{number}] is not "
                        "reduced, since it was not added by the DistributedOptimizer's own "
                        "add_param_group: use that one"
                    )

    def synchronize(self) -> None:
        """Wait until all gradients are reduced; step() does so itself.

        Raises ValueError for a gradient that no rank reduces; see add_param_group.
        """
        self._check_all_reduced()
        if self._gradients is not None:
            self._gradients.synchronize()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Make step() use the gradients as they are, inside ``with``, after synchronize()."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def explain(self) -> str:
        """Describe the messages of a step, and the reason for them."""
        if isinstance(self._gradients, ScheduledGradients):
            return self._gradients.explain()
        if self._gradients is None:
            return "nothing: there is no other rank"
        return "each gradient or group by itself, when all ranks have it"

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes before a step. ValueError unless it is at least 1."""
        super().set_backward_passes_per_step(passes)
        if self._gradients is not None:
            self._gradients.passes = passes

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronize, then step as the optimizer does.

        With a closure, each call of it is followed by a reduction of the gradients it computes.
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
        return super().step(closure)  # type: ignore[misc]  # the next base is the optimizer's class

    def zero_grad(self, *args: Any, **words: Any) -> None:
        """Zero gradients as the optimizer does. AssertionError while they are being reduced."""
        if self._gradients is not None and self._gradients.under_way:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() and before "
                "optimizer.step() or optimizer.synchronize(), while gradients are being reduced"
            )
        super().zero_grad(*args, **words)  # type: ignore[misc]  # as in step

    def state_dict(self, *args: Any, **words: Any) -> dict[str, Any]:
        """The state of the optimizer; with a codec also this rank's entry "compression".

        With a codec it raises RuntimeError while gradients are being reduced.
        """
        own: Any = super()
        saved: dict[str, Any] = own.state_dict(*args, **words)
        coded = self._coded_gradients
        if coded is not None:
            saved[ENTRY] = coded.coded_state()
        return saved

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **words: Any) -> Any:
        """Load the state as the optimizer does, and reset the counts of backward passes.

        A state without the entry "compression" begins without residuals. Without a codec the entry
        is ignored.
        """
        if self._gradients is not None:
            self._gradients.reset()
        self._synchronized = False
        rest = state_dict
        if ENTRY in state_dict:
            rest = {name: value for name, value in state_dict.items() if name != ENTRY}
        told = super().load_state_dict(rest, *args, **words)  # type: ignore[misc]  # as in step
        coded = self._coded_gradients
        if coded is not None:
            coded.load_coded_state(state_dict.get(ENTRY))
        return told

    def state_for_others(self) -> dict[str, Any]:
        """``state_dict()`` without what this rank alone has left out, for ranks that take it."""
        saved = self.state_dict()
        if ENTRY in saved:
            saved[ENTRY] = without_residuals(saved[ENTRY])
        return saved

    def take_state_of(self, state_dict: dict[str, Any]) -> None:
        """Load another rank's ``state_for_others()``, and keep what this rank has left out."""
        coded = self._coded_gradients
        if coded is not None and ENTRY in state_dict:
            entry = with_residuals_of(coded.coded_state(), state_dict[ENTRY])
            state_dict = {**state_dict, ENTRY: entry}
        self.load_state_dict(state_dict)

    def meet_again(self) -> None:
        """Begin the next step with the present state of the codec, also in a new world.

        There a scheduler would begin with the first draws, unlike ranks that have taken a state.
        """
        coded = self._coded_gradients
        if coded is not None:
            coded.load_coded_state(coded.coded_state())

    @property
    def _coded_gradients(self) -> Gradients | ScheduledGradients | None:
        """The object that keeps what a codec leaves out; None without a codec or without peers."""
        if self._settings.codec is None or isinstance(self._gradients, StoredGradients):
            return None
        return self._gradients

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


class DeferringWrapped(Wrapped):
    """An optimizer that defers steps to the next forward pass; see memory/deferred_step.py."""

    _deferred: DeferredSteps

    @property
    def state(self) -> Any:
        """The state of the optimizer, by parameter. An access finishes deferred steps first."""
        self._deferred.finish()
        return vars(self)["state"]

    @state.setter
    def state(self, value: Any) -> None:
        vars(self)["state"] = value

    def explain(self) -> str:
        """Describe the messages of a step, the reason for them, and when parameters step."""
        gradients = self._gradients
        at_once = isinstance(gradients, ScheduledGradients) and not gradients.waits_singly
        when = "at once" if at_once else "when the next forward pass needs them"
        if not self._deferred.can_wait:
            when = f"at once, since {self._deferred.obstacle}"
        return f"parameters step {when}\n{super().explain()}"

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Send the remaining messages; each parameter steps when it is read next.

        All parameters step at once with a closure, with step hooks of the optimizer, and where
        gradients were synchronized before.
        """
        hooks = (
            vars(self).get("_optimizer_step_pre_hooks"),
            vars(self).get("_optimizer_step_post_hooks"),
        )
        at_once = self._synchronized or not self._should_synchronize
        if closure is not None or at_once or any(hooks):
            self._deferred.finish()
            return super().step(closure)
        self._check_all_reduced()
        return self._deferred.defer(vars(self)["param_groups"])

    def synchronize(self) -> None:
        """Finish deferred steps, then wait until all gradients are reduced."""
        self._deferred.finish()
        super().synchronize()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero gradients as the optimizer does; after its step for a deferred parameter."""
        self._deferred.zero(set_to_none)
        waiting = self._deferred.waiting
        groups = [
            {**group, "params": [p for p in group["params"] if p not in waiting]}
            for group in vars(self)["param_groups"]
        ]
        with self._only(groups):
            super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **words: Any) -> Any:
        """Finish deferred steps, load the state, and reset the counts of backward passes."""
        self._deferred.finish()
        return super().load_state_dict(state_dict, *args, **words)

    def step_groups(self, groups: Groups) -> None:
        """Run the step of the optimizer's class for the parameters of these groups only."""
        with self._only(groups):
            super(Wrapped, self).step()  # type: ignore[misc]  # the base after Wrapped

    @contextmanager
    def _only(self, groups: Groups) -> Iterator[None]:
        every, self.param_groups = vars(self)["param_groups"], groups
        try:
            yield
        finally:
            self.param_groups = every


class AdasumWrapped(Distributed):
    """An optimizer that steps by local gradients and combines the changes of all ranks by Adasum.

    Source: Maleki et al., "Scaling Distributed Training with Adaptive Summation" (2020).
    """

    def synchronize(self) -> None:
        """Do nothing: step() steps and synchronizes."""

    def skip_synchronize(self) -> Any:
        """Raise AssertionError: with Adasum, step() always synchronizes."""
        raise AssertionError("skip_synchronize() cannot be used with op=hvd.Adasum")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step as the optimizer does, then replace the change by the Adasum over all ranks."""
        groups = self.param_groups
        parameters = [p for group in groups for p in group["params"] if p.requires_grad]
        before = [p.detach().clone() for p in parameters]
        loss = super().step(closure)  # type: ignore[misc]  # the next base is the optimizer's class
        compression = self._settings.compression
        pairs = [
            compression.compress(p.detach() - old)
            for p, old in zip(parameters, before, strict=True)
        ]
        grouped_allreduce_([small for small, _ in pairs], op=Adasum, name="adasum.step")
        for p, old, (small, note) in zip(parameters, before, pairs, strict=True):
            p.detach().copy_(old + compression.decompress(small, note))
        return loss
