"""Rows that workers keep: what a pull may see of them, in simulation; and the bytes they save."""

from __future__ import annotations

import functools
import threading
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from harness import TIMEOUT_S, succeeded
from simulated_servers import Program, World
from stores import Comm, run_store

from pycoll import InvalidArgumentError, ps
from pycoll.ps.consistency import ASP, BSP, SSP, Backup, Consistency
from pycoll.ps.messages import REPEATED, STEPPED, Kind
from pycoll.ps.values import row_cache, row_repeats
from pycoll.ps.values.id_sets import IdSets
from pycoll.ps.values.row_cache import PULLS_MAX, RowCache
from pycoll.ps.values.row_terms import check_table_terms
from pycoll.ps.values.server_optimizers import SGD, Optimizer
from pycoll.ps.values.store_values import TABLE, StoreValues
from pycoll.types import DType

WORKERS, STEPS = 3, 12


def made(rows: int | str, consistency: Consistency, dim: int = WORKERS) -> RowCache:
    return RowCache(check_table_terms(DType.FLOAT64, None, dim, "zeros", 0), rows, consistency)


def batch(draw: Any, count: int, end: int = 400) -> Any:
    """Different ids of a Zipf trace, in any order."""
    weights = 1 / np.arange(1, end + 1) ** 1.1
    return draw.permutation(np.unique(draw.choice(end, count, p=weights / weights.sum()) * 977))


class Readers:
    """Workers that pull rows, push ones to half of them in a column of their own, and end rounds.

    So a row tells how many pushes of each worker it holds. ``moved``: the bytes of answers.
    """

    def __init__(
        self, seed: int, staleness: int, rows: int | str, optimizer: Optimizer | None
    ) -> None:
        consistency = SSP(staleness)
        self.world = World(seed, consistency, WORKERS, 1, 0, StoreValues())
        self.staleness = staleness
        self.optimizer = optimizer
        self.caches = [made(rows, consistency) if rows else None for _ in range(WORKERS)]
        #: By worker and id the rounds of the pushes that have begun.
        self.begun: Any = defaultdict(functools.partial(defaultdict, list))
        self.moved = self.reads = 0
        for rank in range(WORKERS):
            self.world.start(rank, self.read(rank))
        self.world.run()
        assert self.world.ended == set(range(WORKERS)) and not self.world.failed

    def open(self, rank: int) -> Program:
        ask = functools.partial(self.world.request, rank)
        if rank:
            yield [ask(Kind.LOOKUP, payload=b"ready")]
            return
        terms = check_table_terms(DType.FLOAT64, None, WORKERS, "zeros", 0).to_text().encode()
        if self.optimizer is not None:
            yield [ask(Kind.OPTIMIZE, flags=1, payload=self.optimizer.to_bytes())]
        yield [ask(Kind.LOAD, rule=TABLE | DType.FLOAT64 << 8, payload=terms)]
        yield [ask(Kind.WRITE, payload=b"ready\0yes")]

    def read(self, rank: int) -> Program:
        yield from self.open(rank)
        draw = np.random.default_rng(rank)
        cache = self.caches[rank]
        for clock in range(STEPS):
            ids = batch(draw, 60)
            rows = np.zeros((len(ids), WORKERS))
            lookup = None if cache is None else cache.lookup(ids, clock, rows)
            left = np.flatnonzero(np.ones(len(ids), bool) if lookup is None else ~lookup.hits)
            if left.size:
                asked = self.world.request(rank, Kind.PULL, payload=ids[left].tobytes())
                yield [asked]
                found = np.frombuffer(asked.answer.payload).reshape(-1, WORKERS)
                self.moved += found.nbytes
                rows[left] = found
                if cache is not None and lookup is not None:
                    cache.insert(ids[left], found, asked.answer.round, clock, lookup)
            self.check(rank, clock, ids, rows)
            self.push(rank, clock, ids[::2])
            yield self.world.clock(rank, clock + 1)

    def push(self, rank: int, clock: int, ids: Any) -> None:
        rows = np.zeros((len(ids), WORKERS))
        rows[:, rank] = 1
        cache = self.caches[rank]
        if cache is not None:
            cache.note_push(ids, rows, np.arange(len(ids)))
        payload = ids.tobytes() + rows.tobytes()
        request = self.world.request(rank, Kind.PUSH, payload=payload, round=clock)
        if cache is not None:
            request.on_end = lambda ended: cache.note_answer(ids, ended.answer.flags)
        for one in ids:
            self.begun[rank][int(one)].append(clock)

    def check(self, rank: int, clock: int, ids: Any, rows: Any) -> None:
        """A worker sees its own pushes, and those of others that are older than the staleness."""
        sign = 1 if self.optimizer is None else -1
        for one, row in zip(ids, rows * sign, strict=True):
            for other in range(WORKERS):
                rounds = self.begun[other][int(one)]
                old = sum(turn < clock - self.staleness for turn in rounds)
                least = len(rounds) if other == rank else old
                assert least <= row[other] <= len(rounds), (rank, clock, one, other)
                self.reads += 1


@pytest.mark.parametrize("optimizer", [None, SGD(1.0)], ids=str)
@pytest.mark.parametrize("staleness", [1, 3])
@pytest.mark.parametrize("rows", [64, "hot"])
def test_kept_rows_are_as_fresh_as_the_staleness_in_every_seed(
    rows: int | str, staleness: int, optimizer: Optimizer | None
) -> None:
    hits = 0
    for seed in range(25):
        print(f"seed {seed}")
        readers = Readers(seed, staleness, rows, optimizer)
        hits += sum(one.hits for one in readers.caches if one is not None)
        assert readers.reads > 1000
    assert hits > 0


def test_kept_rows_of_a_zipf_trace_save_bytes() -> None:
    plain, some, more, hot = (Readers(1, 3, rows, None).moved for rows in (0, 32, 256, "hot"))
    assert more < some < 0.95 * plain and more < 0.7 * plain
    assert more < hot < 0.95 * plain


@pytest.mark.parametrize("rows", [64, "hot"])
def test_a_cache_that_forgets_pushes_or_clocks_is_found(rows: int | str) -> None:
    class Deaf(RowCache):
        def note_push(self, ids: Any, rows: Any, turns: Any) -> None:
            return

    class Timeless(RowCache):
        def _oldest(self, clock: int) -> int:
            return -1

    for kind in (Deaf, Timeless):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError):
            patch.setitem(globals(), "RowCache", kind)
            for seed in range(10):
                Readers(seed, 1, rows, None)


# The cache alone


def held(cache: RowCache, clock: int, ids: Any) -> Any:
    """Which ids a worker at this clock finds."""
    ids = np.asarray(ids)
    return cache.lookup(ids, clock, np.empty((len(ids), WORKERS))).hits.tolist()


def store(cache: RowCache, ids: Any, version: int, clock: int) -> None:
    ids = np.asarray(ids)
    lookup = cache.lookup(ids, clock, np.empty((len(ids), WORKERS)))
    cache.insert(ids, np.ones((len(ids), WORKERS)), version, clock, lookup)


@pytest.mark.parametrize(
    ("consistency", "last"), [(BSP(), 5), (Backup(0.5), 5), (SSP(2), 7)], ids=str
)
def test_a_row_is_answered_as_long_as_its_version_may_be_seen(
    consistency: Consistency, last: int
) -> None:
    cache = made(8, consistency)
    store(cache, [3], version=5, clock=5)
    assert held(cache, last, [3, 4]) == [True, False] and held(cache, last + 1, [3]) == [False]
    store(cache, [3], version=4, clock=last)
    assert held(cache, last, [3]) == [True], "an answer that is too old takes no place"


def test_without_staleness_a_row_ends_with_the_round_and_after_some_pulls() -> None:
    cache = made(8, ASP)
    store(cache, [3], version=0, clock=0)
    assert held(cache, 0, [3]) == [True] and held(cache, 1, [3]) == [False]
    store(cache, [3], version=0, clock=1)
    found = [held(cache, 1, [3])[0] for _ in range(PULLS_MAX + 1)]
    assert found == [True] * PULLS_MAX + [False]


def test_pushes_of_this_worker_are_seen_at_once() -> None:
    cache, ids, rows = made(8, SSP(9)), np.array([3]), np.ones((1, WORKERS))
    turns = np.zeros(1, np.int64)
    store(cache, ids, 0, 0)
    cache.note_push(ids, rows, turns)
    assert held(cache, 0, ids) == [False], "no server has told what it does with pushes"
    cache.note_answer(ids, 0)
    store(cache, ids, 0, 0)
    lookup = cache.lookup(ids, 0, rows)
    cache.note_push(ids, np.ones((1, WORKERS)), turns)
    found = np.empty((1, WORKERS))
    assert cache.lookup(ids, 0, found).hits.all() and (found == 2).all()
    # An answer that was asked for ahead of the push may lack it.
    cache.insert(ids, rows, 5, 0, lookup)
    assert cache.lookup(ids, 0, found).hits.all() and (found == 2).all()
    for flags in (REPEATED, STEPPED):
        store(cache, ids, 0, 0)
        cache.note_answer(ids, flags)
        assert held(cache, 0, ids) == [False]
    store(cache, ids, 0, 0)
    cache.note_push(ids, rows, turns)
    assert held(cache, 0, ids) == [False], "an optimizer steps"


def test_rows_end_with_the_round_at_any_clock() -> None:
    cache = made(8, ASP)
    for clock in (1 << 23, (1 << 23) + 1, 1 << 62):
        assert held(cache, clock, [3]) == [False]
        store(cache, [3], version=0, clock=clock)
        assert held(cache, clock, [3]) == [True]


def test_an_answer_that_may_lack_a_push_of_this_worker_is_not_kept() -> None:
    cache, ids, rows = made(8, SSP(9)), np.array([3]), np.ones((1, WORKERS))
    with cache.hold_answers():
        cache.note_push(ids, rows, np.zeros(1, np.int64))
        # Another thread's pull, which is sent ahead of the push.
        lookup = cache.lookup(ids, 0, rows)
        cache.insert(ids, rows, 0, 0, lookup)
        assert held(cache, 0, ids) == [False]
    cache.insert(ids, rows, 0, 0, lookup)
    assert held(cache, 0, ids) == [False]
    store(cache, ids, 0, 0)
    assert held(cache, 0, ids) == [True]


def test_rows_of_a_push_that_failed_or_that_an_optimizer_will_step_are_forgotten() -> None:
    cache, ids, rows = made(8, SSP(9)), np.array([3]), np.ones((1, WORKERS))
    store(cache, ids, 0, 0)
    cache.note_answer(ids, 0)
    cache.note_failure(ids)
    assert held(cache, 0, ids) == [False]
    store(cache, ids, 0, 0)
    cache.step()
    cache.note_answer(ids, 0)
    assert held(cache, 0, ids) == [True], "only a push changes the row"
    cache.note_push(ids, rows, np.zeros(1, np.int64))
    assert held(cache, 0, ids) == [False]


def test_memory_is_bounded_and_rows_that_are_used_most_stay() -> None:
    draw = np.random.default_rng(3)
    cache = made(128, SSP(1000))
    for _ in range(60):
        ids = batch(draw, 200, 100_000)
        lookup = cache.lookup(ids, 0, np.empty((len(ids), WORKERS)))
        left = ids[~lookup.hits]
        cache.insert(left, np.ones((len(left), WORKERS)), 0, 0, lookup)
    facts = cache.counts()
    assert facts["kept"] <= facts["most"] == 128 and facts["bytes"] == 128 * WORKERS * 8
    # The 128 most frequent ids are 0.36 of those of a batch.
    assert facts["hits"] > 0.22 * (facts["hits"] + facts["misses"])
    assert all(held(cache, 0, np.arange(8) * 977)), "the most frequent ids"


# Hot rows


class Trace:
    """A worker alone that pulls batches and ends a round after each; each row holds its id.

    ``share``: of the given ids, those whose rows were here. ``facts``: the counts of the cache.
    """

    def __init__(
        self, rows: int | str, weights: Any, consistency: Consistency, seed: int, *shifts: int
    ) -> None:
        print(f"seed {seed}")
        draw = np.random.default_rng(seed)
        self.cache = RowCache(
            check_table_terms(DType.INT64, None, 1, "zeros", 0), rows, consistency
        )
        ends = np.cumsum(weights) / np.sum(weights)
        self.shares = []
        for turn, shift in enumerate(shifts or (0,)):
            found = 0
            for clock in range(turn * ROUNDS, (turn + 1) * ROUNDS):
                given = np.searchsorted(ends, draw.random(BATCH)) + shift
                ids, counts = np.unique(given, return_counts=True)
                found += int(counts[self.pull(ids, clock)].sum())
            self.shares.append(found / ROUNDS / BATCH)
        self.facts = self.cache.counts()

    def pull(self, ids: Any, clock: int) -> Any:
        return pull(self.cache, ids, clock)


def pull(cache: RowCache, ids: Any, clock: int) -> Any:
    """Pull rows that hold their ids in all columns; return which were here."""
    target = np.full((len(ids), cache._rows.shape[1]), -1, cache._rows.dtype)
    lookup = cache.lookup(ids, clock, target)
    assert (target[lookup.hits] == ids[lookup.hits, None]).all()
    left = ids[~lookup.hits]
    cache.insert(
        left, np.broadcast_to(left[:, None], (len(left), target.shape[1])), clock, clock, lookup
    )
    return lookup.hits


ROUNDS, BATCH, IDS = 100, 1000, 100_000
ZIPF, UNIFORM = 1 / np.arange(1, IDS + 1) ** 1.1, np.ones(IDS)


@pytest.mark.parametrize("seed", range(3))
def test_few_hot_rows_serve_much_of_a_zipf_trace(seed: int) -> None:
    hot, most = (Trace(rows, ZIPF, SSP(3), seed) for rows in ("hot", 1 << 18))
    # The 400 most frequent ids are 0.69 of the trace, and each fourth pull of one is too old.
    assert hot.facts["kept"] < 500 < most.facts["kept"] / 20
    assert hot.shares[0] > 0.42 and hot.shares[0] > 0.85 * most.shares[0]
    assert hot.shares[0] > Trace(256, ZIPF, SSP(3), seed).shares[0]
    assert hot.facts["bytes"] <= 4096 * 8 and hot.facts["fetched"] == hot.facts["misses"]
    # Pulls that an earlier answer could serve are served or counted.
    assert hot.facts["hits"] + hot.facts["repeated"] >= most.facts["hits"]


@pytest.mark.parametrize("seed", range(3))
def test_hardly_a_row_of_a_uniform_trace_is_kept(seed: int) -> None:
    hot, most = (Trace(rows, UNIFORM, SSP(3), seed) for rows in ("hot", 1 << 18))
    assert hot.facts["kept"] < 60 and most.facts["kept"] > 40_000
    assert hot.facts["bytes"] <= 512 * 8 and hot.facts["repeated"] < 0.04 * hot.facts["fetched"]


def test_no_row_is_hot_where_nothing_may_be_pulled_twice() -> None:
    for consistency in (BSP(), Backup(0.5), ASP):
        facts = Trace("hot", ZIPF, consistency, 5).facts
        assert facts["kept"] == facts["repeated"] == facts["hits"] == 0


@pytest.mark.parametrize("consistency", [BSP(), Backup(0.5), ASP], ids=str)
def test_rows_that_are_pulled_often_in_a_round_are_hot(consistency: Consistency) -> None:
    cache, ids = made("hot", consistency), np.arange(10)
    for clock in range(3):
        for _ in range(12):
            pull(cache, ids, clock)
    facts = cache.counts()
    assert facts["kept"] == 10
    # The third pull keeps the rows. Of later rounds only the first pull asks the servers.
    assert facts["misses"] == facts["fetched"] == 10 * (3 + 1 + 1)


def test_other_rows_become_hot_when_the_trace_changes() -> None:
    moved = Trace("hot", ZIPF, SSP(3), 6, 0, 10**6, 2 * 10**6)
    print(moved.shares)
    assert min(moved.shares) > 0.9 * max(moved.shares)
    assert moved.facts["kept"] < 1500 and moved.facts["bytes"] <= 4096 * 8


def test_rows_that_this_worker_steps_are_not_hot() -> None:
    cache, ids, rows = made("hot", SSP(9)), np.arange(20), np.ones((20, WORKERS))
    cache.step()
    for clock in range(30):
        pull(cache, ids, clock)
        assert cache.counts()["kept"] == (0 if clock < 2 else 10)
        cache.note_push(ids[:10], rows[:10], np.arange(10))
    assert held(cache, 29, ids) == [False] * 10 + [True] * 10


def test_many_new_ids_do_not_displace_hot_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_repeats, "_IDS_MAX", 1 << 12)
    cache, ids = made("hot", SSP(3)), np.arange(100) * 977
    found = []
    for clock in range(120):
        new = 1_000_000 + clock * 8000 + np.arange(8000)
        found.append(pull(cache, np.concatenate([ids, new]), clock)[:100].mean())
    # Each fourth pull of a hot row is too old.
    assert np.mean(found[60:]) > 0.65, found
    assert cache.counts()["kept"] <= 100


def test_hot_rows_take_more_slots_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_cache, "_HOT_BYTES_MAX", 5000 * 8)
    monkeypatch.setattr(row_repeats, "_IDS_MAX", 1 << 13)
    trace = Trace("hot", np.ones(20), SSP(100), 7)
    assert trace.facts["bytes"] == 64 * 8 and trace.facts["kept"] == 20
    for count, size in ((1000, 2048), (3000, 4096), (10_000, 4096), (100_000, 4096)):
        for clock in range(ROUNDS, ROUNDS + 8):
            trace.pull(np.arange(count) * 977, clock)
        facts = trace.cache.counts()
        assert facts["bytes"] == size * 8 and facts["kept"] <= 4096 and facts["most"] == 5000
        assert facts["kept"] > min(count, 4096) * 0.8, count
    assert len(trace.cache._repeats._sets) == 1 << 13  # type: ignore[union-attr]


@pytest.mark.parametrize("size", [1, 3, 4, 9, 64])
def test_ids_keep_what_belongs_to_them_when_sets_double(size: int) -> None:
    sets = IdSets(size)
    assert len(sets) == (size if size < 4 else 4 << (size // 4).bit_length() - 1)
    known = []
    for one in range(1000):
        slots = sets.slots(np.array([one]))[0]
        free = slots[sets.ids[slots] < 0]
        if len(free):
            sets.ids[free[0]], sets.stamps[free[0]], sets.scores[free[0]] = one, 3 * one, one % 100
            known.append(one)
    ids = np.array(known)
    for _ in range(3):
        before = sets.find(ids)
        old, new = sets.double()
        moved = dict(zip(old.tolist(), new.tolist(), strict=True))
        slots = sets.find(ids)
        assert slots.tolist() == [moved[one] for one in before.tolist()]
        assert (sets.stamps[slots] == 3 * ids).all() and (sets.scores[slots] == ids % 100).all()
        assert np.count_nonzero(sets.ids >= 0) == len(ids)


# Stores


def test_rounds_have_the_same_bits_with_and_without_kept_rows() -> None:
    def work(store: ps.Store, comm: Comm) -> None:
        plain = store.table("plain", dim=4, init="normal:1")
        kept = store.table("kept", dim=4, init="normal:1", cache_rows=1024)
        hot = store.table("hot", dim=4, init="normal:1", cache_rows="hot")
        store.set_optimizer(ps.SGD(0.3, momentum=0.9))
        draw = np.random.default_rng(comm.rank)
        for _ in range(4):
            for _ in range(3):
                ids = draw.choice(batch(draw, 100), 80)
                expected, found = plain.pull(ids), kept.pull(ids, async_op=True).wait()
                assert found.tobytes() == expected.tobytes() == hot.pull(ids).tobytes()
                rows = draw.standard_normal((len(ids), 4)).astype(np.float32)
                plain.push(ids, rows)
                for one in (kept, hot):
                    one.push(ids, rows)
            store.clock()
        facts = store.stats()["caches"]
        assert set(facts) == {"kept", "hot"}
        assert facts["kept"]["hits"] > facts["kept"]["misses"] / 5 and facts["hot"]["hits"] > 0
        assert "table 'kept': " in store.explain() and "rows are kept here" in store.explain()

    succeeded(run_store(work))


@pytest.mark.parametrize("consistency", ["asp", ps.SSP(4)], ids=str)
def test_a_worker_sees_its_own_pushes_of_kept_rows(consistency: Any) -> None:
    def work(store: ps.Store, comm: Comm) -> None:
        table = store.table("t", dim=2, cache_rows=64)
        ids = np.arange(10)
        for turn in range(6):
            assert (table.pull([*ids, 3]) == turn).all()
            table.push(ids, np.ones((10, 2), np.float32))
        assert table.cache is not None and table.cache.hits >= 40
        store.set_optimizer(ps.SGD(1.0), "t")
        table.push(ids, np.ones((10, 2), np.float32))
        assert (table.pull(ids) == 5).all()
        table.push(ids, np.ones((10, 2), np.float32))
        assert (table.pull(ids) == 4).all() and table.pull([]).shape == (0, 2)

    succeeded(run_store(work, workers=1, consistency=consistency))


@pytest.mark.parametrize("servers", [1, 2])
def test_a_store_finds_the_hot_rows_of_a_table(servers: int) -> None:
    """A Zipf trace is served from few rows, and a uniform one keeps hardly any."""

    # A worker that is three clocks ahead gets rows that are too old in its next round.
    together = threading.Barrier(2)

    def work(store: ps.Store, comm: Comm) -> None:
        tables = [store.table(name, dim=2, cache_rows="hot") for name in ("zipf", "uniform")]
        draw = np.random.default_rng(comm.rank)
        ends = np.cumsum(ZIPF) / ZIPF.sum()
        for _ in range(40):
            for table, ids in zip(
                tables,
                (np.searchsorted(ends, draw.random(BATCH)), draw.integers(0, IDS, BATCH)),
                strict=True,
            ):
                assert (table.pull(ids) == 0).all()
            store.clock()
            together.wait(TIMEOUT_S)
        zipf, uniform = (store.stats()["caches"][one.name] for one in tables)
        assert zipf["kept"] < 500 and zipf["hits"] > 0.1 * (zipf["hits"] + zipf["misses"])
        assert uniform["kept"] < 60 and uniform["hits"] < 0.01 * uniform["misses"]
        text = store.explain()
        for name, one in (("zipf", zipf), ("uniform", uniform)):
            assert (
                f"table {name!r}: {one['kept']} of at most 262144 rows are kept here, and answered "
                f"{one['hits']} of {one['hits'] + one['misses']} pulled rows; hot rows are kept: "
                f"servers sent {one['fetched']} rows, and for {one['repeated']} of these an "
                "earlier answer was new enough"
            ) in text

    succeeded(run_store(work, workers=2, servers=servers, consistency=ps.SSP(3)))


def test_wrong_numbers_of_rows_are_named() -> None:
    def work(store: ps.Store, comm: Comm) -> None:
        for wrong in (-1, True, 1.5, 1 << 31, "warm", None):
            with pytest.raises(InvalidArgumentError, match=f"cache_rows is {wrong!r}: expected"):
                store.table("t", dim=2, cache_rows=wrong)  # type: ignore[arg-type]
        store.table("t", dim=2, cache_rows=8)
        for other in (9, "hot", 0):
            with pytest.raises(InvalidArgumentError, match=f"cache_rows is {other!r} for .*with 8"):
                store.table("t", dim=2, cache_rows=other)

    succeeded(run_store(work, workers=1, servers=1, consistency="asp"))
