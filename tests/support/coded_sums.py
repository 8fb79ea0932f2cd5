"""What collectives with a dense codec must give: NumPy, by the codecs' oracle."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import codec_oracle
import numpy as np

Array = Any
_RANK_STEP = 0xD6E8FEB86659FD93
_64_BITS = (1 << 64) - 1


def cuts(count: int, parts: int) -> list[slice]:
    """The parts of an array as plans cut it: longer ones first."""
    ends = [0]
    for part in range(parts):
        ends.append(ends[-1] + count // parts + (part < count % parts))
    return [slice(begin, end) for begin, end in pairwise(ends)]


def rounded(codec: Any, values: Array, rank: int, chunk: int) -> tuple[Array, Array]:
    """What the codes of a chunk decode to if ``rank`` encodes it, and what they leave out."""
    kind, block, by_chance, seed = codec.native()
    drawn = seed ^ rank * _RANK_STEP & _64_BITS if by_chance else None
    first = chunk << 40 & _64_BITS
    _, sent, rests = codec_oracle.encode(kind, np.ascontiguousarray(values), block, drawn, first)
    return sent, rests


def all_reduce(
    codec: Any, xs: Sequence[Array], average: bool = False, residuals: Sequence[Array] | None = None
) -> Array:
    """The result of two-shot; changes the residuals, if there are any."""
    out = np.empty(xs[0].size, np.float32)
    flat = [x.reshape(-1) for x in xs]
    with np.errstate(all="ignore"):
        for owner, part in enumerate(cuts(out.size, len(xs))):
            total = None
            for rank, x in enumerate(flat):
                value = x[part]
                if rank != owner:
                    value = _sent(codec, value, rank, owner, part, residuals)
                total = value if total is None else total + value
            if average and len(xs) > 1:
                total = total / np.float32(len(xs))
            out[part] = _sent(codec, total, owner, owner, part, residuals)
    return out.reshape(xs[0].shape)


def _sent(codec: Any, value: Array, rank: int, chunk: int, part: slice, residuals: Any) -> Array:
    if residuals is None:
        return rounded(codec, value, rank, chunk)[0]
    held = residuals[rank].reshape(-1)
    sent, held[part] = rounded(codec, value + held[part], rank, chunk)
    return sent


def same(found: Array, expected: Array) -> bool:
    """Whether two float32 arrays have the same bits; all NaN are alike."""
    if found.shape != expected.shape or found.dtype != np.float32:
        return False
    alike = found.reshape(-1).view(np.uint32) == expected.reshape(-1).view(np.uint32)
    return bool(np.all(alike.reshape(found.shape) | (np.isnan(found) & np.isnan(expected))))
