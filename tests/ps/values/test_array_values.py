"""The sums and means of a server have the bits of a deterministic all_reduce, for every type."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from oracle import DTYPES, np_dtype

import pycoll
from pycoll.ps.shard_arrays import ArrayValues, rule_of
from pycoll.types import DType

WORKERS = 5
COUNT = 300


@pytest.fixture(scope="module")
def world() -> Iterator[list[pycoll.Communicator]]:
    made = pycoll.local_world(WORKERS, transports="shm")
    yield made
    for comm in made:
        comm.close()


def pushes(dtype: str, seed: int) -> list[Any]:
    """Values whose sums depend on the order of folding, as far as the type rounds."""
    draw = np.random.default_rng(seed)
    target = np_dtype(dtype)
    if target.kind in "iub":
        size = target.itemsize
        rows = [draw.integers(0, 256, COUNT * size, np.uint8) for _ in range(WORKERS)]
        return [(one.view(target) if target.kind != "b" else one > 127) for one in rows]
    scale = 2.0 if target.itemsize == 1 else 10.0
    rows = [draw.standard_normal(COUNT) * scale ** draw.integers(-2, 3) for _ in range(WORKERS)]
    if target.kind == "c":
        rows = [one + 1j * np.roll(one, 1) for one in rows]
    return [np.asarray(one).astype(target) for one in rows]


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_equal_those_of_a_deterministic_all_reduce(
    world: list[pycoll.Communicator], dtype: str
) -> None:
    values = ArrayValues()
    rows = pushes(dtype, 7)
    for update, op in (("sum", "sum"), ("mean", "avg")):
        rule = rule_of(update, DType[dtype.upper()])
        begun = values.load(rule, np.zeros_like(rows[0]).view(np.uint8))
        folded = values.apply(rule, begun, [one.view(np.uint8) for one in rows], WORKERS)
        works = [
            comm.all_reduce(row, op, deterministic=True, async_op=True)
            for comm, row in zip(world, rows, strict=True)
        ]
        assert folded.array.tobytes() == works[0].wait().tobytes(), op
        for work in works[1:]:
            work.wait()


def test_an_answer_keeps_its_bytes_while_pushes_go_on() -> None:
    values = ArrayValues()
    rule = rule_of("add", DType.INT64)
    value = values.load(rule, np.arange(4).view(np.uint8))
    push = np.ones(4, np.int64).view(np.uint8)
    same = values.apply(rule, value, [push], 1)
    assert same is value, "without a reader the value changes in place"
    answer = values.read(rule, value)
    value = values.apply(rule, value, [push], 1)
    assert answer.view(np.int64).tolist() == [1, 2, 3, 4]
    assert value.array.tolist() == [2, 3, 4, 5]
    for _ in range(1000):
        values.read(rule, value)
    assert len(value.storage._views) <= 64, "answers that are gone are forgotten"
    del answer
    assert values.apply(rule, value, [push], 1) is value


def test_pushes_of_another_length_are_refused() -> None:
    values = ArrayValues()
    rule = rule_of("add", DType.FLOAT32)
    value = values.load(rule, bytes(16))
    assert values.refusal(rule, value, bytes(16)) == ""
    assert "12 bytes for a part of 16" in values.refusal(rule, value, bytes(12))
    assert "0 bytes" in values.refusal(rule, value, None)
    with pytest.raises(ValueError, match="no element type"):
        values.load(99 << 8, bytes(16))
    with pytest.raises(ValueError, match="size"):
        values.load(rule, bytes(15))
    with pytest.raises(pycoll.InvalidArgumentError, match="'add', 'sum', 'mean'"):
        rule_of("max", DType.FLOAT32)
