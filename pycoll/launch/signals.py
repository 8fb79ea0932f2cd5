"""Catches the signals that the launcher passes on, and wakes its selector for them."""

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
    """Within the context, append SIGINT, SIGTERM and SIGHUP to ``caught`` and wake the selector.

    In a thread that is not the main one it does nothing, since Python handles signals only there.
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

    # A signal that is ignored stays ignored, as nohup does with SIGHUP.
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


@contextlib.contextmanager
def ignore_terminal_stop() -> Iterator[None]:
    """Within the context Ctrl-Z does nothing: a launcher that stands still sends no pulse. Children
    keep the default, since a handler ends with exec."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTSTP, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, before or signal.SIG_DFL)
