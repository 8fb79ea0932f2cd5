"""The proof of plans: what it refuses, and with which words."""

from __future__ import annotations

import pytest
from mutants import edited
from samples import binomial, chain, doubling, make, ring

from pycoll.plan.lowering import add_acknowledgements, lower_all
from pycoll.plan.plan_format import (
    DIRECT_WRITE,
    FINAL,
    FLUSH,
    ZERO_COPY,
    Buffer,
    Channel,
    Row,
    leading_count,
    pack,
    unpack,
)
from pycoll.plan.verifier import PlanVerifier, verify_plans
from pycoll.schedule.collectives import Collective
from pycoll.schedule.copies import CopyStrategy
from pycoll.schedule.language import ScheduleError, Transfer


def refused(plans: list[bytes], **options: object) -> str:
    with pytest.raises(ScheduleError) as caught:
        verify_plans(plans, **options)
    return str(caught.value)


def test_a_deadlock_names_who_waits_for_what() -> None:
    plans = lower_all(chain(3))
    plan = unpack(plans[0])
    plans[0] = pack(plan._replace(rows=plan.rows[1:]))
    text = refused(plans)
    assert text.startswith("deadlock: rank 0 lane 1 row 0 tile 0 waits for a segment from rank 1; ")
    assert "deadlock" in refused(lower_all(ring(3)), depth=1)


def test_left_over_segments_are_found() -> None:
    plans = lower_all(binomial(2, 0))
    plan = unpack(plans[1])
    plans[1] = pack(plan._replace(rows=()))
    assert refused(plans).startswith("deadlock: rank 0 lane 0 row 0 tile 2 waits for a free slot")
    assert "1 segments from rank 0 to rank 1 on channel 0 are never received" in refused(
        plans, tiles=1
    )


def test_a_missing_flush_is_a_race_only_where_memory_is_shared() -> None:
    plans = lower_all(doubling(2))
    assert unpack(plans[0]).rows[1].flags == FINAL | FLUSH
    text = refused(edited(plans, 0, 1, flags=FINAL))
    assert text == (
        "rank 0, lane 0, row 1 (chunk 0), tile 0: "
        "writes output 0 while it is being sent by rank 0 lane 0"
    )
    ring_plans = lower_all(ring(4))
    index = next(i for i, row in enumerate(unpack(ring_plans[0]).rows) if row.flags & FLUSH)
    verify_plans(edited(ring_plans, 0, index, flags=0))


def test_memory_is_exposed_only_until_a_reader_sends_what_replaces_it() -> None:
    """In a ring what returns was made of what left; in an exchange both write at once."""
    first, second, *_ = unpack(lower_all(ring(3))[0]).rows
    assert (
        first.flags == ZERO_COPY and not second.flags & ZERO_COPY
    )  # a sum that passes through no memory
    exchange = lower_all(doubling(2))
    assert not unpack(exchange[0]).rows[0].flags & ZERO_COPY
    assert refused(edited(exchange, 0, 0, flags=ZERO_COPY)) == (
        "rank 0, lane 0, row 1 (chunk 0), tile 0: "
        "writes output 0 while it is being sent by rank 0 lane 0"
    )


def test_results_are_exposed_where_they_stay() -> None:
    plans = lower_all(chain(3))
    rows = unpack(plans[1]).rows
    passing = [row for row in rows if row.recv and row.send]
    assert [bool(row.flags & ZERO_COPY) for row in passing] == [False, True]
    assert [row.target for row in passing] == [Buffer.NONE, Buffer.OUTPUT]
    up = rows.index(passing[0])
    assert "is flagged zero-copy but sends no input or output in place" in refused(
        edited(plans, 1, up, flags=ZERO_COPY)
    )


def test_results_land_where_all_who_read_there_have_told_their_sender() -> None:
    """In a ring what comes was made of what lay there; two who exchange read as they write."""
    plans = lower_all(ring(3))
    rows = unpack(plans[0]).rows
    direct_write = [bool(row.flags & DIRECT_WRITE) for row in rows]
    assert direct_write == [len(row.recv) == 1 and row.operands == 1 for row in rows]
    assert sum(direct_write) == 2
    combines = next(i for i, row in enumerate(rows) if row.operands == 2)
    assert "is flagged direct-write but does more than copy one segment" in refused(
        edited(plans, 0, combines, flags=rows[combines].flags | DIRECT_WRITE)
    )
    # A rank that looks at its contribution once more, when the sum may be on its way already.
    plans = lower_all(chain(2, back_lane=0))
    plan = unpack(plans[0])
    tells, hears = plan.rows
    assert hears.flags & DIRECT_WRITE
    looks = tells._replace(send=(), flags=0, target=Buffer.SCRATCH)
    for flags in (hears.flags, hears.flags & ~DIRECT_WRITE):
        rows = (tells, looks, hears._replace(flags=flags))
        plans[0] = pack(plan._replace(scratch_slots=1, rows=rows))
        if not flags & DIRECT_WRITE:
            verify_plans(plans)
            continue
        assert refused(plans) == (
            "rank 0, lane 0, row 2 (chunk 0), tile 0: lets its sender write output 0, "
            "although rank 0 lane 0 may not have used it yet"
        )


def test_no_direct_write_goes_where_a_rank_may_still_read_what_was_sent() -> None:
    plans = lower_all(chain(2, back_lane=0))
    one, two = unpack(plans[0]), unpack(plans[1])
    tells, hears = one.rows
    (combines,) = two.rows
    twice = tells._replace(flags=0, send=(*tells.send, len(one.channels)))
    late = Row(0, 0, 0, Buffer.NONE, 0, 0, Buffer.SCRATCH, 0, (len(two.channels),), ())
    channels = (*two.channels, Channel(0, 5, False))
    plans[1] = pack(two._replace(scratch_slots=1, channels=channels, rows=(combines, late)))
    channels = (*one.channels, Channel(1, 5, True))
    for flags in (FLUSH, FLUSH | DIRECT_WRITE):
        rows = (twice, hears._replace(flags=flags))
        plans[0] = pack(one._replace(channels=channels, rows=rows))
        if not flags & DIRECT_WRITE:
            verify_plans(plans)
            continue
        assert refused(plans) == (
            "rank 0, lane 0, row 1 (chunk 0), tile 0: lets its sender write output 0, "
            "although the segment that rank 0 lane 0 sends from it may not be read yet"
        )


def test_what_leads_a_lane_sends_the_input_and_nothing_else() -> None:
    first, second = rows = unpack(lower_all(doubling(2))[0]).rows
    assert leading_count(rows) == 1
    for changed in (
        first._replace(source=Buffer.OUTPUT),
        first._replace(target=Buffer.OUTPUT),
        first._replace(recv=second.recv),
        first._replace(send=()),
        first._replace(carry=0),
    ):
        assert leading_count((changed, second)) == 0
    assert leading_count((first, second._replace(send=first.send))) == 0  # its order would change
    assert leading_count((first, first, second)) == 2
    assert leading_count((first,)) == leading_count(()) == 0
    assert leading_count(unpack(lower_all(ring(4))[0]).rows) == 0


def test_a_lead_knows_nothing_of_what_is_behind_it() -> None:
    """In the next tile its peer hears what the leading rows have run, not what the lane has."""
    machine = PlanVerifier([unpack(plan) for plan in lower_all(doubling(2))], 2, 3, None)
    machine.run(everyone_heard=False)
    leading, rest = machine.processes[:2]
    assert rest.has_leading and not leading.has_leading
    assert leading.clock == [3, 0, 0, 0] and rest.clock == [3, 3, 3, 0]


def test_a_lane_whose_lead_cannot_go_on_is_told_with_it() -> None:
    plans = lower_all(doubling(2))
    rows = unpack(plans[1]).rows
    plans[1] = pack(unpack(plans[1])._replace(rows=(rows[0],)))
    assert refused(plans) == (
        "deadlock: rank 0 lane 0 row 0 tile 2 waits for a free slot towards rank 1; "
        "rank 0 lane 0 row 1 tile 2 waits for the leading rows"
    )


def test_final_in_the_wrong_place_is_refused() -> None:
    plans = lower_all(ring(3))
    rows = unpack(plans[0]).rows
    final = next(i for i, row in enumerate(rows) if row.flags & FINAL)
    assert "is not final though it makes chunk 1 of ranks 0-2" in refused(
        edited(plans, 0, final, flags=0)
    )
    assert "is final but makes" in refused(edited(plans, 0, final - 1, flags=FINAL))


def test_lanes_that_share_memory_without_an_order_are_a_race() -> None:
    plans = lower_all(chain(3))
    split = unpack(plans[2])
    assert split.lane_count == 1
    row = split.rows[0]
    stored = row._replace(send=(), flags=row.flags & FINAL)
    sent = row._replace(lane=1, recv=(), source=2, source_position=0, target=0, flags=0)
    stored = stored._replace(copies=CopyStrategy.RECEIVER)
    plans[2] = pack(split._replace(lane_count=2, rows=(stored, sent)))
    assert "output 0, which nothing has written" in refused(plans) or "while" in refused(plans)


def test_a_copy_from_the_input_is_a_write_unless_in_place() -> None:
    plans = lower_all(binomial(2, 0))
    plan = unpack(plans[0])
    (both,) = plan.rows
    copied = both._replace(send=(), flags=0)
    sent = both._replace(lane=1, source=Buffer.OUTPUT, target=Buffer.NONE, target_slot=0)
    verify_plans([pack(plan._replace(rows=(copied, sent._replace(lane=0)))), plans[1]])
    text = refused([pack(plan._replace(rows=(copied, sent), lane_count=2)), plans[1]])
    assert text == (
        "rank 0, lane 1, row 0 (chunk 0), tile 0: reads output 0 while rank 0 lane 0 writes it"
    )


def test_plans_of_different_operations_are_refused() -> None:
    assert "not one operation" in refused([*lower_all(ring(3))[:2], lower_all(chain(3))[2]])
    assert "2 plans were given for size 3" in refused(lower_all(ring(3))[:2])


def test_a_rank_that_leaves_early_is_found() -> None:
    plans = lower_all(binomial(3, 0))
    verify_plans(plans)
    assert "leaves without hearing of" in refused(plans, everyone_heard=True)
    verify_plans(lower_all(add_acknowledgements(binomial(3, 0))), everyone_heard=True)


def test_an_order_that_only_a_shorter_chunk_gives_is_no_order() -> None:
    """Rank 1 may overwrite chunk 0 on lane 1 when chunk 1 has come round after it."""
    transfers = [
        Transfer(0, 0, 0, 1),
        Transfer(0, 1, 0, 1),
        Transfer(1, 1, 1, 2),
        Transfer(2, 0, 1, 2),
        Transfer(3, 1, 1, 2, into=2),
        Transfer(4, 2, 2, 0),
        Transfer(5, 2, 0, 1, into=1, lane=1),
        Transfer(6, 0, 0, 1, lane=1),
    ]
    schedule = make(Collective.BROADCAST, 3, transfers, parts=2, temporaries=(1,))
    plans = lower_all(schedule)
    verify_plans(plans)
    verify_plans(plans, tiles_of=lambda chunk: 1 + 2 * chunk)
    text = refused(plans, tiles_of=lambda chunk: 3 - 2 * chunk)
    assert text.startswith("rank 1, lane 1, row 1 (chunk 0), tile 1: writes output 0 while ")
