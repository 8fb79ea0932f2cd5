"""Tensors as torch.distributed passes them: flat views for pycoll, and the way back."""

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

#: Types that pycoll does not know, and torch cannot add up either.
_BYTES_ALONE = {torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu}

Tensors = Sequence[torch.Tensor]
Finish = Callable[[], None]


def word_of(op: dist.ReduceOp) -> str:
    """pycoll's name of a reduction."""
    for known, word in _WORDS.items():
        if op == known:
            return word
    if op == _PREMUL_SUM:
        return "sum"
    raise ValueError(f"op is {op}: the backend pycoll does not know it")


class Ends(NamedTuple):
    """What is reduced, where the result goes, and what brings it from there to the caller's."""

    source: torch.Tensor
    target: torch.Tensor
    back: Finish | None


def ends_for(
    op: dist.ReduceOp, source: torch.Tensor, target: torch.Tensor, back: Finish | None
) -> Ends:
    """The tensors, or for PREMUL_SUM a multiple: of 16 bits in float32, rounded at the end, so that
    neither a small product nor a large partial sum is lost."""
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
    """The tensor, detached. ValueError, with what goes instead, if it is no array of numbers."""
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
    """The values in one piece; the tensor's own memory where that goes."""
    return plain(tensor).contiguous()


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """As solid, along one axis."""
    return solid(tensor).view(-1)


def one_axis(piece: torch.Tensor) -> torch.Tensor:
    """The same memory along one axis: pycoll compares shapes, torch.distributed counts only.

    Requires: ``piece`` is contiguous."""
    return piece if piece.dim() == 1 else piece.view(-1)


def apart(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """``source``, copied if it may share memory with ``target``: a share within the whole."""
    same = source.untyped_storage().data_ptr() == target.untyped_storage().data_ptr()
    return source.clone() if same and source.numel() else source


def writable(tensor: torch.Tensor) -> tuple[torch.Tensor, Finish | None]:
    """Memory in one piece to write the tensor's values to, and what brings them there."""
    target = plain(tensor)
    if target.is_contiguous():
        return target, None
    piece = target.contiguous()
    return piece, lambda: _copy(target, piece)


def _copy(target: torch.Tensor, piece: torch.Tensor) -> None:
    target.copy_(piece)
    used_now(piece)


def used_now(piece: torch.Tensor) -> None:
    """Memory on a device is not to serve again before the current stream has read it."""
    if piece.is_cuda:
        piece.record_stream(torch.cuda.current_stream(piece.device))


def dealt(piece: torch.Tensor, outputs: Tensors) -> Finish:
    """What spreads a flat result over the outputs, one after the other."""

    def finish() -> None:
        lengths = [one.numel() for one in outputs]
        for part, output in zip(piece.split(lengths), outputs, strict=True):
            output.detach().copy_(part.view(output.shape))
        used_now(piece)

    return finish


def same_type(tensors: Tensors, like: torch.Tensor, name: str) -> None:
    """ValueError unless all have the type of ``like``, and that is one that can be moved."""
    plain(like)
    for number, one in enumerate(tensors):
        if one.dtype != like.dtype:
            raise ValueError(f"{name}[{number}] has type {one.dtype}: expected {like.dtype}")


def together(*finishes: Finish | None) -> Finish | None:
    """One function for all; None if there is none."""
    wanted = [one for one in finishes if one is not None]
    if len(wanted) < 2:
        return wanted[0] if wanted else None

    def finish() -> None:
        for one in wanted:
            one()

    return finish
