"""Convert tensors of torch.distributed to flat views for pycoll, and results back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

_ReduceOp = dist.ReduceOp
_WORDS = {
    _ReduceOp.SUM: "sum",
    _ReduceOp.AVG: "avg",
    _ReduceOp.PRODUCT: "prod",
    _ReduceOp.MIN: "min",
    _ReduceOp.MAX: "max",
    _ReduceOp.BAND: "band",
    _ReduceOp.BOR: "bor",
    _ReduceOp.BXOR: "bxor",
}
_PREMUL_SUM = _ReduceOp.PREMUL_SUM
_HALVES = {torch.float16, torch.bfloat16}

#: Dtypes that pycoll does not support and torch cannot add either.
_BYTES_ALONE = {torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu}

Tensors = Sequence[torch.Tensor]
Finish = Callable[[], None]


def word_of(op: dist.ReduceOp) -> str:
    """The name of a reduction in pycoll."""
    for known, word in _WORDS.items():
        if op == known:
            return word
    if op == _PREMUL_SUM:
        return "sum"
    raise ValueError(f"op is {op}: the backend pycoll does not support it")


class Ends(NamedTuple):
    """The source and target of a reduction, and a function that copies the target to the caller's.

    ``back`` is None where no copy is needed.
    """

    source: torch.Tensor
    target: torch.Tensor
    back: Finish | None


def ends_for(
    op: dist.ReduceOp, source: torch.Tensor, target: torch.Tensor, back: Finish | None
) -> Ends:
    """The ends of a reduction: the tensors themselves, or for PREMUL_SUM a multiple of the source.

    Multiples of 16-bit floats are float32 and are rounded after the sum, so that neither a small
    product nor a large partial sum is lost.
    """
    if op != _PREMUL_SUM:
        return Ends(source, target, back)
    if source.dtype not in _HALVES:
        return Ends((source * op.factor).to(source.dtype), target, back)
    wide = source.float() * op.factor
    made = wide if source is target else wide.new_empty(target.shape)
    return Ends(wide, made, together(lambda: _copy(target, made), back))


def only(tensors: Tensors, name: str) -> torch.Tensor:
    """The one tensor of a list. ValueError unless there is exactly one."""
    if len(tensors) != 1:
        raise ValueError(f"{name} has {len(tensors)} tensors: expected 1")
    return tensors[0]


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, detached. ValueError for a layout or dtype that pycoll cannot move.

    The error names an alternative.
    """
    if tensor.layout != torch.strided:
        raise ValueError(
            f"a tensor of layout {tensor.layout} cannot be moved: pass its to_dense(), or its "
            "parts one by one; all_reduce alone takes sparse ones, of layout torch.sparse_coo"
        )
    if tensor.is_quantized:
        raise ValueError(
            f"a tensor of type {tensor.dtype} cannot be moved: pass its int_repr(), and scale and "
            "zero point apart"
        )
    if tensor.dtype in _BYTES_ALONE:
        raise ValueError(
            f"a tensor of type {tensor.dtype} cannot be moved: pass its view(torch.uint8), of "
            "which nothing can be reduced"
        )
    return tensor.detach()


def solid(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, detached and contiguous; its own memory where possible."""
    return plain(tensor).contiguous()


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """``solid`` with one axis."""
    return solid(tensor).view(-1)


def one_axis(piece: torch.Tensor) -> torch.Tensor:
    """Return a view of ``piece`` with one axis; ``piece`` must be contiguous.

    pycoll compares the shapes of the ranks, torch.distributed only the numbers of elements.
    """
    return piece if piece.dim() == 1 else piece.view(-1)


def apart(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """``source``, copied if it may share memory with ``target`` (a share of the whole may)."""
    same = source.untyped_storage().data_ptr() == target.untyped_storage().data_ptr()
    return source.clone() if same and source.numel() else source


def writable(tensor: torch.Tensor) -> tuple[torch.Tensor, Finish | None]:
    """Contiguous memory for the result, and a function that copies it to the tensor.

    The function is None where the memory is that of the tensor.
    """
    target = plain(tensor)
    if target.is_contiguous():
        return target, None
    piece = target.contiguous()
    return piece, lambda: _copy(target, piece)


def _copy(target: torch.Tensor, piece: torch.Tensor) -> None:
    target.copy_(piece)
    used_now(piece)


def used_now(piece: torch.Tensor) -> None:
    """Keep device memory from being reused before the current stream has read it."""
    if piece.is_cuda:
        piece.record_stream(torch.cuda.current_stream(piece.device))


def dealt(piece: torch.Tensor, outputs: Tensors) -> Finish:
    """A function that copies a flat result to the outputs, one after the other."""

    def finish() -> None:
        lengths = [one.numel() for one in outputs]
        for part, output in zip(piece.split(lengths), outputs, strict=True):
            output.detach().copy_(part.view(output.shape))
        used_now(piece)

    return finish


def same_type(tensors: Tensors, like: torch.Tensor, name: str) -> None:
    """Raise ValueError unless all tensors have the dtype of ``like`` and pycoll can move it."""
    plain(like)
    for number, one in enumerate(tensors):
        if one.dtype != like.dtype:
            raise ValueError(f"{name}[{number}] has type {one.dtype}: expected {like.dtype}")


def together(*finishes: Finish | None) -> Finish | None:
    """One function that calls all of these; None if there are none."""
    wanted = [one for one in finishes if one is not None]
    if len(wanted) < 2:
        return wanted[0] if wanted else None

    def finish() -> None:
        for one in wanted:
            one()

    return finish
