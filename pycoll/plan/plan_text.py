"""Schedules and plans as readable text: one line per transfer, one line per row."""

from __future__ import annotations

from itertools import groupby

from pycoll.plan.plan_format import (
    ANNOUNCE_WINDOW,
    AWAIT_WINDOW,
    CODED_SOURCE,
    CODED_TARGET,
    DIRECT_WRITE,
    ENCODE,
    FINAL,
    FLUSH,
    NO_CARRY,
    TOKEN_ROW,
    ZERO_COPY,
    Buffer,
    Plan,
    Row,
    place_text,
    unpack,
)
from pycoll.schedule.language import TOKEN, Schedule, Transfer

_FLAG_NAMES = {
    FINAL: "final",
    FLUSH: "flush",
    ZERO_COPY: "zero-copy",
    DIRECT_WRITE: "direct-write",
    AWAIT_WINDOW: "await-window",
    ANNOUNCE_WINDOW: "announce-window",
}


def schedule_text(schedule: Schedule) -> str:
    """The text of all transfers, step by step.

    >>> ring = Schedule(Collective.ALL_GATHER, 2, 1, (Transfer(0, 0, 0, 1), Transfer(0, 1, 1, 0)))
    >>> print(schedule_text(ring))
    all_gather of 2 ranks, 2 chunks, 1 steps
    step 0
      0 -> 1  copy 0
      1 -> 0  copy 1
    """
    part = "" if schedule.only is None else f", only rank {schedule.only}"
    lines = [
        f"{schedule.collective.name.lower()} of {schedule.size} ranks, "
        f"{schedule.data_chunks} chunks, {schedule.steps} steps{part}"
    ]
    for step, group in groupby(schedule.transfers, key=lambda t: t.step):
        lines.append(f"step {step}")
        lines.extend(f"  {_transfer_text(t)}" for t in group)
    return "\n".join(lines)


def _transfer_text(t: Transfer) -> str:
    route = f"{t.source} -> {t.destination}"
    lane = f"  lane {t.lane}" if t.lane else ""
    if t.chunk == TOKEN:
        return f"{route}  token{lane}"
    into = "" if t.target == t.chunk else f" into {t.target}"
    how = "copy" if not t.reduce else "reduce in front" if t.before else "reduce behind"
    if t.partial:
        how += " partial"
    return f"{route}  {how} {t.chunk}{into}{lane}"


def plan_text(image: bytes) -> str:
    """The text of the rows of a plan, lane by lane.

    Raises ScheduleError if the bytes are not a plan.
    """
    plan = unpack(image)
    lines = [
        f"{plan.collective.name.lower()} of {plan.size} ranks, rank {plan.rank}: "
        f"{len(plan.rows)} rows, {plan.scratch_slots} scratch slots"
    ]
    for lane, rows in groupby(plan.rows, key=lambda row: row.lane):
        lines.append(f"lane {lane}")
        lines.extend(f"  {_row_text(plan, row)}" for row in rows)
    return "\n".join(lines)


def _row_text(plan: Plan, row: Row) -> str:
    local = row.coded_local
    operands = [
        f"{_codes(row.coded_recv >> i & 1)}rank {plan.channels[end].peer}"
        for i, end in enumerate(row.recv)
    ]
    if row.source:
        place = place_text(row.source, row.source_slot)
        operands.insert(row.source_position, _codes(local & CODED_SOURCE) + place)
    if row.carry != NO_CARRY:
        operands.insert(0, place_text(Buffer.SCRATCH, row.carry))
    results = [
        f"{_codes(row.coded_send >> i & 1)}rank {plan.channels[end].peer}"
        for i, end in enumerate(row.send)
    ]
    if row.target:
        place = place_text(row.target, row.target_slot)
        results.insert(0, _codes(local & CODED_TARGET) + place)
    chunk = "token" if row.chunk == TOKEN_ROW else f"chunk {row.chunk}"
    flags = "".join(f" {name}" for flag, name in _FLAG_NAMES.items() if row.flags & flag)
    flags += " encode" if local & ENCODE else ""
    copies = f" {row.copies.name.lower()}-copies" if row.copies else ""
    made, sent = " + ".join(operands) or "nothing", ", ".join(results) or "none"
    return f"{chunk}: {made} -> {sent}{flags}{copies}"


def _codes(coded: int) -> str:
    return "codes " if coded else ""
