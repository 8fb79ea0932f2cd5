"""Dense codecs of calls: what ``compress=`` means for plans and for the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from pycoll import _core
from pycoll.errors import InvalidArgumentError
from pycoll.schedule.collectives import CODED, REDUCING, Collective
from pycoll.types import DType, ReduceOp, wrong_op, wrong_type

if TYPE_CHECKING:
    from pycoll.cost.codec_costs import Coded

#: Reductions of values that have been rounded by a codec.
_SUMS = (ReduceOp.SUM, ReduceOp.AVG)

#: Types of arrays; codes hold float32 (``coded_ends``).
TAKEN = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64)

#: The bytes of codes to which segments grow, and the segments that a chunk keeps.
_CODES_MAX = 40 << 10
_SEGMENTS_MIN = 8


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
    """Return whether ``compress`` is a codec whose collectives are methods of its own."""
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
    """Return what the cost model knows of a codec, for messages of ``nbytes`` of float32.

    Raises InvalidArgumentError for a value that is no codec, for a codec that the model cannot
    predict, and for a collective that does not take the codec.
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
