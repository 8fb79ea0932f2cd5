"""Whole programs: every rank runs the same random operations and knows what must come out."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest
from harness import world_in_processes, world_in_threads
from hypothesis import given
from hypothesis import strategies as st

import pycoll

Comm = pycoll.Communicator
DTYPES = ["int8", "uint32", "float16", "bfloat16", "float32", "float64", "complex64", "float8_e5m2"]


def step(comm: Comm, rng: Any, index: int) -> list[tuple[Any, Any]]:
    """One random operation, alike on all ranks: pairs of what came out and what must."""
    size, rank = comm.size, comm.rank
    dtype = str(rng.choice(DTYPES))
    count = int(rng.choice([0, 1, 5, 64, 1000, 9000])) // size * size
    root = int(rng.integers(size))
    rows = oracle.inputs(dtype, "sum", size, count, index)
    mine, total, each = rows[rank].copy(), oracle.fold(rows, "sum"), count // size
    own = slice(rank * each, rank * each + each)
    kind = int(rng.integers(9))
    if kind == 0:
        return [(comm.all_reduce(mine), total)]
    if kind == 1:
        return [(comm.broadcast(mine, root), rows[root])]
    if kind == 2:
        return [(comm.reduce_scatter(mine), total[own])]
    if kind == 3:
        return [
            (
                comm.all_gather(mine[: rank + 1]),
                np.concatenate([r[: i + 1] for i, r in enumerate(rows)]),
            )
        ]
    if kind == 4:
        return [(comm.all_to_all(mine), rows[:, own].reshape(-1))]
    if kind == 5:
        found = comm.reduce(mine, root)
        return [(found, total)] if rank == root else []
    if kind == 6:
        return [(comm.scan(mine), oracle.fold(rows[: rank + 1], "sum"))]
    if kind == 7:
        return [(comm.scatter(mine if rank == root else None, root), rows[root][own])]
    right, left = (rank + 1) % size, (rank - 1) % size
    inbox = np.zeros_like(mine)
    with comm.group():
        comm.send(mine, right, index % 7)
        comm.recv(inbox, left, index % 7)
        half = comm.all_reduce(mine[: count // 2])
        rest = comm.all_reduce(mine[count // 2 :])
    joined = np.concatenate([half.wait(), rest.wait()])
    return [(inbox, rows[left]), (joined, total)]


def program(comm: Comm, seed: int, steps: int) -> list[str]:
    """What went wrong on this rank."""
    rng = np.random.default_rng(seed)
    wrong = []
    for index in range(steps):
        for found, expected in step(comm, rng, seed + index):
            if not oracle.same_bits(found, expected):
                wrong.append(f"seed {seed}, step {index}: {found!r}, expected {expected!r}")
    return wrong


@given(st.integers(1, 9), st.integers(0, 10_000), st.sampled_from(["shm", "tcp"]))
def test_programs_on_threads(size: int, seed: int, transports: str) -> None:
    found = world_in_threads(size, transports).run(lambda comm: program(comm, seed, 10))
    assert found == [[]] * size


@pytest.mark.parametrize("transports", ["shm", "tcp"])
@pytest.mark.parametrize("size", [3, 9])
def test_programs_on_processes(size: int, transports: str) -> None:
    assert world_in_processes(size, program, 7 * size, 60, transports=transports) == [[]] * size
