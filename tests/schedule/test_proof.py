"""The proof of schedules: what it accepts, what it refuses and with which words."""

from __future__ import annotations

import pytest
from samples import all_samples, chain, direct_reduce, doubling, make, one_shot, part_of, ring, tree
from simulate import schedule_is_right

from pycoll.schedule.collectives import Collective
from pycoll.schedule.contributions import ranks_text
from pycoll.schedule.language import REDUCE, TOKEN, Schedule, Transfer
from pycoll.schedule.proof import ScheduleError, fold_order, hears_all, verify_schedule

SAMPLES = [pair for size in (1, 2, 3, 4, 5, 8, 13) for pair in all_samples(size)]


@pytest.mark.parametrize("name, schedule", SAMPLES, ids=[name for name, _ in SAMPLES])
def test_right_schedules_are_proved(name: str, schedule: Schedule) -> None:
    verify_schedule(schedule)
    assert schedule_is_right(schedule), name


def refused(schedule: Schedule) -> str:
    with pytest.raises(ScheduleError) as caught:
        verify_schedule(schedule)
    return str(caught.value)


def with_transfers(schedule: Schedule, *transfers: Transfer) -> Schedule:
    return schedule._replace(transfers=transfers)


def pair(*transfers: Transfer, kind: Collective = Collective.ALL_REDUCE, **more: object) -> str:
    return refused(make(kind, 2, transfers, **more))


def test_a_missing_contribution_is_named() -> None:
    whole = chain(3)
    text = refused(with_transfers(whole, *whole.transfers[:-1]))
    assert text == (
        "rank 0 ends with chunk 0 of rank 0 in output chunk 0; it must hold chunk 0 of ranks 0-2"
    )


def test_counting_a_rank_twice_names_the_transfer() -> None:
    text = pair(Transfer(0, 0, 0, 1, REDUCE), Transfer(1, 0, 0, 1, REDUCE))
    assert text.startswith("step 1, transfer 1 (reduce chunk 0, rank 0 -> rank 1, lane 0): ")
    assert "contribution of rank 0 would count twice" in text


def test_reading_what_is_not_held_is_refused() -> None:
    text = pair(Transfer(0, 0, 1, 0), kind=Collective.BROADCAST)
    assert "rank 1 holds nothing in chunk 0" in text


def test_combining_with_nothing_is_refused() -> None:
    text = pair(Transfer(0, 0, 0, 1, REDUCE, into=1), temporaries=(0,))
    assert "rank 1 holds nothing in chunk 1 to combine with" in text


def test_two_writes_of_a_step_are_refused() -> None:
    three = (Transfer(0, 0, 0, 1), Transfer(0, 0, 2, 1))
    assert "written twice" in refused(make(Collective.ALL_REDUCE, 3, three))


def test_one_fold_uses_one_lane_and_one_value_of_each_rank() -> None:
    lanes = (Transfer(0, 0, 0, 1, REDUCE), Transfer(0, 0, 2, 1, REDUCE, lane=1))
    assert "one fold uses one lane" in refused(make(Collective.ALL_REDUCE, 3, lanes))
    twice = (Transfer(0, 0, 0, 1, REDUCE), Transfer(0, 0, 0, 1, REDUCE))
    assert "sends twice into one fold" in pair(*twice)


@pytest.mark.parametrize(
    "transfer, words",
    [
        (Transfer(0, 0, 0, 2), "ranks are 0..1"),
        (Transfer(0, 0, -1, 1), "ranks are 0..1"),
        (Transfer(0, 1, 0, 1), "chunks are 0..0"),
        (Transfer(0, 0, 0, 1, into=-3), "chunks are 0..0"),
        (Transfer(-1, 0, 0, 1), "steps count from 0"),
        (Transfer(0, 0, 0, 1, lane=7), "lanes are 0..6"),
        (Transfer(0, 0, 0, 0), "neither changes rank nor chunk"),
        (Transfer(0, TOKEN, 0, 1, REDUCE), "a token is copied"),
        (Transfer(0, TOKEN, 0, 0), "a token is copied"),
        (Transfer(0, TOKEN, 0, 1, into=0), "a token is copied"),
    ],
)
def test_transfers_out_of_range_are_refused(transfer: Transfer, words: str) -> None:
    assert words in pair(transfer)


def test_chunks_of_different_sizes_do_not_mix() -> None:
    text = pair(Transfer(0, 0, 0, 1, into=1), parts=2)
    assert "chunk 0 and chunk 1 may differ in size" in text
    assert "sized by chunk 4" in pair(temporaries=(4,))


def test_a_collective_that_only_copies_refuses_combinations() -> None:
    text = pair(Transfer(0, 0, 0, 1, REDUCE), kind=Collective.ALL_GATHER)
    assert "all_gather combines nothing" in text


def test_shape_of_the_schedule_is_checked() -> None:
    assert "only rank 1's part" in refused(part_of(ring(3), 1))
    assert "root 2" in refused(direct_reduce(2, 0)._replace(root=2))
    assert "has no root" in refused(chain(3)._replace(root=1))
    late_first = with_transfers(chain(2), Transfer(1, 0, 0, 1, REDUCE), Transfer(0, 0, 1, 0))
    assert "step 0 is listed after step 1" in refused(late_first)


def test_a_step_reads_what_was_there_before_it() -> None:
    verify_schedule(doubling(2))
    swap = [Transfer(0, 0, 0, 1, REDUCE), Transfer(1, 0, 1, 0)]
    verify_schedule(make(Collective.ALL_REDUCE, 2, swap))
    too_early = [Transfer(0, 0, 0, 1, REDUCE), Transfer(0, 0, 1, 0)]
    assert "rank 0 ends with chunk 0 of rank 1" in refused(
        make(Collective.ALL_REDUCE, 2, too_early)
    )


def test_a_barrier_is_left_only_after_everyone_came() -> None:
    one_way = make(Collective.BARRIER, 3, [Transfer(0, TOKEN, 0, 1), Transfer(1, TOKEN, 1, 2)])
    assert refused(one_way) == "rank 0 leaves the barrier without hearing of ranks 1-2"


def test_ranks_that_fold_in_different_orders_are_refused() -> None:
    verify_schedule(one_shot(5))
    others_behind = [t._replace(before=False) for t in one_shot(3).transfers]
    text = refused(make(Collective.ALL_REDUCE, 3, others_behind))
    assert "ranks 0 and 2 combine chunk 0 in different orders" in text


def test_fold_order_tells_the_left_fold_from_the_rest() -> None:
    assert fold_order(chain(5)) == "rank"
    assert fold_order(one_shot(9)) == "rank"
    assert fold_order(direct_reduce(6, 0)) == "rank"
    assert fold_order(direct_reduce(6, 5)) == "rank"
    assert fold_order(tree(5)) == "other"
    assert fold_order(ring(3)) == "other"
    assert fold_order(doubling(4)) == "other"
    assert fold_order(make(Collective.BROADCAST, 2, [Transfer(0, 0, 0, 1)])) == "rank"


def test_hears_all_follows_data_and_tokens() -> None:
    assert hears_all(ring(5))
    half = make(Collective.BROADCAST, 2, [Transfer(0, 0, 0, 1)])
    assert not hears_all(half)
    assert hears_all(with_transfers(half, *half.transfers, Transfer(1, TOKEN, 1, 0)))


def test_ranks_in_words() -> None:
    assert ranks_text(0) == "no rank"
    assert ranks_text(0b1000) == "rank 3"
    assert ranks_text(0b10000111) == "ranks 0-2, 7"
