"""Signals that a launcher passes on, taken where its selector wakes up for them."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def signals_caught(selector: selectors.BaseSelector, caught: list[int]) -> Iterator[None]:
    """Within, signals to be passed on end up in ``caught``, and wake the selector.

    Does nothing in other threads than the main one, where Python takes none.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)

    def handle(signum: int, frame: FrameType | None) -> None:
        caught.append(signum)

    def drain() -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(reader, 4096)

    # What is ignored stays ignored: nohup.
    heeded = [signum for signum in _FORWARDED if signal.getsignal(signum) != signal.SIG_IGN]
    before = {signum: signal.signal(signum, handle) for signum in heeded}
    wakeup_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    selector.register(reader, selectors.EVENT_READ, drain)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup_before)
        for signum, handler in before.items():
            signal.signal(signum, handler or signal.SIG_DFL)
        selector.unregister(reader)
        os.close(reader)
        os.close(writer)
