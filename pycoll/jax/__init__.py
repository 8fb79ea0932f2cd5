"""Collectives inside jax.jit, on the CPU: compiled programs call the engines directly.

    import jax, pycoll, pycoll.jax
    pycoll.init()

    @jax.jit
    def step(weights, batch):
        gradient = jax.grad(loss)(weights, batch)
        return weights - 0.1 * pycoll.jax.all_reduce(gradient, "avg")

Each rank is a process that compiles and runs its own program. The functions work under jit, grad,
vmap, scan, while_loop and cond, and outside of all of these. Their results have the same bits as
those of the communicator's methods, which take JAX arrays outside of jit.

Order: all ranks must run the same collectives in the same order, but XLA runs independent
operations in any order, or at once. Therefore each collective carries an ordered effect. Inside a
program it takes the token of the collective before it; JAX passes the last token to the next
program, also where calls return before the program has run. So the order is that in which Python
traced the collectives, and it is the same on ranks that run the same Python code. If ranks differ,
they get the text of a MismatchError, as in any collective. Tokens belong to the process: all
communicators of a process share one order, and ranks that are threads of one process
(``local_world``) cannot use these functions.

Tracing fixes the shapes, the algorithm, the deadline (``comm.timeout_s``) and the communicator;
``comm=None`` means the world at that time. After that communicator is closed, its compiled programs
fail; ``jax.clear_caches()`` removes them.

Errors: wrong arguments raise InvalidArgumentError while tracing. A failure during a run is a
JaxRuntimeError with pycoll's text. JAX raises it when the program waits for results. Ctrl-C takes
effect after the collective has ended, at its deadline at the latest.

Gradients: the gradient of an all_reduce by sum is the sum of the gradients of all ranks, and by avg
their average. The gradients of all_gather and reduce_scatter are each other. The gradient of
broadcast is the sum of all ranks' gradients on the root, and zeros elsewhere. Other reductions have
no gradient, and there is no forward mode.
"""

from __future__ import annotations

from pycoll.jax.cluster import register as _register
from pycoll.jax.jit_collectives import all_gather, all_reduce, broadcast, reduce_scatter

_register()

__all__ = ["all_gather", "all_reduce", "broadcast", "reduce_scatter"]
