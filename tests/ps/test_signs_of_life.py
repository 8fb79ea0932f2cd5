"""The silence of peers, counted by a clock that the tests set."""

from __future__ import annotations

from pycoll.ps.membership.signs_of_life import SignsOfLife


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def passed(clock: Clock, signs: SignsOfLife, seconds: float) -> bool:
    clock.now += seconds
    return signs.was_stopped()


def test_silence_is_counted_by_peer() -> None:
    clock = Clock()
    signs = SignsOfLife(8.0, clock)
    for step in range(1, 5):
        assert not passed(clock, signs, 1.0)
        assert signs.is_due()
        assert signs.count([3, 4]) == {3: 1.0, 4: step}
        assert not signs.is_due()
        signs.hear(3)


def test_the_time_of_a_stop_counts_for_nobody() -> None:
    clock = Clock()
    signs = SignsOfLife(8.0, clock)
    assert not passed(clock, signs, 2.0)
    assert signs.count([3]) == {3: 2.0}
    assert passed(clock, signs, 2.5)
    assert not signs.is_due()
    assert not passed(clock, signs, 1.0)
    assert signs.count([3]) == {3: 3.0}


def test_processes_that_stop_together_do_not_find_each_other_silent() -> None:
    """Short stops between two counts, of which none is noticed as such."""
    clock = Clock()
    signs = SignsOfLife(8.0, clock)
    for _ in range(2):
        assert not passed(clock, signs, 1.9)
    assert signs.count([3]) == {3: 2.0}
    signs.hear(3)
    assert not passed(clock, signs, 1.0)
    assert signs.count([3]) == {3: 1.0}
