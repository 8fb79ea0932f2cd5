"""One collective on every rank of a simulation: inputs, the calls, and what must come out."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pycoll import _core
from pycoll.algorithms import TABLE, lookup
from pycoll.plan.lowering import add_acknowledgements, lower
from pycoll.schedule.collectives import ROOTED, Collective
from pycoll.schedule.topology import Topology

FLOAT32, INT32 = 11, 3
SUM = 0
DTYPES = {FLOAT32: np.float32, INT32: np.int32}


@dataclass
class Case:
    """A collective on ``size`` ranks with one block count per block."""

    collective: Collective
    algorithm: str
    size: int
    root: int
    counts: list[int]
    dtype: int = FLOAT32
    segment_bytes: int = 4096
    topology: Topology | None = None
    inputs: list[np.ndarray] = field(default_factory=list)
    outputs: list[np.ndarray] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.collective.name.lower()} by {self.algorithm}, {self.size} ranks, root "
            f"{self.root}, counts {self.counts}, segments of {self.segment_bytes} bytes"
        )

    @property
    def servers(self) -> int:
        """The number of ranks, the last ones, that serve."""
        return 0 if self.topology is None else self.topology.servers

    def contribution(self, rank: int, length: int) -> np.ndarray:
        index = np.arange(length)
        return ((index * 7 + rank * 31 + (index >> 6)) % 1021).astype(DTYPES[self.dtype])

    def prepare(self) -> None:
        """Make inputs and outputs of every rank."""
        kind, size, total = self.collective, self.size, sum(self.counts)
        for rank in range(size):
            own = self.counts[rank] if len(self.counts) == size else 0
            lengths = {
                Collective.ALL_GATHER: (own, total),
                Collective.GATHER: (own, total if rank == self.root else 0),
                Collective.REDUCE_SCATTER: (total, own),
                Collective.SCATTER: (total if rank == self.root else 0, own),
                Collective.REDUCE: (total, total if rank == self.root else 0),
                Collective.BROADCAST: (total if rank == self.root else 0, total),
                Collective.ALL_TO_ALL: (
                    sum(self.counts[rank * size : (rank + 1) * size]),
                    sum(self.counts[rank::size]),
                ),
                Collective.BARRIER: (0, 0),
            }
            in_length, out_length = lengths.get(kind, (total, total))
            if rank >= size - self.servers:
                in_length = out_length = 0
            self.inputs.append(self.contribution(rank, in_length))
            self.outputs.append(np.full(out_length, -7, DTYPES[self.dtype]))

    def expected(self, rank: int) -> np.ndarray:
        """What ``rank`` must hold in the end; exact, for all values are small whole numbers."""
        kind, size = self.collective, self.size
        full = [self.contribution(r, len(self.inputs[r])) for r in range(size)]
        starts = np.concatenate([[0], np.cumsum(self.counts)]).astype(int)
        full = full[: size - self.servers]
        if rank >= len(full):
            return self.outputs[rank]
        if kind in (Collective.ALL_REDUCE, Collective.REDUCE):
            return sum(full) if kind is Collective.ALL_REDUCE or rank == self.root else full[0][:0]
        if kind is Collective.BROADCAST:
            return full[self.root]
        if kind is Collective.REDUCE_SCATTER:
            return sum(full)[starts[rank] : starts[rank + 1]]
        if kind in (Collective.ALL_GATHER, Collective.GATHER):
            whole = np.concatenate(full)
            return whole if kind is Collective.ALL_GATHER or rank == self.root else whole[:0]
        if kind is Collective.SCATTER:
            return full[self.root][starts[rank] : starts[rank + 1]]
        if kind is Collective.SCAN:
            return sum(full[: rank + 1])
        if kind is Collective.EXSCAN:
            return sum(full[:rank]) if rank else self.outputs[0]
        if kind is Collective.ALL_TO_ALL:
            pieces = []
            for peer in range(size):
                row = np.concatenate([[0], np.cumsum(self.counts[peer * size : (peer + 1) * size])])
                pieces.append(full[peer][int(row[rank]) : int(row[rank + 1])])
            return np.concatenate(pieces)
        return self.outputs[rank]

    def add_to(self, simulation: Any, rank: int, **words: Any) -> int:
        """Let ``rank`` enter the collective.

        ``words`` go to Simulation.add, or replace those of the request.
        """
        entry = lookup(self.collective, self.algorithm)
        schedule = entry.build(self.size, root=self.root, only=rank, topology=self.topology)
        if self.collective in ROOTED or self.collective in (Collective.SCAN, Collective.EXSCAN):
            schedule = add_acknowledgements(schedule)
        empty = self.collective is Collective.BARRIER or rank >= self.size - self.servers
        times = {word: words.pop(word) for word in ("timeout_s", "at_s") if word in words}
        request = _core.Request(
            _core.Plan(lower(schedule, rank)),
            **{
                "dtype": self.dtype,
                "op": SUM,
                "counts": self.counts,
                "plan_key": 1,
                "segment_bytes": self.segment_bytes,
                **words,
            },
        )
        return simulation.add(
            rank,
            request,
            None if empty else _core.view(self.inputs[rank]),
            None if empty else _core.view(self.outputs[rank]),
            **times,
        )

    def wrong_at(self, rank: int) -> str | None:
        """The first wrong element of ``rank``, in words, or None."""
        want = self.expected(rank)
        got = self.outputs[rank]
        if np.array_equal(want, got):
            return None
        index = int(np.flatnonzero(want != got)[0])
        return f"rank {rank}, element {index}: expected {want[index]}, got {got[index]}"


def random_case(seed: int, sizes: tuple[int, int] = (1, 9)) -> Case:
    """A case drawn from ``seed``: any collective, any algorithm that fits, uneven counts."""
    draw = random.Random(seed)
    size = draw.randint(*sizes)
    collective = draw.choice(list(TABLE))
    names = list(TABLE[collective])
    blocks = {
        Collective.ALL_TO_ALL: size * size,
        Collective.BARRIER: 0,
        Collective.ALL_GATHER: size,
        Collective.GATHER: size,
        Collective.REDUCE_SCATTER: size,
        Collective.SCATTER: size,
    }.get(collective, 1)
    longest = draw.choice([0, 1, 3, 64, 700, 6000])
    even = draw.random() < 0.5
    first = draw.randint(0, longest)
    counts = [first if even else draw.randint(0, longest) for _ in range(blocks)]
    hosts = draw.randint(1, size)
    case = Case(
        collective,
        draw.choice(names),
        size,
        draw.randrange(size) if collective in ROOTED else 0,
        counts,
        dtype=draw.choice([FLOAT32, INT32]),
        segment_bytes=draw.choice([64, 256, 4096, 65536]),
        topology=Topology.even(size, hosts),
    )
    case.prepare()
    return case
