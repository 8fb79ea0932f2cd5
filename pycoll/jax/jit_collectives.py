"""The public functions of pycoll.jax, and their gradients."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from pycoll.arrays.rows import check_rows, need_axis, shares
from pycoll.comm.codecs import check_elements, coding_of, runs_itself
from pycoll.comm.communicator import Communicator
from pycoll.compress import PowerSGD, RandomK
from pycoll.errors import InvalidArgumentError
from pycoll.jax.bound import How, communicator_of, kind_of
from pycoll.jax.primitive import collective, method
from pycoll.ops import find_reduction
from pycoll.schedule.collectives import Collective
from pycoll.types import DType, check_rank

if TYPE_CHECKING:
    from pycoll.compress import Codec


def all_reduce(
    x: Any,
    op: str = "sum",
    *,
    comm: Communicator | None = None,
    deterministic: bool | None = None,
    compress: Codec | None = None,
    residual: Any = None,
    step: Any = 0,
) -> Any:
    """Combine the arrays ``x`` of all ranks; every rank gets the result with the same bits.

    ``x``: an array with the same shape and dtype on all ranks. ``op``: sum, prod, min, max,
    avg, band, bor or bxor. ``comm``: the communicator, or None for the world.
    ``deterministic``: True folds in rank order; None takes the setting of the communicator.
    ``compress``: None, or a codec of pycoll.compress, the same on all ranks, as in
    Communicator.all_reduce. ``residual``: None, or what the codec left out in the call before: an
    array of the shape of x, zeros at first, float64 for float64 and else float32. It does what a
    ``Feedback`` does outside of compiled programs: the codec encodes x + residual, and the call
    also returns what that leaves out. ``step``: the number of the call, an integer or an array of
    one, the same on all ranks; RandomK draws its places from it.

    The derivative of this call uses no codec, and a residual counts as a constant.

    Returns an array with the shape and dtype of x; with ``residual``, this array and the next
    residual.

    Raises InvalidArgumentError while tracing, as Communicator.all_reduce does, for a reduction
    from ``register_op``, for a residual of another shape or dtype, and for a residual of PowerSGD,
    which also has to keep its Q. A failure during the run is a JaxRuntimeError.

    Cost: as Communicator.all_reduce. With ``residual``, and with codecs that leave values out, the
    compiled program calls Python, which copies the arrays. Many small arrays cost one message if
    the program joins them first with ``jax.flatten_util.ravel_pytree``.

    >>> jax.jit(lambda x: pycoll.jax.all_reduce(x, "avg"))(jnp.ones(2))
    Array([1., 1.], dtype=float32)
    """
    how = How(Collective.ALL_REDUCE, communicator_of(comm), op, deterministic=deterministic)
    return _run(how, jnp.asarray(x), compress, residual, step)


def reduce_scatter(
    x: Any,
    op: str = "sum",
    *,
    comm: Communicator | None = None,
    deterministic: bool | None = None,
    compress: Codec | None = None,
    residual: Any = None,
    step: Any = 0,
) -> Any:
    """Combine the arrays ``x`` of all ranks; every rank gets its rows of the result.

    ``x``: an array of at least one axis, with the same shape and dtype on all ranks. ``op``,
    ``comm``, ``deterministic``, ``compress``, ``residual`` and ``step``: as in all_reduce.

    Returns ``len(x) // size`` rows; the lowest ranks get one more each where size does not divide
    ``len(x)``. With ``residual``, these and the next residual.

    Raises InvalidArgumentError while tracing, as Communicator.reduce_scatter does, and for a
    reduction from ``register_op``. A failure during the run is a JaxRuntimeError.

    Cost: as Communicator.reduce_scatter.

    >>> jax.jit(pycoll.jax.reduce_scatter)(jnp.ones(2))  # on one rank all rows
    Array([1., 1.], dtype=float32)
    """
    value, comm = jnp.asarray(x), communicator_of(comm)
    need_axis(value.shape, "reduce_scatter")
    rows = tuple(shares(value.shape[0], comm.size))
    how = How(Collective.REDUCE_SCATTER, comm, op, rows=rows, deterministic=deterministic)
    return _run(how, value, compress, residual, step)


def all_gather(
    x: Any,
    *,
    lengths: Sequence[int] | None = None,
    comm: Communicator | None = None,
    compress: Codec | None = None,
    residual: Any = None,
    step: Any = 0,
) -> Any:
    """Join the arrays ``x`` of all ranks along axis 0, in rank order; every rank gets all rows.

    ``x``: an array of at least one axis; its dtype and all dimensions but the first are the same on
    all ranks. ``lengths``: the first dimension of each rank, the same sequence on all ranks. None
    means that all ranks have as many rows as this one, because a trace cannot wait for other ranks.
    ``comm``: the communicator, or None for the world. ``compress``: as in all_reduce; each rank
    encodes its rows once, and all ranks get what the codes decode to. ``residual`` and ``step``: as
    in all_reduce.

    Returns an array with the rows of all ranks and the dtype of x; with ``residual``, this array
    and the next residual.

    Raises InvalidArgumentError while tracing where x has no axis, and where ``lengths`` does not
    have one entry per rank or differs from the rows of x. A failure during the run is a
    JaxRuntimeError.

    Cost: every rank receives the rows of all other ranks.

    >>> jax.jit(lambda x: pycoll.jax.all_gather(x, lengths=[2]))(jnp.ones(2))
    Array([1., 1.], dtype=float32)
    """
    value, comm = jnp.asarray(x), communicator_of(comm)
    need_axis(value.shape, "all_gather")
    length = value.shape[0]
    rows = check_rows([length] * comm.size if lengths is None else lengths, "lengths", comm.size)
    if rows[comm.rank] != length:
        raise InvalidArgumentError(
            f"lengths[{comm.rank}] is {rows[comm.rank]}, but x has {length} rows on this rank"
        )
    how = How(Collective.ALL_GATHER, comm, rows=tuple(rows))
    return _run(how, value, compress, residual, step)


def broadcast(
    x: Any,
    root: int = 0,
    *,
    comm: Communicator | None = None,
    compress: Codec | None = None,
    residual: Any = None,
    step: Any = 0,
) -> Any:
    """Copy the root's ``x`` to every rank.

    ``x``: an array with the same shape and dtype on all ranks; only the root's values count.
    ``root``: the sending rank, from 0 to size - 1, the same on all ranks. ``comm``: the
    communicator, or None for the world. ``compress``: as in all_reduce; the root encodes once.
    ``residual`` and ``step``: as in all_reduce; the residual of other ranks does not change.

    Returns an array with the shape and dtype of x; with ``residual``, this array and the next
    residual.

    Raises InvalidArgumentError while tracing for a wrong root. A failure during the run is a
    JaxRuntimeError.

    Cost: as Communicator.broadcast.

    >>> jax.jit(pycoll.jax.broadcast)(jnp.ones(2))
    Array([1., 1.], dtype=float32)
    """
    comm = communicator_of(comm)
    how = How(Collective.BROADCAST, comm, root=check_rank(root, "root", comm.size))
    return _run(how, jnp.asarray(x), compress, residual, step)


def _run(how: How, x: Any, compress: Codec | None, residual: Any, step: Any) -> Any:
    """Run a collective, with a codec on arrays that it takes."""
    if compress is None:
        if residual is not None:
            raise InvalidArgumentError(
                "residual is what a codec leaves out, and compress is None: pass a codec, or leave "
                "residual out"
            )
        return _differentiable(how, x)
    if not runs_itself(compress):
        coding_of(compress)
    kind, name = kind_of(x.dtype), how.collective.name.lower()
    code = None if how.op is None else find_reduction(how.op, kind, name).code
    check_elements(how.collective, kind, code)
    how = how._replace(compress=compress, given=str(x.dtype))
    if residual is None:
        if isinstance(compress, RandomK):
            raise InvalidArgumentError(
                f"residual is None and compress is {compress!r}: pass a residual, and a step that "
                "changes the places from call to call"
            )
        return _differentiable(how, x)
    residual = jnp.asarray(residual)
    wanted = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    if residual.shape != x.shape or residual.dtype != wanted:
        raise InvalidArgumentError(
            f"residual is {residual.dtype} of shape {residual.shape}: expected "
            f"{jnp.dtype(wanted)} of shape {x.shape}, zeros at first"
        )
    if isinstance(compress, PowerSGD) and how.collective is Collective.ALL_REDUCE:
        raise InvalidArgumentError(
            f"residual is an array and compress is {compress!r}, which also has to keep its Q: "
            "call Communicator.all_reduce with a Feedback outside of compiled programs"
        )
    return _with_residual(how, x, residual, jnp.asarray(step, jnp.int32))


def _result(how: How, x: Any) -> Any:
    """Return the result; with a codec by way of float32, as ``comm.codecs.coded_ends`` does it."""
    if how.compress is None:
        return collective(how, x)
    if runs_itself(how.compress):
        return method(how, x)[0]
    found = collective(how, x.astype(jnp.float32)).astype(x.dtype)
    divides = how.op == "avg" and kind_of(how.given) == DType.FLOAT64
    return found / how.comm.size if divides else found


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(how: How, x: Any) -> Any:
    return _result(how, x)


def _forward(how: How, x: Any) -> tuple[Any, None]:
    return _result(how, x), None


def _backward(how: How, _: None, gradient: Any) -> tuple[Any]:
    return (_gradient(how._replace(compress=None, given=""), gradient),)


_differentiable.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_residual(how: How, x: Any, residual: Any, step: Any) -> tuple[Any, Any]:
    found, rest = method(how, x, residual, step)
    return found, rest


def _forward_both(how: How, x: Any, residual: Any, step: Any) -> tuple[Any, Any]:
    return _with_residual(how, x, residual, step), residual


def _backward_both(how: How, residual: Any, gradients: Any) -> tuple[Any, Any, None]:
    return *_backward(how, None, gradients[0]), jnp.zeros_like(residual), None


_with_residual.defvjp(_forward_both, _backward_both)


def _gradient(how: How, given: Any) -> Any:
    """Return the gradient of the input from that of the result. It is differentiable again."""
    if how.op not in (None, "sum", "avg"):
        raise InvalidArgumentError(
            f"{how.collective.name.lower()} with op {how.op!r} has no gradient: sum and avg have"
        )
    if how.collective is Collective.ALL_REDUCE:
        return _differentiable(how, given)
    if how.collective is Collective.BROADCAST:
        whole = _differentiable(How(Collective.ALL_REDUCE, how.comm, "sum"), given)
        return whole if how.comm.rank == how.root else jnp.zeros_like(whole)
    if how.collective is Collective.ALL_GATHER:
        return _differentiable(
            How(Collective.REDUCE_SCATTER, how.comm, "sum", rows=how.rows), given
        )
    whole = _differentiable(How(Collective.ALL_GATHER, how.comm, rows=how.rows), given)
    return whole / how.comm.size if how.op == "avg" else whole
