"""Feedback by itself: what it keeps, its form in checkpoints, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from pycoll import InvalidArgumentError
from pycoll.compress import Feedback


def test_memory_is_zeros_at_first_and_belongs_to_one_array() -> None:
    feedback = Feedback()
    assert feedback.residual is None and feedback.norm() == 0 and feedback.step == 0
    memory = feedback.residuals.memory((2, 2))
    assert memory.dtype == np.float32 and not memory.any()
    memory[:] = [[3, 0], [0, 4]]
    assert feedback.residual is memory and feedback.norm() == 5
    for shape, kind in (((4,), np.float32), ((2, 2), np.float64)):
        with pytest.raises(
            InvalidArgumentError, match=r"call feedback\.reset\(\), or pass the Fee"
        ):
            feedback.residuals.memory(shape, dtype=kind)
    feedback.residuals.memory((1,), 1)
    assert [one.shape for one in feedback.residual] == [(2, 2), (1,)]
    feedback.ended()
    feedback.reset()
    assert feedback.residual is None and feedback.step == 0


def test_momentum_sums_velocities_and_masking_clears_what_was_sent() -> None:
    feedback = Feedback(momentum=0.5)
    x = np.float32([1, 2, 4])
    assert feedback.corrected(x).tolist() == [1, 2, 4]
    assert feedback.corrected(x).tolist() == [1, 2, 4], "nothing counts before ended()"
    feedback.velocities.mask(np.array([1]))
    feedback.ended()
    assert feedback.corrected(x).tolist() == [1.5, 2, 6]
    feedback = Feedback(momentum=0.5, masking=False)
    feedback.corrected(x)
    feedback.velocities.mask(np.array([1]))
    feedback.ended()
    assert feedback.corrected(x).tolist() == [1.5, 3, 6]
    plain = Feedback()
    assert plain.corrected(x) is x


def test_the_density_falls_by_the_same_factor() -> None:
    feedback = Feedback(warmup=3)
    found = []
    for _ in range(5):
        found.append(feedback.density(0.0001))
        feedback.ended()
    assert np.allclose(found, [0.1, 0.01, 0.001, 0.0001, 0.0001])


def test_a_checkpoint_goes_on_bit_by_bit() -> None:
    feedback = Feedback(momentum=0.5)
    x = np.float32([1, 2, 4])
    feedback.residuals.memory((3,))[:] = 0.5
    feedback.corrected(x)
    feedback.factors[0] = np.ones((2, 1), np.float32)
    feedback.ended()
    saved = feedback.state_dict()
    other = Feedback(momentum=0.5)
    other.load_state_dict(saved)
    feedback.reset()
    assert other.step == 1 and other.residual.tolist() == [0.5] * 3
    assert other.corrected(x).tolist() == [1.5, 3, 6]
    factor = other.factors.get(0)
    assert factor is not None and factor.tolist() == [[1], [1]] and 1 not in other.factors
    with pytest.raises(InvalidArgumentError, match="saved state is dict without form 1"):
        other.load_state_dict({"step": 3})


def test_a_failed_call_leaves_an_adopted_residual_alone() -> None:
    feedback = Feedback()
    whole = slice(0, 4)
    feedback.residuals.pair((4,), 0, np.float32, whole)[1][:] = [1, 2, 3, 4]
    feedback.residuals.replace()
    kept = feedback.residuals.memory((4,))
    feedback.residuals.adopt(kept)
    feedback.residuals.pair((4,), 0, np.float32, whole)[1][:] = 9
    assert feedback.residuals.memory((4,)).tolist() == [1, 2, 3, 4]
    # The memory of another residual may be adopted: the one for the next call is new, then.
    feedback.residuals.replace()
    feedback.residuals.adopt(kept)
    residual, spare = feedback.residuals.pair((4,), 0, np.float32, whole)
    assert not np.shares_memory(residual, spare)


def test_a_failed_call_for_another_piece_leaves_nothing_behind() -> None:
    feedback, whole, half = Feedback(), slice(0, 4), slice(0, 2)

    def call(piece: slice, value: float) -> None:
        feedback.check_free()
        feedback.residuals.strays((4,), 0, np.float32, piece)
        feedback.residuals.pair((4,), 0, np.float32, piece)[1][:] = value

    call(half, 1)
    feedback.residuals.replace()
    feedback.ended()
    call(whole, 7)  # and fails
    call(half, 2)
    feedback.residuals.replace()
    feedback.ended()
    assert feedback.residuals.memory((4,)).tolist() == [2, 2, 0, 0]
