"""Who completes futures: in which order, in how many threads, and what callbacks may do."""

from __future__ import annotations

import threading
from typing import Any

import torch

from pycoll.torch.c10d.watcher import Watcher

PATIENCE_S = 20


class Work:
    """Done when it is let go."""

    def __init__(self) -> None:
        self.future: torch.futures.Future[int] = torch.futures.Future()
        self.go = threading.Event()

    def settle(self) -> None:
        assert self.go.wait(PATIENCE_S)
        self.future.set_result(1)


def watched(watcher: Watcher, count: int) -> list[Work]:
    works = [Work() for _ in range(count)]
    for work in works:
        watcher.watch(work, work.future)
    return works


def test_futures_complete_in_the_order_in_which_they_were_asked_for() -> None:
    """Though the last one's work is done first, and the first one's callback returns last."""
    watcher, told, last = Watcher(), [], threading.Event()
    works = watched(watcher, 6)

    def tell(number: int) -> None:
        told.append((number, [work.future.done() for work in works[: number + 1]]))
        if number == 0:
            assert last.wait(PATIENCE_S)

    for number, work in enumerate(works):
        work.future.add_done_callback(lambda _, number=number: tell(number))
    for work in reversed(works):
        assert not any(one.future.done() for one in works)
        work.go.set()
    works[-1].future.wait()
    last.set()
    watcher.close()
    assert sorted(told) == [(number, [True] * (number + 1)) for number in range(6)]


def test_callbacks_may_wait_for_what_they_start() -> None:
    watcher, depths = Watcher(), []

    def nested(depth: int) -> Any:
        work = watched(watcher, 1)[0]
        found = work.future.then(lambda _: nested(depth - 1).wait() + 1 if depth else 0)
        work.go.set()
        return found

    for depth in (0, 1, 8, 3):
        depths.append(nested(depth).wait())
    assert depths == [0, 1, 8, 3]
    watcher.close()
    assert not watcher._threads


def test_a_thread_per_callback_and_two_more_and_at_rest_one() -> None:
    """However the machine deals out its cores: a callback may be held up before it returns."""
    watcher, called = Watcher(), []
    for _ in range(50):
        works = watched(watcher, 4)
        for work in works:
            work.future.add_done_callback(called.append)
            work.go.set()
        works[-1].future.wait()
        assert len(watcher._threads) <= len(works) + 2
        with watcher._changed:
            assert watcher._changed.wait_for(lambda: len(watcher._threads) == 1, PATIENCE_S)
    (thread,) = watcher._threads
    assert len(called) == 50 * 4
    watcher.close()
    assert not thread.is_alive()


def test_what_is_asked_for_after_the_end_is_done_at_once() -> None:
    watcher = Watcher()
    work, late = watched(watcher, 1)[0], Work()
    late.go.set()
    closed = work.future.then(lambda _: watcher.close())
    work.go.set()
    closed.wait()
    watcher.watch(late, late.future)
    assert late.future.done()
    watcher.close()
    assert not watcher._threads
