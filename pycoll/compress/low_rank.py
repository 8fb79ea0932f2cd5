"""PowerSGD: holds a matrix as the product of two thin ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from pycoll import _core
from pycoll.compress.codec import Array, as_bytes, as_float32, wrong_length
from pycoll.compress.coded_exchange import agree_first
from pycoll.compress.composed import ComposedCodec, Started
from pycoll.compress.dense import check_seed
from pycoll.compress.operands import Operands
from pycoll.compress.sparse import draws_from
from pycoll.errors import InvalidArgumentError
from pycoll.types import ReduceOp, real, whole

#: A column that keeps less than this share of its length is noise of float32, and becomes 0.
_LEAST_SHARE = 2.0**-17
#: The numbers in front of codes: rows, columns, rank.
_HEAD = 3
_SEED_MASK = 2**64 - 1


@dataclass(frozen=True)
class PowerSGD(ComposedCodec):
    """Send a matrix m x n as P Q^T, where P has m rows, Q has n rows, and both have few columns.

    An array of several axes counts as a matrix whose rows are the first axis. An array of one axis,
    and one that P and Q would not make smaller, is sent whole. It needs feedback, which keeps Q
    from call to call, so that P Q^T comes near the best product of this rank.

    A matrix with a NaN or an infinity on any rank becomes NaN on all ranks. It leaves no residual
    there, and the next call begins with a new Q.

    Arguments: ``rank``, the columns of P and Q, at least 1; ``seed``, of the first Q, from 0 to
    2**64 - 1; ``saving``, at least 1: a matrix is sent whole unless P and Q have so many times
    fewer elements.

    Errors: InvalidArgumentError for other arguments.

    Cost: 4 rank (m + n) bytes in two messages, the second of which waits for the first, and about 8
    rank m n floating-point operations.

    Source: Vogels, Karimireddy and Jaggi, "PowerSGD", 2019 (arXiv 1905.13727).

    >>> codec = pycoll.compress.PowerSGD(rank=1)
    >>> codec.encode(np.ones((64, 64), np.float32)).nbytes
    524
    """

    rank: int
    seed: int = 0
    saving: float = 1.0

    def __post_init__(self) -> None:
        expected = "a number of at least 1"
        saving = real("saving", self.saving, expected)
        if saving < 1:
            raise InvalidArgumentError(f"saving is {self.saving!r}: expected {expected}")
        object.__setattr__(self, "saving", saving)
        object.__setattr__(self, "rank", whole("rank", self.rank, 1))
        object.__setattr__(self, "seed", check_seed(self.seed))

    def encode(self, x: Any) -> Array:
        """Return rows, columns, rank, P and Q of an array, as one axis of uint8."""
        return self.encode_block(as_float32(x).reshape(np.shape(x)), 0)

    def encode_block(self, x: Any, step: int) -> Array:
        """Do the same for call number ``step``, which has a first Q of its own.

        What P leaves out is orthogonal to this Q. With the same Q in every call P would not change,
        and residuals would never be sent.
        """
        shape = np.shape(x)
        values = np.ascontiguousarray(x).reshape(-1)
        if not self.shrinks(shape):
            head = np.array([1, len(values), 0], np.uint32)
            return np.concatenate([head.view(np.uint8), values.view(np.uint8)])
        matrix = values.reshape(shape[0], -1)
        p = orthonormal(matrix @ self.first_q(matrix.shape[1], step).astype(values.dtype))
        q = np.ascontiguousarray(matrix.T @ p)
        head = np.array([*matrix.shape, self.rank], np.uint32)
        return np.concatenate([one.reshape(-1).view(np.uint8) for one in (head, p, q)])

    def decode(self, codes: Any, count: int) -> Array:
        """Return the ``count`` float32 values of some codes, on one axis."""
        return self.decode_block(codes, whole("count", count, 0), np.dtype(np.float32))

    def decode_block(self, codes: Any, count: int, kind: np.dtype[Any]) -> Array:
        """Return the ``count`` values of a block of this type, on one axis."""
        given = as_bytes(codes)
        if len(given) < 4 * _HEAD:
            raise wrong_length(self, len(given), count, f"at least {4 * _HEAD}")
        rows, columns, rank = given[: 4 * _HEAD].view(np.uint32).tolist()
        numbers = rank * (rows + columns) if rank else columns
        shape_fits = rows * columns == count and (rank == self.rank or (rank == 0 and rows == 1))
        if not shape_fits or len(given) != 4 * _HEAD + kind.itemsize * numbers:
            raise wrong_length(self, len(given), count, "those of encode")
        floats = np.frombuffer(given[4 * _HEAD :].tobytes(), kind)
        if not rank:
            return floats.copy()
        p, q = floats[: rows * rank].reshape(rows, rank), floats[rows * rank :]
        return product(p, q.reshape(columns, rank)).reshape(-1)

    def start_all_reduce(
        self, comm: Any, given: Operands, name: str, deterministic: bool | None
    ) -> Started:
        """Run all exchanges but the last, which it starts.

        The first message has P of all matrices and the arrays that are sent whole, the second one
        all Q. Residuals are a rank's matrix minus the product of P and its own Q.
        """
        given.memory.correct(given.own)
        call = _Call(self, given)
        step = 0 if given.feedback is None else given.feedback.step
        agree_first(comm, name, [self, *given.facts(), f"step {step}"])
        word = "avg" if given.mean else "sum"
        call.take_p(comm.all_reduce(call.first_message(), word, deterministic=deterministic))
        work = comm.all_reduce(
            call.second_message(), word, async_op=True, deterministic=deterministic
        )
        call.keep()
        return work, call.results

    def shrinks(self, shape: tuple[int, ...]) -> bool:
        """Return whether P and Q have few enough elements for an array of this shape."""
        if len(shape) < 2 or 0 in shape:
            return False
        rows, columns = shape[0], math.prod(shape[1:])
        return self.rank * (rows + columns) * self.saving < rows * columns

    def first_q(self, rows: int, step: int = 0) -> Array:
        """Return the first Q: numbers from -1 to 1 that follow from seed and step alone."""
        draws = draws_from(self.seed + step & _SEED_MASK, rows * self.rank) >> np.uint64(40)
        numbers = draws.astype(np.float32) * np.float32(2.0**-23) - np.float32(1)
        return numbers.reshape(rows, self.rank)


class _Call:
    """The matrices of one all_reduce, on their way through its two messages."""

    def __init__(self, codec: PowerSGD, given: Operands) -> None:
        self._codec, self._given = codec, given
        #: The arrays with their residuals, one axis each. With feedback they become the residuals.
        shapes = given.layout.shapes
        self._arrays = [self._add_residual(number) for number in range(len(shapes))]
        self._numbers = [n for n, shape in enumerate(shapes) if codec.shrinks(shape)]
        self._rest = [n for n in range(len(shapes)) if n not in set(self._numbers)]
        self._matrices = [self._arrays[n].reshape(shapes[n][0], -1) for n in self._numbers]
        self._p: list[Array] = []
        self._q: list[Array] = []
        self._whole: Array = np.empty(0, given.kind)

    def _add_residual(self, number: int) -> Array:
        given = self._given
        rests, sums = given.memory.pairs(number)
        if given.is_native and rests is not None:
            views = [given.source(number), _core.view(rests)]
            _core.combine(_core.view(sums), views, ReduceOp.SUM, _core.isas()[-1])
            return sums
        values = given.own(number)
        return values if rests is None else np.add(values, rests, out=sums)

    def first_message(self) -> Array:
        """Return P of all matrices, and the arrays that are sent whole."""
        made = [
            matrix @ self._last_q(n, matrix)
            for n, matrix in zip(self._numbers, self._matrices, strict=True)
        ]
        whole_arrays = [self._arrays[n] for n in self._rest]
        return np.concatenate([one.reshape(-1) for one in (*made, *whole_arrays)])

    def _last_q(self, number: int, matrix: Array) -> Array:
        """Return Q of the call before, with fresh numbers in columns that have become 0."""
        feedback = self._given.feedback
        step = 0 if feedback is None else feedback.step
        fresh = self._codec.first_q(matrix.shape[1], step).astype(matrix.dtype)
        last = None if feedback is None else feedback.factors.get(number)
        if last is None or last.shape != fresh.shape:
            return fresh
        return np.where(last.any(axis=0), last, fresh)

    def take_p(self, received: Array) -> None:
        """Take P of all ranks together."""
        at, rank = 0, self._codec.rank
        for matrix in self._matrices:
            count = len(matrix) * rank
            self._p.append(orthonormal(received[at : at + count].reshape(-1, rank)))
            at += count
        self._whole = received[at:]

    def second_message(self) -> Array:
        """Return Q of this rank's matrices."""
        pairs = zip(self._matrices, self._p, strict=True)
        self._q = [matrix.T @ p for matrix, p in pairs]
        return np.concatenate([self._whole[:0], *(one.reshape(-1) for one in self._q)])

    def keep(self) -> None:
        """Keep the arrays less those of this rank's P and Q; zeros for arrays sent whole."""
        if self._given.feedback is None:
            return
        for n in self._rest:
            self._arrays[n][:] = 0
        for matrix, p, q in zip(self._matrices, self._p, self._q, strict=True):
            if self._given.is_native:
                _core.thin_product(_core.view(matrix), *_factors(p, q), _core.view(matrix))
            else:
                np.subtract(matrix, product(p, q), out=matrix)
            # With a NaN in P, which is the same on all ranks, the result of all is NaN.
            if not (np.isfinite(p).all() and np.isfinite(q).all()):
                matrix[:] = 0
        self._given.memory.replace()

    def results(self, received: Array) -> Array | None:
        """Return the values of the result, from Q of all ranks together; feedback keeps these.

        None where they are in the result's memory.
        """
        given, at, rank = self._given, 0, self._codec.rank
        ends = given.layout.ends
        targets = [given.target(n) for n in range(len(given.layout.shapes))]
        in_place = given.is_native and None not in targets
        values: Array = None if in_place else np.empty(ends[-1], given.kind)
        for n, p, q in zip(self._numbers, self._p, self._q, strict=True):
            q_of_all = received[at : at + q.size].reshape(-1, rank)
            at += q.size
            target = targets[n]
            if in_place and target is not None:
                _core.thin_product(target, *_factors(p, q_of_all))
            else:
                values[ends[n] : ends[n + 1]] = product(p, q_of_all).reshape(-1)
            if given.feedback is not None:
                keeps = np.isfinite(q_of_all).all()  # columns of zeros begin anew
                given.feedback.factors[n] = q_of_all if keeps else np.zeros_like(q_of_all)
        at = 0
        for n in self._rest:
            begin, end = ends[n], ends[n + 1]
            sent = self._whole[at : at + end - begin]
            at += end - begin
            target = targets[n]
            if in_place and target is not None:
                _core.unpack(_core.view(sent), [target])
            else:
                values[begin:end] = sent
        return values


def orthonormal(p: Array) -> Array:
    """Return a matrix with orthonormal columns that span those of ``p``, by Gram-Schmidt.

    A column that depends on those before it becomes 0. The function only uses operations whose
    bits are the same on every processor, so that equal ``p`` give equal bits on all ranks.
    """
    columns = np.array(p.T, np.float64, order="C")
    for number in range(len(columns)):
        column = columns[number]
        before = _dot(column, column)
        for _ in range(2):  # the second pass removes the rounding errors of the first
            for other in columns[:number]:
                column = column - _dot(other, column) * other
        after = _dot(column, column)
        # NaN and infinities times 0 are NaN, so they stay visible.
        keeps = after > before * _LEAST_SHARE**2
        with np.errstate(invalid="ignore"):
            columns[number] = column / math.sqrt(after) if keeps else column * 0.0
    return np.ascontiguousarray(columns.T, p.dtype)


def product(p: Array, q: Array) -> Array:
    """Return P Q^T: products of columns, added in their order, the same bits on all ranks."""
    if p.dtype == np.float32:
        found = np.empty((len(p), len(q)), np.float32)
        _core.thin_product(_core.view(found), *_factors(p, q))
        return found
    found = p[:, :1] * q[:, 0]
    for number in range(1, p.shape[1]):
        found += p[:, number : number + 1] * q[:, number]
    return found


def _factors(p: Array, q: Array) -> tuple[_core.BufferView, _core.BufferView]:
    """Return P and the transpose of Q for kernels."""
    return _core.view(np.ascontiguousarray(p)), _core.view(np.ascontiguousarray(q.T))


def _dot(a: Array, b: Array) -> float:
    return float(np.add.reduce(a * b))
