"""The copy strategy of rows, the waits that follow from it, and the proof of these waits."""

from __future__ import annotations

import pytest
from mutants import edited
from samples import make

from pycoll.algorithms import TABLE, Algorithm
from pycoll.cost.copying import choose_copies
from pycoll.cost.model import DEFAULT
from pycoll.plan.lowering import add_acknowledgements, lower_all
from pycoll.plan.plan_format import (
    ANNOUNCE_WINDOW,
    AWAIT_WINDOW,
    TOKEN_ROW,
    Row,
    unpack,
)
from pycoll.plan.verifier import verify_plans
from pycoll.schedule.collectives import REDUCING, ROOTED, Collective
from pycoll.schedule.copies import Copies, CopyStrategy
from pycoll.schedule.language import ScheduleError, Transfer
from pycoll.schedule.topology import Topology

RECEIVER, SENDER, SPLIT = CopyStrategy
MOVING = [
    algorithm
    for collective, entries in TABLE.items()
    if collective not in REDUCING and collective is not Collective.BARRIER
    for algorithm in entries.values()
]


def lowered(algorithm: Algorithm, size: int, copies: Copies) -> list[bytes]:
    topology = Topology.even(size, min(size, 2)) if algorithm.needs_topology else None
    schedule = algorithm.build(size, root=size // 2, topology=topology)
    return lower_all(add_acknowledgements(schedule), copies)


def rows_of(plans: list[bytes]) -> list[tuple[int, int, Row]]:
    """(rank, index, row) of all rows that send data."""
    return [
        (rank, index, row)
        for rank, image in enumerate(plans)
        for index, row in enumerate(unpack(image).rows)
        if row.send and row.chunk != TOKEN_ROW
    ]


def refused(plans: list[bytes]) -> str:
    with pytest.raises(ScheduleError) as caught:
        verify_plans(plans)
    return str(caught.value)


@pytest.mark.parametrize(
    "algorithm", MOVING, ids=[f"{a.collective.name.lower()}-{a.name}" for a in MOVING]
)
def test_every_strategy_is_proved(algorithm: Algorithm) -> None:
    # Ranks wait only in collectives with a root; in others every rank also receives.
    for size in range(1, 34 if algorithm.collective in ROOTED else 10):
        for idle, busy in ((SENDER, SENDER), (SPLIT, RECEIVER)):
            verify_plans(lowered(algorithm, size, Copies(idle, busy)), tiles=2, everyone_heard=True)


def test_only_idle_ranks_wait_and_only_for_windows_that_open() -> None:
    for algorithm in MOVING:
        plans = lowered(algorithm, 6, Copies(SENDER, SENDER))
        for rank, _, row in rows_of(plans):
            idle = not any(r.recv and r.chunk != TOKEN_ROW for r in unpack(plans[rank]).rows)
            assert bool(row.flags & AWAIT_WINDOW) == (idle and row.copies is not RECEIVER)
    gather = lowered(TABLE[Collective.GATHER]["direct"], 3, Copies(SENDER))
    assert [row.flags & AWAIT_WINDOW for _, _, row in rows_of(gather)] == [AWAIT_WINDOW] * 2


def test_a_wait_for_an_announcement_that_nobody_makes_is_refused() -> None:
    plans = lowered(TABLE[Collective.BROADCAST]["direct"], 2, Copies(SPLIT))
    sender = next(rank for rank, _, row in rows_of(plans) if row.flags & AWAIT_WINDOW)
    rows = unpack(plans[1 - sender]).rows
    index = next(i for i, row in enumerate(rows) if row.flags & ANNOUNCE_WINDOW)
    damaged = edited(plans, 1 - sender, index, flags=rows[index].flags & ~ANNOUNCE_WINDOW)
    assert "announces no write window, but its sender waits for that" in refused(damaged)


def test_what_cannot_be_written_directly_is_read_in_place() -> None:
    """A chunk that the receiver passes on, one that it combines, and one that several receive."""
    passed = make(
        Collective.GATHER, 3, [Transfer(0, 2, 2, 1), Transfer(1, 1, 1, 0), Transfer(1, 2, 1, 0)]
    )
    strategies = {
        (rank, row.chunk): row.copies for rank, _, row in rows_of(lower_all(passed, Copies(SENDER)))
    }
    assert strategies == {(2, 2): RECEIVER, (1, 1): SENDER, (1, 2): SENDER}
    combined = make(Collective.REDUCE, 2, [Transfer(0, 0, 1, 0, reduce=True)])
    assert [row.copies for _, _, row in rows_of(lower_all(combined))] == [RECEIVER]
    spread = make(Collective.BROADCAST, 3, [Transfer(0, 0, 0, 1), Transfer(0, 0, 0, 2)])
    assert [row.copies for _, _, row in rows_of(lower_all(spread, Copies(SENDER)))] == [RECEIVER]


def test_a_rank_that_just_received_a_segment_writes_it() -> None:
    chain = make(Collective.BROADCAST, 3, [Transfer(0, 0, 0, 1), Transfer(1, 0, 1, 2)])
    rows = rows_of(lower_all(chain, Copies(RECEIVER, RECEIVER)))
    assert [(rank, row.copies) for rank, _, row in rows] == [(0, RECEIVER), (1, SENDER)]


def test_the_choice_depends_on_the_message_and_on_shared_cores() -> None:
    segment, caches = DEFAULT.segment_bytes, DEFAULT.inside.cache_bytes
    shared = DEFAULT.with_ranks_per_core(2.0)
    assert choose_copies(Collective.GATHER, 4, 4 * segment, DEFAULT).idle is RECEIVER
    assert choose_copies(Collective.GATHER, 4, 4 * segment + 1, DEFAULT).idle is SENDER
    assert choose_copies(Collective.GATHER, 4, 4 * segment + 1, shared).idle is SPLIT
    assert choose_copies(Collective.BROADCAST, 2, 1 << 20, DEFAULT).idle is SPLIT
    assert choose_copies(Collective.BROADCAST, 2, 1 << 20, shared).idle is RECEIVER
    assert choose_copies(Collective.ALL_GATHER, 2, caches - 1, DEFAULT).busy is RECEIVER
    assert choose_copies(Collective.ALL_GATHER, 2, caches, DEFAULT).busy is SENDER
    assert choose_copies(Collective.ALL_REDUCE, 2, 1 << 30, DEFAULT) == Copies()


def test_fields_out_of_bounds_are_refused() -> None:
    plans = lowered(TABLE[Collective.BROADCAST]["direct"], 2, Copies(SPLIT))
    sender, index, _ = next(one for one in rows_of(plans) if one[2].copies is SPLIT)
    assert "is flagged await-window but" in refused(edited(plans, sender, index, copies=RECEIVER))
    assert "copies 3" in refused(edited(plans, sender, index, copies=3))
    rows = unpack(plans[1 - sender]).rows
    other = next(i for i, one in enumerate(rows) if not one.send)
    assert "but sends no data" in refused(edited(plans, 1 - sender, other, copies=SENDER))
