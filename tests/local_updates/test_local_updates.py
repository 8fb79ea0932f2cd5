"""LocalUpdates against an oracle bit by bit, its degenerate cases, frameworks, and restarts."""

from __future__ import annotations

import doctest
import pickle
from typing import Any

import numpy as np
import pytest
from harness import world_in_threads
from local_oracle import mean, oracle

import pycoll
from pycoll.local_updates.array_values import ranges
from pycoll.optim import LocalState, LocalUpdates, PostLocal

LR = 2.0**-3
SHAPES = [(3, 4), (), (5,), (2, 2)]
Arrays = list[Any]


def start_of(kind: Any = np.float64) -> Arrays:
    return [np.asarray(np.arange(np.prod(s)).reshape(s) * 8 - 16, kind) for s in SHAPES]


def whole_gradients(rank: int, step: int, params: Arrays) -> Arrays:
    """Whole numbers that differ by element, rank and step, and that 1, 2 and 4 ranks average."""
    return [
        np.asarray((np.arange(p.size).reshape(p.shape) * 7 + rank * 4 + step * 3) % 64 * 4, p.dtype)
        for p in params
    ]


def inner(rank: int, step: int, params: Arrays) -> Arrays:
    gradients = whole_gradients(rank, step, params)
    return [np.asarray(p - g * LR, p.dtype) for p, g in zip(params, gradients, strict=True)]


def curved(rank: int, step: int, params: Arrays) -> Arrays:
    """Inner steps whose values are rounded."""
    return [
        np.asarray(p - np.sin(p + np.float32(rank + step)) * np.float32(0.1), p.dtype)
        for p in params
    ]


def trained(
    comm: Any, updates: LocalUpdates, steps: int, step_of: Any = inner, kind: Any = np.float64
) -> Arrays:
    # Only rank 0 begins at the start; the others take its values.
    params = [one + comm.rank for one in start_of(kind)]
    params, state = updates.begin(params, comm)
    for step in range(1, steps + 1):
        params = step_of(comm.rank, step, params)
        params, state = updates.advance(params, state)
        assert state.step == step
    return params


def same(found: Arrays, wanted: Arrays) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert type(one) is np.ndarray and one.dtype == other.dtype and one.shape == other.shape
        assert one.tobytes() == other.tobytes()


def test_the_example_of_the_docstring() -> None:
    examples = doctest.DocTestParser().get_examples(LocalUpdates.__doc__ or "")

    def run(comm: pycoll.Communicator) -> str:
        scope = {"comm": comm, "np": np, "pycoll": pycoll}
        for example in examples[:-1]:
            exec(example.source, scope)
        return repr(eval(examples[-1].source, scope))

    assert world_in_threads(3).run(run) == [examples[-1].want.rstrip("\n")] * 3


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("every", [1, 2, 5])
def test_local_sgd_has_the_bits_of_the_oracle(size: int, every: int, kind: Any) -> None:
    for step_of in (inner, curved):
        wanted = oracle(start_of(kind), size, 12, step_of, [every])

        def run(comm: pycoll.Communicator, step_of: Any = step_of) -> Arrays:
            return trained(comm, LocalUpdates(every), 12, step_of, kind)

        for found, expected in zip(world_in_threads(size).run(run), wanted, strict=True):
            same(found, expected)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_step_is_synchronous_training(size: int) -> None:
    """With whole gradients and a rate of 2**-3, averages of parameters and of gradients agree."""
    params = start_of()
    for step in range(1, 8):
        every = [whole_gradients(rank, step, params) for rank in range(size)]
        averages = [mean(one) for one in zip(*every, strict=True)]
        params = [np.asarray(p - g * LR) for p, g in zip(params, averages, strict=True)]
    for updates in (
        LocalUpdates(1),
        LocalUpdates(1, outer={"lr": 1.0, "momentum": 0.0}),
        LocalUpdates(PostLocal(7, 3)),
    ):

        def run(comm: pycoll.Communicator, updates: LocalUpdates = updates) -> Arrays:
            if updates.starts_with_gradients:
                return by_gradients(comm, updates, 7)
            return trained(comm, updates, 7)

        for found in world_in_threads(size).run(run):
            same(found, params)


def by_gradients(comm: Any, updates: LocalUpdates, steps: int) -> Arrays:
    params, state = updates.begin([one + comm.rank for one in start_of()], comm)
    for step in range(1, steps + 1):
        gradients = updates.gradients(whole_gradients(comm.rank, step, params), state)
        params = [np.asarray(p - g * LR) for p, g in zip(params, gradients, strict=True)]
        params, state = updates.advance(params, state)
        assert state.synchronized or step > updates.every.start  # type: ignore[union-attr]
    return params


def test_post_local_goes_local_after_its_start() -> None:
    def run(comm: pycoll.Communicator) -> tuple[Arrays, Arrays]:
        updates = LocalUpdates(PostLocal(4, 3))
        at_start = by_gradients(comm, updates, 4)
        return at_start, by_gradients(comm, updates, 12)

    found = world_in_threads(2).run(run)
    same(found[0][0], found[1][0])
    later = oracle(found[0][0], 2, 8, lambda r, t, x: inner(r, t + 4, x), [3])
    for rank in range(2):
        same(found[rank][1], later[rank])


def test_finish_makes_all_ranks_equal_and_is_idempotent() -> None:
    def run(comm: pycoll.Communicator) -> Arrays:
        updates = LocalUpdates(5)
        params, state = updates.begin(start_of(), comm)
        for step in range(1, 8):
            params, state = updates.advance(inner(comm.rank, step, params), state)
        before = params
        params, state = updates.finish(params, state)
        assert state.synchronized and state.begun == 7
        again, after = updates.finish(params, state)
        assert after.begun == 7
        same(again, params)
        same(params, [comm.all_reduce(one, "avg") for one in before])
        for step in range(8, 13):
            params, state = updates.advance(inner(comm.rank, step, params), state)
            assert state.synchronized == (step == 12)
        return params

    first, second = world_in_threads(2).run(run)
    same(first, second)


def test_arguments_are_never_changed() -> None:
    def run(comm: pycoll.Communicator) -> None:
        for outer in (None, {"lr": 0.5, "momentum": 0.5}):
            updates = LocalUpdates(1, outer=outer)
            given = start_of()
            params, state = updates.begin(given, comm)
            same(given, start_of())
            moved = inner(comm.rank, 1, params)
            kept = [one.copy() for one in moved]
            after, later = updates.advance(moved, state)
            same(moved, kept)
            assert state.step == 0 and later.step == 1
            # A program that steps in place changes neither anchors nor what it got before.
            before = [one.copy() for one in after]
            for one in after:
                one[...] += 1.0
            again, _ = updates.advance(after, later)
            if outer is not None:
                anchors = later.anchors
                assert anchors is not None
                same(list(anchors), before)
            assert all(np.isfinite(one).all() for one in again)

    world_in_threads(2).run(run)


def test_structures_and_frameworks_stay_what_they_are() -> None:
    torch = pytest.importorskip("torch", reason="no torch: pip install -r tests/requirements.txt")
    jax = pytest.importorskip("jax", reason="no jax: pip install -r tests/requirements.txt")
    ml_dtypes = pytest.importorskip(
        "ml_dtypes", reason="no ml_dtypes: pip install -r tests/requirements.txt"
    )

    def run(comm: pycoll.Communicator) -> None:
        params = {
            "t": torch.full((2, 3), 4.0, dtype=torch.bfloat16),
            "j": [jax.numpy.full((3,), 4.0), jax.numpy.full((), 4, jax.numpy.float16)],
            "n": (np.full(3, 4, ml_dtypes.bfloat16), np.full((), 4, np.float16)),
            "number": 4.0,
            "none": None,
        }
        for outer in (None, {"lr": 0.5}):
            updates = LocalUpdates(1, outer=outer)
            now, state = updates.begin(params, comm)
            moved = {
                "t": now["t"] + comm.rank * 2,
                "j": [one + comm.rank * 2 for one in now["j"]],
                "n": tuple((one + comm.rank * 2).astype(one.dtype) for one in now["n"]),
                "number": now["number"] + comm.rank * 2,
                "none": None,
            }
            found, state = updates.advance(moved, state)
            wanted = 5.0 if outer is None else 4.5
            assert found["t"].dtype == torch.bfloat16 and found["t"].tolist() == [[wanted] * 3] * 2
            assert all(isinstance(one, jax.Array) for one in found["j"])
            assert [one.dtype for one in found["j"]] == [one.dtype for one in params["j"]]
            assert found["j"][0].tolist() == [wanted] * 3 and float(found["j"][1]) == wanted
            assert [one.dtype for one in found["n"]] == [one.dtype for one in params["n"]]
            assert float(found["n"][0][2]) == float(found["n"][1]) == wanted
            assert found["number"] == wanted and found["none"] is None

    world_in_threads(2).run(run)


def test_what_is_no_number_reaches_all_ranks() -> None:
    def run(comm: pycoll.Communicator) -> Arrays:
        updates = LocalUpdates(1)
        _, state = updates.begin([np.zeros(3)], comm)
        moved = [np.array([1.0, np.nan if comm.rank == 1 else 2.0, np.inf])]
        return updates.advance(moved, state)[0]

    for found in world_in_threads(2).run(run):
        assert found[0][0] == 1 and np.isnan(found[0][1]) and found[0][2] == np.inf


@pytest.mark.parametrize("stopped", range(1, 7))
@pytest.mark.parametrize("outer", [None, {"lr": 0.75, "momentum": 0.5, "nesterov": True}])
def test_a_restart_goes_on_bit_by_bit(stopped: int, outer: Any) -> None:
    updates = LocalUpdates(4, outer=outer)

    def run(comm: pycoll.Communicator) -> tuple[Arrays, Arrays]:
        params, state = updates.begin(start_of(np.float32), comm)
        for step in range(1, stopped + 1):
            params, state = updates.advance(curved(comm.rank, step, params), state)
        saved = pickle.dumps((params, state.state_dict()))
        for step in range(stopped + 1, 11):
            params, state = updates.advance(curved(comm.rank, step, params), state)
        again, loaded = pickle.loads(saved)
        again, state = updates.resume(again, LocalState.load(loaded), comm)
        for step in range(stopped + 1, 11):
            again, state = updates.advance(curved(comm.rank, step, again), state)
        return params, again

    for params, again in world_in_threads(2).run(run):
        same(again, params)


def test_ranks_that_join_take_parameters_and_state_and_the_rest_keep_their_steps() -> None:
    updates = LocalUpdates(3, outer={"lr": 0.5, "momentum": 0.5})

    def run(comm: pycoll.Communicator) -> tuple[Arrays, Any]:
        pair = comm.split(0 if comm.rank > 0 else None)
        params: Any = [np.asarray(one + comm.rank) for one in start_of()]
        if pair is not None:
            params, state = updates.begin(params, pair)
            for step in range(1, 6):
                params, state = updates.advance(inner(comm.rank, step, params), state)
            kept = params
            params, state = updates.resume(params, state, comm)
            same(params, kept)
            pair.close()
        else:
            params, state = updates.begin(params, comm)
        assert (state.step, state.begun, comm.size) == (5, 3, 3)
        params, state = updates.advance(inner(comm.rank, 6, params), state)
        return params, state.state_dict()

    found = world_in_threads(3).run(run)
    for params, state in found[1:]:
        same(params, found[0][0])
        same(state["anchors"], found[0][1]["anchors"])
        same(state["velocities"], found[0][1]["velocities"])
        assert (state["step"], state["progress"]) == (6, found[0][1]["progress"])


@pytest.mark.parametrize("counts", [[1], [1, 1, 1], [10, 1, 1], [1, 1, 10], [0, 0], [5, 1, 4, 2]])
def test_fragments_are_neighbours_and_none_is_empty(counts: list[int]) -> None:
    for fragments in range(1, len(counts) + 1):
        found = ranges(counts, fragments)
        assert [n for one in found for n in one] == list(range(len(counts)))
        assert len(found) == fragments and all(len(one) > 0 for one in found)
    assert ranges([1, 1, 10, 10], 2) == [range(3), range(3, 4)]
