"""All_reduces with dense codecs over the virtual network, with and without faults: 1,000 seeds.

A rank that ends has the oracle's bits and residual. Another one names a rank that is lost.
"""

from __future__ import annotations

import functools
import os
import random
from typing import Any

import coded_sums
import numpy as np
import pytest

from pycoll import _core
from pycoll.algorithms import lookup
from pycoll.comm.codecs import coding_of
from pycoll.compress import BF16, FP8, Block, Sign
from pycoll.errors import PeerLostError, PycollError
from pycoll.plan.lowering import lower
from pycoll.schedule.collectives import Collective
from pycoll.schedule.topology import single_host

BASE = int(os.environ.get("TEST_SEED", "0"))
FLOAT32, SUM, AVG = 11, 0, 4
CODECS = [
    BF16(),
    FP8(block=32),
    Block("int8", block=64),
    Block("int4", block=32, rounding="stochastic", seed=9),
    Sign(block=32),
]


@functools.cache
def plan(size: int, rank: int) -> _core.Plan:
    algorithm = lookup(Collective.ALL_REDUCE, "direct")
    schedule = algorithm.build(size, only=rank)
    return _core.Plan(lower(algorithm.encode(schedule, single_host(size)), rank))


def outcome(simulation: _core.Simulation, operation: int) -> PycollError | None:
    try:
        simulation.check(operation)
    except PycollError as error:
        return error
    return None


def run(seed: int) -> tuple[int, int]:
    """Two operations in a row. Returns how many of those of living ranks ended, and failed."""
    dice = random.Random(seed)
    size, codec = dice.randrange(1, 6), dice.choice(CODECS)
    count, averages, keeps = dice.randrange(400), dice.random() < 0.5, dice.random() < 0.5
    segment_bytes = dice.choice((64, 256, 1024))
    mode = "faults" if seed % 2 and size > 1 else "swarm"
    simulation = _core.Simulation(size, seed, mode, 0.002)
    coding = coding_of(codec)
    assert coding is not None
    draw = np.random.default_rng(seed)
    residuals = [np.zeros(count, np.float32) for _ in range(size)]
    wanted_rests = [one.copy() for one in residuals] if keeps else None
    begun: list[tuple[int, Any]] = []
    expected = []
    for _ in range(2):
        xs = draw.standard_normal((size, count)).astype(np.float32)
        expected.append(coded_sums.all_reduce(codec, xs, averages, wanted_rests))
        for rank in range(size):
            request = _core.Request(
                plan(size, rank), dtype=FLOAT32, op=AVG if averages else SUM, counts=[count],
                plan_key=1, segment_bytes=segment_bytes, codec=coding.native(),
            )  # fmt: skip
            out = np.empty(count, np.float32)
            rests = _core.view(residuals[rank]) if keeps else None
            number = simulation.add(
                rank, request, _core.view(xs[rank]), _core.view(out), residual=rests
            )
            begun.append((number, out))
    where = f"seed {seed}: {codec!r}, {size} ranks, {count} values, {mode}"
    assert simulation.run(60.0), f"{where}: it hangs"
    ended = failed = 0
    for place, (number, out) in enumerate(begun):
        step, rank = divmod(place, size)
        if simulation.dead(rank):
            continue
        error = outcome(simulation, number)
        if error is not None:
            assert mode == "faults" and isinstance(error, PeerLostError), f"{where}: {error!r}"
            assert error.ranks, where
            failed += 1
            continue
        ended += 1
        assert coded_sums.same(out, expected[step]), f"{where}: rank {rank}, step {step}"
        if step == 1 and wanted_rests is not None:
            assert coded_sums.same(residuals[rank], wanted_rests[rank]), f"{where}: rank {rank}"
    return ended, failed


@pytest.mark.parametrize("block", range(10))
def test_codes_are_exact_or_a_lost_rank_is_named(block: int) -> None:
    ended = failed = 0
    for number in range(block * 100, block * 100 + 100):
        one, other = run(BASE * 1_000_003 + number)
        ended, failed = ended + one, failed + other
    assert ended > 100 and failed > 10, (ended, failed)
