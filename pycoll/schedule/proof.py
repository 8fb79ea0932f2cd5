"""The proof of a schedule: a symbolic run that computes the final content of every rank.

A value is a chunk together with the set of ranks whose contributions it holds. The run refuses a
transfer that combines two values with a common contribution or reads a chunk that the rank does not
hold. It also refuses two writes of one chunk in a step. The error names the transfer at fault.
`pycoll.plan.verifier.verify_plans` proves the plans that a schedule is lowered to.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import groupby
from typing import NoReturn

from pycoll.schedule.collectives import REDUCING, ROOTED, SERVABLE, Collective
from pycoll.schedule.contributions import (
    Trees,
    Value,
    check_same_bits,
    combine,
    initial,
    outputs_of,
    ranks_text,
)
from pycoll.schedule.language import (
    LANES_MAX,
    TOKEN,
    Schedule,
    ScheduleError,
    Transfer,
    block_count,
)

__all__ = ["ScheduleError", "fold_order", "hears_all", "verify_schedule"]


def verify_schedule(schedule: Schedule) -> None:
    """Proves that the schedule implements its collective.

    For all_reduce it also proves that every rank gets the same bits. Raises ScheduleError that
    names the step and the transfer, or the rank and the output chunk, at fault. Requires: the whole
    schedule, not one rank's part.
    """
    holdings, heard = _run(schedule)
    for rank, held in enumerate(holdings):
        for chunk, ranks in outputs_of(schedule, rank):
            value = held.get(chunk)
            if value is None:
                raise ScheduleError(f"rank {rank} ends without output chunk {chunk}")
            if value.chunk != chunk or value.ranks != ranks:
                raise ScheduleError(
                    f"rank {rank} ends with {value} in output chunk {chunk}; "
                    f"it must hold chunk {chunk} of {ranks_text(ranks)}"
                )
    outputs = (
        (rank, held[chunk])
        for rank, held in enumerate(holdings)
        for chunk, _ in outputs_of(schedule, rank)
    )
    check_same_bits(schedule, outputs)
    if schedule.collective is Collective.BARRIER:
        everyone = (1 << schedule.size) - 1
        for rank, ranks in enumerate(heard):
            if ranks != everyone:
                missing = ranks_text(everyone & ~ranks)
                raise ScheduleError(f"rank {rank} leaves the barrier without hearing of {missing}")


def fold_order(schedule: Schedule) -> str:
    """``"rank"`` if every output is exactly ((x0 op x1) op x2) op ...; otherwise ``"other"``.

    The result is also ``"rank"`` if the collective combines nothing. ``deterministic=True`` accepts
    only schedules with the result ``"rank"``. Requires: verify_schedule passed.
    """
    if schedule.collective not in REDUCING:
        return "rank"
    holdings, _ = _run(schedule)
    for rank, held in enumerate(holdings):
        for chunk, ranks in outputs_of(schedule, rank):
            if held[chunk].first < 0 or ranks.bit_count() != held[chunk].last + 1:
                return "other"
    return "rank"


def hears_all(schedule: Schedule) -> bool:
    """Whether every worker ends causally after the start of every rank, by data or by tokens.

    A rank that serves must end after the start of every worker.
    """
    everyone, workers = (1 << schedule.size) - 1, (1 << schedule.workers) - 1
    return all(
        ranks == everyone or (rank >= schedule.workers and ranks & workers == workers)
        for rank, ranks in enumerate(_run(schedule)[1])
    )


def _run(schedule: Schedule) -> tuple[list[dict[int, Value]], list[int]]:
    """The final chunks of each rank, and the mask of ranks that causally precede its end."""
    _check_schedule(schedule)
    holdings = [_inputs(schedule, rank) for rank in range(schedule.size)]
    heard = [1 << rank for rank in range(schedule.size)]
    trees: Trees = {}
    numbered = enumerate(schedule.transfers)
    for _, group in groupby(numbered, key=lambda pair: pair[1].step):
        _run_step(schedule, list(group), holdings, heard, trees)
    return holdings, heard


def _inputs(schedule: Schedule, rank: int) -> dict[int, Value]:
    blocks, parts = schedule.inputs_of(rank), schedule.parts
    chunks = (c for block in blocks for c in range(block * parts, (block + 1) * parts))
    return {chunk: initial(chunk, rank) for chunk in chunks}


def _run_step(
    schedule: Schedule,
    group: Sequence[tuple[int, Transfer]],
    holdings: list[dict[int, Value]],
    heard: list[int],
    trees: Trees,
) -> None:
    before = {t.source: heard[t.source] for _, t in group}
    arriving: dict[tuple[int, int], list[tuple[int, Transfer]]] = {}
    values: dict[Transfer, Value] = {}
    for index, t in group:
        _check_transfer(schedule, index, t)
        heard[t.destination] |= before[t.source]
        if t.chunk == TOKEN:
            continue
        value = holdings[t.source].get(t.chunk)
        if value is None:
            _refuse(index, t, f"rank {t.source} holds nothing in chunk {t.chunk}")
        values[t] = value
        arriving.setdefault((t.destination, t.target), []).append((index, t))
    results = {
        place: _arrive(schedule, holdings[place[0]].get(place[1]), arrivals, values, trees)
        for place, arrivals in arriving.items()
    }
    for (rank, chunk), value in results.items():
        holdings[rank][chunk] = value


def _arrive(
    schedule: Schedule,
    own: Value | None,
    arrivals: Sequence[tuple[int, Transfer]],
    values: dict[Transfer, Value],
    trees: Trees,
) -> Value:
    """The value of one chunk of one rank after the transfers of a step into this chunk.

    ``own`` is the value before the step; ``arrivals`` are the transfers with their indices. A rank
    that serves may have no value before.
    """
    index, t = arrivals[-1]
    if len(arrivals) > 1:
        _check_fold(arrivals)
    if not t.reduce:
        return values[t]
    if own is None and t.destination < schedule.workers:
        _refuse(index, t, f"rank {t.destination} holds nothing in chunk {t.target} to combine with")
    try:
        front = [values[t] for _, t in arrivals if t.before]
        behind = [values[t] for _, t in arrivals if not t.before]
        middle = [own] if own is not None else []
        return reduce(lambda left, right: combine(left, right, trees), [*front, *middle, *behind])
    except ScheduleError as error:
        _refuse(index, t, str(error))


def _check_fold(arrivals: Sequence[tuple[int, Transfer]]) -> None:
    index, last = arrivals[-1]
    for _, t in arrivals:
        if not t.reduce:
            _refuse(index, last, f"chunk {t.target} of rank {t.destination} is written twice")
        if t.lane != last.lane:
            _refuse(index, last, f"joins a value on lane {t.lane}; one fold uses one lane")
    sources = [t.source for _, t in arrivals]
    if len(set(sources)) != len(sources):
        _refuse(index, last, f"rank {last.source} sends twice into one fold; combine there first")


def _check_schedule(schedule: Schedule) -> None:
    size, temporaries = schedule.size, schedule.temporaries
    if schedule.only is not None:
        raise ScheduleError(f"only rank {schedule.only}'s part is given; the proof needs all ranks")
    if size < 1 or schedule.parts < 1 or not 0 <= schedule.root < size:
        raise ScheduleError(
            f"size {size}, parts {schedule.parts}, root {schedule.root}: "
            "size and parts must be positive and root below size"
        )
    if schedule.root != 0 and schedule.collective not in ROOTED:
        raise ScheduleError(f"root {schedule.root}: {schedule.collective.name.lower()} has no root")
    _check_servers(schedule)
    data = block_count(schedule.collective, size) * schedule.parts
    for i, chunk in enumerate(temporaries):
        if not 0 <= chunk < data:
            raise ScheduleError(
                f"temporary {i} is sized by chunk {chunk}, not one of 0..{data - 1}"
            )
    for earlier, later in zip(schedule.transfers, schedule.transfers[1:], strict=False):
        if later.step < earlier.step:
            raise ScheduleError(f"step {later.step} is listed after step {earlier.step}")


def _check_servers(schedule: Schedule) -> None:
    servers, word = schedule.servers, schedule.collective.name.lower()
    if not 0 <= servers < schedule.size:
        raise ScheduleError(f"{servers} servers of {schedule.size} ranks: one rank must work")
    if servers and schedule.collective not in SERVABLE:
        raise ScheduleError(f"{servers} servers: {word} has a block for every rank, so none serves")
    if servers and schedule.root >= schedule.workers:
        raise ScheduleError(f"root {schedule.root} serves; the root of {word} must work")


def _check_transfer(schedule: Schedule, index: int, t: Transfer) -> None:
    size, chunks = schedule.size, schedule.data_chunks + len(schedule.temporaries)
    if t.step < 0:
        _refuse(index, t, "steps count from 0")
    if not (0 <= t.source < size and 0 <= t.destination < size):
        _refuse(index, t, f"ranks are 0..{size - 1}")
    if not 0 <= t.lane < LANES_MAX:
        _refuse(index, t, f"lane {t.lane}; lanes are 0..{LANES_MAX - 1}")
    if t.chunk == TOKEN:
        if t.reduce or t.target != TOKEN or t.source == t.destination:
            _refuse(index, t, "a token is copied from one rank to another and writes no chunk")
        return
    for chunk in (t.chunk, t.target):
        if not 0 <= chunk < chunks:
            _refuse(index, t, f"chunk {chunk}; chunks are 0..{chunks - 1}")
    if t.source == t.destination and t.chunk == t.target:
        _refuse(index, t, "neither changes rank nor chunk")
    if schedule.sized_by(t.chunk) != schedule.sized_by(t.target):
        _refuse(index, t, f"chunk {t.chunk} and chunk {t.target} may differ in size")
    if t.reduce and schedule.collective not in REDUCING:
        _refuse(index, t, f"{schedule.collective.name.lower()} combines nothing")


def _refuse(index: int, t: Transfer, why: str) -> NoReturn:
    what = "token" if t.chunk == TOKEN else f"chunk {t.chunk}"
    into = "" if t.target == t.chunk else f" into {t.target}"
    how = "reduce" if t.reduce else "copy"
    raise ScheduleError(
        f"step {t.step}, transfer {index} ({how} {what}{into}, rank {t.source} -> "
        f"rank {t.destination}, lane {t.lane}): {why}"
    )
