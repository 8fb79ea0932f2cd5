"""Codecs in a world of one, on arrays of zeros and of nothing, and PowerSGD of full rank."""

from __future__ import annotations

import numpy as np
import pytest
from harness import world_in_threads

import pycoll
from pycoll.compress import (
    BF16,
    FP8,
    Block,
    Codec,
    Feedback,
    PowerSGD,
    RandomK,
    Sign,
    Threshold,
    TopK,
)

CODECS = [
    BF16(),
    FP8(),
    Block("int8"),
    Block("int4", 64, "stochastic", 3),
    Sign(),
    TopK(0.1),
    Threshold(1.0),
    RandomK(0.1, 1),
    PowerSGD(2),
]


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_one_rank_encodes_as_many_do(codec: Codec) -> None:
    """The result is what the code stands for, and the residual is the rest, bit for bit."""

    def alone(comm: pycoll.Communicator) -> None:
        x = np.random.default_rng(7).standard_normal((60, 50)).astype(np.float32)
        feedback = Feedback()
        sent = comm.all_reduce(x, compress=codec, feedback=feedback)
        assert not np.array_equal(sent, x)
        rest = np.asarray(feedback.residual).reshape(x.shape)
        assert rest.tobytes() == (x - sent).astype(np.float32).tobytes()

    world_in_threads(1).run(alone)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_zeros_and_nothing_come_back_as_they_are(codec: Codec, size: int) -> None:
    def every(comm: pycoll.Communicator) -> None:
        for shape in ((0,), (0, 5), (1,), (7,), (40, 30)):
            x, feedback = np.zeros(shape, np.float32), Feedback()
            for _ in range(2):
                found = comm.all_reduce(x, compress=codec, feedback=feedback)
                assert found.shape == shape and not found.any()
                rest = feedback.residual
                assert rest is None or not np.asarray(rest).any()

    world_in_threads(size).run(every)


@pytest.mark.parametrize("shape", [(12, 8), (40, 30), (64, 64)])
def test_powersgd_of_full_rank_loses_nothing_but_roundings(shape: tuple[int, int]) -> None:
    """Longer matrices add up more roundings: 1.8e-6 for 100 by 64."""

    def every(comm: pycoll.Communicator) -> None:
        dice = np.random.default_rng(comm.rank)
        x = dice.standard_normal(shape).astype(np.float32)
        total = comm.all_reduce(x.astype(np.float64))
        found = comm.all_reduce(x, compress=PowerSGD(min(shape)), feedback=Feedback())
        assert np.linalg.norm(found - total) < 1e-6 * np.linalg.norm(total)

    world_in_threads(2).run(every)
