"""How several values that arrive in one step become rows."""

from __future__ import annotations

from samples import direct_reduce, make, one_shot, rows_of, tree

from pycoll.plan.lowering import lower, lower_all
from pycoll.plan.plan_format import FINAL, ZERO_COPY, Buffer, unpack
from pycoll.plan.verifier import verify_plans
from pycoll.schedule.collectives import Collective
from pycoll.schedule.language import REDUCE, Transfer


def test_children_of_one_step_arrive_in_one_row() -> None:
    plan = unpack(lower(tree(7), 0))
    assert len(plan.rows) == 1, "the root turns around in one row"
    row = plan.rows[0]
    assert (len(row.recv), len(row.send), row.flags, row.target) == (
        2,
        2,
        FINAL | ZERO_COPY,
        Buffer.OUTPUT,
    )
    assert plan.lane_count == 1, "lanes that exchange values are one"
    middle = unpack(lower(tree(7), 1))
    assert middle.lane_count == 2
    up, down = middle.rows
    assert (up.target, len(up.recv), len(up.send), up.flags) == (Buffer.NONE, 2, 1, 0)
    assert (down.target, len(down.recv), len(down.send)) == (Buffer.OUTPUT, 1, 2)


def test_more_values_than_a_row_takes_take_more_rows_and_scratch_between_them() -> None:
    rows = rows_of(direct_reduce(20, 0), 0)
    assert [len(row.recv) for row in rows] == [8, 8, 3]
    assert [row.flags for row in rows] == [0, 0, FINAL]
    assert [row.target for row in rows] == [Buffer.SCRATCH, Buffer.SCRATCH, Buffer.OUTPUT]
    assert [row.carry for row in rows] == [-1, 0, 0]
    ten = make(
        Collective.REDUCE,
        12,
        [
            *(Transfer(0, 0, r, 1, REDUCE, before=False) for r in range(2, 12)),
            Transfer(1, 0, 1, 0, REDUCE),
        ],
    )
    plan = unpack(lower(ten, 1))
    assert plan.scratch_slots == 1
    assert [row.target for row in plan.rows] == [Buffer.SCRATCH, Buffer.NONE]
    assert (plan.rows[1].source, plan.rows[1].carry) == (Buffer.NONE, 0)
    verify_plans(lower_all(ten))


def test_one_shot_of_four_is_one_row_of_four_operands() -> None:
    for rank in range(4):
        send, fold = rows_of(one_shot(4), rank)
        assert len(send.send) == 3 and len(fold.recv) == 3
        assert fold.source_position == rank


def test_one_shot_of_many_folds_from_the_left_and_carries() -> None:
    for rank in range(20):
        folds = [row for row in rows_of(one_shot(20), rank) if row.recv]
        assert [row.carry >= 0 for row in folds] == [False] + [True] * (len(folds) - 1)
        assert sum(len(row.recv) for row in folds) == 19
        assert sum(row.source != Buffer.NONE for row in folds) == 1
        assert all(row.operands <= 9 for row in folds)
        assert [row.target for row in folds[:-1]] == [Buffer.SCRATCH] * (len(folds) - 1)
        assert folds[-1].target == Buffer.OUTPUT and folds[-1].flags & FINAL
