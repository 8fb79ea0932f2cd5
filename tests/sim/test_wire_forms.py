"""Averages, logical and location reductions by every algorithm and up to 33 ranks, exact inputs.

Elements travel in a wire form of their own (csrc/kernels/wire.h), whose partial sums are exact for
these inputs: so all ranks and algorithms must give one result, that of the oracle.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest
from cases import Case

from pycoll import _core
from pycoll.algorithms import TABLE
from pycoll.arrays.rows import shares
from pycoll.schedule.collectives import Collective
from pycoll.schedule.topology import Topology
from pycoll.types import DType, ReduceOp, wire_form

MEANS = [one for one in DType if wire_form(one, ReduceOp.AVG)]
HORIZON_S = 60.0


def run(case: Case, dtype: str, rows: Any, op: str, expected: Any) -> None:
    """Every rank contributes its row; ``expected``: what the whole comes to."""
    size = case.size
    case.topology = Topology.even(size, 1 + size // 3)
    cut = np.cumsum([0, *case.counts])
    own = case.collective is Collective.REDUCE_SCATTER
    wanted = []
    for rank in range(size):
        part = expected[cut[rank] : cut[rank + 1]] if own else expected
        here = case.collective is not Collective.REDUCE or rank == case.root
        wanted.append(part if here else expected[:0])
    case.inputs = [row.copy() for row in rows]
    case.outputs = [np.zeros_like(one) for one in wanted]
    simulation = _core.Simulation(size, size * 31, "swarm")
    words = {"dtype": int(DType[dtype.upper()]), "op": int(ReduceOp[op.upper()])}
    operations = [case.add_to(simulation, rank, **words) for rank in range(size)]
    assert simulation.run(HORIZON_S), f"{case}: it hangs"
    for rank, operation in enumerate(operations):
        simulation.check(operation)
        assert oracle.same_bits(case.outputs[rank], wanted[rank]), f"{op} of {dtype}, {case}"


@pytest.mark.parametrize("size", range(1, 34))
def test_every_algorithm_gives_the_exact_average(size: int) -> None:
    turn = size
    for collective in (Collective.ALL_REDUCE, Collective.REDUCE, Collective.REDUCE_SCATTER):
        for name in TABLE[collective]:
            turn += 1
            dtype, count = MEANS[turn % len(MEANS)].word, (7, 3 * size + 1, 700)[turn % 3]
            own = collective is Collective.REDUCE_SCATTER
            counts = shares(count, size) if own else [count]
            root = turn % size if collective is Collective.REDUCE else 0
            case = Case(collective, name, size, root, counts, segment_bytes=256)
            rows = oracle.inputs(dtype, "avg", size, count, turn)
            run(case, dtype, rows, "avg", oracle.fold(rows, "avg"))


@pytest.mark.parametrize("dtype", [one.word for one in MEANS])
def test_averages_of_every_type(dtype: str) -> None:
    for size in (1, 2, 3, 7, 33):
        case = Case(Collective.ALL_REDUCE, "ring", size, 0, [900], segment_bytes=256)
        rows = oracle.inputs(dtype, "avg", size, 900, size)
        run(case, dtype, rows, "avg", oracle.fold(rows, "avg"))


@pytest.mark.parametrize("op", ["land", "lor", "lxor"])
@pytest.mark.parametrize("dtype", oracle.DTYPES)
def test_logical_reductions_of_every_type(dtype: str, op: str) -> None:
    for size in (1, 2, 5):
        for name in ("ring", "direct"):
            case = Case(Collective.ALL_REDUCE, name, size, 0, [300], segment_bytes=64)
            rows = oracle.inputs(dtype, op, size, 300, size)
            run(case, dtype, rows, op, oracle.fold(rows, op))


@pytest.mark.parametrize("op", ["maxloc", "minloc"])
def test_locations_by_every_algorithm(op: str) -> None:
    for turn, name in enumerate(TABLE[Collective.ALL_REDUCE]):
        for size in (1, 2, 7, 16):
            dtype = ["int32", "float64", "uint8", "float16", "int64"][turn % 5]
            rows = oracle.pairs(dtype, size, 200, turn)
            case = Case(Collective.ALL_REDUCE, name, size, 0, [400], segment_bytes=256)
            run(case, dtype, rows.reshape(size, 400), op, oracle.located(rows, op).reshape(400))
