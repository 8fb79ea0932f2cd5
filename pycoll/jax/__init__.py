"""Collectives inside jax.jit, on the CPU: compiled programs call the engines themselves.

    import jax, pycoll, pycoll.jax
    pycoll.init()

    @jax.jit
    def step(weights, batch):
        gradient = jax.grad(loss)(weights, batch)
        return weights - 0.1 * pycoll.jax.all_reduce(gradient, "avg")

Each rank is a process that compiles and runs a program of its own. The functions work under jit,
grad, vmap, scan, while_loop and cond, and outside of all of these; what they give has the bits of
the communicator's own methods. Outside of jit those take JAX's arrays too.

Order: ranks must call the same collectives in the same order, but XLA runs what does not depend on
each other in any order, or at once. So collectives carry an ordered effect: inside a program each
takes a token that the one before it gives, and JAX hands the last one to the next program, also
where calls return before they have run. The order is that in which Python traced them, on each rank
alike where ranks run the same Python; a rank that did other things gets a MismatchError's text, as
of any collective. Since tokens are the process's, all communicators of a process share this order,
and ranks that are threads of one process (local_world) cannot be used here.

Shapes are settled while a function is traced, and so are the algorithm, the deadline
(``comm.timeout_s``) and the communicator: None means the world as it is then. Once that is closed,
programs that were compiled for it fail, and ``jax.clear_caches()`` forgets them.

Errors: wrong arguments raise InvalidArgumentError while tracing. What happens in a run is
a JaxRuntimeError with pycoll's text, raised where JAX tells errors of programs: when results are
waited for. Ctrl-C is seen after the collective has ended, at its deadline at the latest.

Gradients: that of a sum over ranks is the sum of all ranks' gradients, and so for avg; all_gather
and reduce_scatter are each other's, broadcast's is the sum for the root and zeros for others. There
is none of other reductions, and no forward mode.
"""

from __future__ import annotations

from pycoll.jax.collectives import all_gather, all_reduce, broadcast, reduce_scatter

__all__ = ["all_gather", "all_reduce", "broadcast", "reduce_scatter"]
