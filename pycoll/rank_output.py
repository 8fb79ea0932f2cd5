"""Ranks' output, so that no rank's lines are torn by another's; if wanted, each behind its rank."""

from __future__ import annotations

import os
import selectors
import signal
import time
from typing import IO

#: A line longer than this is passed on in pieces, each with its own prefix.
LINE_BYTES_MAX = 1 << 20
#: A rank has said what it had to say when nothing came for so long, which nobody feels and who has
#: to wait for a core seldom exceeds; the first of it waits no longer than the second time.
QUIET_S = 0.1
LATE_S = 0.5
_READ_BYTES = 1 << 16
_STDERR = 2


class LinePrefixer:
    """Turns one stream's pieces into whole prefixed lines."""

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._pending = bytearray()

    def take(self, piece: bytes) -> bytes:
        """What can be shown after ``piece`` came."""
        self._pending += piece
        end = self._pending.rfind(b"\n") + 1
        if end == 0 and len(self._pending) < LINE_BYTES_MAX:
            return b""
        whole = bytes(self._pending[:end] if end else self._pending)
        del self._pending[: len(whole)]
        return self._show(whole)

    def has_part(self) -> bool:
        """Whether a line has begun, and may be shown so: behind a prefix lines are whole."""
        return bool(self._pending) and not self._prefix

    def take_part(self) -> bytes:
        """That beginning of a line; the rest of it follows as it comes."""
        return self._take_rest() if self.has_part() else b""

    def finish(self) -> bytes:
        """The last line, if it had no end."""
        rest = self._take_rest()
        return self._show(rest) if rest else b""

    def _take_rest(self) -> bytes:
        rest, self._pending = bytes(self._pending), bytearray()
        return rest

    def _show(self, data: bytes) -> bytes:
        # Only newlines end a line: a carriage return belongs to a progress bar.
        lines = data.removesuffix(b"\n").split(b"\n")
        return b"".join(self._prefix + line + b"\n" for line in lines)


class _Stream:
    """What one rank says on one descriptor."""

    def __init__(self, pipe: IO[bytes], prefix: bytes, target: int) -> None:
        self.pipe = pipe
        self.target = target
        self.prefixer = LinePrefixer(prefix)
        # Whole lines not shown yet, since when there are some, and when something came last.
        self.kept = bytearray()
        self.since = 0.0
        self.heard = 0.0

    def due(self) -> float | None:
        """When what is kept is to be shown."""
        waiting = self.kept or self.prefixer.has_part()
        return min(self.heard + QUIET_S, self.since + LATE_S) if waiting else None

    def keep(self, piece: bytes) -> None:
        """Take what has come just now."""
        self.heard = time.monotonic()
        if self.due() is None:
            self.since = self.heard
        self.kept += self.prefixer.take(piece)


class RankOutput:
    """Reads ranks' pipes within the owner's selector and writes to our own descriptors.

    Lines come whole. What a rank says on stderr in one go, such as a traceback, stays together
    though other ranks speak meanwhile.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._open: dict[int, _Stream] = {}
        self._ended: list[_Stream] = []
        #: The signal that stands for whoever read our output having left; 0 while all is well.
        self.broken = 0

    def add(self, pipe: IO[bytes], target: int, prefix: str = "") -> None:
        """Show ``pipe`` on descriptor ``target``, with ``prefix`` in front of every line.

        Without a prefix the beginning of a line is shown, too, if nothing more comes for a moment.
        """
        os.set_blocking(pipe.fileno(), False)
        self._open[pipe.fileno()] = _Stream(pipe, prefix.encode(), target)
        self._selector.register(pipe, selectors.EVENT_READ, lambda: self._read(pipe.fileno()))

    def waits(self) -> list[float]:
        """Seconds until there is something to show."""
        now = time.monotonic()
        dues = [stream.due() for stream in (*self._open.values(), *self._ended)]
        return [max(0.0, due - now) for due in dues if due is not None]

    def show(self) -> None:
        """Show what has waited for long enough."""
        now = time.monotonic()
        for stream in (*self._open.values(), *self._ended):
            due = stream.due()
            if due is not None and due <= now:
                self._flush(stream)
        self._ended = [stream for stream in self._ended if stream.kept]

    def drain(self) -> None:
        """Show what is there, without waiting for streams that somebody still holds open."""
        for fd in list(self._open):
            while fd in self._open and self._read(fd):
                pass
            if fd in self._open:
                self._end(fd)
        for stream in self._ended:
            self._flush(stream)
        self._ended.clear()

    def _read(self, fd: int) -> bool:
        stream = self._open[fd]
        try:
            piece = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return False
        if not piece:
            self._end(fd)
            return False
        stream.keep(piece)
        if stream.target != _STDERR or len(stream.kept) >= LINE_BYTES_MAX:
            self._write(stream.target, stream.kept)
        return True

    def _flush(self, stream: _Stream) -> None:
        stream.kept += stream.prefixer.take_part()
        self._write(stream.target, stream.kept)

    def _end(self, fd: int) -> None:
        stream = self._open.pop(fd)
        stream.kept += stream.prefixer.finish()
        # Whoever ends together with others has just been heard, and they may be speaking still.
        self._ended.append(stream)
        self._selector.unregister(stream.pipe)
        stream.pipe.close()

    def _write(self, target: int, kept: bytearray) -> None:
        view = memoryview(bytes(kept))
        kept.clear()
        try:
            while view and not self.broken:
                view = view[os.write(target, view) :]
        except BrokenPipeError:
            self.broken = signal.SIGPIPE
