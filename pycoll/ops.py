"""What ``op=`` may be: the builtin reductions, and those that users register by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from pycoll import _core
from pycoll.errors import InvalidArgumentError
from pycoll.foreign_words import about_op
from pycoll.types import (
    OPS,
    ROUNDED,
    DType,
    ReduceOp,
    identity_bytes,
    is_defined,
    numpy_dtype,
)


class Reduction(NamedTuple):
    """A reduction by name. ``function`` and ``identity`` belong to users' ones only."""

    name: str
    code: ReduceOp
    function: Callable[[Any, Any], Any] | None = None
    identity: Any = None
    commutative: bool = True

    def is_rounded(self, dtype: int) -> bool:
        """Whether the bits of a result depend on the order of folding."""
        if self.function is not None:
            return True
        return dtype in ROUNDED and self.code not in (ReduceOp.MIN, ReduceOp.MAX)

    def identity_bytes(self, dtype: int) -> bytes:
        """The element that changes nothing; InvalidArgumentError if the user gave none."""
        if self.function is None:
            return identity_bytes(dtype, self.code)
        if self.identity is None:
            raise InvalidArgumentError(
                f"op {self.name!r} was registered without identity=, which exscan gives to rank 0"
            )
        return np.asarray(self.identity).astype(numpy_dtype(dtype)).tobytes()

    def native(self, dtype: int) -> _core.UserOp:
        """What the engine calls for a user's reduction. Made anew for every operation."""
        return _core.UserOp(self._combine, numpy_dtype(dtype))

    def _combine(self, target: Any, source: Any) -> None:
        assert self.function is not None
        result = self.function(target, source)
        if result is None or result is target:
            return
        found = np.asarray(result)
        loses = np.iscomplexobj(found) and not np.iscomplexobj(target)
        if found.shape != target.shape or loses:
            raise InvalidArgumentError(
                f"op {self.name!r} gave {found.dtype} of shape {found.shape} for two arrays of "
                f"{target.dtype} of shape {target.shape}: expected as many elements, of a dtype "
                "that becomes this one"
            )
        target[...] = found


_REDUCTIONS = {word: Reduction(word, code) for word, code in OPS.items()}


def register_op(
    name: str,
    function: Callable[[Any, Any], Any],
    *,
    identity: Any = None,
    commutative: bool = True,
) -> None:
    """Make ``op=name`` mean ``function`` from now on; to be done on every rank alike.

    ``function(a, b)`` combines two NumPy arrays of equal length element by element, and returns the
    result or changes ``a`` and returns None. It must be associative, and is called for any pieces
    of the arrays. ``identity`` is what exscan gives to rank 0.
    With ``commutative=False`` operands are combined in rank order. It runs under the GIL, so it is
    slower than builtin reductions. A name can be registered again; builtin ones cannot.

    >>> pycoll.register_op("logaddexp", numpy.logaddexp, identity=-numpy.inf)
    """
    if not isinstance(name, str) or not name:
        raise InvalidArgumentError(f"name is {name!r}: expected a text that is not empty")
    if name in OPS:
        raise InvalidArgumentError(
            f"name is {name!r}, which is a builtin reduction: choose another"
        )
    if not callable(function):
        raise InvalidArgumentError(f"function is {function!r}, which cannot be called")
    _REDUCTIONS[name] = Reduction(name, ReduceOp.USER, function, identity, commutative)


def find_reduction(op: Any, dtype: int, operation: str) -> Reduction:
    """The reduction that ``op`` names. InvalidArgumentError if it is unknown or undefined here."""
    word = op.word if isinstance(op, ReduceOp) else op
    reduction = _REDUCTIONS.get(word) if isinstance(word, str) else None
    if reduction is None:
        raise InvalidArgumentError(
            f"op is {op!r}{about_op(op, _REDUCTIONS)}; there are {', '.join(_REDUCTIONS)} "
            "(register_op adds others)"
        )
    if not is_defined(dtype, reduction.code):
        allowed = [w for w, code in OPS.items() if is_defined(dtype, code)]
        raise InvalidArgumentError(
            f"op {word!r} is not defined for {DType(dtype).word}; defined are {', '.join(allowed)}"
        )
    if reduction.code is ReduceOp.AVG and operation in ("scan", "exscan"):
        raise InvalidArgumentError(
            f"op 'avg' is not defined for {operation}: take 'sum' and divide by the ranks so far"
        )
    return reduction
