"""DistributedOptimizer: gradients are reduced while the backward pass still runs."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pycoll.optim.policies import policy_of
from pycoll.torch import world
from pycoll.torch.compression import Compression, Compressor
from pycoll.torch.gradients import Gradients, Parameters, Settings
from pycoll.torch.ops import Adasum, Average, checked
from pycoll.torch.process_sets import ProcessSet, global_process_set
from pycoll.torch.reducing import grouped_allreduce_
from pycoll.torch.scheduled import ScheduledGradients


class _Wrapped:
    """What DistributedOptimizer adds in front of the optimizer's own class."""

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


class _AdasumWrapped:
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


def DistributedOptimizer(  # noqa: N802  # the name that programs use
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Compressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    policy: Any = None,
) -> Any:
    """An optimizer of the same class name that steps by the gradients of all ranks.

    It shares parameter groups and state with ``optimizer``, which is not to be used any more. Each
    gradient is reduced by ``op`` as soon as the backward pass has it; ``step()`` waits for all.
    Also has ``synchronize()``, ``skip_synchronize()`` and ``set_backward_passes_per_step(n)``.

    ``named_parameters``: usually ``model.named_parameters()``; names say which gradients of the
    ranks belong together, so without them parameters must come in the same order on all ranks.
    ``gradient_predivide_factor``: with Average, gradients are divided by it before they are added,
    and by size / it afterwards. ``groups``: a number of groups, or lists of parameters, that are
    reduced together. ``sparse_as_dense``: sparse gradients travel as dense ones. ``policy``: how
    gradients become messages, by a name or a ``pycoll.optim.Policy``; ``explain()`` then says what
    is sent, and why. Without one each gradient or group travels when all ranks have it.

    Raises ValueError for doubly named or unnamed parameters, wrong groups, fewer than one backward
    pass, a predivide factor where op is not Average, an unknown policy, and one together with
    groups or Adasum.
    """
    reduction = checked(op)
    if gradient_predivide_factor != 1.0 and reduction != Average:
        raise ValueError(
            f"gradient_predivide_factor is {gradient_predivide_factor} and op is {reduction.name}: "
            "it can be used with Average only"
        )
    if backward_passes_per_step <= 0:
        raise ValueError(
            f"backward_passes_per_step is {backward_passes_per_step}: expected at least 1"
        )
    if num_groups:
        warnings.warn("num_groups is now called groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    if policy is not None:
        policy = policy_of(policy)
        if groups is not None or reduction == Adasum:
            what = "groups" if groups is not None else "op=Adasum"
            raise ValueError(f"policy is {policy} and there is {what}: they exclude each other")
    names = _named(optimizer, named_parameters)
    settings = Settings(
        compression, reduction, gradient_predivide_factor, sparse_as_dense, process_set
    )
    if reduction == Adasum and world.size() > 1:
        if process_set.process_set_id != 0:
            raise ValueError(f"op is Adasum and process_set is {process_set}: it needs all ranks")
        wrapped = _wrapped(optimizer, _AdasumWrapped)
    else:
        wrapped = _wrapped(optimizer, _Wrapped)
        wrapped._gradients, wrapped._synchronized, wrapped._skips = None, False, False
        buckets = _buckets(optimizer, groups)
        elastic = os.environ.get("HOROVOD_ELASTIC") == "1"
        if process_set.included() and (world.size() > 1 or elastic):
            wrapped._gradients = (
                Gradients(names, buckets, settings)
                if policy is None
                else ScheduledGradients(names, settings, policy)
            )
        wrapped.set_backward_passes_per_step(backward_passes_per_step)
    wrapped._settings, wrapped._parameter_names = settings, names
    return wrapped


def _wrapped(optimizer: torch.optim.Optimizer, mixin: type) -> Any:
    """The optimizer itself under another class, sharing all it has."""
    base = type(optimizer)
    made: Any = type(base.__name__, (mixin, base), {"__module__": base.__module__})
    wrapped = made.__new__(made)
    # A scheduler may have put a step of its own onto the instance; that one steps alone.
    own = {name: value for name, value in vars(optimizer).items() if name != "step"}
    vars(wrapped).update(own)
    return wrapped


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _named(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[torch.Tensor, str]:
    """Names of all parameters of the optimizer, in the order of its groups."""
    parameters = _parameters_of(optimizer)
    if named_parameters is None:
        return {p: f"parameter.{number}" for number, p in enumerate(parameters)}
    pairs = list(named_parameters)
    if any(not isinstance(one, tuple) or len(one) != 2 for one in pairs):
        raise ValueError(
            "named_parameters has an entry that is no (name, parameter) pair: pass "
            "model.named_parameters()"
        )
    seen = [name for name, _ in pairs]
    twice = sorted({name for name in seen if seen.count(name) > 1})
    if twice:
        raise ValueError(f"named_parameters has names twice: {', '.join(map(str, twice))}")
    names = {p: name for name, p in reversed(pairs)}
    unnamed = [number for number, p in enumerate(parameters) if p not in names]
    if unnamed:
        raise ValueError(
            f"named_parameters lacks {len(unnamed)} of the optimizer's {len(parameters)} "
            f"parameters, the first being number {unnamed[0]}"
        )
    return {p: names[p] for p in parameters}


def _buckets(optimizer: torch.optim.Optimizer, groups: Any) -> list[Parameters]:
    """Which parameters are reduced together."""
    parameters = [p for p in _parameters_of(optimizer) if p.requires_grad]
    if groups is None:
        return [(p,) for p in parameters]
    if isinstance(groups, bool) or not (isinstance(groups, list) or groups > 0):
        raise ValueError(f"groups is {groups!r}: expected a number above 0, or lists of parameters")
    if not isinstance(groups, list):
        count = min(int(groups), len(parameters))
        ends = [len(parameters) * number // count for number in range(count + 1)]
        return [tuple(parameters[start:end]) for start, end in itertools.pairwise(ends)]
    grouped = [p for group in groups for p in group]
    if any(not isinstance(p, torch.Tensor) for p in grouped):
        raise ValueError("groups has an entry that is no list of parameters")
    if len({id(p) for p in grouped}) != len(grouped):
        raise ValueError("groups has a parameter twice")
    known = {id(p) for p in parameters}
    buckets = [tuple(p for p in group if id(p) in known) for group in groups]
    single = [(p,) for p in parameters if all(p is not one for one in grouped)]
    return [bucket for bucket in buckets if bucket] + single
