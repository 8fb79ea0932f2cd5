"""Small schedules for the tests of the proof and the lowering, drawn by hand; schedules as text."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from pycoll.plan.lowering import lower
from pycoll.plan.plan_format import Row, unpack
from pycoll.schedule.collectives import Collective
from pycoll.schedule.language import REDUCE, TOKEN, Schedule, Transfer


def make(
    kind: Collective,
    size: int,
    transfers: Iterable[Transfer],
    parts: int = 1,
    root: int = 0,
    temporaries: tuple[int, ...] = (),
) -> Schedule:
    ordered = tuple(sorted(transfers, key=lambda t: t.step))
    return Schedule(kind, size, parts, ordered, root, temporaries)


def ring(size: int) -> Schedule:
    scatter = [
        Transfer(s, (r - s) % size, r, (r + 1) % size, REDUCE)
        for s in range(size - 1)
        for r in range(size)
    ]
    gather = [
        Transfer(size - 1 + s, (r + 1 - s) % size, r, (r + 1) % size)
        for s in range(size - 1)
        for r in range(size)
    ]
    return make(Collective.ALL_REDUCE, size, scatter + gather, parts=size)


def ring_reduce_scatter(size: int) -> Schedule:
    transfers = [
        Transfer(s, (r - s - 1) % size, r, (r + 1) % size, REDUCE)
        for s in range(size - 1)
        for r in range(size)
    ]
    return make(Collective.REDUCE_SCATTER, size, transfers)


def ring_all_gather(size: int) -> Schedule:
    transfers = [
        Transfer(s, (r - s) % size, r, (r + 1) % size) for s in range(size - 1) for r in range(size)
    ]
    return make(Collective.ALL_GATHER, size, transfers)


def chain(size: int, parts: int = 1, back_lane: int = 1) -> Schedule:
    up = [Transfer(r, c, r, r + 1, REDUCE) for r in range(size - 1) for c in range(parts)]
    down = [
        Transfer(2 * size - 2 - r, c, r, r - 1, lane=back_lane)
        for r in range(size - 1, 0, -1)
        for c in range(parts)
    ]
    return make(Collective.ALL_REDUCE, size, up + down, parts)


def tree(size: int, lane: int = 0) -> Schedule:
    """Heap-shaped: ranks 2r+1 and 2r+2 are below r; up on one lane, down on the next."""
    depth = [0] * size
    for r in range(1, size):
        depth[r] = depth[(r - 1) // 2] + 1
    deepest = max(depth)
    up = [
        Transfer(deepest - depth[r], 0, r, (r - 1) // 2, REDUCE, before=False, lane=lane)
        for r in range(1, size)
    ]
    down = [Transfer(deepest + depth[r], 0, (r - 1) // 2, r, lane=lane + 1) for r in range(1, size)]
    return make(Collective.ALL_REDUCE, size, up + down)


def doubling(size: int) -> Schedule:
    """Recursive doubling for a power of two."""
    transfers = [
        Transfer(s, 0, r, r ^ (1 << s), REDUCE, before=bool(r < r ^ (1 << s)))
        for s in range(size.bit_length() - 1)
        for r in range(size)
    ]
    return make(Collective.ALL_REDUCE, size, transfers)


def one_shot(size: int) -> Schedule:
    transfers = [
        Transfer(0, 0, a, b, REDUCE, before=a < b)
        for a in range(size)
        for b in range(size)
        if a != b
    ]
    return make(Collective.ALL_REDUCE, size, transfers)


def direct_reduce(size: int, root: int) -> Schedule:
    transfers = [Transfer(0, 0, r, root, REDUCE, before=r < root) for r in range(size) if r != root]
    return make(Collective.REDUCE, size, transfers, root=root)


def binomial(size: int, root: int) -> Schedule:
    transfers = []
    step, distance = 0, 1
    while distance < size:
        for r in range(min(distance, size - distance)):
            transfers.append(Transfer(step, 0, (r + root) % size, (r + distance + root) % size))
        step, distance = step + 1, 2 * distance
    return make(Collective.BROADCAST, size, transfers, root=root)


def binomial_reduce(size: int, root: int, parts: int = 1) -> Schedule:
    transfers = [
        Transfer(s, c, (r + root) % size, (r - (1 << s) + root) % size, REDUCE, before=False)
        for s in range((size - 1).bit_length())
        for r in range(1 << s, size, 2 << s)
        for c in range(parts)
    ]
    return make(Collective.REDUCE, size, transfers, parts, root)


def star(kind: Collective, size: int, root: int) -> Schedule:
    """Gather or scatter in one step."""
    others = [r for r in range(size) if r != root]
    inwards = kind is Collective.GATHER
    transfers = [Transfer(0, r, r, root) if inwards else Transfer(0, r, root, r) for r in others]
    return make(kind, size, transfers, root=root)


def pairwise(size: int) -> Schedule:
    transfers = [
        Transfer(k - 1, r * size + (r + k) % size, r, (r + k) % size)
        for k in range(1, size)
        for r in range(size)
    ]
    return make(Collective.ALL_TO_ALL, size, transfers)


def relayed(size: int) -> Schedule:
    """All_to_all in which every block first visits the right neighbour of its source."""
    first = [
        Transfer(0, s * size + d, s, (s + 1) % size)
        for s in range(size)
        for d in range(size)
        if s != d
    ]
    last = [
        Transfer(1, s * size + d, (s + 1) % size, d)
        for s in range(size)
        for d in range(size)
        if d not in (s, (s + 1) % size)
    ]
    return make(Collective.ALL_TO_ALL, size, first + last)


def scan(size: int) -> Schedule:
    """Hillis and Steele: log2 steps."""
    transfers = []
    step, distance = 0, 1
    while distance < size:
        transfers += [Transfer(step, 0, r, r + distance, REDUCE) for r in range(size - distance)]
        step, distance = step + 1, 2 * distance
    return make(Collective.SCAN, size, transfers)


def exscan(size: int) -> Schedule:
    """A scan of which every rank passes its result one up; by way of a temporary."""
    steps = scan(size)
    shift = [Transfer(steps.steps, 0, r, r + 1, into=1) for r in range(size - 1)]
    back = [Transfer(steps.steps + 1, 1, r, r, into=0) for r in range(1, size)]
    return make(Collective.EXSCAN, size, [*steps.transfers, *shift, *back], temporaries=(0,))


def barrier(size: int) -> Schedule:
    transfers = [
        Transfer(s, TOKEN, r, (r + (1 << s)) % size)
        for s in range((size - 1).bit_length())
        for r in range(size)
    ]
    return make(Collective.BARRIER, size, transfers)


def served(size: int, servers: int) -> Schedule:
    """The last ranks serve: each folds a part of what the workers send, and sends it back."""
    workers = size - servers
    push = [Transfer(0, s, w, workers + s, REDUCE) for w in range(workers) for s in range(servers)]
    pull = [Transfer(1, s, workers + s, w) for s in range(servers) for w in range(workers)]
    return make(Collective.ALL_REDUCE, size, [*push, *pull], parts=servers)._replace(
        servers=servers
    )


def all_samples(size: int) -> list[tuple[str, Schedule]]:
    """Everything above, at one size."""
    root = size - 1
    samples = {
        "ring": ring(size),
        "ring_reduce_scatter": ring_reduce_scatter(size),
        "ring_all_gather": ring_all_gather(size),
        "chain": chain(size),
        "chain of 2 parts": chain(size, 2),
        "chain on one lane": chain(size, 2, back_lane=0),
        "tree": tree(size),
        "direct_reduce": direct_reduce(size, root),
        "binomial": binomial(size, root),
        "binomial_reduce": binomial_reduce(size, root, parts=2),
        "gather": star(Collective.GATHER, size, 0),
        "scatter": star(Collective.SCATTER, size, root),
        "pairwise": pairwise(size),
        "relayed": relayed(size),
        "scan": scan(size),
        "exscan": exscan(size),
        "barrier": barrier(size),
    }
    if size > 1:
        samples["served by one"] = served(size, 1)
        samples["served by half"] = served(size, size // 2)
    if size & (size - 1) == 0:
        samples["doubling"] = doubling(size)
    if size <= 4:
        samples["one_shot"] = one_shot(size)
    return [(f"{name} of {size}", schedule) for name, schedule in samples.items()]


def rows_of(schedule: Schedule, rank: int) -> tuple[Row, ...]:
    """The rows of the rank's plan."""
    return unpack(lower(schedule, rank)).rows


def part_of(schedule: Schedule, rank: int) -> Schedule:
    """The schedule with only the transfers from or to ``rank``."""
    mine = tuple(t for t in schedule.transfers if rank in (t.source, t.destination))
    return schedule._replace(transfers=mine, only=rank)


def schedule_text(schedule: Schedule) -> str:
    """The text of all transfers, step by step."""
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
