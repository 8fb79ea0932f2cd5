"""Values that are arrays: pushes are folded with the bits of a deterministic all_reduce.

A part's value is an array of one axis, and a push is its bytes. The native kernels add pushes in
rank order. A mean is one division of the sum, as all_reduce divides for the type.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pycoll import _core
from pycoll.errors import InvalidArgumentError
from pycoll.ps.values.copy_on_write import CopyOnWriteArray
from pycoll.ps.values.server_optimizers import Optimizer
from pycoll.types import COMPLEX, INTEGERS, ITEM_BYTES, DType, ReduceOp, numpy_dtype

Array = npt.NDArray[Any]

#: How pushes change a value, by the word of ``Store.init``. "sum" and "mean" replace it.
UPDATES = {"add": 0, "sum": 1, "mean": 2}
ADD, SUM, MEAN = UPDATES.values()
#: The number of arrays that one call of a kernel folds.
_SOURCES_MAX = 4
_NARROW = frozenset({DType.FLOAT16, DType.BFLOAT16, DType.FLOAT8_E4M3, DType.FLOAT8_E5M2})


def rule_of(update: str, dtype: int) -> int:
    """Return the number of a rule. Raises InvalidArgumentError for an unknown ``update``."""
    if update not in UPDATES:
        words = ", ".join(map(repr, UPDATES))
        raise InvalidArgumentError(f"update is {update!r}: expected one of {words}")
    return UPDATES[update] | dtype << 8


#: The types that optimizers step. Narrow ones are stepped as float32, with float32 state.
_STEPPED = frozenset({DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64})
#: The number of steps of a part, ahead of its serialized optimizer.
STATE = struct.Struct("<Q")


class ArrayValue:
    """A part's value. ``states``: the arrays of its optimizer; ``steps``: its steps so far."""

    __slots__ = ("optimizer", "states", "steps", "storage")

    def __init__(self, array: Array) -> None:
        self.storage = CopyOnWriteArray(array)
        self.optimizer: Optimizer | None = None
        self.states: list[CopyOnWriteArray] = []
        self.steps = 0

    @property
    def array(self) -> Array:
        """The elements."""
        return self.storage.array

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Step by this optimizer from now on. State of the same form is kept."""
        old, self.optimizer = self.optimizer, optimizer
        if old is not None and (old.name, old.states) == (optimizer.name, optimizer.states):
            return
        kind = np.float64 if self.array.dtype == np.float64 else np.float32
        fresh = (np.full(self.array.shape, optimizer.fresh, kind) for _ in range(optimizer.states))
        self.states = [CopyOnWriteArray(one) for one in fresh]
        self.steps = 0

    def step(self, gradient: Array) -> None:
        """Let the optimizer change the elements."""
        assert self.optimizer is not None
        self.steps += 1
        target = self.storage.writable()
        is_narrow = target.dtype not in (np.float32, np.float64)
        weights = target.astype(np.float32) if is_narrow else target
        states = [one.writable() for one in self.states]
        slope = gradient.astype(np.float32) if is_narrow else gradient
        self.optimizer.step(weights, states, slope, self.steps)
        if is_narrow:
            target[...] = weights.astype(target.dtype)


class ArrayValues:
    """The arithmetic of arrays; see ``shard.Arithmetic``."""

    def load(self, rule: int, payload: Any) -> ArrayValue:
        """Return the value of a new part. Raises ValueError for an unknown type."""
        return ArrayValue(as_type(payload, rule >> 8).copy())

    def set_optimizer(self, rule: int, value: ArrayValue, optimizer: Optimizer) -> ArrayValue:
        """Return the value with this optimizer, or unchanged if optimizers do not step its type."""
        if takes_optimizer(rule):
            value.set_optimizer(optimizer)
        return value

    def refusal(self, rule: int, value: ArrayValue, payload: Any) -> str:
        """Return why the payload does not fit this part, or an empty text."""
        given = 0 if payload is None else memoryview(payload).nbytes
        if given != value.array.nbytes:
            return f"a push of {given} bytes for a part of {value.array.nbytes} bytes"
        return ""

    def apply(
        self, rule: int, value: ArrayValue, pushes: Sequence[Any], workers: int
    ) -> ArrayValue:
        """Return the value after the pushes."""
        dtype = DType(rule >> 8)
        arrays = [as_type(one, dtype) for one in pushes]
        if value.optimizer is not None:
            is_one = len(arrays) == 1 and workers == 1
            slope = arrays[0] if is_one else np.empty_like(value.array)
            value.step(slope if is_one else mean(slope, arrays, workers, dtype))
            return value
        old = value.array
        # writable() copies the array if an answer that is being sent shows it.
        target = value.storage.writable()
        if rule & 0xFF == ADD:
            fold(target, [old, *arrays], dtype)
        elif rule & 0xFF == MEAN:
            mean(target, arrays, workers, dtype)
        else:
            fold(target, arrays, dtype)
        return value

    def read(self, rule: int, value: ArrayValue, query: Any = None) -> Array:
        """Return the bytes of the value. They do not change while the returned array exists."""
        return value.storage.view()

    def nbytes(self, value: ArrayValue) -> int:
        """Return the bytes that a value takes."""
        return value.array.nbytes + sum(one.array.nbytes for one in value.states)

    def pieces(self, value: ArrayValue) -> Sequence[Any]:
        """Return the payloads of a value: its elements, and the optimizer with its state."""
        if value.optimizer is None:
            return (value.storage.view(),)
        kept = STATE.pack(value.steps) + value.optimizer.to_bytes()
        return (value.storage.view(), kept, *(one.view() for one in value.states))

    def join(self, rule: int, pieces: Sequence[Any]) -> ArrayValue:
        """Return the value from the payloads that ``pieces`` made."""
        if not pieces:
            raise ValueError("a value of no pieces")
        value = self.load(rule, pieces[0])
        for place, piece in enumerate(pieces[1:], 1):
            self.restore(rule, value, place, piece)
        if len(pieces) != (2 + len(value.states) if value.optimizer else 1):
            raise ValueError(f"a value of {len(pieces)} pieces, which is another number")
        return value

    def restore(self, rule: int, value: ArrayValue, place: int, payload: Any) -> ArrayValue:
        """Return the value with one payload of ``pieces``.

        ``place``: its number, 1 for the steps and the optimizer, and then those of the states.
        """
        if place == 1:
            kept = bytes(payload)
            value.set_optimizer(Optimizer.from_bytes(kept[STATE.size :]))
            (value.steps,) = STATE.unpack(kept[: STATE.size])
        elif 1 < place < 2 + len(value.states):
            target = value.states[place - 2].writable()
            target[...] = np.frombuffer(b"" if payload is None else payload, target.dtype)
        else:
            raise ValueError(f"piece {place} of the pieces of {2 + len(value.states)}")
        return value


def takes_optimizer(rule: int) -> bool:
    """Return whether an optimizer may step arrays of this rule."""
    return rule & 0xFF == ADD and rule >> 8 in _STEPPED


def as_type(payload: Any, dtype: int) -> Array:
    """Return the bytes as elements. Raises ValueError if they do not fit the type."""
    if not 0 <= dtype < len(ITEM_BYTES):
        raise ValueError(f"{dtype} is no element type")
    data = np.frombuffer(b"" if payload is None else payload, np.uint8)
    elements: Array = data.view(numpy_dtype(dtype))
    return elements


def fold(target: Array, arrays: Sequence[Array], dtype: int) -> Array:
    """Write the sum of the arrays into ``target``, which may be the first one; return it."""
    if not target.size:
        return target
    if len(arrays) == 1:
        target[...] = arrays[0]
        return target
    op = ReduceOp.BOR if dtype == DType.BOOL else ReduceOp.SUM
    # Narrow types round after each addition, so they are folded one by one.
    step = 1 if dtype in _NARROW else _SOURCES_MAX - 1
    view, total = _core.view(target), _core.view(arrays[0])
    for first in range(1, len(arrays), step):
        sources = [_core.view(one) for one in arrays[first : first + step]]
        _core.combine(view, [total, *sources], op, _core.isa())
        total = view
    return target


def mean(target: Array, arrays: Sequence[Array], workers: int, dtype: int) -> Array:
    """Write the sum of the arrays, divided by ``workers``, into ``target``; return it.

    Integers are divided exactly and rounded towards zero.
    """
    if dtype == DType.BOOL or (workers == 1 and len(arrays) == 1):
        return fold(target, arrays, dtype)
    if dtype in INTEGERS:
        target[...] = _whole_mean(arrays, workers)
    elif dtype in _NARROW:
        # Scaling by 2**-k keeps the sum inside the range of the type.
        factor = np.float32(2.0 ** -(workers - 1).bit_length())
        scaled = [one.astype(np.float32) * factor for one in arrays]
        total = fold(scaled[0], scaled, DType.FLOAT32)
        target[...] = (total / (np.float32(workers) * factor)).astype(target.dtype)
    else:
        fold(target, arrays, dtype)
        plain = target.view(target.real.dtype) if dtype in COMPLEX else target
        np.divide(plain, plain.dtype.type(workers), out=plain)
    return target


def _whole_mean(arrays: Sequence[Array], workers: int) -> Array:
    """Return the means of whole numbers.

    Quotients and remainders are added separately, so no sum exceeds 64 bits.
    """
    wide = np.uint64 if arrays[0].dtype == np.uint64 else np.int64
    count = wide(workers)
    quotients = np.zeros(arrays[0].shape, wide)
    rests = np.zeros(arrays[0].shape, wide)
    for one in arrays:
        quotient, rest = np.divmod(one.astype(wide), count)
        quotients += quotient
        rests += rest
    more, rest = np.divmod(rests, count)
    quotients += more
    # divmod rounds down, and the mean rounds towards zero.
    quotients[(quotients < 0) & (rest != 0)] += wide(1)
    return quotients
