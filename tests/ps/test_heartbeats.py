"""The silence of peers, counted by a clock that the tests set."""

from __future__ import annotations

from pycoll.ps.membership.heartbeats import Heartbeats


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def passed(clock: Clock, heartbeats: Heartbeats, seconds: float) -> bool:
    clock.now += seconds
    return heartbeats.was_stopped()


def test_silence_is_counted_by_peer() -> None:
    clock = Clock()
    heartbeats = Heartbeats(8.0, clock)
    for step in range(1, 5):
        assert not passed(clock, heartbeats, 1.0)
        assert heartbeats.is_due()
        assert heartbeats.measure([3, 4]) == {3: 1.0, 4: step}
        assert not heartbeats.is_due()
        heartbeats.record(3)


def test_the_time_of_a_stop_counts_for_nobody() -> None:
    clock = Clock()
    heartbeats = Heartbeats(8.0, clock)
    assert not passed(clock, heartbeats, 2.0)
    assert heartbeats.measure([3]) == {3: 2.0}
    assert passed(clock, heartbeats, 2.5)
    assert not heartbeats.is_due()
    assert not passed(clock, heartbeats, 1.0)
    assert heartbeats.measure([3]) == {3: 3.0}


def test_processes_that_stop_together_do_not_find_each_other_silent() -> None:
    """Short stops between two counts, of which none is noticed as such."""
    clock = Clock()
    heartbeats = Heartbeats(8.0, clock)
    for _ in range(2):
        assert not passed(clock, heartbeats, 1.9)
    assert heartbeats.measure([3]) == {3: 2.0}
    heartbeats.record(3)
    assert not passed(clock, heartbeats, 1.0)
    assert heartbeats.measure([3]) == {3: 1.0}
