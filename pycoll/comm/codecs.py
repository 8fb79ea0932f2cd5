"""Dense codecs of calls: turns ``compress=`` into arguments of plans and of the engine.

The engine takes float32 arrays in place of the caller's:

| type of the caller | what is sent | result |
|---|---|---|
| float32 | the array | float32 |
| float16, bfloat16 | its values, exactly | rounded once to the type, ties to even |
| float64 | its values, rounded to float32 | widened, which is exact |

A Feedback of float64 arrays also keeps the error of the rounding to float32. So the sent values
plus the residual are the array plus the last residual, bit for bit. The next call adds the residual
to its array, at the owner of a part too. A mean of float64 therefore is a sum of codes that
``store`` divides: residuals have the unit of the array. All ranks round results to 16 bits alike,
and no residual keeps the error of this rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pycoll import _core
from pycoll.errors import InvalidArgumentError
from pycoll.schedule.collectives import CODED, REDUCING, Collective
from pycoll.types import DType, ReduceOp, numpy_dtype, wrong_op, wrong_type

if TYPE_CHECKING:
    from pycoll.cost.codec_costs import Coded

#: Reductions of values that have been rounded by a codec.
_SUMS = (ReduceOp.SUM, ReduceOp.AVG)

#: Types of arrays; codes hold float32.
TAKEN = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64)

#: The bytes of codes to which segments grow, and the segments that a chunk keeps.
_CODES_MAX = 40 << 10
_SEGMENTS_MIN = 8


#: A NumPy array.
Array = Any

#: The kernels that turn float32 into bfloat16 and back.
_BF16 = _core.Codec(0, 256, False, 0)


class Coding(NamedTuple):
    """A codec of csrc/kernels/codecs.h; equal on all ranks."""

    kind: int
    block: int
    stochastic: bool
    seed: int

    def native(self) -> _core.Codec:
        """Return the codec that requests take."""
        return _core.Codec(self.kind, self.block, self.stochastic, self.seed)

    @property
    def ratio(self) -> float:
        """The bytes of codes for each byte of float32, in long messages."""
        values = 1 << 20
        return float(self.native().nbytes(values)) / (4 * values)

    def segment_bytes(self, least: int, chunk: int) -> int:
        """Return the bytes of values in a segment of data that travels as codes only.

        ``least``: in segments of values. The codes of a segment cost a message, even few bytes. So
        a segment grows while its codes are short, and while a chunk of ``chunk`` bytes has many
        segments, which overlap.
        """
        nbytes, found = self.native().nbytes, least
        while nbytes(2 * found // 4) <= _CODES_MAX and 2 * found * _SEGMENTS_MIN <= chunk:
            found *= 2
        return found


def runs_itself(compress: Any) -> bool:
    """Return whether ``compress`` is a codec that runs its collectives itself, without kernels."""
    if isinstance(compress, type) or not hasattr(compress, "native"):
        return False
    return compress.native() is None


def coding_of(compress: Any, feedback: Any = None) -> Coding | None:
    """Return the codec of a call; None without one.

    Raises InvalidArgumentError unless ``compress`` is None or a codec of the executor, and
    ``feedback`` is None or belongs to it.
    """
    if compress is None:
        if feedback is not None:
            raise InvalidArgumentError(
                "feedback keeps what a codec leaves out, and compress is None: pass a codec, or "
                "leave feedback out"
            )
        return None
    native = getattr(compress, "native", None)
    if native is None or isinstance(compress, type):
        raise InvalidArgumentError(
            f"compress is {compress!r}: expected a codec of pycoll.compress, or None"
        )
    if feedback is not None and not hasattr(feedback, "residuals"):
        raise InvalidArgumentError(
            f"feedback is {feedback!r}: expected a pycoll.compress.Feedback, or None"
        )
    described = native()
    if described is None:
        raise InvalidArgumentError(
            f"compress is {compress!r}: this collective takes codecs that keep every element, "
            "BF16, FP8, Block and Sign"
        )
    return Coding(*described)


def model_codec(collective: Collective, nbytes: int, compress: Any) -> Coded:
    """Return the facts of a codec for the cost model, for messages of ``nbytes`` of float32.

    Raises InvalidArgumentError for a value that is no codec and for a collective that does not take
    the codec. Also for a codec that the model cannot predict.
    """
    from pycoll.cost.codec_costs import Coded

    if not runs_itself(compress):
        coding_of(compress)
    elif collective is not Collective.ALL_REDUCE:
        raise InvalidArgumentError(
            f"compress is {compress!r} and collective is {collective.name.lower()!r}: the model "
            "predicts this codec in all_reduce only"
        )
    if collective not in CODED:
        words = ", ".join(sorted(one.name.lower() for one in CODED))
        raise InvalidArgumentError(
            f"collective is {collective.name.lower()!r}, which takes no codec; these do: {words}"
        )
    described = compress.modelled(nbytes // 4)
    if described is None:
        raise InvalidArgumentError(
            f"compress is {compress!r}, whose bytes follow from values or shapes: the model "
            "predicts BF16, FP8, Block, Sign, TopK and RandomK"
        )
    return Coded(*described)


def check_elements(collective: Collective, dtype: int, code: int | None) -> None:
    """Raise InvalidArgumentError unless a codec can hold the elements and the reduction suits it.

    ``code``: the number of the reduction; None where nothing is reduced.
    """
    if dtype not in TAKEN:
        raise wrong_type("x", dtype, TAKEN)
    if collective in REDUCING and code not in _SUMS:
        raise wrong_op("a function" if code == ReduceOp.USER else repr(ReduceOp(code or 0).word))


class CodedEnds(NamedTuple):
    """The memory of one array of a call, as the executor takes it with a codec.

    ``store`` runs once, after the operation: it completes the residual, and puts the result into
    the caller's memory. None where nothing is left to do.
    """

    source: _core.BufferView | None
    target: _core.BufferView | None
    residual: _core.BufferView | None = None
    store: Callable[[], None] | None = None


def coded_ends(
    source: _core.BufferView | None,
    target: _core.BufferView | None,
    divisor: int,
    feedback: Any = None,
    number: int = 0,
) -> CodedEnds:
    """Return float32 arrays in place of ``source`` and ``target``.

    ``divisor``: by which float64 results are divided. ``feedback``: None, or the Feedback that
    keeps the residual of array ``number``. Raises InvalidArgumentError where earlier calls had
    another shape or type.
    """
    steps: list[Callable[[], None]] = []
    residual = None
    if source is not None and feedback is not None:
        source, residual = _with_residual(source, feedback, number, steps)
    elif source is not None and source.dtype != DType.FLOAT32:
        source = _core.view(_as_float32(source))
    if target is not None and target.dtype != DType.FLOAT32:
        target = _widened_target(target, divisor, steps)

    def store() -> None:
        for step in steps:
            step()

    return CodedEnds(source, target, residual, store if steps else None)


def behind(ends: Sequence[CodedEnds], finish: Callable[[], Any]) -> Callable[[], Any]:
    """Return ``finish`` behind the ``store`` of each array."""
    stores = [one.store for one in ends if one.store is not None]
    if not stores:
        return finish

    def both() -> Any:
        for store in stores:
            store()
        return finish()

    return both


def _with_residual(
    source: _core.BufferView, feedback: Any, number: int, steps: list[Callable[[], None]]
) -> tuple[_core.BufferView, _core.BufferView]:
    """Return the array to send, and the residual that the executor adds and replaces."""
    shape = tuple(source.shape)
    if source.dtype == DType.FLOAT64:
        return _with_wide_residual(source, feedback, number, steps)
    residual = _core.view(feedback.residuals.memory(shape, number), "feedback")
    if feedback.momentum:
        source = _core.view(feedback.corrected(_as_float32(source), number))
    elif source.dtype != DType.FLOAT32:
        source = _core.view(_as_float32(source))
    return source, residual


def _with_wide_residual(
    source: _core.BufferView, feedback: Any, number: int, steps: list[Callable[[], None]]
) -> tuple[_core.BufferView, _core.BufferView]:
    """Return both for float64; this module keeps the residual of float64 itself."""
    shape = tuple(source.shape)
    kept = feedback.residuals.memory(shape, number, np.float64)
    with np.errstate(all="ignore"):  # infinities and NaN show in the result
        wanted = feedback.corrected(_copy_of(source), number) + kept
        sent = np.asarray(wanted, np.float32)
    rests = np.zeros(shape, np.float32)

    def keep() -> None:
        with np.errstate(all="ignore"):
            np.subtract(wanted, sent, out=kept)
            np.add(kept, rests, out=kept)

    steps.append(keep)
    return _core.view(sent), _core.view(rests)


def _widened_target(
    target: _core.BufferView, divisor: int, steps: list[Callable[[], None]]
) -> _core.BufferView:
    """Return float32 memory for a result, which a step puts into ``target``."""
    found = np.empty(tuple(target.shape), np.float32)

    def put() -> None:
        _core.unpack(_core.view(_round_to(found, target.dtype, divisor)), [target])

    steps.append(put)
    return _core.view(found)


def _copy_of(view: _core.BufferView) -> Array:
    """Return a copy of an array; one of bfloat16 as bits."""
    kind = np.dtype(np.uint16) if view.dtype == DType.BFLOAT16 else numpy_dtype(view.dtype)
    copy = np.empty(tuple(view.shape), kind)
    _core.pack([view], _core.view(copy))
    return copy


def _as_float32(view: _core.BufferView) -> Array:
    """Return a copy of an array as float32; float64 beyond its range becomes infinite."""
    given = _copy_of(view)
    if view.dtype == DType.BFLOAT16:
        values = np.empty(given.shape, np.float32)
        _BF16.decode(_core.view(values.reshape(-1)), _bytes_of(given))
        return values
    with np.errstate(over="ignore"):
        return np.asarray(given, np.float32)


def _round_to(values: Array, dtype: int, divisor: int) -> Array:
    """Return float32 values in another type; of bfloat16 the bits."""
    if dtype == DType.BFLOAT16:
        bits = np.empty(values.shape, np.uint16)
        _BF16.encode(_bytes_of(bits), _core.view(values.reshape(-1)), None)
        return bits
    with np.errstate(over="ignore"):
        found = np.asarray(values, numpy_dtype(dtype))
    return found if divisor == 1 else np.asarray(found / divisor)


def _bytes_of(bits: Array) -> _core.BufferView:
    return _core.view(bits.reshape(-1).view(np.uint8))
