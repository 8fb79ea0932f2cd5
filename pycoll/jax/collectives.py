"""The functions of pycoll.jax, and their gradients."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pycoll.collective import Collective
from pycoll.communicator import Communicator
from pycoll.errors import InvalidArgumentError
from pycoll.jax.bound import How, chosen
from pycoll.jax.primitive import collective
from pycoll.rows import check_rows, need_axis, shares


def all_reduce(
    x: Any,
    op: str = "sum",
    *,
    comm: Communicator | None = None,
    deterministic: bool | None = None,
) -> jax.Array:
    """The combination of all ranks' ``x``, on every rank; shape and type are those of x.

    ``op``: sum, prod, min, max, avg, band, bor or bxor. Where there are many small arrays, one of
    ``jax.flatten_util.ravel_pytree`` costs one message. InvalidArgumentError as of
    Communicator.all_reduce, and for a reduction of the user's.
    """
    how = How(Collective.ALL_REDUCE, chosen(comm), op, deterministic=deterministic)
    return _differentiable(how, jnp.asarray(x))


def reduce_scatter(
    x: Any,
    op: str = "sum",
    *,
    comm: Communicator | None = None,
    deterministic: bool | None = None,
) -> jax.Array:
    """This rank's rows of the combination: ``len(x) // size``, low ranks one more if need be.

    InvalidArgumentError as of Communicator.reduce_scatter, and for a reduction of the user's.
    """
    value, comm = jnp.asarray(x), chosen(comm)
    need_axis(value.shape, "reduce_scatter")
    rows = tuple(shares(value.shape[0], comm.size))
    how = How(Collective.REDUCE_SCATTER, comm, op, rows=rows, deterministic=deterministic)
    return _differentiable(how, value)


def all_gather(
    x: Any, *, lengths: Sequence[int] | None = None, comm: Communicator | None = None
) -> jax.Array:
    """All ranks' ``x``, joined along axis 0 in rank order.

    ``lengths``: the ranks' first dimensions, alike on all; None where all are as long as this one,
    since shapes cannot wait for other ranks. InvalidArgumentError where x has no axis, and where
    lengths are not one per rank or say something else of this one.
    """
    value, comm = jnp.asarray(x), chosen(comm)
    need_axis(value.shape, "all_gather")
    length = value.shape[0]
    rows = check_rows([length] * comm.size if lengths is None else lengths, "lengths", comm.size)
    if rows[comm.rank] != length:
        raise InvalidArgumentError(
            f"lengths[{comm.rank}] is {rows[comm.rank]}, but x has {length} rows on this rank"
        )
    return _differentiable(How(Collective.ALL_GATHER, comm, rows=tuple(rows)), value)


def broadcast(x: Any, root: int = 0, *, comm: Communicator | None = None) -> jax.Array:
    """The root's ``x``, on every rank; all pass one of its shape and type.

    InvalidArgumentError where there is no such root.
    """
    comm = chosen(comm)
    if isinstance(root, bool) or not isinstance(root, int) or not 0 <= root < comm.size:
        raise InvalidArgumentError(f"root is {root!r}: expected a rank from 0 to {comm.size - 1}")
    return _differentiable(How(Collective.BROADCAST, comm, root=root), jnp.asarray(x))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(how: How, x: Any) -> Any:
    return collective(how, x)


def _forward(how: How, x: Any) -> tuple[Any, None]:
    return collective(how, x), None


def _backward(how: How, _: None, gradient: Any) -> tuple[Any]:
    return (_gradient(how, gradient),)


_differentiable.defvjp(_forward, _backward)


def _gradient(how: How, given: Any) -> Any:
    """That of the input, by that of the result: itself differentiable."""
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
