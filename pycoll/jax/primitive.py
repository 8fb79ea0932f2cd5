"""The JAX primitive of a collective: its tracing, order, batching and lowering.

Only this file uses private parts of JAX. Ordered effects have no public name yet;
io_callback(ordered=True) and debug.print(ordered=True) use them.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from pycoll import _core
from pycoll.jax.bound import How, number_of
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
        f"has them elsewhere ({error}): install jax 0.5 to 0.10"
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


def _batch(arguments: Any, dims: Any, *, how: How) -> tuple[Any, int]:
    """Run the whole batch as one collective; the rows stay the first axis."""
    (x,), (dim,) = arguments, dims
    place = 1 if how.collective in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER) else dim
    return collective(how, jax.numpy.moveaxis(x, dim, place)), place


batching.primitive_batchers[_collective] = _batch
