"""Lowering: bytes, which transfers share a row, where values live; and the proof of all plans."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable

import pytest
from processor import calls_of
from samples import (
    all_samples,
    barrier,
    binomial,
    binomial_reduce,
    chain,
    doubling,
    exscan,
    make,
    pairwise,
    part_of,
    ring,
    rows_of,
    schedule_text,
    star,
    tree,
)
from simulate import PRIME, World, in_order, plans_are_right, run_schedule, sources

from pycoll import _core
from pycoll.algorithms.binomial import gather
from pycoll.plan.lowering import add_acknowledgements, lower, lower_all
from pycoll.plan.plan_format import (
    FINAL,
    FLUSH,
    TOKEN_ROW,
    ZERO_COPY,
    Buffer,
    Plan,
    pack,
    unpack,
)
from pycoll.plan.verifier import verify_plans
from pycoll.schedule.collectives import Collective
from pycoll.schedule.language import REDUCE, TOKEN, Schedule, ScheduleError, Transfer
from pycoll.schedule.proof import hears_all

SAMPLES = [pair for size in (1, 2, 3, 4, 5, 8, 13) for pair in all_samples(size)]
each_sample = pytest.mark.parametrize("name, schedule", SAMPLES, ids=[name for name, _ in SAMPLES])


@each_sample
def test_plans_are_proved_and_right(name: str, schedule: Schedule) -> None:
    plans = lower_all(schedule)
    verify_plans(plans)
    assert plans_are_right(plans, seed=1, runs=4), name


@each_sample
def test_plans_are_proved_with_uneven_chunks(name: str, schedule: Schedule) -> None:
    plans = lower_all(schedule)
    for seed in range(3):
        rng = random.Random(seed)
        tiles = [rng.randint(1, 3) for _ in range(schedule.data_chunks)]
        verify_plans(plans, tiles_of=tiles.__getitem__)


@each_sample
def test_lanes_that_begin_by_sending_come_first(name: str, schedule: Schedule) -> None:
    for image in lower_all(schedule):
        first: dict[int, bool] = {}
        for row in unpack(image).rows:
            first.setdefault(row.lane, bool(row.recv))
        waits = [first[lane] for lane in sorted(first)]
        assert waits == sorted(waits), name


@each_sample
def test_plans_fold_in_the_order_of_the_schedule(name: str, schedule: Schedule) -> None:
    held = run_schedule(schedule, in_order)
    world = World(lower_all(schedule), random.Random(2), in_order, factor=1, tiles=1)
    world.run()
    for rank in range(schedule.size):
        for chunk in range(schedule.data_chunks):
            if sources(schedule, rank, chunk // schedule.parts):
                assert world.outputs[rank][chunk, 0] == held[rank][chunk], (name, rank, chunk)


@each_sample
def test_a_rank_lowers_alike_from_the_whole_and_from_its_part(
    name: str, schedule: Schedule
) -> None:
    whole = add_acknowledgements(schedule)
    plans = lower_all(whole)
    for rank, plan in enumerate(plans):
        assert lower(whole, rank) == plan, name
        assert lower(add_acknowledgements(part_of(schedule, rank)), rank) == plan, name


@each_sample
def test_acknowledged_lets_nobody_leave_early(name: str, schedule: Schedule) -> None:
    whole = add_acknowledgements(schedule)
    assert hears_all(whole), name
    assert (whole is schedule) or not hears_all(schedule) or schedule.size == 1 or "scan" in name
    plans = lower_all(whole)
    verify_plans(plans, everyone_heard=True)
    assert plans_are_right(plans, seed=3, runs=3, everyone_heard=True)


def test_the_bytes_are_those_of_the_format() -> None:
    image = lower(ring(2), 1)
    assert image[:8] == b"PCPL\x03\x00\x00\x01"
    words = struct.unpack_from("<9I", image, 8)
    assert words == (2, 1, 0, 1, 2, 0, 0, 2, 3)
    assert image[44:60] == bytes(16)
    checksum = int.from_bytes(image[60:64], "little")
    assert checksum == zlib.crc32(image[:60] + bytes(4) + image[64:])
    assert image[64:80] == struct.pack("<IHBBIHBB", 0, 0, 1, 0, 0, 0, 0, 0)
    none = (0xFFFF,)
    rows = [struct.unpack_from("<I8BII16H12x", image, 80 + 64 * i) for i in range(3)]
    assert len(image) == 80 + 64 * 3
    # chunk, lane, recvs, sends, flags, source, position, target, carry, slots, recv, send
    assert rows[0] == (1, 0, 0, 1, 4, 1, 0, 0, 0, 1, 0, *none * 8, 0, *none * 7)
    assert rows[1] == (0, 0, 1, 1, 5, 1, 1, 2, 0, 0, 0, 1, *none * 7, 0, *none * 7)
    assert rows[2] == (1, 0, 1, 0, 10, 0, 0, 2, 0, 0, 1, 1, *none * 15)


def test_packing_what_was_read_gives_the_same_bytes() -> None:
    for _, schedule in SAMPLES:
        for image in lower_all(schedule):
            assert pack(unpack(image)) == image


def test_every_damaged_byte_is_noticed() -> None:
    image = lower(tree(5), 1)
    for place in range(len(image)):
        damaged = bytearray(image)
        damaged[place] ^= 0x40
        with pytest.raises(ScheduleError, match="malformed plan"):
            unpack(bytes(damaged))
    with pytest.raises(ScheduleError, match="at least 64 bytes"):
        unpack(image[:63])


def test_receive_reduce_send_is_one_row_and_sums_on_the_way_stay_nowhere() -> None:
    rows = rows_of(ring(5), 2)
    assert len(rows) == 2 * 5 - 1
    for row in rows[1:4]:
        assert (row.source, row.target, len(row.recv), len(row.send)) == (Buffer.INPUT, 0, 1, 1)
    assert (
        rows[4].flags == FINAL | ZERO_COPY
        and rows[4].target == Buffer.OUTPUT
        and len(rows[4].send) == 1
    )
    for row in rows[5:]:
        assert (row.source, row.target, len(row.recv)) == (Buffer.NONE, Buffer.OUTPUT, 1)
    assert unpack(lower(ring(5), 2)).scratch_slots == 0


def test_lanes_without_common_values_stay_apart() -> None:
    two = [*tree(7).transfers, *(t._replace(chunk=1) for t in tree(7, lane=2).transfers)]
    both = make(Collective.ALL_REDUCE, 7, two, parts=2)
    plan = unpack(lower(both, 1))
    assert plan.lane_count == 4
    assert {channel.number for channel in plan.channels} == {0, 1, 2, 3}
    verify_plans(lower_all(both))


def test_scratch_slots_are_used_again() -> None:
    plan = unpack(lower(binomial_reduce(16, 0, parts=2), 8))
    assert [row.target for row in plan.rows] == [Buffer.SCRATCH] * 4 + [Buffer.NONE] * 2
    assert plan.scratch_slots == 2, "a sum takes the place of the one that it continues"
    plan = unpack(lower(binomial_reduce(16, 0, parts=2), 0))
    assert plan.scratch_slots == 0, "the root has an output to keep them in"


def test_own_blocks_are_copied_by_the_row_that_sends_them() -> None:
    gather = make(
        Collective.ALL_GATHER,
        2,
        [Transfer(0, 0, 0, 1), Transfer(0, 1, 1, 0)],
    )
    row = rows_of(gather, 0)[0]
    assert (row.source, row.target, row.target_slot, len(row.send)) == (1, 2, 0, 1)
    lonely = rows_of(make(Collective.ALL_REDUCE, 1, (), parts=2), 0)
    assert [(row.source, row.target, row.source_slot, row.flags) for row in lonely] == [
        (1, 2, 0, 0),
        (1, 2, 1, 0),
    ]


def test_one_value_to_several_peers_is_one_row() -> None:
    rows = rows_of(star(Collective.SCATTER, 4, 0), 0)
    assert [len(row.send) for row in rows] == [1, 1, 1, 0], "different blocks, different rows"
    flat = make(Collective.BROADCAST, 12, [Transfer(0, 0, 0, r) for r in range(1, 12)])
    assert [len(row.send) for row in rows_of(flat, 0)] == [8, 3]
    assert len(rows_of(binomial(8, 0), 1)) == 1, "received and passed on"


def test_tokens_share_rows_step_by_step() -> None:
    plan = unpack(lower(barrier(8), 3))
    assert [(len(row.recv), len(row.send)) for row in plan.rows] == [(0, 1), (1, 1), (1, 1), (1, 0)]
    assert all(row.chunk == TOKEN_ROW for row in plan.rows)


def test_in_place_writes_wait_for_memory_that_was_sent() -> None:
    rows = rows_of(ring(4), 0)
    flushed = [row for row in rows if row.flags & FLUSH]
    assert [row.target_slot for row in flushed] == [0], "the chunk that rank 0 sent first"
    assert not any(row.flags & FLUSH for row in rows_of(pairwise(4), 0))


def test_final_is_where_a_sum_is_complete() -> None:
    for rank in range(8):
        flags = [row.flags & FINAL for row in rows_of(doubling(8), rank) if len(row.recv)]
        assert flags == [0, 0, FINAL]
    assert not any(row.flags & FINAL for rank in range(5) for row in rows_of(exscan(5), rank))


def test_exscan_leaves_rank_0_alone() -> None:
    assert all(row.target == Buffer.NONE for row in rows_of(exscan(4), 0))


def test_a_value_that_outlives_its_place_moves_to_scratch() -> None:
    """Rank 1 keeps its input in a temporary while the output gets something else for a while."""
    kept = make(
        Collective.ALL_REDUCE,
        2,
        [
            Transfer(0, 0, 1, 1, into=1),
            Transfer(1, 0, 0, 1),
            Transfer(2, 0, 1, 1, into=2),
            Transfer(3, 1, 1, 0, into=1),
            Transfer(4, 1, 0, 1, REDUCE, into=2, before=False),
            Transfer(5, 2, 1, 1, into=0),
            Transfer(6, 0, 1, 0),
        ],
        temporaries=(0, 0),
    )
    plans = lower_all(kept)
    verify_plans(plans)
    assert plans_are_right(plans, seed=5, runs=6)
    first = unpack(plans[1]).rows[0]
    assert first.target != Buffer.OUTPUT, "in place, the input is still needed there"


def test_what_rows_cannot_say_is_refused() -> None:
    steps = [Transfer(0, 0, 0, 1, into=1), Transfer(1, 1, 1, 1, REDUCE, into=0)]
    local = make(Collective.SCAN, 2, steps, temporaries=(0,))
    with pytest.raises(ScheduleError, match="rank 1 combines its chunks 1 and 0"):
        lower(local, 1)
    crossed = make(
        Collective.ALL_REDUCE,
        3,
        [
            Transfer(0, 0, 0, 2, REDUCE),
            Transfer(0, 1, 1, 2, REDUCE),
            Transfer(0, 1, 0, 2, REDUCE),
            Transfer(0, 0, 1, 2, REDUCE),
        ],
        parts=2,
    )
    with pytest.raises(ScheduleError, match="use another step"):
        lower(crossed, 2)
    with pytest.raises(ScheduleError, match="only rank 1's part"):
        lower(part_of(ring(3), 1), 2)
    with pytest.raises(ScheduleError, match="not below size"):
        lower(ring(3), 3)
    with pytest.raises(ScheduleError, match="holds nothing in chunk 0"):
        lower(make(Collective.BROADCAST, 2, [Transfer(0, 0, 1, 0)]), 1)


def part_of_the_great_ring(size: int, rank: int) -> Schedule:
    before, after = (rank - 1) % size, (rank + 1) % size
    transfers = []
    for s in range(size - 1):
        transfers.append(Transfer(s, (rank - s) % size, rank, after, REDUCE))
        transfers.append(Transfer(s, (before - s) % size, before, rank, REDUCE))
    for s in range(size - 1):
        transfers.append(Transfer(size - 1 + s, (rank + 1 - s) % size, rank, after))
        transfers.append(Transfer(size - 1 + s, (before + 1 - s) % size, before, rank))
    return Schedule(Collective.ALL_REDUCE, size, size, tuple(transfers), only=rank)


def test_the_work_of_lowering_one_rank_grows_with_the_ranks_and_no_faster() -> None:
    def ring_of(size: int) -> Callable[[], bytes]:
        return lambda: lower(part_of_the_great_ring(size, 7), 7)

    def star_of(size: int) -> Callable[[], bytes]:
        star = make(Collective.GATHER, size, [Transfer(0, r, r, 0) for r in range(1, size)])
        return lambda: lower(star, 0)

    assert len(unpack(ring_of(1024)()).rows) == 2 * 1024 - 1
    for kind in (ring_of, star_of):
        assert calls_of(kind(1024)) < 5 * calls_of(kind(256))


def random_schedule(rng: random.Random, size: int) -> Schedule:
    """Valid steps without any purpose: copies and folds between ranks, chunks and temporaries."""
    chunks = 4  # two parts, and a temporary of each one's size
    held = [{0, 1} for _ in range(size)]
    transfers = []
    for step in range(rng.randint(1, 8)):
        arrived: dict[tuple[int, int], list[Transfer]] = {}
        for _ in range(rng.randint(1, 10)):
            source, destination = rng.randrange(size), rng.randrange(size)
            chunk = rng.choice(sorted(held[source]))
            into = rng.choice([c for c in range(chunks) if c % 2 == chunk % 2])
            reduce = source != destination and into in held[destination] and rng.random() < 0.5
            if source == destination and chunk == into:
                continue
            before = arrived.get((destination, into), [])
            alone = not reduce or not all(t.reduce for t in before)
            if before and (alone or source in [t.source for t in before]):
                continue
            t = Transfer(step, chunk, source, destination, reduce, into, rng.random() < 0.5)
            arrived.setdefault((destination, into), []).append(t)
            transfers.append(t)
        for rank, chunk in arrived:
            held[rank].add(chunk)
    return make(Collective.SCAN, size, transfers, parts=2, temporaries=(0, 1))


def test_random_schedules_mean_the_same_when_lowered() -> None:
    """No deadlock with two segments; outputs are folded as the schedule says, in place too."""
    lowered = 0
    for seed in range(400):
        rng = random.Random(seed)
        schedule = random_schedule(rng, rng.randint(2, 5))
        held = run_schedule(schedule, in_order)
        try:
            plans = lower_all(schedule)
        except ScheduleError as error:
            assert "use another step" in str(error)
            continue
        lowered += 1
        for in_place in (False, True):
            world = World(plans, rng, in_order, factor=1, tiles=1, in_place=in_place)
            world.run()
            for rank in range(schedule.size):
                for chunk in (0, 1):
                    got = world.outputs[rank][chunk, 0]
                    assert got == held[rank][chunk], (
                        f"seed {seed}, rank {rank}, chunk {chunk}, in place {in_place}\n"
                        f"{schedule_text(schedule)}\n{_core.Plan(plans[rank])}"
                    )
    assert lowered >= 300


@pytest.mark.parametrize("size", range(2, 34))
def test_nobody_is_told_what_the_data_tells(size: int) -> None:
    """The root's first token of what comes from it, and all tokens to it of what goes there."""
    rounds = (size - 1).bit_length()
    for root in {0, size // 2, size - 1}:
        shared = add_acknowledgements(binomial(size, root))
        tokens = [t for t in shared.transfers if t.chunk == TOKEN]
        assert len(tokens) == rounds * size - 1
        assert hears_all(shared)
        gathered = add_acknowledgements(gather(size, root=root))
        tokens = [t for t in gathered.transfers if t.chunk == TOKEN]
        assert len(tokens) == rounds * (size - 1)
        assert not any(t.destination == root for t in tokens)
        assert hears_all(gathered)


def test_text_shows_routes_and_rows() -> None:
    text = schedule_text(add_acknowledgements(binomial(2, 0)))
    assert text.splitlines() == [
        "broadcast of 2 ranks, 1 chunks, 1 steps",
        "step 0",
        "  1 -> 0  token",
        "  0 -> 1  copy 0",
    ]
    assert "  1 -> 0  copy 0  lane 1" in schedule_text(part_of(chain(2), 0)).splitlines()
    assert str(_core.Plan(lower(ring(2), 1))).splitlines() == [
        "all_reduce, rank 1 of 2, 2 chunks, 1 lane, 0 scratch slots",
        "lane 0: chunk 1: in[1] -> send 0 (zero_copy)",
        "lane 0: chunk 0: recv 0 + in[0] -> out[0], send 0 (final, zero_copy, sender copies)",
        "lane 0: chunk 1: recv 0 -> out[1] (flush, direct_write)",
    ]


def test_a_contribution_is_told_from_every_other() -> None:
    assert in_order(1, 2) != in_order(2, 1)
    assert in_order(in_order(1, 2), 3) != in_order(1, in_order(2, 3))
    assert PRIME == 2**61 - 1
    assert isinstance(unpack(lower(ring(2), 0)), Plan)
