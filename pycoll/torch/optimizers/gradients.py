"""Reduce the gradients of an optimizer without a policy: one by one, or in groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from pycoll.compress import Auto, Codec, Feedback
from pycoll.torch.compression import Compressor
from pycoll.torch.horovod import horovod_world
from pycoll.torch.horovod.handles import synchronize
from pycoll.torch.horovod.process_sets import ProcessSet, controller_of
from pycoll.torch.horovod.reducing_calls import grouped_allreduce_async_
from pycoll.torch.horovod.scaled_ops import WORDS, Average, ReduceOp, scale_tensor
from pycoll.torch.horovod.tasks import Collective
from pycoll.torch.optimizers.coded_state import (
    Parameters,
    check_idle,
    loaded_feedbacks,
    saved_feedbacks,
)
from pycoll.torch.optimizers.sparse_gradients import sparse_allreduce_async


class Settings(NamedTuple):
    """Arguments of DistributedOptimizer."""

    compression: Compressor
    op: ReduceOp
    predivide: float
    sparse_as_dense: bool
    process_set: ProcessSet
    architecture: str | None = None
    #: In place of a compressor; a choice of codecs comes with a policy only.
    codec: Codec | Auto | None = None


class _Reduction(NamedTuple):
    """A reduction under way. ``finish`` waits and stores the reduced gradients of the bucket."""

    bucket: Parameters
    finish: Callable[[], None]


class Gradients:
    """Reduces the gradients of one optimizer between backward pass and step.

    A bucket is a tuple of parameters that are reduced together. Its reduction starts when
    ``passes`` backward passes have added to each of its gradients.
    """

    def __init__(
        self, named: dict[torch.Tensor, str], buckets: list[Parameters], settings: Settings
    ) -> None:
        self.names = named
        self.settings = settings
        self.passes = 1
        self.bucket_of: dict[torch.Tensor, Parameters] = {}
        self.counts: dict[torch.Tensor, int] = {}
        self.under_way: dict[Parameters, _Reduction] = {}
        #: The residuals of the codec, by bucket.
        self.feedbacks: dict[Parameters, Feedback] = {}
        self._include(buckets)

    def include(self, named: dict[torch.Tensor, str]) -> None:
        """Also reduce the gradients of further parameters, each in a separate bucket."""
        self.names.update(named)
        self._include([(p,) for p in named if p.requires_grad])

    def _include(self, buckets: list[Parameters]) -> None:
        for bucket in buckets:
            for parameter in bucket:
                self.bucket_of[parameter] = bucket
                self.counts[parameter] = 0
                parameter.register_post_accumulate_grad_hook(self.note_gradient)

    def touched(self) -> bool:
        """Whether a backward pass has added to a gradient since the last synchronization."""
        return bool(self.under_way) or any(self.counts.values())

    def coded_state(self) -> dict[str, Any]:
        """The memory of the codec, for a checkpoint of this rank; see coded_state.py."""
        check_idle(bool(self.under_way))
        return saved_feedbacks(self.feedbacks, self.names)

    def load_coded_state(self, entry: Any) -> None:
        """Go on from a ``coded_state()``; None: without residuals.

        A reduction that was given up may still change its Feedback, which this call replaces.
        """
        buckets = dict.fromkeys(self.bucket_of.values())
        self.feedbacks = loaded_feedbacks(entry, buckets, self.names)

    def reset(self) -> None:
        """Reset the counts of backward passes and forget reductions under way."""
        self.under_way.clear()
        self.counts = dict.fromkeys(self.counts, 0)

    def note_gradient(self, parameter: torch.Tensor) -> None:
        """Count a backward pass that has added to a gradient (hook); may start its bucket."""
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
        """Start the reduction of a bucket; a missing gradient counts as zeros."""
        for parameter in bucket:
            if parameter.grad is None:
                # Another rank may have a gradient: its forward pass may have used this parameter.
                parameter.grad = torch.zeros_like(parameter)
        if len(bucket) == 1 and self._is_sparse(bucket[0]):
            self.under_way[bucket] = _Reduction(bucket, self._start_sparse(bucket[0]))
        else:
            self.under_way[bucket] = _Reduction(bucket, self._startdense(bucket))

    def synchronize(self) -> None:
        """Start the remaining buckets, and wait for all buckets."""
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

    def _startdense(self, bucket: Parameters) -> Callable[[], None]:
        compression, op, predivide, _, process_set, _, codec = self.settings
        if isinstance(codec, Codec):
            return self._start_coded(bucket, codec)
        pairs = [compression.compress(dense(one.grad)) for one in bucket]
        halves = (1.0 / predivide, predivide) if op == Average else (1.0, 1.0)
        handle = grouped_allreduce_async_(
            [small for small, _ in pairs], None, self.names[bucket[0]], op, *halves, process_set
        )

        def finish() -> None:
            reduced = synchronize(handle)
            for parameter, small, (_, note) in zip(bucket, reduced, pairs, strict=True):
                put_back(parameter, compression.decompress(small, note))

        return finish

    def _start_coded(self, bucket: Parameters, codec: Codec) -> Callable[[], None]:
        """Start an all_reduce with a codec; the controller runs it when all ranks have the bucket.

        The bucket owns the residuals: they stay when the world changes.
        """
        _, op, predivide, _, process_set, *_ = self.settings
        before, after = (1.0 / predivide, predivide) if op == Average else (1.0, 1.0)
        given = [scale_tensor(dense(one.grad), before) for one in bucket]
        feedback = self.feedbacks.setdefault(bucket, Feedback())
        shapes = [list(one.shape) for one in given]
        kinds = [str(one.dtype).removeprefix("torch.") for one in given]
        terms = {"shape": shapes, "dtype": kinds, "op": op.name, "codec": repr(codec)}

        def reduce(comm: Any) -> Any:
            return comm.all_reduce(given, WORDS[op], compress=codec, feedback=feedback)

        task = Collective(terms, reduce)
        controller_of(process_set).submit(task, self.names[bucket[0]])

        def finish() -> None:
            for parameter, reduced in zip(bucket, horovod_world.wait_for(task), strict=True):
                put_back(parameter, scale_tensor(reduced, after))

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


def dense(grad: Any) -> torch.Tensor:
    """The gradient as a dense tensor without autograd history."""
    whole: torch.Tensor = grad.to_dense() if grad.is_sparse else grad
    return whole.detach()


def put_back(parameter: torch.Tensor, reduced: torch.Tensor) -> None:
    """Store the reduced gradient as the parameter's gradient."""
    grad = parameter.grad
    assert grad is not None
    if grad.is_sparse:
        parameter.grad = reduced.to_sparse()
    elif reduced.data_ptr() != grad.data_ptr():
        grad.detach().copy_(reduced)
