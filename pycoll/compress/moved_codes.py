"""Codecs without kernels in broadcast, all_gather and reduce_scatter: whole blocks are encoded.

    broadcast         the root encodes its array once; all ranks decode
    all_gather        each rank encodes its rows once; all ranks decode all rows
    reduce_scatter    each rank encodes the rows of each other rank, which folds them in rank order

Values are float32 in between, or float64 where the arrays are. A rank whose codec raises reports
that to the others, so all ranks raise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pycoll import _core
from pycoll.arrays.device_view import DeviceView
from pycoll.arrays.registry import input_of, output_view
from pycoll.arrays.rows import check_rows, elements, need_axis, split_rows, with_rows
from pycoll.compress.codec import Array, remainder
from pycoll.compress.coded_exchange import (
    NO_CODES,
    ComposedWork,
    Encoded,
    agree,
    codes_of,
    from_owners,
    name_errors,
    to_owners,
)
from pycoll.compress.feedback import Feedback
from pycoll.errors import InvalidArgumentError
from pycoll.types import ITEM_BYTES, DType, ReduceOp, numpy_dtype, wrong_op, wrong_type

if TYPE_CHECKING:
    from pycoll.compress.composed import ComposedCodec

#: Types of arrays; those of 16 bits are widened, which is exact, and results are rounded once.
_FLOATS = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64)


class Moved:
    """One call: its values, its residual, and the memory of its result.

    ``words``: the arguments of the call besides the array; see ``run``. Raises
    InvalidArgumentError for what the codec does not take.
    """

    def __init__(self, codec: ComposedCodec, comm: Any, name: str, x: Any, words: Any) -> None:
        self.comm, self.name = comm, name
        self._x, self._out = x, words["out"]
        self._framework, self._view = input_of(x, self._out)
        self.feedback: Feedback | None = words["feedback"]
        self._check(codec, words)
        self.codec = codec if self.feedback is None else codec.warmed(self.feedback)
        self.step = 0 if self.feedback is None else self.feedback.step
        self.shape = tuple(self._view.shape)
        self.word = DType(self._view.dtype).word
        self.item_bytes = ITEM_BYTES[self._view.dtype]
        given = np.empty(self.shape, numpy_dtype(self._view.dtype))
        _core.pack([self._view], _core.view(given))
        is_wide = self._view.dtype == DType.FLOAT64
        self.kind = np.dtype(np.float64 if is_wide else np.float32)
        self.values: Array = np.asarray(given, self.kind)
        if self.feedback is not None and self.feedback.momentum:
            # A copy, since masking clears entries of the velocity before the values are folded.
            self.values = self.feedback.corrected(self.values).copy()

    def _check(self, codec: ComposedCodec, words: Any) -> None:
        for word in ("algorithm", "stream"):
            if words[word] is not None:
                raise InvalidArgumentError(
                    f"{word} is {words[word]!r} and compress is {codec!r}, which runs several "
                    f"collectives in host memory: leave {word} out"
                )
        if isinstance(self._view, DeviceView):
            raise InvalidArgumentError(
                f"x is on {self._view.device}: {codec!r} takes arrays in host memory in "
                f"{self.name}. Take BF16, FP8, Block or Sign, copy the array to the host, or leave "
                "compress out"
            )
        taken = _FLOATS if codec.wide else _FLOATS[:3]
        if self._view.dtype not in taken:
            raise wrong_type("x", self._view.dtype, taken)
        if self.feedback is not None and not isinstance(self.feedback, Feedback):
            raise InvalidArgumentError(
                f"feedback is {self.feedback!r}: expected a pycoll.compress.Feedback, or None"
            )
        codec.check_feedback(self.feedback)
        if self.feedback is None:
            return
        if self.feedback.momentum and self.name != "reduce_scatter":
            raise InvalidArgumentError(
                f"feedback has momentum {self.feedback.momentum:g}, which sums up gradients, and "
                f"{self.name} adds nothing up: pass a Feedback without momentum"
            )
        if self.feedback.warms:
            codec.check_warm_up()
        self.feedback.check_free()

    def encode(self, rows: slice, left_out: list[tuple[slice, Array]]) -> Array:
        """Return the codes of some rows, and append their residual to ``left_out``."""
        wanted = self.values[rows] if self.shape else self.values
        if self.feedback is None:
            return self.codec.encode_block(wanted, self.step)
        held = self.feedback.residuals.memory(self.shape, 0, self.kind)
        wanted = wanted + (held[rows] if self.shape else held)
        codes = self.codec.encode_block(wanted, self.step)
        sent = self.decode(codes, wanted.size).reshape(wanted.shape)
        rest = remainder(wanted, sent)
        left_out.append((rows, rest))
        places = self.codec.places_of(codes, wanted.size, self.kind)
        if places is not None:
            told = np.flatnonzero(~np.isfinite(wanted) & (rest == 0))
            self._mask(rows, np.union1d(places, told))
        return codes

    def decode(self, codes: Array, count: int) -> Array:
        """Return the values of some codes, on one axis."""
        return self.codec.decode_block(codes, count, self.kind)

    def mask_own(self, rows: slice) -> None:
        """Note that these rows are sent whole, where the codec sends some places of the others."""
        if self.codec.sends_places:
            self._mask(rows, np.arange(self.values[rows].size))

    def _mask(self, rows: slice, places: Array | None) -> None:
        if self.feedback is not None and places is not None:
            begin = self.values[: rows.start or 0].size if self.shape else 0
            self.feedback.velocities.mask(np.asarray(places, np.int64) + begin)

    def keep(self, left_out: list[tuple[slice, Array]]) -> None:
        """Store the residuals of ``left_out`` in the Feedback, and count the call."""
        if self.feedback is None:
            return
        for rows, rest in left_out:
            held = self.feedback.residuals.memory(self.shape, 0, self.kind)
            held[rows if self.shape else ...] = rest
        self.feedback.ended()

    def target(self, shape: tuple[int, ...], own_place: int | None) -> Callable[[Array], Any]:
        """Return a function that writes the values of a result of this shape, and returns it."""
        dtype = self._view.dtype
        memory = None
        if self._out is not None:
            alike = shape == self.shape and own_place is None
            to = output_view(self._out, dtype, shape, self._view, alike, own_place)
        else:
            memory = self._framework.empty(self._x, shape, dtype)
            to = self._framework.result(memory)

        def finish(values: Array) -> Any:
            with np.errstate(over="ignore"):
                found = np.asarray(values.reshape(shape), numpy_dtype(dtype))
            _core.unpack(_core.view(found), [to])
            return self._out if memory is None else self._framework.finish(self._x, memory)

        return finish

    def end(self, last: Any, finish: Callable[[Any], Any], async_op: bool) -> Any:
        """Return the result, or the Work of it, which waits for the last exchange."""

        def start(finish: Callable[[Any], Any]) -> ComposedWork:
            return ComposedWork(last, finish, self.name)

        if self.feedback is None:
            work = start(finish)
        else:
            work = self.feedback.serve(lambda: self.comm.failure, finish, start)
        return work if async_op else work.wait()


def broadcast(codec: ComposedCodec, comm: Any, x: Any, root: int, **words: Any) -> Any:
    """Run ``comm.broadcast`` with a codec."""
    with name_errors("broadcast"):
        call = Moved(codec, comm, "broadcast", x, words)
        finish = call.target(call.shape, None)
        left_out: list[tuple[slice, Array]] = []
        is_root = comm.rank == root
        codes = call.encode(slice(None), left_out) if is_root else NO_CODES
        facts = [call.codec, call.word, list(call.shape), f"root {root}"]
        nbytes = int(agree(comm, call.name, facts, [len(codes)])[root][0])
        sent = codes if is_root else np.empty(nbytes, np.uint8)
        last = comm.broadcast(sent, root, async_op=True)
        call.keep(left_out)

    def decode_all(received: Array) -> Any:
        with codes_of(root):
            return finish(call.decode(received, call.values.size))

    return call.end(last, decode_all, words["async_op"])


def all_gather(
    codec: ComposedCodec, comm: Any, x: Any, lengths: Sequence[int] | None, **words: Any
) -> Any:
    """Run ``comm.all_gather`` with a codec."""
    with name_errors("all_gather"):
        call = Moved(codec, comm, "all_gather", x, words)
        mine = call.shape[0] if call.shape else 1
        given = None if lengths is None else check_rows(lengths, "lengths", comm.size)
        if given is not None and given[comm.rank] != mine:
            raise InvalidArgumentError(
                f"lengths[{comm.rank}] is {given[comm.rank]}, but x of this rank has {mine} rows"
            )
        left_out: list[tuple[slice, Array]] = []
        codes = call.encode(slice(None), left_out)
        facts = [call.codec, call.word, f"rows of {list(call.shape[1:])}", f"lengths {given}"]
        rows = agree(comm, call.name, facts, [mine])[:, 0].tolist()
        counts = elements(rows, call.shape or (1,))
        finishes: list[Callable[[Array], Any]] = []

        def make() -> tuple[Array, int]:
            place = sum(counts[: comm.rank]) * call.item_bytes
            finishes.append(call.target(with_rows(call.shape or (1,), sum(rows)), place))
            return codes, 0

        replies = from_owners(comm, Encoded(make), call.name)
        call.keep(left_out)

    def decode_all(received: Array) -> Any:
        parts = []
        for rank, (sent, count) in enumerate(zip(replies.codes(received), counts, strict=True)):
            with codes_of(rank):
                parts.append(call.decode(sent, count))
        return finishes[0](np.concatenate(parts))

    return call.end(replies.work, decode_all, words["async_op"])


def reduce_scatter(
    codec: ComposedCodec, comm: Any, x: Any, op: Any, splits: Sequence[int] | None, **words: Any
) -> Any:
    """Run ``comm.reduce_scatter`` with a codec. The rows of this rank are not encoded."""
    with name_errors("reduce_scatter"):
        op = ReduceOp(op).word if isinstance(op, ReduceOp) else op
        if op not in ("sum", "avg"):
            raise wrong_op(repr(op))
        call = Moved(codec, comm, "reduce_scatter", x, words)
        need_axis(call.shape, "reduce_scatter")
        rows = split_rows(splits, call.shape[0], comm.size)
        ends = np.cumsum([0, *rows]).tolist()
        parts = [slice(ends[rank], ends[rank + 1]) for rank in range(comm.size)]
        finish = call.target(with_rows(call.shape, rows[comm.rank]), None)
        left_out: list[tuple[slice, Array]] = []
        codes = [
            NO_CODES if rank == comm.rank else call.encode(part, left_out)
            for rank, part in enumerate(parts)
        ]
        call.mask_own(parts[comm.rank])
        facts = [call.codec, call.word, list(call.shape), f"splits {list(rows)}", op]
        arrived = to_owners(comm, call.name, facts, Encoded(lambda: (codes, 0)))
        found: list[Array] = []

        def fold() -> tuple[Array, int]:
            found.append(_fold(call, arrived, parts[comm.rank], op == "avg"))
            return NO_CODES, 0

        replies = from_owners(comm, Encoded(fold), call.name)
        call.keep(left_out)
    return call.end(replies.work, lambda _: finish(found[0]), words["async_op"])


def _fold(call: Moved, arrived: list[Array], own: slice, is_mean: bool) -> Array:
    """Return the sum or mean of this rank's rows, in rank order."""
    total: Array = None
    mine = call.values[own].reshape(-1)
    for rank, codes in enumerate(arrived):
        with codes_of(rank):
            one = mine if rank == call.comm.rank else call.decode(codes, mine.size)
        total = one.copy() if total is None else total + one
    return total / call.kind.type(len(arrived)) if is_mean else total
