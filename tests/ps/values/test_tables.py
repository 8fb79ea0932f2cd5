"""Tables of rows as values of a shard: against dictionaries, bit for bit, and in simulation."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from simulated_servers import Program, World

import pycoll
from pycoll.arrays.hashes import hashes
from pycoll.ps.consistency import ASP, BSP, Consistency
from pycoll.ps.messages import ENDS_ROUND, PART_BYTES_MAX, Kind
from pycoll.ps.opening import check_terms
from pycoll.ps.shard_arrays import ADD, ArrayValues
from pycoll.ps.values.row_index import HotIds, RowIndex, shards_of
from pycoll.ps.values.row_terms import TableTerms, check_table_terms, first_rows
from pycoll.ps.values.server_optimizers import SGD, Adagrad, Adam, Optimizer
from pycoll.ps.values.store_values import TABLE, StoreValues
from pycoll.ps.values.table_values import TableValue, TableValues, sum_rows
from pycoll.types import DType

DIM = 8
RULE = TABLE | DType.FLOAT32 << 8
VALUES = TableValues()
#: Seeds of a store of tables, of each of which one server is killed.
TABLE_SEEDS = 50


def table(rows: int | None = None, init: str = "normal:0.1", dtype: Any = DType.FLOAT32) -> Any:
    terms = check_table_terms(dtype, rows, DIM, init, 7)
    return VALUES.load(RULE, terms.to_text().encode())


def push(ids: Any, rows: Any) -> bytes:
    return np.asarray(ids, np.int64).tobytes() + np.asarray(rows).tobytes()


def asked(value: TableValue, ids: Any) -> Any:
    found = VALUES.read(RULE, value, np.asarray(ids, np.int64).tobytes())
    return found.view(np.float32).reshape(-1, value.terms.dim)


def distinct(draw: Any, count: int, end: int = 1 << 62) -> Any:
    return np.unique(draw.integers(0, end, count))


# Places and first values


def test_places_are_those_of_a_dictionary() -> None:
    draw = np.random.default_rng(1)
    index, known = RowIndex(), dict[int, int]()
    for count, end in ((5, 20), (3000, 1 << 62), (40_000, 100_000), (1000, 2000)):
        ids = distinct(draw, count, end)
        expected = np.array([known.get(int(one), -1) for one in ids])
        assert (index.find(ids) == expected).all()
        new = draw.permutation(ids[expected < 0])
        places = index.add(new)
        known |= {int(one): int(place) for one, place in zip(new, places, strict=True)}
    assert index.count == len(known) and sorted(known.values()) == list(range(len(known)))
    assert (index.find(index.ids) == np.arange(index.count)).all()
    assert index.find(np.empty(0, np.int64)).size == 0


def test_rows_are_spread_evenly_whatever_their_ids_are() -> None:
    for ids in (np.arange(200_000), np.arange(200_000) * 4096, np.arange(200_000) ** 2):
        for shards in (2, 3, 8):
            counts = np.bincount(shards_of(ids, shards), minlength=shards)
            part_of_rows = PART_BYTES_MAX // 256
            assert counts.max() <= len(ids) / shards + part_of_rows
            assert counts.max() <= 1.03 * len(ids) / shards


def test_each_server_holds_as_many_rows_as_others() -> None:
    ids = np.arange(100_000)
    for servers in (2, 3, 4, 7):
        for shards in range(servers, 5 * servers + 1):
            size = servers + 1
            ranks = range(1, size)
            if shards % servers:
                good = shards // servers * servers
                text = f"shards is {shards}: .* multiple of the {servers} .* {good} or "
                with pytest.raises(pycoll.InvalidArgumentError, match=text):
                    check_terms(ranks, 0, "bsp", shards, size)
                continue
            view = check_terms(ranks, 0, "bsp", shards, size).first_view(size)
            heads = np.array([chain[0] for chain in view.chains])
            counts = np.bincount(heads[shards_of(ids, shards)], minlength=size)[1:]
            assert counts.max() <= 1.1 * len(ids) / servers, (servers, shards, counts)
    with pytest.raises(pycoll.InvalidArgumentError, match=r"shards is 1024: .*; pass 1023$"):
        check_terms(range(1, 4), 0, "bsp", 1024, 4)


def test_first_rows_depend_on_seed_and_id_alone() -> None:
    terms = check_table_terms(DType.FLOAT32, None, 64, "normal:0.5", 3)
    ids = np.arange(3000) * 7919
    rows = first_rows(terms, ids)
    assert abs(rows.mean()) < 0.01 and abs(rows.std() - 0.5) < 0.01 and abs(rows).max() < 3
    order = np.random.default_rng(2).permutation(3000)
    assert first_rows(terms, ids[order]).tobytes() == rows[order].tobytes()
    assert (first_rows(terms._replace(seed=4), ids) != rows).mean() > 0.99
    even = first_rows(terms._replace(init="uniform:2.0"), ids)
    assert abs(even).max() <= 2 and abs(even.std() - 2 / 3**0.5) < 0.02
    assert len(np.unique(even)) > 0.9 * even.size
    assert not first_rows(terms._replace(init="zeros"), ids).any()
    # The bits are a promise to restarts and to other machines.
    found = hashlib.sha256(rows.tobytes() + even.tobytes()).hexdigest()[:16]
    assert found == FIRST_BITS


FIRST_BITS = "721a1359a3f1c7a3"


# Sums


@pytest.mark.parametrize("dim", [1, DIM])
@pytest.mark.parametrize("distinct_ids", [1, 50, 10_000])
def test_repeated_ids_are_summed_in_their_order(distinct_ids: int, dim: int) -> None:
    draw = np.random.default_rng(5)
    ids = draw.integers(0, distinct_ids, 4000)
    rows = draw.standard_normal((4000, dim)).astype(np.float32)
    expected: dict[int, Any] = {}
    for one, row in zip(ids, rows, strict=True):
        expected[int(one)] = expected[int(one)] + row if int(one) in expected else row
    found_ids, found = sum_rows(ids, rows)
    assert found_ids.tolist() == list(expected)
    for one, row in zip(found_ids, found, strict=True):
        assert row.tobytes() == expected[int(one)].tobytes()


def test_pushes_add_to_rows_and_pulls_store_nothing() -> None:
    draw = np.random.default_rng(6)
    value, known = table(), dict[int, Any]()
    for _ in range(20):
        ids = distinct(draw, 200, 1000)
        before = value.index.count
        found = asked(value, ids)
        assert value.index.count == before
        first = first_rows(value.terms, ids)
        for one, row, begun in zip(ids, found, first, strict=True):
            assert row.tobytes() == known.get(int(one), begun).tobytes()
        rows = draw.standard_normal((len(ids), DIM)).astype(np.float32)
        VALUES.apply(RULE, value, [push(ids, rows)], 1)
        for one, row, begun in zip(ids, rows, first, strict=True):
            known[int(one)] = known.get(int(one), begun) + row
    assert value.index.count == len(known)


@pytest.mark.parametrize("optimizer", [SGD(0.1), SGD(0.1, 0.9), Adagrad(0.1), Adam(0.1)], ids=str)
def test_each_row_steps_like_an_array_of_its_own(optimizer: Optimizer) -> None:
    draw = np.random.default_rng(8)
    value, arrays = table(), dict[int, Any]()
    plain, rule = ArrayValues(), ADD | DType.FLOAT32 << 8
    VALUES.set_optimizer(RULE, value, optimizer)
    for _ in range(15):
        ids = distinct(draw, 10, 40)
        rows = draw.standard_normal((len(ids), DIM)).astype(np.float32)
        VALUES.apply(RULE, value, [push(ids, rows)], 1)
        for one, row in zip(ids, rows, strict=True):
            if int(one) not in arrays:
                begun = first_rows(value.terms, np.array([one]))
                made = plain.load(rule, begun.view(np.uint8).reshape(-1))
                arrays[int(one)] = plain.set_optimizer(rule, made, optimizer)
            plain.apply(rule, arrays[int(one)], [row.view(np.uint8)], 1)
    ids = sorted(arrays)
    assert asked(value, ids).tobytes() == b"".join(arrays[one].array.tobytes() for one in ids)


def test_a_round_steps_each_row_once_by_the_mean_over_workers() -> None:
    value = table(init="zeros")
    VALUES.set_optimizer(RULE, value, SGD(1.0))
    ones = np.ones((3, DIM), np.float32)
    pushes = [push([1, 2, 3], ones), push([2, 3, 9], ones * 2), push([3], ones[:1] * 5)]
    VALUES.apply(RULE, value, pushes, 4)
    expected = [-0.25, -0.75, -2.0, -0.5, 0]
    assert asked(value, [1, 2, 3, 9, 10])[:, 0].tolist() == expected


# What other servers receive


@pytest.mark.parametrize("optimizer", [None, SGD(0.1, momentum=0.5), Adam(0.1)], ids=str)
def test_pieces_fit_messages_and_make_the_same_table(optimizer: Any) -> None:
    draw = np.random.default_rng(9)
    value = table()
    if optimizer is not None:
        VALUES.set_optimizer(RULE, value, optimizer)
    ids = distinct(draw, 150_000)
    rows = draw.standard_normal((len(ids), DIM)).astype(np.float32)
    VALUES.apply(RULE, value, [push(ids, rows)], 1)
    pieces = VALUES.pieces(value)
    assert max(memoryview(one).nbytes for one in pieces) <= PART_BYTES_MAX and len(pieces) >= 4
    # The pieces stay as they are while pushes go on.
    before = asked(value, ids[:100])
    VALUES.apply(RULE, value, [push(ids, rows)], 1)
    other = VALUES.join(RULE, [bytes(one) for one in pieces])
    assert asked(other, ids[:100]).tobytes() == before.tobytes()
    del pieces
    VALUES.apply(RULE, other, [push(ids, rows)], 1)
    assert asked(other, ids[:9000]).tobytes() == asked(value, ids[:9000]).tobytes()
    last = [bytes(one) for one in VALUES.pieces(other)]
    for wrong in ([], last[:1], [*last, b"x"], last[:-1], [last[0], *last[2:]]):
        with pytest.raises(ValueError):
            VALUES.join(RULE, wrong)


def test_wrong_pushes_and_pulls_are_refused() -> None:
    value = table(rows=100)
    row = np.ones((1, DIM), np.float32)
    for payload in (
        *(None, b"", push([1], row)[:-1], push([-1], row), push([100], row)),
        *(push([2, -1], row.repeat(2, 0)), push([100, 2], row.repeat(2, 0))),
    ):
        assert VALUES.refusal(RULE, value, payload) != ""
    assert VALUES.refusal(RULE, value, push([0, 99], row.repeat(2, 0))) == ""
    for wrong in ([-1], [100], [2, -1, 5], [100, 5]):
        with pytest.raises(ValueError, match="ids that are not all from 0 to 99"):
            asked(value, wrong)
    with pytest.raises(ValueError, match="without ids"):
        VALUES.read(RULE, value, None)
    terms = check_table_terms(DType.FLOAT32, None, 1 << 19, "zeros", 0)
    wide = VALUES.load(RULE, terms.to_text().encode())
    with pytest.raises(ValueError, match="a pull of 3 rows"):
        asked(wide, [1, 2, 3])


@pytest.mark.parametrize(
    ("terms", "text"),
    [
        ((DType.FLOAT16, None, 4, "zeros", 0), "dtype 9 of a table: expected one of int32"),
        ((DType.FLOAT32, 0, 4, "zeros", 0), "rows is 0: expected a whole number from 1"),
        ((DType.FLOAT32, True, 4, "zeros", 0), "rows is True"),
        ((DType.FLOAT32, None, 0, "zeros", 0), "dim is 0: expected a whole number from 1"),
        ((DType.FLOAT32, None, 1 << 20, "zeros", 0), "dim is 1048576: .* to 1048574"),
        ((DType.FLOAT32, None, 4, "ones", 0), "init is 'ones': expected \"zeros\""),
        ((DType.FLOAT32, None, 4, "normal", 0), "init is 'normal'"),
        ((DType.FLOAT32, None, 4, "normal:x", 0), "init is 'normal:x'"),
        ((DType.FLOAT32, None, 4, "zeros:1", 0), "init is 'zeros:1'"),
        ((DType.FLOAT32, None, 4, "uniform:-1", 0), "init is 'uniform:-1'"),
        ((DType.INT64, None, 4, "uniform:1", 0), "for a table of whole numbers"),
        ((DType.FLOAT32, None, 4, "zeros", -1), "seed is -1"),
    ],
)
def test_wrong_terms_are_named(terms: Any, text: str) -> None:
    with pytest.raises(pycoll.InvalidArgumentError, match=text):
        check_table_terms(*terms)


def test_terms_are_read_back() -> None:
    for terms in (
        check_table_terms(DType.FLOAT32, None, 64, "normal:0.01", 5),
        check_table_terms(DType.INT64, 10, 1, "zeros", 0),
    ):
        assert TableTerms.from_text(terms.to_text()) == terms
        assert terms.rows_of_message * (8 + terms.row_bytes) <= PART_BYTES_MAX
    with pytest.raises(ValueError):
        TableTerms.from_text("{}")


# Load


def zipf(draw: Any, count: int, end: int = 100_000) -> Any:
    weights = 1 / np.arange(1, end + 1) ** 1.1
    ranks = draw.choice(end, count, p=weights / weights.sum())
    return hashes(ranks) >> np.uint64(20)


def test_the_most_frequent_ids_are_found_in_bounded_memory() -> None:
    draw = np.random.default_rng(10)
    trace = zipf(draw, 300_000).astype(np.int64)
    hot = HotIds(256)
    for batch in np.split(trace, 100):
        hot.note(batch)
    ids, counts = np.unique(trace, return_counts=True)
    order = np.argsort(-counts)[:10]
    found = dict(hot.top(10))
    assert set(found) >= set(ids[order[:8]].tolist()), "the ranks 9 and 10 may be close"
    for one, count in zip(ids[order[:8]], counts[order[:8]], strict=True):
        assert count - len(trace) / 256 <= found[int(one)] <= count
    assert hot.seen == len(trace) and len(hot.top(1 << 20)) < 2 * 256


# On a simulated network


def stepping(world: World, rank: int, steps: int, optimizer: Optimizer | None) -> Program:
    """Push ones to rows of a table on each shard, and end the rounds."""
    shards = range(len(world.clients[rank].view.chains))
    if rank == 0:
        terms = check_table_terms(DType.FLOAT64, None, 2, "uniform:1", 1).to_text().encode()
        if optimizer is not None:
            form = optimizer.to_bytes()
            yield [
                world.request(rank, Kind.OPTIMIZE, shard=one, flags=1, payload=form)
                for one in shards
            ]
        rule = TABLE | DType.FLOAT64 << 8
        yield [
            world.request(rank, Kind.LOAD, shard=one, rule=rule, payload=terms) for one in shards
        ]
        yield [world.request(rank, Kind.WRITE, shard=0, payload=b"ready\0yes")]
    else:
        yield [world.request(rank, Kind.LOOKUP, shard=0, payload=b"ready")]
    for step in range(steps):
        ids = np.arange(rank, rank + 3 + step)
        rows = np.full((len(ids), 2), 0.1 + rank + step)
        for one in shards:
            world.request(
                rank, Kind.PUSH, shard=one, payload=push(ids, rows), round=step, flags=ENDS_ROUND
            )
        yield [world.request(rank, Kind.PULL, shard=one, payload=ids.tobytes()) for one in shards]


@pytest.mark.parametrize("consistency", [ASP, BSP()], ids=str)
@pytest.mark.parametrize("optimizer", [None, SGD(0.1, momentum=0.9), Adam(0.1)], ids=str)
def test_replicas_of_tables_have_the_same_bits_when_servers_die(
    consistency: Consistency, optimizer: Optimizer | None
) -> None:
    results = set()
    for seed in range(TABLE_SEEDS):
        world = World(seed, consistency, 3, 3, 1, StoreValues())
        for rank in world.clients:
            world.start(rank, stepping(world, rank, 4, optimizer))
        victim = world.random.choice(list(world.servers))
        world.faults[world.random.randint(1, 200)] = lambda w=world, v=victim: w.kill(v)
        world.run()
        assert world.ended == {0, 1, 2} and world.failed == {}, seed
        states: dict[int, set[tuple[bytes, ...]]] = {}
        for rank, server in world.servers.items():
            for number, replica in server.replicas.items() if rank in world.alive else ():
                pieces = replica.shard.arithmetic.pieces(replica.shard.parts[0, 0].value)
                states.setdefault(number, set()).add(tuple(bytes(one) for one in pieces))
                rows = asked_all(replica.shard.parts[0, 0].value)
                results.add(rows.tobytes())
        assert set(states) == {0, 1, 2} and all(len(one) == 1 for one in states.values()), seed
        if optimizer is None and consistency is ASP:
            assert_sums(rows, 3, 4)
    if consistency == BSP():
        assert len(results) == 1, "a round is folded in rank order, whatever the seed is"


def asked_all(value: TableValue) -> Any:
    found = VALUES.read(RULE, value, np.arange(9).tobytes())
    return found.view(np.float64).reshape(9, 2)


def assert_sums(rows: Any, workers: int, steps: int) -> None:
    """Every push is applied once, up to the rounding of another order."""
    expected = first_rows(check_table_terms(DType.FLOAT64, None, 2, "uniform:1", 1), np.arange(9))
    for rank in range(workers):
        for step in range(steps):
            expected[rank : rank + 3 + step] += 0.1 + rank + step
    np.testing.assert_allclose(rows, expected, 1e-12)
