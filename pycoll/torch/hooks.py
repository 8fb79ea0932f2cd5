"""Communication hooks of DistributedDataParallel that send gradients as codes.

Names and defaults are those of torch.distributed.algorithms.ddp_comm_hooks where these exist. The
hooks reduce over the communicator of a process group of the backend "pycoll", in host memory or on
CUDA devices; there codecs that keep every element work (docs/gpu.md). ``fp16_compress_hook`` and
post_localSGD are torch's own. DDP admits a ``bf16_compress_hook`` on devices only;
``State(group, BF16())`` takes its place.
"""

# No `from __future__ import annotations`: torch compares the annotations of hooks with types.

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)

from pycoll.compress import Block, Codec, Feedback, PowerSGD
from pycoll.errors import InvalidArgumentError
from pycoll.torch.c10d.group_work import pending
from pycoll.torch.c10d.process_group import PycollProcessGroup
from pycoll.types import whole

__all__ = [
    "PostLocalSGDState",
    "PowerSGDState",
    "State",
    "compress",
    "fp16_compress_hook",
    "post_localSGD_hook",
    "powerSGD_hook",
    "quantization_perchannel_hook",
    "quantization_pertensor_hook",
]

_Future: TypeAlias = torch.futures.Future[torch.Tensor]


class State:
    """The state of ``compress``: the codec, and what it has left out of each gradient bucket.

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

    Example::

        state = State(None, pycoll.compress.Block("int8"), start=100)
        ddp.register_comm_hook(state, compress)
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

    def reduce(self, bucket: dist.GradBucket) -> _Future:
        """Start to average a bucket; the future has its buffer."""
        buffer = bucket.buffer()
        backend = backend_of(self.group, buffer.device)
        is_plain = self.step < self.start or buffer.numel() * buffer.element_size() < self.min_bytes
        if bucket.is_last():
            self.step += 1
        if is_plain:
            return _average(backend, buffer)
        feedback = None
        if self._keeps:
            feedback = self.feedbacks.setdefault(bucket.index(), Feedback())
        if not isinstance(self.codec, PowerSGD):
            return _average(backend, buffer, self.codec, feedback)
        gradients = bucket.gradients()
        work = backend.communicator.all_reduce(
            gradients, "avg", compress=self.codec, feedback=feedback, async_op=True
        )

        def store() -> None:
            for gradient, average in zip(gradients, work.wait(), strict=True):
                gradient.copy_(average)

        return _future(backend, work, buffer, store)


def compress(state: State, bucket: dist.GradBucket) -> _Future:
    """Average the gradients of DistributedDataParallel with the codec of ``state``.

    Register it by ``ddp.register_comm_hook(State(None, codec), compress)``; arguments, errors and
    cost are described there.
    """
    return state.reduce(bucket)


class PowerSGDState(State):
    """The state of ``powerSGD_hook``, with the arguments of torch's.

    Arguments: ``process_group``; ``matrix_approximation_rank``, the columns of P and Q;
    ``start_powerSGD_iter``, as ``start`` of ``State``; ``min_compression_rate``, by which P and Q
    must have fewer elements than a matrix, or it is sent whole; ``use_error_feedback``, whether
    residuals are kept; ``random_seed``, of the first Q. With feedback, Q stays from step to step.

    Errors, cost: those of ``State``. Source: see ``pycoll.compress.PowerSGD``.
    """

    def __init__(
        self,
        process_group: Any,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1000,  # noqa: N803  # torch's name
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        random_seed: int = 0,
    ) -> None:
        codec = PowerSGD(matrix_approximation_rank, random_seed, min_compression_rate)
        super().__init__(process_group, codec, start_powerSGD_iter, 0, use_error_feedback)


def powerSGD_hook(  # noqa: N802  # torch's name
    state: PowerSGDState, bucket: dist.GradBucket
) -> _Future:
    """Average gradients with PowerSGD; ``ddp.register_comm_hook(PowerSGDState(None), ...)``."""
    return state.reduce(bucket)


def quantization_pertensor_hook(
    process_group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> _Future:
    """Average gradients as ``Block("int8", block=4096)``, without feedback.

    It takes the place of torch's hook of this name, which has one scale per bucket and gathers the
    codes of all ranks on each. ``State`` adds feedback.
    """
    buffer = bucket.buffer()
    return _average(backend_of(process_group, buffer.device), buffer, Block("int8", 4096))


def quantization_perchannel_hook(
    process_group: dist.ProcessGroup | None, bucket: dist.GradBucket, bucket_size: int = 512
) -> _Future:
    """Average gradients as ``Block("int8", block=bucket_size)``, without feedback.

    ``bucket_size``: a power of two from 32 to 4096. It takes the place of torch's hook of this
    name, which gathers the codes of all ranks on each. ``State`` adds feedback.
    """
    buffer = bucket.buffer()
    return _average(backend_of(process_group, buffer.device), buffer, Block("int8", bucket_size))


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
