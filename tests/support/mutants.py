"""Damages schedules and plans, and checks the answers of the proof.

Every mutant that the proof accepts runs with numbers in random orders (`simulate`); a wrong result
there is a hole in the proof and fails the test with the mutant and its seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
from samples import schedule_text
from simulate import (
    World,
    WrongRunError,
    contribution,
    in_order,
    plans_are_right,
    run_schedule,
    schedule_is_right,
    sources,
)

from pycoll import _core
from pycoll.plan.lowering import ANNOUNCING, lower_all
from pycoll.plan.plan_format import (
    ANNOUNCE_WINDOW,
    AWAIT_WINDOW,
    DIRECT_WRITE,
    FINAL,
    FLUSH,
    ZERO_COPY,
    Channel,
    Plan,
    pack,
    unpack,
)
from pycoll.plan.verifier import verify_plans
from pycoll.schedule.copies import Copies, CopyStrategy
from pycoll.schedule.language import TOKEN, Schedule, ScheduleError, Transfer
from pycoll.schedule.proof import fold_order, verify_schedule

SEED = 20_240_229
SCHEDULE_EACH = 3
PLAN_EACH = 3


def other(rng: random.Random, bound: int, than: int) -> int:
    """A number below ``bound`` that is not ``than``; ``bound`` itself if there is none."""
    return rng.choice([value for value in range(bound) if value != than] or [bound])


def drop(rng: random.Random, s: Schedule, i: int) -> list[Transfer]:
    return [*s.transfers[:i], *s.transfers[i + 1 :]]


def duplicate(rng: random.Random, s: Schedule, i: int) -> list[Transfer]:
    t = s.transfers[i]
    again = t._replace(step=t.step + rng.randrange(3))
    return [*s.transfers[: i + 1], again, *s.transfers[i + 1 :]]


def swap_order(rng: random.Random, s: Schedule, i: int) -> list[Transfer]:
    j = rng.randrange(len(s.transfers))
    transfers = list(s.transfers)
    transfers[i], transfers[j] = (
        transfers[j]._replace(step=transfers[i].step),
        transfers[i]._replace(step=transfers[j].step),
    )
    return transfers


def change(
    edit: Callable[[random.Random, Schedule, Transfer], Transfer],
) -> Callable[[random.Random, Schedule, int], list[Transfer]]:
    def mutate(rng: random.Random, s: Schedule, i: int) -> list[Transfer]:
        return [*s.transfers[:i], edit(rng, s, s.transfers[i]), *s.transfers[i + 1 :]]

    return mutate


def any_chunk(rng: random.Random, s: Schedule, than: int) -> int:
    return other(rng, s.data_chunks + len(s.temporaries), than)


SCHEDULE_MUTATIONS = {
    "drop": drop,
    "duplicate": duplicate,
    "swap order": swap_order,
    "redirect destination": change(
        lambda rng, s, t: t._replace(destination=other(rng, s.size, t.destination))
    ),
    "redirect source": change(lambda rng, s, t: t._replace(source=other(rng, s.size, t.source))),
    "turn around": change(lambda rng, s, t: t._replace(source=t.destination, destination=t.source)),
    "change chunk": change(lambda rng, s, t: t._replace(chunk=any_chunk(rng, s, t.chunk))),
    "change place": change(lambda rng, s, t: t._replace(into=any_chunk(rng, s, t.target))),
    "copy or reduce": change(lambda rng, s, t: t._replace(reduce=not t.reduce)),
    "front or behind": change(lambda rng, s, t: t._replace(before=not t.before)),
    "shift step": change(
        lambda rng, s, t: t._replace(step=max(0, t.step + rng.choice((-2, -1, 1, 2))))
    ),
    "change lane": change(lambda rng, s, t: t._replace(lane=other(rng, 3, t.lane))),
    "make a token": change(lambda rng, s, t: t._replace(chunk=TOKEN, reduce=False, into=-2)),
}


def check_accepted(schedule: Schedule, plans: list[bytes], seed: int) -> None:
    """Raises WrongRunError where a run contradicts the proof."""
    if not schedule_is_right(schedule):
        raise WrongRunError("the schedule's sums are wrong")
    if not plans_are_right(plans, seed, runs=4):
        raise WrongRunError("the plans' sums are wrong")
    held = run_schedule(schedule, in_order)
    left = fold_order(schedule) == "rank"
    world = World(plans, random.Random(seed), in_order, factor=1, tiles=1)
    world.run()
    for rank in range(schedule.size):
        for chunk in range(schedule.data_chunks):
            ranks = sources(schedule, rank, chunk // schedule.parts)
            if ranks and world.outputs[rank][chunk, 0] != held[rank][chunk]:
                raise WrongRunError(
                    f"rank {rank} chunk {chunk}: plan and schedule fold differently"
                )
            if ranks and left and held[rank][chunk] != left_fold(ranks, chunk):
                raise WrongRunError(f"rank {rank} chunk {chunk}: not the left fold")


def left_fold(ranks: list[int], chunk: int) -> int:
    value = contribution(ranks[0], chunk)
    for rank in ranks[1:]:
        value = in_order(value, contribution(rank, chunk))
    return value


def schedule_mutants(name: str, schedule: Schedule) -> Iterator[tuple[str, Schedule]]:
    """(seed, mutant): every mutation `SCHEDULE_EACH` times."""
    for mutation, mutate in SCHEDULE_MUTATIONS.items():
        for number in range(SCHEDULE_EACH):
            seed = f"{SEED} {name} {mutation} {number}"
            rng = random.Random(seed)
            transfers = mutate(rng, schedule, rng.randrange(len(schedule.transfers)))
            ordered = tuple(sorted(transfers, key=lambda t: t.step))
            yield seed, schedule._replace(transfers=ordered)


def judge_schedules(name: str, schedule: Schedule) -> tuple[int, int]:
    """How many mutants were tried and how many refused; fails the test if one slips through."""
    tried, refused = 0, 0
    for seed, mutant in schedule_mutants(name, schedule):
        tried += 1
        try:
            verify_schedule(mutant)
            plans = lower_all(mutant)
            verify_plans(plans)
        except ScheduleError as error:
            assert str(error)
            refused += 1
            continue
        try:
            check_accepted(mutant, plans, tried)
        except WrongRunError as error:
            pytest.fail(f"seed {seed!r}: {error}\n{schedule_text(mutant)}")
    return tried, refused


def drop_row(rng: random.Random, plan: Plan, i: int) -> Plan:
    return plan._replace(rows=(*plan.rows[:i], *plan.rows[i + 1 :]))


def repeat_row(rng: random.Random, plan: Plan, i: int) -> Plan:
    return plan._replace(rows=(*plan.rows[: i + 1], *plan.rows[i:]))


def swap_rows(rng: random.Random, plan: Plan, i: int) -> Plan:
    j = rng.randrange(len(plan.rows))
    rows = list(plan.rows)
    rows[i], rows[j] = rows[j]._replace(lane=rows[i].lane), rows[i]._replace(lane=rows[j].lane)
    return plan._replace(rows=tuple(rows))


def swap_neighbours(rng: random.Random, plan: Plan, i: int) -> Plan:
    rows = list(plan.rows)
    rows[i - 1], rows[i] = rows[i], rows[i - 1]
    return plan._replace(rows=tuple(rows))


def change_row(i: int, plan: Plan, **fields: object) -> Plan:
    rows = list(plan.rows)
    rows[i] = rows[i]._replace(**fields)
    return plan._replace(rows=tuple(rows))


def edited(plans: list[bytes], rank: int, index: int, **fields: object) -> list[bytes]:
    """The plans with some fields of one row replaced."""
    image = pack(change_row(index, unpack(plans[rank]), **fields))
    return [*plans[:rank], image, *plans[rank + 1 :]]


def flip(flag: int) -> Callable[[random.Random, Plan, int], Plan]:
    def mutate(rng: random.Random, plan: Plan, i: int) -> Plan:
        marked = [k for k, row in enumerate(plan.rows) if row.flags & flag] or [i]
        k = rng.choice([*marked, i])
        return change_row(k, plan, flags=plan.rows[k].flags ^ flag)

    return mutate


def change_channel(rng: random.Random, plan: Plan, i: int) -> Plan:
    field = rng.choice(("recv", "send"))
    ends = list(getattr(plan.rows[i], field))
    if not ends:
        return change_row(i, plan, **{field: (rng.randrange(max(1, len(plan.channels))),)})
    ends[rng.randrange(len(ends))] = rng.randrange(len(plan.channels))
    return change_row(i, plan, **{field: tuple(ends)})


def redirect_channel(rng: random.Random, plan: Plan, i: int) -> Plan:
    channels = list(plan.channels)
    k = rng.randrange(len(channels))
    peer, number, direction = channels[k]
    if rng.random() < 0.5:
        channels[k] = Channel(rng.randrange(plan.size), number, direction)
    else:
        channels[k] = Channel(peer, rng.randrange(3), direction)
    return plan._replace(channels=tuple(channels))


def new_lane(rng: random.Random, plan: Plan, i: int) -> Plan:
    """Row i and those behind it, or row i alone, run on a lane of their own."""
    first = plan.rows[i]
    alone = rng.random() < 0.5
    moved = [r for k, r in enumerate(plan.rows) if k == i or (k > i and not alone)]
    moved = [row._replace(lane=plan.lane_count) for row in moved if row.lane == first.lane]
    kept = [
        r for k, r in enumerate(plan.rows) if k < i or (k > i and (alone or r.lane != first.lane))
    ]
    return plan._replace(rows=(*kept, *moved), lane_count=plan.lane_count + 1)


PLAN_MUTATIONS: dict[str, Callable[[random.Random, Plan, int], Plan]] = {
    "drop row": drop_row,
    "repeat row": repeat_row,
    "swap rows": swap_rows,
    "swap neighbours": swap_neighbours,
    "source slot": lambda rng, plan, i: change_row(i, plan, source_slot=rng.randrange(4)),
    "target slot": lambda rng, plan, i: change_row(i, plan, target_slot=rng.randrange(4)),
    "source": lambda rng, plan, i: change_row(i, plan, source=rng.randrange(4)),
    "target": lambda rng, plan, i: change_row(i, plan, target=rng.choice((0, 2, 3))),
    "chunk": lambda rng, plan, i: change_row(i, plan, chunk=rng.randrange(4)),
    "carry": lambda rng, plan, i: change_row(i, plan, carry=rng.randrange(-1, 3)),
    "position": lambda rng, plan, i: change_row(i, plan, source_position=rng.randrange(3)),
    "turn receives": lambda rng, plan, i: change_row(i, plan, recv=plan.rows[i].recv[::-1]),
    "drop send": lambda rng, plan, i: change_row(i, plan, send=plan.rows[i].send[1:]),
    "drop receive": lambda rng, plan, i: change_row(i, plan, recv=plan.rows[i].recv[1:]),
    "flush": flip(FLUSH),
    "final": flip(FINAL),
    "zero-copy": flip(ZERO_COPY),
    "direct write": flip(DIRECT_WRITE),
    "await window": flip(AWAIT_WINDOW),
    "announce window": flip(ANNOUNCE_WINDOW),
    "copies": lambda rng, plan, i: change_row(i, plan, copies=rng.choice(list(CopyStrategy))),
    "channel": change_channel,
    "redirect": redirect_channel,
    "new lane": new_lane,
    "fewer scratch slots": lambda rng, plan, i: plan._replace(scratch_slots=0),
}


def plan_mutants(name: str, schedule: Schedule) -> Iterator[tuple[str, list[bytes]]]:
    """(seed, all plans with one of them damaged): every mutation `PLAN_EACH` times.

    Where receivers announce write windows, ranks that only send make the copies and wait for
    windows.
    """
    idle = CopyStrategy.SENDER if schedule.collective in ANNOUNCING else CopyStrategy.RECEIVER
    plans = lower_all(schedule, Copies(idle))
    for mutation, mutate in PLAN_MUTATIONS.items():
        for number in range(PLAN_EACH):
            seed = f"{SEED} {name} {mutation} {number}"
            rng = random.Random(seed)
            rank = rng.randrange(schedule.size)
            plan = unpack(plans[rank])
            if not plan.rows or not plan.channels:
                continue
            image = pack(mutate(rng, plan, rng.randrange(len(plan.rows))))
            if image != plans[rank]:
                yield seed, [*plans[:rank], image, *plans[rank + 1 :]]


def judge_plans(name: str, schedule: Schedule) -> tuple[int, int]:
    """How many mutants were tried and how many refused; fails the test if one slips through."""
    tried, refused = 0, 0
    for seed, plans in plan_mutants(name, schedule):
        tried += 1
        try:
            verify_plans(plans, everyone_heard=True)
        except ScheduleError as error:
            assert str(error)
            refused += 1
            continue
        if not plans_are_right(plans, tried, runs=12, everyone_heard=True):
            text = "".join(str(_core.Plan(image)) for image in plans)
            pytest.fail(f"seed {seed!r}: accepted, but runs go wrong\n{text}")
    return tried, refused
