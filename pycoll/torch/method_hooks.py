"""A communication hook of DistributedDataParallel that reduces gradients by a method.

DDP hands over its buckets in their order. The hook copies each gradient into the memory of a
Scheduler, whose communication plan merges or cuts without regard to the buckets. The hook of the
last bucket waits for all messages; before that, messages travel while the backward pass goes on.
"""

# No `from __future__ import annotations`: torch compares the annotations of hooks with types.

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from pycoll.errors import InvalidArgumentError
from pycoll.gradients.layout import ITEM_BYTES_OF, Entry
from pycoll.gradients.methods import method_of
from pycoll.gradients.policies import Policy
from pycoll.gradients.scheduler import Scheduler
from pycoll.torch.c10d.process_group import PycollProcessGroup
from pycoll.torch.optimizers.policy_gradients import allocate


class _Bucket(NamedTuple):
    future: torch.futures.Future[torch.Tensor]
    buffer: torch.Tensor
    pairs: list[tuple[int, torch.Tensor]]


class MethodState:
    """The state of ``method_hook``: how the gradients of one model become messages.

    Arguments:
        ``model``: the DistributedDataParallel module, in host memory.
        ``policy``: a policy or a method by name ("WFBP-PS"), or a ``pycoll.optim.Policy``.
        ``architecture``: "a2a", "ps", "auto" or None; see ``pycoll.optim.Scheduler``.
        ``comm``: a communicator of the ranks of the model's process group, in their order; the
            hook uses a duplicate of it. Pass ``pycoll.world()`` of a job with servers to use these.
            By default that of the process group, whose backend must be "pycoll".

    Errors: InvalidArgumentError for a model that is not a DistributedDataParallel or not in host
    memory, and for an unknown policy or architecture. The same for a process group of another
    backend without ``comm``, and for a ``comm`` of other ranks. A backward pass raises the errors
    of ``comm``, before any gradient is replaced.

    Cost: the constructor is collective. Every step copies each gradient twice. The messages are
    those of a ``pycoll.optim.Scheduler``.

    >>> ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    >>> state = method_hooks.MethodState(ddp, policy="fixed")
    >>> ddp.register_comm_hook(state, method_hooks.method_hook)
    >>> ddp(torch.ones(1, 2)).sum().backward()
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        policy: str | Policy = "auto",
        *,
        architecture: str | None = None,
        comm: Any = None,
    ) -> None:
        if not isinstance(model, DistributedDataParallel):
            raise InvalidArgumentError(
                f"model is a {type(model).__name__}: expected a DistributedDataParallel"
            )
        method_of(policy, architecture)
        left_out = set(model.parameters_to_ignore)
        named = [
            (name, parameter)
            for name, parameter in model.module.named_parameters()
            if parameter.requires_grad and name not in left_out
        ]
        # The backward pass usually begins with the parameters that were created last.
        named.reverse()
        self._numbers = {parameter: number for number, (_, parameter) in enumerate(named)}
        self._comm = _communicator(model, comm).dup()
        self._scheduler = Scheduler(
            self._comm,
            [_entry(name, parameter) for name, parameter in named],
            policy=policy,
            architecture=architecture,
            op="avg",
            allocate=allocate,
        )
        self._views: list[torch.Tensor] = []
        #: The buckets of the step under way: a future, its result, and the gradients in that, each
        #: with its number.
        self._buckets: list[_Bucket] = []

    def explain(self) -> str:
        """Describe the messages of a step; see ``Scheduler.explain``."""
        return self._scheduler.explain()

    def close(self) -> None:
        """Release the duplicate of the communicator. The hook must not be called any more."""
        self._comm.close()

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Take the gradients of a bucket, and send the messages that are complete."""
        if not self._buckets:
            # End a step that was given up.
            self._scheduler.wait()
            self._views = self._scheduler.begin()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        numbers = [self._numbers[parameter] for parameter in bucket.parameters()]
        pairs = list(zip(numbers, bucket.gradients(), strict=True))
        self._buckets.append(_Bucket(future, bucket.buffer(), pairs))
        for number, gradient in pairs:
            self._views[number].copy_(gradient)
            self._scheduler.ready(number)
        if bucket.is_last():
            buckets, self._buckets = self._buckets, []
            self._scheduler.wait()
            for one in buckets:
                for number, gradient in one.pairs:
                    gradient.copy_(self._views[number])
                one.future.set_result(one.buffer)
        return future


def method_hook(state: MethodState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the gradients of DistributedDataParallel by the method of ``state``.

    All methods give the bits of ``all_reduce("avg", deterministic=True)``.

    Arguments: ``state``, a ``MethodState``; ``bucket``, which torch passes.

    Result: a future of the buffer of the bucket, with the averages.

    Errors: those of ``MethodState``. Cost: that of ``MethodState``.

    >>> ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    >>> state = method_hooks.MethodState(ddp, policy="WFBP-PS")
    >>> ddp.register_comm_hook(state, method_hooks.method_hook)
    >>> ddp(torch.ones(1, 2)).sum().backward()
    """
    return state.reduce(bucket)


def _communicator(model: DistributedDataParallel, given: Any) -> Any:
    """The communicator of the ranks of the model."""
    group = model.process_group
    if given is None:
        backend = group._get_backend(torch.device("cpu"))
        if not isinstance(backend, PycollProcessGroup):
            raise InvalidArgumentError(
                f"the process group of the model has the backend {dist.get_backend(group)!r} for "
                'tensors in host memory: use init_process_group("pycoll"), or pass comm='
            )
        return backend.communicator
    if (given.rank, given.size) != (group.rank(), group.size()):
        raise InvalidArgumentError(
            f"comm has rank {given.rank} of {given.size}, and the process group of the model has "
            f"rank {group.rank()} of {group.size()}: pass a communicator of the same ranks"
        )
    return given


def _entry(name: str, parameter: torch.Tensor) -> Entry:
    if parameter.device.type != "cpu":
        raise InvalidArgumentError(
            f"{name!r} is on {parameter.device}: with a method, parameters have to be in host "
            "memory"
        )
    kind = str(parameter.dtype).removeprefix("torch.")
    if kind not in ITEM_BYTES_OF:
        raise InvalidArgumentError(
            f"{name!r} has dtype {kind}: expected one of {', '.join(ITEM_BYTES_OF)}"
        )
    return Entry(name, tuple(parameter.shape), kind)
