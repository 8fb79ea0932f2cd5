"""average_gradients: structures of arrays of any framework, by every policy, and wrong ones."""

from __future__ import annotations

import collections
import doctest
from typing import Any, NamedTuple

import numpy as np
import pytest
from harness import fresh_world, world_in_threads

import pycoll
from pycoll import InvalidArgumentError, MismatchError
from pycoll.gradients.average import _schedulers
from pycoll.gradients.scheduler import TIMED_STEPS
from pycoll.optim import POLICIES, Policy, average_gradients

SMALL = {"bucket_bytes": 9000, "partition_bytes": 4096, "credit_bytes": 8192, "merge_bytes": 600}


class Layer(NamedTuple):
    weight: Any
    bias: Any


def tree_of(rank: int, step: int) -> dict[str, Any]:
    def numbers(count: int, kind: Any = np.float32) -> Any:
        return ((np.arange(count) * 3 + rank * 6 + step) % 24).astype(kind)

    return {
        "layers": [
            Layer(numbers(3000).reshape(60, 50), numbers(50)),
            Layer(numbers(300).reshape(30, 10).T, None),
        ],
        "embedding": collections.OrderedDict(b=numbers(40, np.float64), a=numbers(0)),
        "scale": (numbers(1).reshape(()), 6.0 * rank),
    }


def flat(tree: Any) -> list[Any]:
    one, two = tree["layers"]
    return [one.weight, one.bias, two.weight, *tree["embedding"].values(), *tree["scale"]]


def test_the_example_of_the_docstring() -> None:
    examples = doctest.DocTestParser().get_examples(average_gradients.__doc__ or "")
    assert len(examples) == 2

    def run(comm: pycoll.Communicator) -> str:
        scope = {"comm": comm, "np": np, "pycoll": pycoll}
        exec(examples[0].source, scope)
        return repr(eval(examples[1].source, scope))

    assert world_in_threads(3).run(run) == [examples[1].want.rstrip("\n")] * 3


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_policy_gives_the_averages(size: int) -> None:
    def run(comm: pycoll.Communicator) -> None:
        for policy in (*(Policy(name, **SMALL) for name in POLICIES), "auto", "WFBP-PS"):
            for step in range(TIMED_STEPS + 2):
                found = average_gradients(tree_of(comm.rank, step), comm=comm, policy=policy)
                every = [flat(tree_of(rank, step)) for rank in range(size)]
                for got, *values in zip(flat(found), *every, strict=True):
                    wanted = comm.all_reduce(values[comm.rank], "avg", deterministic=True)
                    assert type(got) is type(wanted) and np.array_equal(got, wanted)
                assert found["layers"][1].bias is None
                assert list(found["embedding"]) == ["b", "a"]
                assert type(found["embedding"]) is collections.OrderedDict

    world_in_threads(size).run(run)


def test_schedulers_are_kept_by_shape_and_go_with_the_communicator() -> None:
    def run(comm: pycoll.Communicator) -> list[int]:
        part = comm.split(0)
        assert part is not None
        for length in (3, 3, 5, 3):
            average_gradients([np.ones(length)], comm=part)
        average_gradients([np.ones(3)], comm=part, op="sum")
        kept = len(_schedulers[part])
        part.close()
        return [kept]

    assert world_in_threads(2).run(run) == [[3]] * 2


def test_arrays_of_other_frameworks_come_back_as_they_are() -> None:
    torch = pytest.importorskip("torch", reason="no torch: pip install -r tests/requirements.txt")
    jax = pytest.importorskip("jax", reason="no jax: pip install -r tests/requirements.txt")

    class Box:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

    jax.tree_util.register_pytree_node(
        Box, lambda box: ((box.inner,), None), lambda _, children: Box(*children)
    )

    def run(comm: pycoll.Communicator) -> None:
        tree = {
            "t": torch.full((2, 3), float(comm.rank), dtype=torch.bfloat16),
            "j": Box([jax.numpy.full((4,), comm.rank + 1.0)]),
        }
        found = average_gradients(tree, comm=comm, op="sum")
        assert found["t"].dtype == torch.bfloat16 and not found["t"].requires_grad
        assert found["t"].tolist() == [[1.0] * 3] * 2
        assert isinstance(found["j"], Box) and isinstance(found["j"].inner[0], jax.Array)
        assert found["j"].inner[0].tolist() == [3.0] * 4
        assert float(average_gradients(jax.numpy.ones(()), comm=comm)) == 1

    world_in_threads(2).run(run)


def test_the_world_is_used_unless_another_is_given() -> None:
    pycoll.init()
    try:
        assert average_gradients(np.arange(3.0)).tolist() == [0, 1, 2]
        assert average_gradients([]) == []
    finally:
        pycoll.finalize()


@pytest.mark.parametrize(
    ("tree", "words", "text"),
    [
        ({"a": "text"}, {}, "a "),
        ({"a": [object()]}, {}, "a/0 "),
        ({1: np.ones(1), "1": np.ones(1)}, {}, "two keys that read '1'"),
        ([np.ones(1)], {"policy": "fast"}, "policy is 'fast'"),
        ([np.ones(1)], {"op": "mean"}, "mean"),
        ([np.ones(1, np.complex64)], {"op": "max"}, "max"),
    ],
)
def test_wrong_requests_are_told(tree: Any, words: dict[str, Any], text: str) -> None:
    def run(comm: pycoll.Communicator) -> None:
        with pytest.raises(InvalidArgumentError, match=text):
            average_gradients(tree, comm=comm, **words)

    world_in_threads(1).run(run)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"a": np.ones(3)}, "the first without a match being .*'b/0'"),
        ({"a": np.ones(3), "b": [np.ones((2, 1))]}, "'b/0', .*2, 1"),
        ({"a": np.ones(3), "c": [np.ones(2)]}, "'c/0'"),
        ({"a": np.ones(3), "b": [np.ones(2, np.float32)]}, "float32"),
    ],
)
def test_ranks_with_other_structures_are_told(other: Any, text: str) -> None:
    def run(comm: pycoll.Communicator) -> None:
        tree = {"a": np.ones(3), "b": [np.ones(2)]}
        with pytest.raises(MismatchError, match=f"of rank 1 differ from .* 0: .*{text}"):
            average_gradients(other if comm.rank == 1 else tree, comm=comm)
        assert average_gradients(tree, comm=comm)["a"].tolist() == [1, 1, 1]

    world = fresh_world(2)
    world.run(run)
    world.close()


def test_a_rank_that_changes_its_structure_is_told_as_any_disagreement() -> None:
    def run(comm: pycoll.Communicator) -> None:
        average_gradients([np.ones(3)], comm=comm)
        with pytest.raises(MismatchError, match="rank 1 called"):
            average_gradients([np.ones(3 + comm.rank)], comm=comm)

    world = fresh_world(2)
    world.run(run)
    world.close()
