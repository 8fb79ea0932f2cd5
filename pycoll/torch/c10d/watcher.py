"""Threads that complete the futures of works."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, Protocol

from pycoll import _core


class Watched(Protocol):
    """A Work with a future."""

    def settle(self) -> None:
        """Wait until it is done, then complete its future; never raises."""


class Watcher:
    """Completes futures one after the other, in the order in which they were requested.

    The callbacks of a future run in the thread that completes it. They may block, and may even wait
    for a future that they have just requested. So one thread at a time, the waiter, waits for
    Works. When a future is complete, and before its callbacks run, another thread can become the
    waiter. There is one thread per callback that has not returned, one waiter, and at most one
    resting thread. The first future starts the first thread. Any thread may call any method.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._works: deque[Watched] = deque()
        self._threads: set[threading.Thread] = set()
        self._waiter: threading.Thread | None = None
        self._resting = 0  # the number of resting threads, without one that is called to wait
        self._is_called = False  # a resting thread is called to wait and has not woken up yet
        self._is_closed = False

    def watch(self, work: Watched, future: Any) -> None:
        """Complete ``future`` by ``work.settle()``; no other code may have seen the future yet.

        After close() this is done before the method returns, since operations have failed by then.
        """
        with self._changed:
            if not self._is_closed:
                # The first callback added to a future runs before all other callbacks.
                future.add_done_callback(self._let_go)
                self._works.append(work)
                self._ensure_waiter()
                return
        work.settle()

    def close(self) -> None:
        """End the threads after their current Works and join them.

        A callback that calls this does not join the threads.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            threads = set(self._threads)
        if threading.current_thread() not in threads:
            for thread in threads:
                thread.join()

    def _ensure_waiter(self) -> None:
        """Make sure that there is a waiter while there are Works. Requires the lock."""
        if self._waiter is not None or not self._works or self._is_called:
            return
        if self._resting:
            self._resting -= 1
            self._is_called = True
            self._changed.notify()
            return
        thread = threading.Thread(target=self._run, name="pycoll-torch-futures", daemon=True)
        thread.start()
        self._threads.add(thread)
        self._waiter = thread

    def _let_go(self, _: Any = None) -> None:
        with self._changed:
            if self._waiter is threading.current_thread():
                self._waiter = None
                self._ensure_waiter()

    def _run(self) -> None:
        _core.work_in_background()
        me = threading.current_thread()
        try:
            while self._become_waiter(me):
                self._works.popleft().settle()
                self._let_go()
        finally:
            self._let_go()
            with self._changed:
                self._threads.discard(me)
                self._changed.notify_all()

    def _become_waiter(self, me: threading.Thread) -> bool:
        """Become the waiter once there are Works; False if this thread is no longer needed."""
        with self._changed:
            while not self._works or self._waiter not in (None, me):
                if self._resting or (self._is_closed and not self._works):
                    return False
                self._resting += 1
                self._changed.wait()
                if self._is_called:
                    self._is_called = False
                else:
                    self._resting -= 1
            self._waiter = me
            return True
