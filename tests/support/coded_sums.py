"""The expected results of collectives with a dense codec, in NumPy, from the oracle of codecs."""

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
    """The decoded values of a chunk that ``rank`` encodes, and their residual."""
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


def reduce_scatter(
    codec: Any,
    xs: Sequence[Array],
    rows: Sequence[int],
    average: bool = False,
    residuals: Sequence[Array] | None = None,
) -> list[Array]:
    """The result of each rank, which has so many rows; changes the residuals, if there are any."""
    width = int(np.prod(xs[0].shape[1:]))
    results = []
    with np.errstate(all="ignore"):
        for owner, (begin, end) in enumerate(pairwise(np.cumsum([0, *rows]))):
            part = slice(begin * width, end * width)
            total = None
            for rank, x in enumerate(xs):
                value = x.reshape(-1)[part]
                if rank != owner:
                    value = _sent(codec, value, rank, owner, part, residuals)
                total = value if total is None else total + value
            if average and len(xs) > 1:
                total = total / np.float32(len(xs))
            results.append(total.reshape(xs[0][begin:end].shape))
    return results


def all_reduce_between_hosts(
    codec: Any,
    xs: Sequence[Array],
    hosts: Sequence[int],
    average: bool = False,
    residuals: Sequence[Array] | None = None,
) -> Array:
    """The result of the hierarchy direct+direct: sums of hosts in full precision, then codes.

    Changes the residuals, if there are any.
    """
    members = [[r for r, host in enumerate(hosts) if host == h] for h in sorted(set(hosts))]
    shards = max(map(len, members))
    out = np.empty(xs[0].size, np.float32)
    with np.errstate(all="ignore"):
        for chunk, part in enumerate(cuts(out.size, shards * len(members))):
            shard, owner = divmod(chunk, len(members))
            total = None
            for host, ranks in enumerate(members):
                value = xs[ranks[0]][part]
                for rank in ranks[1:]:
                    value = value + xs[rank][part]
                sender = ranks[shard % len(ranks)]
                if host != owner:
                    value = _sent(codec, value, sender, chunk, part, residuals)
                total = value if total is None else total + value
            if average:
                total = total / np.float32(len(xs))
            home = members[owner][shard % len(members[owner])]
            out[part] = _sent(codec, total, home, chunk, part, residuals)
    return out


def copies(
    codec: Any, xs: Sequence[Array], senders: Sequence[int], residuals: Sequence[Array] | None
) -> Array:
    """What ranks that share their arrays, or one root, send: chunk i is that of ``senders[i]``.

    Changes the residuals, if there are any.
    """
    with np.errstate(all="ignore"):
        return np.concatenate(
            [
                _sent(codec, xs[rank], rank, chunk, slice(0, xs[rank].size), residuals)
                for chunk, rank in enumerate(senders)
            ]
        )


def _sent(codec: Any, value: Array, rank: int, chunk: int, part: slice, residuals: Any) -> Array:
    if residuals is None:
        return rounded(codec, value, rank, chunk)[0]
    held = residuals[rank].reshape(-1)
    sent, held[part] = rounded(codec, value + held[part], rank, chunk)
    return sent


def same(found: Array, expected: Array, kind: Any = np.float32) -> bool:
    """Whether two arrays of a type have the same bits; all NaN are alike."""
    if found.shape != expected.shape or not found.dtype == expected.dtype == kind:
        return False
    bits = f"u{found.dtype.itemsize}"
    alike = found.reshape(-1).view(bits) == expected.reshape(-1).view(bits)
    return bool(np.all(alike.reshape(found.shape) | (np.isnan(found) & np.isnan(expected))))


def all_reduce_of_type(
    codec: Any, xs: Sequence[Array], average: bool = False, residuals: Sequence[Array] | None = None
) -> Array:
    """The all_reduce of arrays that are not float32: float32 at the source, the type at the end.

    Residuals of 16-bit types are float32. Those of float64 also hold what the first rounding leaves
    out, and a mean of float64 is a sum that is divided in the end.
    """
    kind = xs[0].dtype
    with np.errstate(all="ignore"):
        if kind != np.float64:
            found = all_reduce(codec, [x.astype(np.float32) for x in xs], average, residuals)
            return found.astype(kind)
        wanted = xs if residuals is None else [x + r for x, r in zip(xs, residuals, strict=True)]
        sent = [one.astype(np.float32) for one in wanted]
        rests = None if residuals is None else [np.zeros_like(one) for one in sent]
        found = all_reduce(codec, sent, False, rests).astype(np.float64)
        for rank, held in enumerate(residuals or []):
            held[...] = wanted[rank] - sent[rank] + rests[rank]
        return found / len(xs) if average else found
