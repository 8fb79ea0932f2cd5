"""The output of ranks: the launcher writes whole lines, so that ranks do not tear each other's.

Every piped stream of a rank has one ``_Stream``. Streams that the launcher writes to the same file
or terminal share one ``_Screen``, which knows whether a line has begun there. If a rank stops in
the middle of a line (a prompt, a progress bar), the launcher shows that beginning after a moment. A
line of another rank then waits for the end of the first one; if the end does not come, the launcher
starts a new line.
"""

from __future__ import annotations

import os
import selectors
import signal
import time
from typing import IO

from pycoll.launch.host_notes import NoteFilter

#: A line longer than this is passed on in pieces, each with its own prefix.
LINE_BYTES_MAX = 1 << 20
#: The launcher shows an unfinished line after QUIET_S seconds without further bytes, and LATE_S
#: seconds after its first byte at the latest. A stream whose line has begun delays others by LATE_S
#: at most.
QUIET_S = 0.1
LATE_S = 0.5
_READ_BYTES = 1 << 16
_STDERR = 2


class RankLines:
    """Cuts one stream's bytes into whole lines and puts the prefix in front of each."""

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._pending = bytearray()
        #: Whether the beginning of the current line has been shown, so that its rest follows.
        self._begun = False

    def take(self, piece: bytes) -> None:
        """Keep ``piece`` until it is shown."""
        self._pending += piece

    def has_whole(self) -> bool:
        """Return whether a line is complete, or too long to wait for its end."""
        return b"\n" in self._pending or len(self._pending) >= LINE_BYTES_MAX

    def has_part(self) -> bool:
        """Return whether any bytes are kept."""
        return bool(self._pending)

    def whole(self) -> bytes:
        """Take all complete lines, to be shown at once."""
        if not self.has_whole():
            return b""
        end = self._pending.rfind(b"\n") + 1 or len(self._pending)
        lines = bytes(self._pending[:end]).removesuffix(b"\n").split(b"\n")
        del self._pending[:end]
        # Only newlines end a line: a carriage return belongs to a progress bar.
        shown = b"".join(self._prefix + line + b"\n" for line in lines)
        if self._begun:
            shown = shown[len(self._prefix) :]
            self._begun = False
        return shown

    def part(self) -> bytes:
        """Take the beginning of a line, to be shown before its end has come."""
        data = bytes(self._pending)
        self._pending.clear()
        if not data:
            return b""
        shown = data if self._begun else self._prefix + data
        # After a carriage return the next piece overwrites the line, so it needs the prefix again.
        self._begun = not data.endswith(b"\r")
        return shown

    def interrupt(self) -> None:
        """Note that another stream's line was shown: the rest of this line starts a new line."""
        self._begun = False

    def end(self) -> None:
        """Note the end of the stream: the last line is complete."""
        if self._pending and not self._pending.endswith(b"\n"):
            self._pending += b"\n"


class _Screen:
    """A file or terminal to which the launcher writes, by descriptor 1, 2 or both."""

    def __init__(self) -> None:
        #: The stream whose line has begun here and has no end yet.
        self.owner: _Stream | None = None
        #: When that beginning was shown.
        self.since = 0.0

    def free_at(self, stream: _Stream) -> float:
        """Return the time from which ``stream`` may write, on the monotonic clock."""
        if self.owner is None or self.owner is stream or self.owner.ended:
            return 0.0
        return self.since + LATE_S


class _Stream:
    """The output of one rank on one descriptor."""

    def __init__(
        self,
        pipe: IO[bytes],
        prefix: bytes,
        target: int,
        screen: _Screen,
        notes: NoteFilter | None,
    ) -> None:
        self.pipe = pipe
        self.notes = notes
        self.target = target
        self.screen = screen
        self.lines = RankLines(prefix)
        self.ended = False
        # When the oldest byte that is not shown has come, and when the newest byte has come.
        self.since = 0.0
        self.heard = 0.0

    def keep(self, piece: bytes) -> None:
        """Keep bytes that have just come, without the notes among them."""
        if self.notes is not None:
            piece = self.notes.rest(piece)
            if not piece:
                return
        self.heard = time.monotonic()
        if not self.lines.has_part():
            self.since = self.heard
        self.lines.take(piece)

    def part_due(self) -> float:
        """Return when the beginning of a line has to be shown."""
        return min(self.heard + QUIET_S, self.since + LATE_S)

    def due(self) -> float | None:
        """Return when kept bytes have to be shown; None if there are none."""
        if not self.lines.has_part():
            return None
        # Lines on stderr are delayed, so that lines written in a row, as a traceback, stay
        # together.
        at_once = self.target != _STDERR and self.lines.has_whole()
        due = self.heard if at_once else self.part_due()
        return max(due, self.screen.free_at(self))


class RankOutput:
    """Reads the ranks' pipes in the owner's selector and writes to the launcher's descriptors."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._open: dict[int, _Stream] = {}
        self._ended: list[_Stream] = []
        self._screens: dict[object, _Screen] = {}
        #: SIGPIPE once the reader of the launcher's output has closed it, else 0.
        self.broken = 0

    def add(
        self, pipe: IO[bytes], target: int, prefix: str = "", notes: NoteFilter | None = None
    ) -> None:
        """Show ``pipe`` on descriptor ``target``, with ``prefix`` in front of every line. ``notes``
        takes messages of an agent out of it."""
        os.set_blocking(pipe.fileno(), False)
        screen = self._screens.setdefault(_file_of(target), _Screen())
        self._open[pipe.fileno()] = _Stream(pipe, prefix.encode(), target, screen, notes)
        self._selector.register(pipe, selectors.EVENT_READ, lambda: self._read(pipe.fileno()))

    def waits(self) -> list[float]:
        """Return the seconds until each stream has something to show."""
        now = time.monotonic()
        dues = [stream.due() for stream in (*self._open.values(), *self._ended)]
        return [max(0.0, due - now) for due in dues if due is not None]

    def show(self) -> None:
        """Show all bytes that are due."""
        now = time.monotonic()
        for stream in (*self._open.values(), *self._ended):
            due = stream.due()
            if due is not None and due <= now:
                self._flush(stream, stream.part_due() <= now)
        self._ended = [stream for stream in self._ended if stream.lines.has_part()]

    def drain(self) -> None:
        """Show all bytes that have come, without waiting for streams that a process still holds
        open."""
        for fd in list(self._open):
            while fd in self._open and self._read(fd):
                pass
            if fd in self._open:
                self._end(fd)
        for stream in self._ended:
            self._flush(stream, True)
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
        due = stream.due()
        if due is not None and due <= time.monotonic():
            self._flush(stream, False)
        return True

    def _flush(self, stream: _Stream, with_part: bool) -> None:
        """Write the whole lines of ``stream``, and with ``with_part`` the beginning of the next."""
        screen = stream.screen
        whole = stream.lines.whole()
        part = stream.lines.part() if with_part else b""
        if not whole and not part:
            return
        begin = b""
        if screen.owner is not None and screen.owner is not stream:
            screen.owner.lines.interrupt()
            begin = b"\n"
        self._write(stream.target, begin + whole + part)
        now = time.monotonic()
        # A carriage return leaves the cursor at the start of the line, so no line has begun.
        screen.owner = stream if part and not part.endswith(b"\r") else None
        screen.since = now
        stream.since = now

    def _end(self, fd: int) -> None:
        stream = self._open.pop(fd)
        if stream.notes is not None:
            stream.lines.take(stream.notes.end())
        stream.lines.end()
        stream.ended = True
        self._ended.append(stream)
        self._selector.unregister(stream.pipe)
        stream.pipe.close()

    def _write(self, target: int, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view and not self.broken:
                view = view[os.write(target, view) :]
        except BrokenPipeError:
            self.broken = signal.SIGPIPE


def _file_of(descriptor: int) -> object:
    """Return a key that is equal for descriptors of one file, pipe or terminal."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return descriptor
    return status.st_dev, status.st_ino
