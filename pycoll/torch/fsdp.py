"""Codecs in FSDP2: the gradients and parameters of a sharded model travel as codes.

FSDP2 lets a module replace its two collectives. ``compress`` does so on every module that
``fully_shard`` has been called on:

    backward    reduce_scatter of gradients    each rank encodes what it sends, and folds its shard
    forward     all_gather of parameters       each rank encodes its shard once

The all_reduce between replicas of a hybrid mesh stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pycoll.compress import Codec, Feedback
from pycoll.errors import InvalidArgumentError
from pycoll.torch.c10d.group_work import Pending, pending, translate_error
from pycoll.torch.c10d.shapes import ends_for, word_of
from pycoll.torch.hooks import backend_of

#: The version of the form in checkpoints.
FORM = 1


class ShardedCodecs:
    """The codecs of a sharded model, as ``compress`` returns them.

    ``feedbacks`` has the ``Feedback`` of each module by its name; it is empty without a codec of
    gradients or without feedback.

    Errors: those of its methods. Cost: none in itself.

    >>> model = torch.distributed.fsdp.fully_shard(torch.nn.Linear(2, 1))
    >>> fsdp.compress(model, parameters=pycoll.compress.BF16()).feedbacks
    {}
    """

    def __init__(self) -> None:
        self.feedbacks: dict[str, Feedback] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the residuals of this rank, for a checkpoint of it."""
        saved = {name: one.state_dict() for name, one in self.feedbacks.items()}
        return {"form": FORM, "feedbacks": saved}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a ``state_dict`` of a model with the same modules.

        Errors: InvalidArgumentError for another form or other modules; then nothing changes.
        """
        if not isinstance(state, Mapping) or state.get("form") != FORM:
            raise InvalidArgumentError(
                f"the saved state is {type(state).__name__} without form {FORM}: expected what "
                "state_dict() of these codecs returns"
            )
        saved = state["feedbacks"]
        if saved.keys() != self.feedbacks.keys():
            name = min(saved.keys() ^ self.feedbacks.keys())
            where = "the saved state" if name in saved else "the model"
            raise InvalidArgumentError(
                f"only {where} has residuals of module {name!r}: expected a state of a model with "
                "the same modules and feedback"
            )
        for name, one in saved.items():
            self.feedbacks[name].load_state_dict(one)


def compress(
    model: torch.nn.Module,
    gradients: Codec | None = None,
    parameters: Codec | None = None,
    *,
    feedback: bool = True,
) -> ShardedCodecs:
    """Send the gradients and the parameters of an FSDP2 model as codes.

    Arguments:
        ``model``: a module on which, or on parts of which, ``fully_shard`` has been called, in host
            memory, on a process group of the backend "pycoll".
        ``gradients``: the codec of the reduce_scatter, one that keeps every element (``BF16``,
            ``FP8``, ``Block``, ``Sign``); None leaves it as it is.
        ``parameters``: the codec of the all_gather. All ranks compute with the decoded parameters;
            each rank's shard, which the optimizer changes, keeps its full precision.
        ``feedback``: whether each rank keeps what the gradients' codec leaves out, and adds it in
            the next step.

    Result: a ``ShardedCodecs`` with the residuals. A later call with ``gradients`` or
    ``parameters`` replaces that codec of an earlier call.

    Errors: InvalidArgumentError for a model without FSDP2 modules, for other codecs, and for a
    torch in which modules cannot replace their collectives. A pass raises the errors of
    ``reduce_scatter`` and ``all_gather``: parameters of several dtypes in one module travel as
    bytes, which no codec takes; with feedback every backward pass needs the same gradients, for
    example by ``model.set_reduce_scatter_unused_params(True)``.

    Cost: no message here. With feedback, memory for one copy of the unsharded gradients.

    Source: Wang et al. 2023 (arXiv 2306.10209) for both directions.

    >>> model = torch.distributed.fsdp.fully_shard(torch.nn.Linear(2, 1))
    >>> codecs = fsdp.compress(model, gradients=pycoll.compress.Block("int8"))
    >>> list(codecs.feedbacks)  # the names of modules; "" is the model itself
    ['']
    """
    for word, codec in (("gradients", gradients), ("parameters", parameters)):
        _check(word, codec)
    if not isinstance(feedback, bool):
        raise InvalidArgumentError(f"feedback is {feedback!r}: expected a bool")
    modules = {name: one for name, one in model.named_modules() if _is_sharded(one)}
    if not modules:
        raise InvalidArgumentError(
            f"model is a {type(model).__name__} without FSDP2 modules: call "
            "torch.distributed.fsdp.fully_shard on it first"
        )
    made = ShardedCodecs()
    for name, module in modules.items():
        if gradients is not None:
            memory = Feedback() if feedback else None
            if memory is not None:
                made.feedbacks[name] = memory
            module.set_custom_reduce_scatter(CodedReduceScatter(gradients, memory))
        if parameters is not None:
            module.set_custom_all_gather(CodedAllGather(parameters))
    return made


class _Allocating:
    """How FSDP2 gets the memory of its messages: as without codecs."""

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class CodedReduceScatter(_Allocating):
    """The reduce_scatter of gradients, as torch's interface ``ReduceScatter`` wants it."""

    def __init__(self, codec: Codec, feedback: Feedback | None) -> None:
        self._codec, self._feedback = codec, feedback

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Pending | None:
        """Reduce the inputs of all ranks; the output is this rank's share."""
        backend = backend_of(group, input_tensor.device)
        ends = ends_for(op, input_tensor, output_tensor, None)
        try:
            work = backend.communicator.reduce_scatter(
                ends.source,
                word_of(op),
                out=ends.target,
                compress=self._codec,
                feedback=self._feedback,
                async_op=True,
            )
        except Exception as error:
            raise translate_error(error) from error
        under_way = pending([work], [output_tensor], backend._watcher, ends.back)
        return _wait_unless_async(under_way, async_op)


class CodedAllGather(_Allocating):
    """The all_gather of parameters, as torch's interface ``AllGather`` wants it."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        async_op: bool = False,
    ) -> Pending | None:
        """Join the inputs of all ranks, of equal lengths."""
        backend = backend_of(group, input_tensor.device)
        try:
            work = backend.communicator.all_gather(
                input_tensor,
                lengths=[input_tensor.numel()] * group.size(),
                out=output_tensor,
                compress=self._codec,
                async_op=True,
            )
        except Exception as error:
            raise translate_error(error) from error
        return _wait_unless_async(pending([work], [output_tensor], backend._watcher), async_op)


def _wait_unless_async(work: Pending, async_op: bool) -> Pending | None:
    if async_op:
        return work
    work.wait()
    return None


def _check(word: str, codec: Any) -> None:
    if codec is not None and (not isinstance(codec, Codec) or codec.native() is None):
        raise InvalidArgumentError(
            f"{word} is {codec!r}: expected BF16, FP8, Block or Sign of pycoll.compress, or None"
        )


def _is_sharded(module: torch.nn.Module) -> bool:
    """Return whether ``fully_shard`` was called on a module.

    Raises InvalidArgumentError where this version of torch cannot replace the collectives.
    """
    try:
        from torch.distributed.fsdp import FSDPModule
    except ImportError:
        return False
    if not isinstance(module, FSDPModule):
        return False
    if not hasattr(module, "set_custom_reduce_scatter"):
        raise InvalidArgumentError(
            f"torch is {torch.__version__}, whose FSDP modules cannot replace their collectives: "
            "expected a torch with FSDPModule.set_custom_reduce_scatter"
        )
    return True
