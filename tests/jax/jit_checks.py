"""What holds of pycoll.jax on any number of ranks; see test_jit.py.

To compile takes most of the time, so each check is few programs, each with much in it.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pycoll
import pycoll.jax as pj
from pycoll import InvalidArgumentError
from pycoll.compress import BF16, Block, Custom, Feedback, PowerSGD, RandomK, Sign, TopK


def values(shape: tuple[int, ...], salt: int) -> Any:
    """Whole numbers, other ones for each salt and in each place."""
    return ((np.arange(np.prod(shape)) * 3 + salt * 6) % 24).astype(np.float32).reshape(shape)


def summed(shape: tuple[int, ...], size: int) -> Any:
    return sum(values(shape, rank) for rank in range(size))


def same(found: Any, wanted: Any) -> None:
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    assert np.asarray(found).tobytes() == np.asarray(wanted).tobytes()


def check_results_are_those_of_the_methods(comm: pycoll.Communicator) -> None:
    """Of any length and type, also of nothing, and of rows that differ between ranks."""
    rank, last = comm.rank, comm.size - 1
    x, part = values((5, 3), rank), values((rank + 1, 2), rank)
    long = jnp.asarray(values((70_001,), rank), jnp.bfloat16)
    rows = [rank + 1 for rank in range(comm.size)]

    @jax.jit
    def program(x: Any, part: Any, long: Any) -> Any:
        return (
            [pj.all_reduce(x, op, comm=comm) for op in ("sum", "avg", "max", "prod")],
            pj.reduce_scatter(x, comm=comm),
            pj.all_gather(x, comm=comm),
            pj.broadcast(x, last, comm=comm),
            pj.all_reduce(x[0, 0], comm=comm),
            pj.all_gather(part, lengths=rows, comm=comm),
            pj.all_reduce(long, comm=comm),
            pj.all_reduce(x[:0], comm=comm),
        )

    reduced, mine, gathered, cast, scalar, joined, summed_long, empty = program(x, part, long)
    for op, one in zip(("sum", "avg", "max", "prod"), reduced, strict=True):
        same(one, comm.all_reduce(x, op))
    same(mine, comm.reduce_scatter(x))
    same(gathered, comm.all_gather(x))
    same(cast, comm.broadcast(x, last))
    same(scalar, comm.all_reduce(x[0, 0]))
    same(joined, comm.all_gather(part, lengths=rows))
    same(summed_long, comm.all_reduce(long))
    same(empty, x[:0])
    # Outside of jit too.
    same(pj.all_reduce(x, comm=comm), comm.all_reduce(x))


def check_collectives_that_do_not_depend_on_each_other_keep_their_order(
    comm: pycoll.Communicator,
) -> None:
    """Different lengths, so that two in another order would be a mismatch."""

    @jax.jit
    def many(x: Any) -> Any:
        return [pj.all_reduce(x[:n], comm=comm) for n in range(1, 13)]

    @jax.jit
    def unused(x: Any) -> Any:
        pj.all_reduce(x[:7] * 3, comm=comm)
        return x

    x, total = values((13,), comm.rank), summed((13,), comm.size)
    for _ in range(5):
        # Programs that depend on each other as little, and are not waited for.
        first, _, second = many(x), unused(x), many(x + 1)
        for n, (one, other) in enumerate(zip(first, second, strict=True), 1):
            assert np.array_equal(one, total[:n])
            assert np.array_equal(other, total[:n] + comm.size)


def check_codecs_give_the_bits_of_the_methods(comm: pycoll.Communicator) -> None:
    rank, size = comm.rank, comm.size
    rows = [rank + 1 for rank in range(size)]
    shapes = {"x": (70, 3), "short": (5,), "long": (40_001,)}
    given = {name: values(shape, rank) / 7 for name, shape in shapes.items()}
    given["half"] = np.asarray(jnp.asarray(given["long"], jnp.bfloat16))
    given["part"] = values((rank + 1, 2), rank) / 7
    int8, sign = Block("int8", block=64), Sign(block=32)

    def calls(module: Any, x: Any, words: Any) -> list[Any]:
        return [
            *(module.all_reduce(x[name], compress=int8, **words) for name in (*shapes, "half")),
            module.all_reduce(x["x"], "avg", compress=sign, **words),
            module.all_reduce(x["half"], "avg", compress=BF16(), **words),
            module.reduce_scatter(x["x"], compress=int8, **words),
            module.all_gather(x["part"], lengths=rows, compress=int8, **words),
            module.broadcast(x["half"], size - 1, compress=int8, **words),
        ]

    found = jax.block_until_ready(jax.jit(lambda x: calls(pj, x, {"comm": comm}))(given))
    for one, wanted in zip(found, calls(comm, given, {}), strict=True):
        same(one, wanted)

    def loss(x: Any) -> Any:
        return (pj.all_reduce(x, compress=sign, comm=comm) * values((5,), rank)).sum()

    # The derivative of rounding counts as 1, and gradients have no codec.
    assert np.array_equal(jax.grad(loss)(given["short"]), summed((5,), size))
    for compress, x, text in (
        (RandomK(0.5, 1), given["x"], "residual is None and compress is RandomK"),
        ("int8", given["x"], "compress is 'int8': expected a codec"),
        (int8, np.arange(3), "x is int32: compress needs float16"),
    ):
        with pytest.raises(InvalidArgumentError, match=text):
            pj.all_reduce(x, compress=compress, comm=comm)
    with pytest.raises(InvalidArgumentError, match="compress needs 'sum' or 'avg'"):
        pj.all_reduce(given["x"], "max", compress=int8, comm=comm)


HALVES = Custom(lambda x: x.astype("f2").tobytes(), lambda b, n: np.frombuffer(b, "f2"), "halves")


def check_residuals_have_the_bits_of_a_feedback(comm: pycoll.Communicator) -> None:
    """Of all codecs, over steps of a compiled loop, between collectives of other lengths."""
    rank, size = comm.rank, comm.size
    x, half = values((6, 5), rank) / 7, jnp.asarray(values((70,), rank) / 7, jnp.bfloat16)
    rows = [rank + 6 for rank in range(size)]
    part = values((rank + 6, 2), rank) / 7
    cases: list[tuple[str, Any, dict[str, Any]]] = [
        *(("all_reduce", x, {"op": "avg", "compress": one}) for one in (Block("int4", 32), Sign())),
        *(("all_reduce", half, {"compress": one}) for one in (Block("int8"), TopK(0.1))),
        *(("all_reduce", x, {"compress": one}) for one in (RandomK(0.2, 3), HALVES)),
        ("all_gather", part, {"lengths": rows, "compress": TopK(0.3)}),
        ("reduce_scatter", values((2 * size, 3), rank) / 7, {"compress": HALVES}),
        ("broadcast", x, {"root": size - 1, "compress": PowerSGD(1)}),
    ]
    zeros = [jnp.zeros(one.shape, jnp.float32) for _, one, _ in cases]

    @jax.jit
    def program(xs: Any, residuals: Any) -> Any:
        def body(residuals: Any, step: Any) -> Any:
            found = []
            for number, ((name, _, words), one) in enumerate(zip(cases, xs, strict=True)):
                given = {**words, "residual": residuals[number], "step": step}
                found.append(getattr(pj, name)(one * (step + 1), comm=comm, **given))
                pj.all_reduce(jnp.ones(number + 1), comm=comm)
            return [rest for _, rest in found], [one for one, _ in found]

        return jax.lax.scan(body, residuals, jnp.arange(3))

    rests, results = jax.block_until_ready(program([one for _, one, _ in cases], zeros))
    for (name, one, words), rest, steps in zip(cases, rests, results, strict=True):
        feedback = Feedback()
        for step in range(3):
            given = np.asarray(one * jnp.asarray(step + 1))
            wanted = getattr(comm, name)(given, feedback=feedback, **words)
            same(steps[step], wanted)
        kept = np.zeros(one.shape, np.float32) if feedback.residual is None else feedback.residual
        same(rest, kept)
        assert name == "broadcast" or kept.any()


def check_codecs_that_leave_values_out(comm: pycoll.Communicator) -> None:
    rank, size = comm.rank, comm.size
    x = values((6, 5), rank) / 7
    for codec in (TopK(0.2), PowerSGD(1), HALVES):
        found = jax.jit(lambda x, codec=codec: pj.all_reduce(x, "avg", compress=codec, comm=comm))
        same(found(x), comm.all_reduce(x, "avg", compress=codec))
    same(pj.all_reduce(x, compress=TopK(0.2), comm=comm), comm.all_reduce(x, compress=TopK(0.2)))

    def loss(x: Any, residual: Any) -> Any:
        found, rest = pj.all_reduce(x, compress=TopK(0.2), residual=residual, comm=comm)
        return (found * values((6, 5), rank)).sum() + (3 * rest).sum()

    # The derivative of rounding counts as 1, gradients have no codec, residuals are constants.
    zeros = jnp.zeros((6, 5))
    by_x, by_residual = jax.jit(jax.grad(loss, (0, 1)))(x, zeros)
    assert np.array_equal(by_x, summed((6, 5), size)) and not by_residual.any()

    words = {"compress": Block("int8"), "comm": comm}
    rows = jax.vmap(lambda x, r: pj.all_reduce(x, residual=r, **words))(x, zeros)
    feedback = Feedback()
    same(rows[0], comm.all_reduce(x, compress=Block("int8"), feedback=feedback))
    same(rows[1], feedback.residual)
    for given, text in (
        ({"residual": zeros}, "compress is None: pass a codec"),
        ({"residual": zeros[0], "compress": TopK(0.2)}, r"residual is float32 of shape \(5,\)"),
        ({"residual": zeros > 0, "compress": TopK(0.2)}, "residual is bool of shape"),
        ({"residual": zeros, "compress": PowerSGD(1)}, "also has to keep its Q"),
        ({"compress": TopK(0.2), "op": "max"}, "compress needs 'sum' or 'avg'"),
    ):
        with pytest.raises(InvalidArgumentError, match=text):
            pj.all_reduce(x, comm=comm, **given)


def check_loops_and_branches(comm: pycoll.Communicator) -> None:
    x, total = values((4,), comm.rank), summed((4,), comm.size)

    @jax.jit
    def program(x: Any, flag: Any) -> Any:
        def body(carry: Any, step: Any) -> Any:
            return pj.all_reduce(carry, "max", comm=comm), pj.all_reduce(x * step, comm=comm)

        def again(_: Any, y: Any) -> Any:
            return pj.all_reduce(y, comm=comm)

        scanned = jax.lax.scan(body, x, jnp.arange(5.0))
        chosen = jax.lax.cond(flag, lambda y: pj.all_reduce(y, comm=comm), lambda y: y, x)
        return scanned, jax.lax.fori_loop(0, 3, again, x), chosen

    (carry, every), repeated, chosen = program(x, True)
    assert np.array_equal(carry, np.max([values((4,), r) for r in range(comm.size)], axis=0))
    assert np.array_equal(every, [total * step for step in range(5)])
    assert np.array_equal(repeated, total * comm.size**2)
    assert np.array_equal(chosen, total)


def check_gradients(comm: pycoll.Communicator) -> None:
    """Of the sum of all ranks' sums of weights times results."""
    size, root = comm.size, comm.size - 1
    shape = (size, 2)
    own, whole = values(shape, comm.rank), values((size * size, 2), comm.rank)
    every = summed(shape, size)

    def looped(x: Any) -> Any:
        def body(carry: Any, _: Any) -> Any:
            return pj.all_reduce(carry, comm=comm), None

        return jax.lax.scan(body, x, None, length=3)[0]

    cases = (
        (lambda x: pj.all_reduce(x, comm=comm), own, every),
        (lambda x: pj.all_reduce(x, "avg", comm=comm), own, every / size),
        (
            lambda x: pj.broadcast(x, root, comm=comm),
            own,
            every if comm.rank == root else every * 0,
        ),
        (lambda x: pj.reduce_scatter(x, comm=comm), own[:1], comm.all_gather(own[:1])),
        (
            lambda x: pj.reduce_scatter(x, "avg", comm=comm),
            own[:1],
            comm.all_gather(own[:1]) / size,
        ),
        (
            lambda x: pj.all_gather(x, comm=comm),
            whole,
            summed((size * size, 2), size).reshape(size, *shape)[comm.rank],
        ),
        (looped, own, every * size**2),
    )

    @jax.jit
    def program(x: Any, weights: Any) -> Any:
        return [
            jax.grad(lambda x, f=f, w=w: (f(x) * w).sum())(x)
            for (f, _, _), w in zip(cases, weights, strict=True)
        ]

    found = program(values(shape, 1), [weight for _, weight, _ in cases])
    for one, (_, _, wanted) in zip(found, cases, strict=True):
        assert np.allclose(one, wanted, rtol=1e-6)
    with pytest.raises(InvalidArgumentError, match="'max' has no gradient: sum and avg have"):
        jax.grad(lambda x: pj.all_reduce(x, "max", comm=comm).sum())(own)


def check_batches(comm: pycoll.Communicator) -> None:
    x = values((4, 6, 2), comm.rank)
    names = ("all_reduce", "all_gather", "reduce_scatter")

    @jax.jit
    def program(x: Any) -> Any:
        return [
            jax.vmap(functools.partial(getattr(pj, name), comm=comm), axis, axis)(x)
            for name in names
            for axis in (0, 2)
        ]

    found = iter(program(x))
    for name in names:
        for axis in (0, 2):
            parts = [getattr(comm, name)(one) for one in np.moveaxis(x, axis, 0)]
            same(next(found), np.stack(parts, axis))


def check_wrong_requests(comm: pycoll.Communicator) -> None:
    x = values((5, 3), comm.rank)
    wrong = {
        "mean": lambda: pj.all_reduce(x, "mean", comm=comm),
        "root is 9": lambda: pj.broadcast(x, 9, comm=comm),
        "band": lambda: pj.all_reduce(x, "band", comm=comm),
        "no axis": lambda: pj.all_gather(1.0, comm=comm),
        r"shape \(\)": lambda: pj.reduce_scatter(1.0, comm=comm),
        "dtype int4": lambda: pj.all_reduce(jnp.zeros(3, jnp.int4), comm=comm),
        f"lengths\\[{comm.rank}\\] is 7": lambda: pj.all_gather(
            x, lengths=[7] * comm.size, comm=comm
        ),
        "lengths has": lambda: pj.all_gather(x, lengths=[5] * (comm.size + 1), comm=comm),
    }
    for text, call in wrong.items():
        with pytest.raises(InvalidArgumentError, match=text):
            call()
    pycoll.register_op("jit_op", lambda a, b: a + b)
    with pytest.raises(InvalidArgumentError, match="'jit_op', which is Python"):
        jax.jit(lambda x: pj.all_reduce(x, "jit_op", comm=comm))(x)


def check_errors_of_a_run_are_told(comm: pycoll.Communicator) -> None:
    part = comm.split(0)
    assert part is not None
    function = jax.jit(lambda x: pj.all_reduce(x, comm=part))
    x = values((3,), comm.rank)
    same(function(x), comm.all_reduce(x))
    comm.barrier()
    part.close()
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"pycoll: all_reduce: .*closed"):
        jax.block_until_ready(function(x))
