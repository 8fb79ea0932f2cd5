"""The collectives that compiled programs call by number, made while JAX traces them."""

from __future__ import annotations

import math
import weakref
from typing import Any, NamedTuple

import numpy as np

from pycoll import _core
from pycoll.arrays.rows import Shape, elements, with_rows
from pycoll.comm.codecs import coding_of
from pycoll.comm.communicator import Communicator
from pycoll.comm.operations import internals_of
from pycoll.compress import Feedback
from pycoll.errors import InvalidArgumentError
from pycoll.schedule.collectives import Collective
from pycoll.types import ITEM_BYTES, DType

DTYPES = {"float8_e4m3fn": DType.FLOAT8_E4M3, **{one.word: one for one in DType}}
_ROWED = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)

#: The numbers of each communicator's collectives. The key describes the collective.
_numbers: weakref.WeakKeyDictionary[Communicator, dict[Any, int]] = weakref.WeakKeyDictionary()


class How(NamedTuple):
    """A collective without its array. ``rows``: rows of each rank, for _ROWED ones.

    ``compress``: a codec, or None. With one that keeps every element, compiled programs call the
    collective with an array of float32, and ``given`` is the name of the caller's type.
    """

    collective: Collective
    comm: Communicator
    op: str | None = None
    root: int = 0
    rows: tuple[int, ...] = ()
    deterministic: bool | None = None
    compress: Any = None
    given: str = ""

    def shape(self, given: Shape) -> Shape:
        """Return the shape of the result for an array of this shape."""
        if self.collective is Collective.ALL_GATHER:
            return with_rows(given, sum(self.rows))
        if self.collective is Collective.REDUCE_SCATTER:
            return with_rows(given, self.rows[self.comm.rank])
        return given


def communicator_of(comm: Communicator | None) -> Communicator:
    """Return the communicator, or the world for None.

    Raise InvalidArgumentError where a peer is a thread of this process, since its collectives would
    deadlock with those of this rank.
    """
    if comm is None:
        import pycoll

        comm = pycoll.world()
    if comm.names.count(comm.names[comm.rank]) > 1:
        raise InvalidArgumentError(
            f"comm is {comm!r}, whose ranks are threads of one process: pycoll.jax needs a process "
            "for each rank, since JAX keeps the collectives of a process in one order"
        )
    return comm


def number_of(how: How, shape: Shape, dtype: Any) -> int:
    """Return the number by which XLA calls this collective on arrays of this shape.

    No other rank takes part before the program runs. Raises InvalidArgumentError for a type that
    pycoll does not have, an unknown op, and an op that is not defined for the type.
    """
    kind = kind_of(how.given or dtype)
    known = _numbers.get(how.comm)
    if known is None:
        known = _numbers[how.comm] = {}
        weakref.finalize(how.comm, _forget, known)
    terms = (how.collective, how.op, how.root, how.rows, how.deterministic, how.compress)
    key = (*terms, shape, kind)
    if key not in known:
        known[key] = _bind(how, shape, kind)
    return known[key]


def kind_of(dtype: Any) -> DType:
    """Return the type of elements. Raise InvalidArgumentError where pycoll has none like it."""
    kind = DTYPES.get(str(dtype))
    if kind is None:
        raise InvalidArgumentError(f"x has dtype {dtype}: expected one of {', '.join(DTYPES)}")
    return kind


def run_method(how: How, x: Any, residual: Any = None, step: Any = None) -> tuple[Any, ...]:
    """Run the method of the communicator on NumPy arrays; compiled programs call it.

    Returns the result, and with ``residual`` what the codec has left out of x + residual.
    """
    words: dict[str, Any] = {"compress": how.compress}
    if residual is not None:
        words["feedback"] = feedback = Feedback()
        feedback.residuals.adopt(np.array(residual))
        feedback.step = int(step)
    if how.op is not None:
        words |= {"op": how.op, "deterministic": how.deterministic}
    if how.collective is Collective.BROADCAST:
        words["root"] = how.root
    if how.rows:
        is_gather = how.collective is Collective.ALL_GATHER
        words["lengths" if is_gather else "splits"] = list(how.rows)
    found = np.asarray(getattr(how.comm, how.collective.name.lower())(np.asarray(x), **words))
    return (found,) if residual is None else (found, feedback.residual)


def _forget(numbers: dict[Any, int]) -> None:
    for number in numbers.values():
        _core.xla_forget(number)


def _bind(how: How, shape: Shape, kind: DType) -> int:
    rowed = how.collective in _ROWED
    counts = elements(how.rows, shape) if rowed else [math.prod(shape)]
    total = sum(counts)
    internals = internals_of(how.comm)
    compiled = internals.compiler.compile(
        how.collective,
        kind,
        how.op,
        how.root,
        total * ITEM_BYTES[kind],
        None,
        how.deterministic,
        shape[1:] if rowed else (),
        coding_of(how.compress),
    )
    if how.collective is not Collective.ALL_GATHER:
        compiled = compiled.of_array(shape)
    if compiled.user is not None:
        raise InvalidArgumentError(
            f"op is {how.op!r}, which is Python: a compiled program can call builtin ones only"
        )
    compiled.check_shape(shape, 2 if rowed else 1)
    return _core.xla_bind(
        internals.engine,
        compiled.request(counts),
        input_count=math.prod(shape),
        output_count=math.prod(how.shape(shape)),
        reads=how.collective is not Collective.BROADCAST or how.comm.rank == how.root,
    )
