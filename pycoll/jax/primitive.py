"""The JAX primitive of a collective: its tracing, order, batching and lowering.

Only this file uses private parts of JAX. Ordered effects have no public name yet;
io_callback(ordered=True) and debug.print(ordered=True) use them.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from pycoll import _core
from pycoll.errors import InvalidArgumentError
from pycoll.jax.bound import How, number_of, run_method
from pycoll.schedule.collectives import Collective

try:
    from jax._src import core, effects
    from jax.extend.core import Primitive
    from jax.interpreters import batching, mlir

    _FFI = jax.ffi
    _TOKEN = core.abstract_token
except (ImportError, AttributeError) as error:
    raise ImportError(
        f"pycoll.jax needs jax.ffi and ordered effects, but jax {jax.__version__} lacks them or "
        f"has them elsewhere ({error}): install jax 0.7 to 0.10"
    ) from error

#: The name under which compiled programs find the native handler.
TARGET = "pycoll_collective"


class _Order(effects.Effect):
    """The ordered effect of a collective."""

    def __str__(self) -> str:
        return "pycoll"


_ORDER = _Order()
for _set in (
    effects.ordered_effects,
    effects.lowerable_effects,
    effects.control_flow_allowed_effects,
    effects.custom_derivatives_allowed_effects,
):
    _set.add_type(_Order)

_FFI.register_ffi_target(TARGET, _core.xla_handler(), platform="cpu")

_collective = Primitive("pycoll")


def collective(how: How, x: Any) -> Any:
    """Return the result of the collective. Outside of tracing it runs as a separate program."""
    return _collective.bind(x, how=how)


_compiled = jax.jit(collective, static_argnums=0)
_collective.def_impl(lambda x, how: _compiled(how, x))


def _evaluate(x: Any, how: How) -> tuple[Any, set[Any]]:
    # Binds the collective now, so that a wrong argument raises at the call that passed it.
    number_of(how, x.shape, x.dtype)
    return core.ShapedArray(how.shape(x.shape), x.dtype), {_ORDER}


_collective.def_effectful_abstract_eval(_evaluate)


def _lower(ctx: Any, x: Any, *, how: How) -> Any:
    given = ctx.avals_in[0]
    lower = _FFI.ffi_lowering(TARGET, has_side_effect=True)
    with_tokens = ctx.replace(avals_in=[_TOKEN, *ctx.avals_in], avals_out=[_TOKEN, *ctx.avals_out])
    number = np.int64(number_of(how, given.shape, given.dtype))
    token, result = lower(with_tokens, ctx.tokens_in.get(_ORDER), x, number=number)
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({_ORDER: token})))
    return [result]


mlir.register_lowering(_collective, _lower, platform="cpu")


def _place_of(how: How, dim: int) -> int:
    """Return the place of a batch's axis among those of x; rows stay the first axis."""
    return 1 if how.collective in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER) else dim


def _batch(arguments: Any, dims: Any, *, how: How) -> tuple[Any, int]:
    """Run the whole batch as one collective."""
    (x,), (dim,) = arguments, dims
    place = _place_of(how, dim)
    return collective(how, jax.numpy.moveaxis(x, dim, place)), place


batching.primitive_batchers[_collective] = _batch

# Collectives that compiled programs run by Python, in the same order.

_method = Primitive("pycoll_method")
_method.multiple_results = True


def method(how: How, *given: Any) -> list[Any]:
    """Return what ``run_method`` does. Outside of tracing it runs as a separate program."""
    return list(_method.bind(*given, how=how))


_compiled_method = jax.jit(method, static_argnums=0)
_method.def_impl(lambda *given, how: _compiled_method(how, *given))


def _evaluate_method(x: Any, *kept: Any, how: How) -> tuple[list[Any], set[Any]]:
    residuals = [core.ShapedArray(one.shape, one.dtype) for one in kept[:1]]
    return [core.ShapedArray(how.shape(x.shape), x.dtype), *residuals], {_ORDER}


_method.def_effectful_abstract_eval(_evaluate_method)


def _lower_method(ctx: Any, *given: Any, how: How) -> Any:
    results, token, _ = mlir.emit_python_callback(
        ctx,
        functools.partial(run_method, how),
        ctx.tokens_in.get(_ORDER),
        list(given),
        ctx.avals_in,
        ctx.avals_out,
        has_side_effect=True,
    )
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({_ORDER: token})))
    return results


mlir.register_lowering(_method, _lower_method, platform="cpu", cacheable=False)


def _batch_method(arguments: Any, dims: Any, *, how: How) -> tuple[Any, Any]:
    """Run the whole batch as one collective; x and the residual have the batch's axis."""
    x, *kept = arguments
    if any(dim is not None for dim in dims[2:]):
        raise InvalidArgumentError("step differs within a batch: pass one number for all of it")
    length = next(
        one.shape[dim] for one, dim in zip(arguments, dims, strict=True) if dim is not None
    )
    place = _place_of(how, 0)

    def move_axis(one: Any, dim: Any) -> Any:
        if dim is None:
            return jax.numpy.repeat(jax.numpy.expand_dims(one, place), length, place)
        return jax.numpy.moveaxis(one, dim, place)

    given = [move_axis(x, dims[0]), *(move_axis(one, dims[1]) for one in kept[:1]), *kept[1:]]
    found = method(how, *given)
    return found, [place] * len(found)


batching.primitive_batchers[_method] = _batch_method
