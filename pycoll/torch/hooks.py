"""Communication hooks of DistributedDataParallel that send gradients as codes.

Names, arguments and defaults are those of torch.distributed.algorithms.ddp_comm_hooks where these
exist. The hooks reduce over the communicator of a process group of the backend "pycoll", in host
memory or on CUDA devices; there codecs that keep every element work (docs/gpu.md). The hooks and
wrappers of 16-bit types and post_localSGD are torch's own. DDP admits those of bfloat16 on devices
only; in host memory ``State(group, BF16())`` takes their place.
"""

# No `from __future__ import annotations`: torch compares the annotations of hooks with types.

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)

from pycoll.compress import Block, Codec, Feedback, PowerSGD
from pycoll.errors import InvalidArgumentError
from pycoll.torch.c10d.group_work import pending
from pycoll.torch.c10d.process_group import PycollProcessGroup
from pycoll.types import real, whole

__all__ = [
    "PostLocalSGDState",
    "PowerSGDState",
    "State",
    "batched_powerSGD_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "compress",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "post_localSGD_hook",
    "powerSGD_hook",
    "quantization_perchannel_hook",
    "quantization_pertensor_hook",
]

_Future: TypeAlias = torch.futures.Future[torch.Tensor]


class State:
    """The state of ``compress``: the codec, and its residuals of each gradient bucket.

    Arguments:
        ``group``: the process group of the model, None for the default group.
        ``codec``: a codec of ``pycoll.compress``.
        ``start``: the steps that reduce gradients without a codec first. DDP makes its buckets anew
            after the first step, so at least 2.
        ``min_bytes``: buckets of fewer bytes are sent without a codec.
        ``feedback``: whether residuals are kept.

    Errors: InvalidArgumentError for other arguments, and from the first backward pass where the
    group has another backend. A backward pass raises the errors of ``all_reduce``.

    Cost: memory for one copy of the gradients.

    >>> ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    >>> state = hooks.State(None, pycoll.compress.Block("int8"), start=100)
    >>> ddp.register_comm_hook(state, hooks.compress)
    >>> ddp(torch.ones(1, 2)).sum().backward()
    >>> state.step
    1
    """

    def __init__(
        self,
        group: Any,
        codec: Codec,
        start: int = 1000,
        min_bytes: int = 1 << 16,
        feedback: bool = True,
    ) -> None:
        if not isinstance(codec, Codec):
            raise InvalidArgumentError(
                f"codec is {codec!r}: expected a codec of pycoll.compress, such as Block('int8')"
            )
        self.group, self.codec = group, codec
        self.start = whole("start", start, 2 if feedback else 0)
        self.min_bytes = whole("min_bytes", min_bytes, 0)
        #: The steps so far.
        self.step = 0
        #: By the number of the bucket.
        self.feedbacks: dict[int, Feedback] = {}
        self._keeps = feedback

    def state_dict(self) -> dict[str, Any]:
        """Return the step and the residuals of this rank, for a checkpoint."""
        saved = {number: one.state_dict() for number, one in self.feedbacks.items()}
        return {"step": self.step, "feedbacks": saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a ``state_dict``."""
        self.step = int(state["step"])
        self.feedbacks = {}
        for number, saved in state["feedbacks"].items():
            self.feedbacks[int(number)] = feedback = Feedback()
            feedback.load_state_dict(saved)

    def feedback_of(self, number: int) -> Feedback | None:
        """Return the Feedback of the next call with a bucket; None without feedback."""
        return self.feedbacks.setdefault(number, Feedback()) if self._keeps else None

    def reduce(self, bucket: dist.GradBucket, batched: bool = False) -> _Future:
        """Start to average a bucket; the future has its buffer.

        ``batched``: whether PowerSGD takes the bucket as one square matrix, not each gradient.
        """
        buffer = bucket.buffer()
        backend = backend_of(self.group, buffer.device)
        is_plain = self.step < self.start or buffer.numel() * buffer.element_size() < self.min_bytes
        if bucket.is_last():
            self.step += 1
        if is_plain:
            return _average(backend, buffer)
        feedback = self.feedback_of(bucket.index())
        if not isinstance(self.codec, PowerSGD):
            return _average(backend, buffer, self.codec, feedback)
        gradients = [_square(buffer)] if batched else bucket.gradients()
        work = backend.communicator.all_reduce(
            gradients, "avg", compress=self.codec, feedback=feedback, async_op=True
        )

        def store() -> None:
            averages = work.wait()
            if batched:
                buffer.copy_(averages[0].view(-1)[: buffer.numel()])
                return
            for gradient, average in zip(gradients, averages, strict=True):
                gradient.copy_(average)

        return _future(backend, work, buffer, store)


def compress(state: State, bucket: dist.GradBucket) -> _Future:
    """Average the gradients of DistributedDataParallel with the codec of ``state``.

    Arguments: ``state``, a ``State``; ``bucket``, which torch passes.

    Result: a future of the buffer of the bucket, with the averages.

    Errors: those of ``State``. Cost: one all-reduce of codes for each bucket.

    >>> ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    >>> ddp.register_comm_hook(hooks.State(None, pycoll.compress.BF16()), hooks.compress)
    >>> ddp(torch.ones(1, 2)).sum().backward()
    """
    return state.reduce(bucket)


class PowerSGDState(State):
    """The state of ``powerSGD_hook``, with the arguments of torch's.

    Arguments:
        ``process_group``: the process group of the model, None for the default group.
        ``matrix_approximation_rank``: the columns of P and Q, at least 1.
        ``start_powerSGD_iter``: as ``start`` of ``State``; at least 2 with feedback or warm start.
        ``min_compression_rate``: at least 1; a matrix is sent whole unless P and Q have so many
            times fewer elements.
        ``use_error_feedback``: whether residuals are kept.
        ``warm_start``: whether Q stays from step to step; otherwise each step draws a new one.
        ``random_seed``: of the first Q.
        ``orthogonalization_epsilon``: 0, since a column of zeros is no division by zero here.
        ``compression_stats_logging_frequency``: the default, since nothing is logged.
        ``batch_tensors_with_same_shape``: False; all matrices of a bucket share two messages.

    Errors: InvalidArgumentError for other values; otherwise those of ``State``.

    Cost: that of ``State``.

    Source: see ``pycoll.compress.PowerSGD``.

    >>> hooks.PowerSGDState(None, matrix_approximation_rank=2).codec
    PowerSGD(rank=2, seed=0, saving=2.0)
    """

    def __init__(
        self,
        process_group: Any,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1000,  # noqa: N803  # torch's name
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        batch_tensors_with_same_shape: bool = False,
    ) -> None:
        _only("orthogonalization_epsilon", orthogonalization_epsilon, 0, "columns of 0 stay 0")
        _only(
            "compression_stats_logging_frequency",
            compression_stats_logging_frequency,
            10_000,
            "nothing is logged",
        )
        _only(
            "batch_tensors_with_same_shape",
            batch_tensors_with_same_shape,
            False,
            "all matrices of a bucket share two messages already",
        )
        rank = whole("matrix_approximation_rank", matrix_approximation_rank, 1)
        if real("min_compression_rate", min_compression_rate, "a number of at least 1") < 1:
            raise InvalidArgumentError(
                f"min_compression_rate is {min_compression_rate!r}: expected a number of at least 1"
            )
        least = 2 if use_error_feedback or warm_start else 0
        start = whole("start_powerSGD_iter", start_powerSGD_iter, least)
        codec = PowerSGD(rank, random_seed, min_compression_rate)
        super().__init__(process_group, codec, start, 0, bool(use_error_feedback))
        self._warm = bool(warm_start)

    def feedback_of(self, number: int) -> Feedback:
        """Return the Feedback of the next call with a bucket, which draws Q by its step."""
        feedback = self.feedbacks.setdefault(number, Feedback())
        feedback.forget(residuals=not self._keeps, factors=not self._warm)
        return feedback


def _only(name: str, value: Any, supported: Any, why: str) -> None:
    """Raise InvalidArgumentError unless an argument of torch's has the value that works here."""
    if value != supported:
        raise InvalidArgumentError(
            f"{name} is {value!r}: expected {supported!r}, the only value here ({why}); leave it "
            "out"
        )


def powerSGD_hook(  # noqa: N802  # torch's name
    state: PowerSGDState, bucket: dist.GradBucket
) -> _Future:
    """Average the gradients of DistributedDataParallel with PowerSGD.

    Arguments: ``state``, a ``PowerSGDState``; ``bucket``, which torch passes.

    Result: a future of the buffer of the bucket, with the averages.

    Errors: those of ``State``. Cost: two all-reduces for each bucket, the second of which waits for
    the first.

    Source: see ``pycoll.compress.PowerSGD``.

    >>> ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    >>> ddp.register_comm_hook(hooks.PowerSGDState(None), hooks.powerSGD_hook)
    >>> ddp(torch.ones(1, 2)).sum().backward()
    """
    return state.reduce(bucket)


def batched_powerSGD_hook(  # noqa: N802  # torch's name
    state: PowerSGDState, bucket: dist.GradBucket
) -> _Future:
    """Average gradients with PowerSGD on each bucket as one square matrix, filled up with zeros.

    It computes less than ``powerSGD_hook`` and approximates worse.

    Arguments: those of ``powerSGD_hook``, ``state`` and ``bucket``.

    Result: a future of the buffer of the bucket, with the averages.

    Errors: those of ``State``. Cost: two all-reduces for each bucket, the second of which waits for
    the first.

    Source: see ``pycoll.compress.PowerSGD``.

    >>> ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    >>> ddp.register_comm_hook(hooks.PowerSGDState(None), hooks.batched_powerSGD_hook)
    >>> ddp(torch.ones(1, 2)).sum().backward()
    """
    return state.reduce(bucket, batched=True)


def quantization_pertensor_hook(
    process_group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> _Future:
    """Average gradients as ``Block("int8", block=4096)``, without feedback.

    It takes the place of torch's hook of this name, which has one scale per bucket and gathers the
    codes of all ranks on each. ``State`` adds feedback.

    Arguments: ``process_group``, that of the model, None for the default group; ``bucket``, which
    torch passes.

    Result: a future of the buffer of the bucket, with the averages.

    Errors: InvalidArgumentError where the group has another backend; those of ``all_reduce``.

    Cost: one all-reduce of codes for each bucket, about a quarter of the bytes of float32.

    >>> ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    >>> ddp.register_comm_hook(None, hooks.quantization_pertensor_hook)
    >>> ddp(torch.ones(1, 2)).sum().backward()
    """
    buffer = bucket.buffer()
    return _average(backend_of(process_group, buffer.device), buffer, Block("int8", 4096))


def quantization_perchannel_hook(
    process_group: dist.ProcessGroup | None, bucket: dist.GradBucket, bucket_size: int = 512
) -> _Future:
    """Average gradients as ``Block("int8", block=bucket_size)``, without feedback.

    It takes the place of torch's hook of this name, which gathers the codes of all ranks on each.
    ``State`` adds feedback.

    Arguments: those of ``quantization_pertensor_hook``, ``process_group`` and ``bucket``;
    ``bucket_size``, the values that share a scale, a power of two from 32 to 4096.

    Result: a future of the buffer of the bucket, with the averages.

    Errors: InvalidArgumentError for another size, and where the group has another backend; those of
    ``all_reduce``.

    Cost: one all-reduce of codes for each bucket, about a quarter of the bytes of float32.

    >>> ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    >>> ddp.register_comm_hook(None, hooks.quantization_perchannel_hook)
    >>> ddp(torch.ones(1, 2)).sum().backward()
    """
    buffer = bucket.buffer()
    return _average(backend_of(process_group, buffer.device), buffer, Block("int8", bucket_size))


def _square(buffer: torch.Tensor) -> torch.Tensor:
    """A copy of a buffer as a square matrix, with zeros behind the values."""
    side = math.isqrt(max(buffer.numel() - 1, 0)) + 1
    square = buffer.new_zeros(side * side)
    square[: buffer.numel()] = buffer
    return square.view(side, side)


def backend_of(group: Any, device: torch.device) -> PycollProcessGroup:
    """The backend of a process group for tensors on ``device``."""
    group = dist.group.WORLD if group is None else group
    backend = group._get_backend(device)
    if isinstance(backend, PycollProcessGroup) and backend.backend_for(device.type) is None:
        return backend
    where = "in host memory" if device.type == "cpu" else f"on {device.type}"
    raise InvalidArgumentError(
        f"the process group has the backend {dist.get_backend(group)!r} for tensors {where}: these "
        'hooks need init_process_group("pycoll")'
    )


def _average(
    backend: PycollProcessGroup,
    buffer: torch.Tensor,
    codec: Codec | None = None,
    feedback: Feedback | None = None,
) -> _Future:
    """Start to average a buffer in place."""
    work = backend.communicator.all_reduce(
        buffer, "avg", out=buffer, compress=codec, feedback=feedback, async_op=True
    )
    return _future(backend, work, buffer)


def _future(
    backend: PycollProcessGroup,
    work: Any,
    buffer: torch.Tensor,
    store: Callable[[], None] | None = None,
) -> _Future:
    """A future of the buffer: complete at once on a device, else by a thread of the group."""
    under_way = pending([work], [buffer], backend._watcher, store)
    future: _Future = under_way.get_future().then(lambda done: done.value()[0])
    return future
