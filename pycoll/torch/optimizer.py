"""DistributedOptimizer: gradients are reduced while the backward pass still runs."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from pycoll.torch import world
from pycoll.torch.compression import Compression, Compressor
from pycoll.torch.handles import synchronize
from pycoll.torch.ops import Adasum, Average, ReduceOp, checked
from pycoll.torch.process_sets import ProcessSet, global_process_set
from pycoll.torch.reducing import grouped_allreduce_, grouped_allreduce_async_
from pycoll.torch.sparse import sparse_allreduce_async

Parameters = tuple[torch.Tensor, ...]


class Settings(NamedTuple):
    """What DistributedOptimizer was told."""

    compression: Compressor
    op: ReduceOp
    predivide: float
    sparse_as_dense: bool
    process_set: ProcessSet


class _Reduction(NamedTuple):
    """A bucket under way. ``finish`` waits and puts the reduced gradients in their place."""

    bucket: Parameters
    finish: Callable[[], None]


class _Gradients:
    """The gradients of one optimizer between backward pass and step.

    Parameters form buckets, by themselves or as ``groups`` say. A bucket starts when each of its
    gradients has been added to ``passes`` times.
    """

    def __init__(
        self, named: dict[torch.Tensor, str], buckets: list[Parameters], settings: Settings
    ) -> None:
        self.names = named
        self.settings = settings
        self.passes = 1
        self.bucket_of = {p: bucket for bucket in buckets for p in bucket}
        self.counts = dict.fromkeys(self.bucket_of, 0)
        self.under_way: dict[Parameters, _Reduction] = {}
        for parameter in self.bucket_of:
            parameter.register_post_accumulate_grad_hook(self.added)

    def touched(self) -> bool:
        """Whether a backward pass has been here since the last synchronization."""
        return bool(self.under_way) or any(self.counts.values())

    def reset(self) -> None:
        """Forget the passes that were counted."""
        self.under_way.clear()
        self.counts = dict.fromkeys(self.counts, 0)

    def added(self, parameter: torch.Tensor) -> None:
        """A backward pass has added to a gradient."""
        bucket = self.bucket_of[parameter]
        if self.counts[parameter] >= self.passes:
            raise AssertionError(
                f"the gradient of {self.names[parameter]!r} was computed more than "
                f"backward_passes_per_step={self.passes} times before step(): raise "
                "backward_passes_per_step to add up gradients on each rank first"
            )
        self.counts[parameter] += 1
        if all(self.counts[one] >= self.passes for one in bucket):
            self.start(bucket)

    def start(self, bucket: Parameters) -> None:
        """Reduce a bucket; parameters without gradient take part with zeros."""
        for parameter in bucket:
            if parameter.grad is None:
                # Another rank's forward pass may have used it.
                parameter.grad = torch.zeros_like(parameter)
        if len(bucket) == 1 and self._is_sparse(bucket[0]):
            self.under_way[bucket] = _Reduction(bucket, self._start_sparse(bucket[0]))
        else:
            self.under_way[bucket] = _Reduction(bucket, self._start_dense(bucket))

    def synchronize(self) -> None:
        """Start what has not started, and wait for all."""
        for bucket in dict.fromkeys(self.bucket_of.values()):
            if bucket not in self.under_way:
                self.start(bucket)
        reductions = list(self.under_way.values())
        self.reset()
        for one in reductions:
            one.finish()

    def _is_sparse(self, parameter: torch.Tensor) -> bool:
        grad = parameter.grad
        return grad is not None and grad.is_sparse and not self.settings.sparse_as_dense

    def _start_dense(self, bucket: Parameters) -> Callable[[], None]:
        compression, op, predivide, _, process_set = self.settings
        pairs = [compression.compress(_dense(one.grad)) for one in bucket]
        halves = (1.0 / predivide, predivide) if op == Average else (1.0, 1.0)
        handle = grouped_allreduce_async_(
            [small for small, _ in pairs], None, self.names[bucket[0]], op, *halves, process_set
        )

        def finish() -> None:
            reduced = synchronize(handle)
            for parameter, small, (_, note) in zip(bucket, reduced, pairs, strict=True):
                _put(parameter, compression.decompress(small, note))

        return finish

    def _start_sparse(self, parameter: torch.Tensor) -> Callable[[], None]:
        settings = self.settings
        assert parameter.grad is not None
        result = sparse_allreduce_async(
            parameter.grad, self.names[parameter], settings.op, settings.process_set
        )

        def finish() -> None:
            parameter.grad = result()

        return finish


def _dense(grad: Any) -> torch.Tensor:
    dense: torch.Tensor = grad.to_dense() if grad.is_sparse else grad
    return dense.detach()


def _put(parameter: torch.Tensor, reduced: torch.Tensor) -> None:
    """The reduced gradient in the place of the parameter's own."""
    grad = parameter.grad
    assert grad is not None
    if grad.is_sparse:
        parameter.grad = reduced.to_sparse()
    elif reduced.data_ptr() != grad.data_ptr():
        grad.detach().copy_(reduced)


class _Wrapped:
    """What DistributedOptimizer adds in front of the optimizer's own class."""

    _gradients: _Gradients | None
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
) -> Any:
    """An optimizer of the same class name that steps by the gradients of all ranks.

    It shares parameter groups and state with ``optimizer``, which is not to be used any more. Each
    gradient is reduced by ``op`` as soon as the backward pass has it; ``step()`` waits for all.
    Also has ``synchronize()``, ``skip_synchronize()`` and ``set_backward_passes_per_step(n)``.

    ``named_parameters``: usually ``model.named_parameters()``; names say which gradients of the
    ranks belong together, so without them parameters must come in the same order on all ranks.
    ``gradient_predivide_factor``: with Average, gradients are divided by it before they are added,
    and by size / it afterwards. ``groups``: a number of groups, or lists of parameters, that are
    reduced together. ``sparse_as_dense``: sparse gradients travel as dense ones.

    Raises ValueError for doubly named or unnamed parameters, wrong groups, fewer than one backward
    pass, and a predivide factor where op is not Average.
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
            wrapped._gradients = _Gradients(names, buckets, settings)
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
