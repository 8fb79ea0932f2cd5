"""Every collective against its meaning in NumPy: sizes, shapes, types, ops, algorithms, media."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import oracle
import pytest
from harness import world_in_threads
from hypothesis import given
from hypothesis import strategies as st

from pycoll.algorithms import TABLE
from pycoll.arrays.rows import shares
from pycoll.schedule.collectives import Collective

sizes = st.integers(1, 9)
seeds = st.integers(0, 2**32 - 1)
dtypes = st.sampled_from(oracle.DTYPES)
#: Shapes as rows and trailing dimensions: empty, tiny, odd, and several segments of 64 KiB.
trailings = st.sampled_from([(), (1,), (3,), (2, 5), (0,)])
rows = st.one_of(st.integers(0, 40), st.sampled_from([8191, 8193, 40_000]))
media = st.sampled_from(["shm", "shm", "tcp"])


def algorithm_names(collective: Collective) -> list[str | None]:
    return [None, *TABLE[collective]]


@st.composite
def cases(draw: Any, collective: Collective, reducing: bool = False) -> dict[str, Any]:
    size = draw(sizes)
    dtype = draw(dtypes)
    return {
        "size": size,
        "dtype": dtype,
        "op": draw(st.sampled_from(oracle.ops_for(dtype))) if reducing else "sum",
        "algorithm": draw(st.sampled_from(algorithm_names(collective))),
        "transports": draw(media),
        "root": draw(st.integers(0, size - 1)),
        "rows": draw(rows),
        "trailing": draw(trailings),
        "seed": draw(seeds),
        "out": draw(st.sampled_from(["new", "given", "same"])),
        "async_op": draw(st.booleans()),
    }


def arrays_of(case: dict[str, Any]) -> Any:
    """One array per rank."""
    shape = (case["rows"], *case["trailing"])
    count = int(np.prod(shape))
    flat = oracle.inputs(case["dtype"], case["op"], case["size"], count, case["seed"])
    return flat.reshape(case["size"], *shape)


def call(method: Any, case: dict[str, Any], x: Any, out: Any, *args: Any) -> Any:
    """The blocking or the non-blocking form; the given out must be what comes back."""
    result = method(x, *args, out=out, algorithm=case["algorithm"], async_op=case["async_op"])
    if case["async_op"]:
        result = result.wait()
    if out is not None:
        assert result is out
    return result


def out_for(case: dict[str, Any], x: Any, shape: tuple[int, ...], in_place: bool) -> Any:
    if case["out"] == "new":
        return None
    if case["out"] == "same" and in_place:
        return x
    return np.full(shape, 1, x.dtype)


def check(found: list[Any], expected: list[Any]) -> None:
    for rank, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert oracle.same_bits(one, other), f"rank {rank}: {one!r}, expected {other!r}"


def run(case: dict[str, Any], function: Any) -> list[Any]:
    return world_in_threads(case["size"], case["transports"]).run(function)


@given(cases(Collective.ALL_REDUCE, reducing=True))
def test_all_reduce(case: dict[str, Any]) -> None:
    inputs = arrays_of(case)
    expected = oracle.fold(inputs, case["op"])

    def rank(comm: Any) -> Any:
        x = inputs[comm.rank].copy()
        return call(comm.all_reduce, case, x, out_for(case, x, x.shape, True), case["op"])

    check(run(case, rank), [expected] * case["size"])


@given(cases(Collective.REDUCE, reducing=True))
def test_reduce(case: dict[str, Any]) -> None:
    inputs, root = arrays_of(case), case["root"]
    expected = oracle.fold(inputs, case["op"])

    def rank(comm: Any) -> Any:
        x = inputs[comm.rank].copy()
        out = out_for(case, x, x.shape, True) if comm.rank == root else None
        return call(comm.reduce, case, x, out, root, case["op"])

    found = run(case, rank)
    assert oracle.same_bits(found[root], expected)
    assert all(one is None for r, one in enumerate(found) if r != root)


@given(cases(Collective.REDUCE_SCATTER, reducing=True))
def test_reduce_scatter(case: dict[str, Any]) -> None:
    inputs = arrays_of(case)
    whole = oracle.fold(inputs, case["op"])
    ends = oracle.bounds(case["rows"], case["size"])

    def rank(comm: Any) -> Any:
        x = inputs[comm.rank].copy()
        shape = (ends[comm.rank + 1] - ends[comm.rank], *case["trailing"])
        return call(comm.reduce_scatter, case, x, out_for(case, x, shape, False), case["op"])

    check(run(case, rank), [whole[a:b] for a, b in pairwise(ends)])


@given(cases(Collective.SCAN, reducing=True))
def test_scan(case: dict[str, Any]) -> None:
    case["op"] = "sum" if case["op"] == "avg" else case["op"]
    inputs = arrays_of(case)

    def rank(comm: Any) -> Any:
        x = inputs[comm.rank].copy()
        return call(comm.scan, case, x, out_for(case, x, x.shape, True), case["op"])

    check(run(case, rank), [oracle.fold(inputs[: r + 1], case["op"]) for r in range(case["size"])])


@given(cases(Collective.EXSCAN, reducing=True))
def test_exscan(case: dict[str, Any]) -> None:
    case["op"] = "sum" if case["op"] == "avg" else case["op"]
    inputs = arrays_of(case)
    first = np.full(inputs[0].shape, oracle.identity(case["dtype"], case["op"]), inputs.dtype)

    def rank(comm: Any) -> Any:
        x = inputs[comm.rank].copy()
        return call(comm.exscan, case, x, out_for(case, x, x.shape, True), case["op"])

    rest = [oracle.fold(inputs[:r], case["op"]) for r in range(1, case["size"])]
    check(run(case, rank), [first, *rest])


@given(cases(Collective.BROADCAST))
def test_broadcast(case: dict[str, Any]) -> None:
    inputs, root = arrays_of(case), case["root"]

    def rank(comm: Any) -> Any:
        x = inputs[comm.rank].copy()
        return call(comm.broadcast, case, x, out_for(case, x, x.shape, True), root)

    check(run(case, rank), [inputs[root]] * case["size"])


def ragged(case: dict[str, Any]) -> list[Any]:
    """Arrays whose first dimensions differ."""
    whole = arrays_of(case)
    return [
        whole[r][: case["rows"] - r * 3 if case["seed"] % 3 else None] for r in range(len(whole))
    ]


@given(cases(Collective.ALL_GATHER))
def test_all_gather(case: dict[str, Any]) -> None:
    parts = ragged(case)
    expected = np.concatenate(parts)

    def rank(comm: Any) -> Any:
        x = parts[comm.rank].copy()
        return call(comm.all_gather, case, x, out_for(case, x, expected.shape, False))

    check(run(case, rank), [expected] * case["size"])


@given(cases(Collective.GATHER))
def test_gather(case: dict[str, Any]) -> None:
    parts, root = ragged(case), case["root"]
    expected = np.concatenate(parts)

    def rank(comm: Any) -> Any:
        x = parts[comm.rank].copy()
        out = out_for(case, x, expected.shape, False) if comm.rank == root else None
        return call(comm.gather, case, x, out, root)

    found = run(case, rank)
    assert oracle.same_bits(found[root], expected)
    assert all(one is None for r, one in enumerate(found) if r != root)


@given(cases(Collective.SCATTER))
def test_scatter(case: dict[str, Any]) -> None:
    root = case["root"]
    whole = arrays_of(case)[root]
    ends = oracle.bounds(case["rows"], case["size"])

    def rank(comm: Any) -> Any:
        x = whole.copy() if comm.rank == root else None
        shape = (ends[comm.rank + 1] - ends[comm.rank], *case["trailing"])
        return call(comm.scatter, case, x, out_for(case, whole, shape, False), root)

    check(run(case, rank), [whole[a:b] for a, b in pairwise(ends)])


@given(cases(Collective.ALL_TO_ALL))
def test_all_to_all_in_equal_shares(case: dict[str, Any]) -> None:
    size = case["size"]
    case["rows"] = case["rows"] // size * size
    inputs = arrays_of(case)
    each = case["rows"] // size

    def rank(comm: Any) -> Any:
        x = inputs[comm.rank].copy()
        return call(comm.all_to_all, case, x, out_for(case, x, x.shape, False))

    expected = [inputs[:, r * each : (r + 1) * each].reshape(inputs[0].shape) for r in range(size)]
    check(run(case, rank), expected)


@given(cases(Collective.ALL_TO_ALL))
def test_all_to_all_with_splits(case: dict[str, Any]) -> None:
    size, inputs = case["size"], arrays_of(case)
    rng = np.random.default_rng(case["seed"])
    ends = np.sort(rng.integers(0, case["rows"] + 1, (size, size - 1)), axis=1)
    ends = np.concatenate(
        [np.zeros((size, 1), int), ends, np.full((size, 1), case["rows"])], axis=1
    )
    splits = np.diff(ends)

    def rank(comm: Any) -> Any:
        x = inputs[comm.rank].copy()
        shape = (int(splits[:, comm.rank].sum()), *case["trailing"])
        out = out_for(case, x, shape, False)
        return call(comm.all_to_all, case, x, out, [int(n) for n in splits[comm.rank]])

    check(
        run(case, rank),
        [
            np.concatenate([inputs[s][ends[s, r] : ends[s, r + 1]] for s in range(size)])
            for r in range(size)
        ],
    )


@pytest.mark.parametrize("size", range(1, 10))
@pytest.mark.parametrize("transports", ["shm", "tcp"])
def test_every_algorithm_of_every_collective(size: int, transports: str) -> None:
    """Small and large enough for several tiles, each algorithm, each root."""
    world = world_in_threads(size, transports)
    for collective, table in TABLE.items():
        if collective is Collective.BARRIER:
            for name in algorithm_names(collective):
                world.run(lambda comm, name=name: comm.barrier(algorithm=name))
            continue
        for index, name in enumerate(table):
            for count in (5 * size, 24_000):
                root = (index + count) % size
                _check_one(world, collective, name, size, count // size * size, root)


def _check_one(
    world: Any, collective: Collective, name: str, size: int, count: int, root: int
) -> None:
    inputs = oracle.inputs("int32", "sum", size, count, count)
    total = oracle.fold(inputs, "sum")
    word = collective.name.lower()
    words: dict[str, Any] = {"algorithm": name}
    if word in ("reduce", "broadcast", "gather", "scatter"):
        words["root"] = root
    found = world.run(lambda comm: getattr(comm, word)(inputs[comm.rank].copy(), **words))
    each = count // size
    ranks = range(size)
    expected: dict[str, list[Any]] = {
        "all_reduce": [total] * size,
        "reduce": [total if r == root else None for r in ranks],
        "broadcast": [inputs[root]] * size,
        "reduce_scatter": [total[r * each : (r + 1) * each] for r in ranks],
        "all_gather": [inputs.reshape(-1)] * size,
        "gather": [inputs.reshape(-1) if r == root else None for r in ranks],
        "scatter": [inputs[root][r * each : (r + 1) * each] for r in ranks],
        "all_to_all": [inputs[:, r * each : (r + 1) * each].reshape(-1) for r in ranks],
        "scan": [oracle.fold(inputs[: r + 1], "sum") for r in ranks],
        "exscan": [oracle.fold(inputs[:r], "sum") if r else np.zeros_like(total) for r in ranks],
    }
    for rank, (one, other) in enumerate(zip(found, expected[word], strict=True)):
        same = one is None if other is None else oracle.same_bits(one, other)
        assert same, f"{word} by {name}, {count} elements, root {root}: rank {rank} differs"


@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (0, 1, 0, 1, 2), (0, 0, 0, 1, 1, 2)])
def test_hierarchies_over_several_hosts(hosts: tuple[int, ...]) -> None:
    size = len(hosts)
    world = world_in_threads(size, "shm,tcp", hosts)
    media = world.run(lambda comm: (comm.transport_names(), comm.local_size, comm.hosts))
    assert {names for names, _, _ in media} <= {"shm+tcp", "tcp"}
    assert [local for _, local, _ in media] == [hosts.count(host) for host in hosts]
    for collective, table in TABLE.items():
        if "hierarchical" in table and collective is not Collective.BARRIER:
            for count in (3 * size, 24_000 // size * size):
                _check_one(world, collective, "hierarchical", size, count, size - 1)
    for name in ("hierarchical:ring+tree", "hierarchical:direct+halving_doubling"):
        _check_one(world, Collective.ALL_REDUCE, name, size, 500 * size, 0)
    world.run(lambda comm: comm.barrier(algorithm="hierarchical"))


@given(st.integers(2, 9), seeds, st.sampled_from(["float32", "float16", "bfloat16", "complex64"]))
def test_deterministic_gives_the_fold_in_rank_order(size: int, seed: int, dtype: str) -> None:
    """Values whose sum depends on the order: the result is the left fold, for any algorithm."""
    rng = np.random.default_rng(seed)
    target = oracle.np_dtype(dtype)
    inputs = (rng.standard_normal((size, 70)) * 10.0 ** rng.integers(-3, 4, (size, 70))).astype(
        target
    )
    expected = inputs[0]
    for row in inputs[1:]:
        expected = (
            (expected.astype(np.result_type(target, np.float32)) + row).astype(target)
            if (target.itemsize < 4)
            else expected + row
        )
    names = [n for n, one in TABLE[Collective.ALL_REDUCE].items() if one.rank_ordered]
    world = world_in_threads(size)
    for name in [None, *names]:
        found = world.run(
            lambda comm, name=name: comm.all_reduce(
                inputs[comm.rank], deterministic=True, algorithm=name
            )
        )
        check(found, [expected] * size)


@given(st.integers(1, 9), seeds)
def test_all_ranks_have_the_same_bits(size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    inputs = rng.standard_normal((size, 300)).astype(np.float32)
    world = world_in_threads(size)
    for name in algorithm_names(Collective.ALL_REDUCE):
        found = world.run(
            lambda comm, name=name: comm.all_reduce(inputs[comm.rank], algorithm=name)
        )
        assert all(one.tobytes() == found[0].tobytes() for one in found), name


def test_lengths_save_the_exchange_and_must_be_true() -> None:
    world = world_in_threads(3)
    found = world.run(
        lambda comm: comm.all_gather(np.full(comm.rank, comm.rank), lengths=[0, 1, 2])
    )
    check(found, [np.array([1, 2, 2])] * 3)


def test_shares_differ_by_at_most_one() -> None:
    assert shares(7, 3) == [3, 2, 2]
    assert shares(0, 2) == [0, 0]


@pytest.mark.parametrize("name", TABLE[Collective.ALL_GATHER])
def test_results_that_no_cache_holds(name: str) -> None:
    """They are written past the caches, in lines that are whole but for the first and the last."""
    length = 24 << 20
    whole = np.arange(length // 8 + 1, dtype=np.uint64).view(np.uint8)
    world = world_in_threads(2)

    def gather(comm: Any) -> Any:
        x = whole[comm.rank : comm.rank + length]
        out = np.zeros(2 * length + 3, np.uint8)[3:]
        return comm.all_gather(x, out=out, algorithm=name)

    expected = np.concatenate([whole[:length], whole[1 : length + 1]])
    check(world.run(gather), [expected] * 2)
