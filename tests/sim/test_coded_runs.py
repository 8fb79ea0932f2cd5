"""Collectives with dense codecs over the virtual network, with faults: 1,000 seeds.

Each seed draws a collective, an algorithm, hosts, a codec, values that may not be finite, and a cut
or a death. A rank that ends has the oracle's bits and residual. Another one names a lost rank.
"""

from __future__ import annotations

import functools
import os
import random
from collections import Counter
from typing import Any

import coded_sums
import numpy as np
import pytest

from pycoll import _core
from pycoll.algorithms import lookup
from pycoll.comm.codecs import coding_of
from pycoll.compress import BF16, FP8, Block, Sign
from pycoll.errors import PeerLostError, PycollError
from pycoll.plan.lowering import add_acknowledgements, lower
from pycoll.schedule.collectives import REDUCING, ROOTED, Collective
from pycoll.schedule.topology import Topology

BASE = int(os.environ.get("TEST_SEED", "0"))
FLOAT32, SUM, AVG = 11, 0, 4
#: Shorter and longer than the operations take: faults come before, between and after them.
FAULTS_WITHIN_S = (200e-6, 0.002, 0.02, 0.2)
CODECS = [
    BF16(),
    FP8(block=32),
    Block("int8", block=64),
    Block("int4", block=32, rounding="stochastic", seed=9),
    Sign(block=32),
]


#: By collective: the algorithms whose data may travel as codes, on one host and on several.
ALGORITHMS = {
    Collective.ALL_REDUCE: (["direct"], ["hierarchical:direct+direct"]),
    Collective.REDUCE_SCATTER: (["direct"], ["direct"]),
    Collective.ALL_GATHER: (["ring", "direct", "recursive_doubling", "bruck"], ["ring", "direct"]),
    Collective.BROADCAST: (["direct", "binomial", "chain"], ["direct", "chain"]),
}


@functools.cache
def plan(collective: Collective, name: str, topology: Topology, root: int, rank: int) -> _core.Plan:
    algorithm = lookup(collective, name)
    schedule = algorithm.build(topology.size, root=root, only=rank, topology=topology)
    if collective in ROOTED:
        schedule = add_acknowledgements(schedule)
    return _core.Plan(lower(algorithm.encode(schedule, topology), rank))


def outcome(simulation: _core.Simulation, operation: int) -> PycollError | None:
    try:
        simulation.check(operation)
    except PycollError as error:
        return error
    return None


class Drawn:
    """A collective with a codec, the arrays of all ranks, and what the oracle makes of them."""

    def __init__(self, seed: int) -> None:
        dice = random.Random(seed)
        self.seed, self.size, self.codec = seed, dice.randrange(2, 7), dice.choice(CODECS)
        self.collective = dice.choice(list(ALGORITHMS))
        hosts = dice.randrange(1, 4) if dice.random() < 0.5 else 1
        self.topology = Topology.even(self.size, min(hosts, self.size))
        several = self.topology.levels[0][-1] > 0
        self.name = dice.choice(ALGORITHMS[self.collective][several])
        self.root = dice.randrange(self.size) if self.collective is Collective.BROADCAST else 0
        self.averages = self.collective in REDUCING and dice.random() < 0.5
        self.keeps = dice.random() < 0.5
        self.segment_bytes = dice.choice((64, 256, 1024))
        self.faults_within_s = dice.choice(FAULTS_WITHIN_S)
        self.bad = dice.random() < 0.3
        longest = dice.choice((3, 400, 400))
        shared = self.collective in (Collective.ALL_REDUCE, Collective.BROADCAST)
        self.counts = [dice.randint(0, longest) for _ in range(1 if shared else self.size)]
        self._draw = np.random.default_rng(seed)

    def __str__(self) -> str:
        return (
            f"seed {self.seed}: {self.collective.name.lower()} by {self.name}, {self.codec!r}, "
            f"hosts {self.topology.levels[0]}, root {self.root}, counts {self.counts}, segments "
            f"of {self.segment_bytes} bytes{', averages' * self.averages}{', keeps' * self.keeps}"
            f"{', not finite' * self.bad}"
        )

    def inputs(self) -> list[Any]:
        """New arrays of all ranks; some hold values that are not finite."""
        own = self.counts if self.collective is Collective.ALL_GATHER else None
        lengths = own or [sum(self.counts)] * self.size
        xs = [self._draw.standard_normal(length).astype(np.float32) for length in lengths]
        if self.bad:
            for x in xs:
                if x.size and self._draw.random() < 0.5:
                    places = self._draw.integers(x.size, size=2)
                    x[places] = self._draw.choice(np.float32([np.nan, np.inf, -np.inf]), 2)
        return xs

    def expected(self, xs: list[Any], rests: list[Any] | None) -> list[Any]:
        """The result of each rank; changes the residuals."""
        if self.collective is Collective.REDUCE_SCATTER:
            return coded_sums.reduce_scatter(self.codec, xs, self.counts, self.averages, rests)
        if self.collective is Collective.ALL_GATHER:
            one = coded_sums.copies(self.codec, xs, range(self.size), rests)
        elif self.collective is Collective.BROADCAST:
            one = coded_sums.copies(self.codec, xs, [self.root], rests)
        elif self.name == "direct":
            one = coded_sums.all_reduce(self.codec, xs, self.averages, rests)
        else:
            hosts = self.topology.levels[0]
            one = coded_sums.all_reduce_between_hosts(self.codec, xs, hosts, self.averages, rests)
        return [one] * self.size


def run(seed: int) -> tuple[str, int, int]:
    """Two operations in a row, with a cut or a death. Returns the name of the collective, and how
    many operations of living ranks ended, and failed."""
    drawn = Drawn(seed)
    size = drawn.size
    simulation = _core.Simulation(size, seed, "faults", drawn.faults_within_s)
    coding = coding_of(drawn.codec)
    assert coding is not None
    begun: list[tuple[int, Any]] = []
    expected, residuals = [], []
    wanted_rests: list[Any] | None = None
    for _ in range(2):
        xs = drawn.inputs()
        if not residuals:
            residuals = [np.zeros_like(x) for x in xs]
            wanted_rests = [one.copy() for one in residuals] if drawn.keeps else None
        expected.append(drawn.expected(xs, wanted_rests))
        for rank in range(size):
            request = _core.Request(
                plan(drawn.collective, drawn.name, drawn.topology, drawn.root, rank),
                dtype=FLOAT32, op=AVG if drawn.averages else SUM, counts=drawn.counts,
                plan_key=1, segment_bytes=drawn.segment_bytes, codec=coding.native(),
            )  # fmt: skip
            out = np.empty_like(expected[-1][rank])
            sends = drawn.collective is not Collective.BROADCAST or rank == drawn.root
            number = simulation.add(
                rank,
                request,
                _core.view(xs[rank] if sends else xs[rank][:0]),
                _core.view(out),
                residual=_core.view(residuals[rank]) if drawn.keeps and sends else None,
            )
            begun.append((number, out))
    where = f"{drawn} over {simulation}"
    assert simulation.run(60.0), f"{where}: it hangs"
    ended = failed = 0
    for place, (number, out) in enumerate(begun):
        step, rank = divmod(place, size)
        if simulation.dead(rank):
            continue
        error = outcome(simulation, number)
        if error is not None:
            assert isinstance(error, PeerLostError), f"{where}: {error!r}"
            assert error.ranks, where
            failed += 1
            continue
        ended += 1
        assert coded_sums.same(out, expected[step][rank]), f"{where}: rank {rank}, step {step}"
        if step == 1 and wanted_rests is not None:
            assert coded_sums.same(residuals[rank], wanted_rests[rank]), f"{where}: rank {rank}"
    return drawn.collective.name, ended, failed


@pytest.mark.parametrize("block", range(10))
def test_codes_are_exact_or_a_lost_rank_is_named(block: int) -> None:
    ended: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    for number in range(block * 100, block * 100 + 100):
        name, exact, lost = run(BASE * 1_000_003 + number)
        ended[name] += exact
        failed[name] += lost
    for collective in ALGORITHMS:
        assert ended[collective.name] > 10 and failed[collective.name] > 10, (ended, failed)
