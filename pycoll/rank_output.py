"""Ranks' output with the rank in front of every line, and no line torn by another."""

from __future__ import annotations

import os
import selectors
import signal
from typing import IO

#: A line longer than this is passed on in pieces, each with its own prefix.
LINE_BYTES_MAX = 1 << 20
_READ_BYTES = 1 << 16


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

    def finish(self) -> bytes:
        """The last line, if it had no end."""
        rest, self._pending = bytes(self._pending), bytearray()
        return self._show(rest) if rest else b""

    def _show(self, data: bytes) -> bytes:
        # Only newlines end a line: a carriage return belongs to a progress bar.
        lines = data.removesuffix(b"\n").split(b"\n")
        return b"".join(self._prefix + line + b"\n" for line in lines)


class RankOutput:
    """Reads ranks' pipes within the owner's selector and writes lines to our own descriptors."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._open: dict[int, tuple[IO[bytes], LinePrefixer, int]] = {}
        #: The signal that stands for whoever read our output having left; 0 while all is well.
        self.broken = 0

    def add(self, rank: int, width: int, pipe: IO[bytes], target: int) -> None:
        """Show ``pipe`` on descriptor ``target`` behind "[rank] "."""
        os.set_blocking(pipe.fileno(), False)
        prefixer = LinePrefixer(f"[{rank:>{width}}] ".encode())
        self._open[pipe.fileno()] = (pipe, prefixer, target)
        self._selector.register(pipe, selectors.EVENT_READ, lambda: self._read(pipe.fileno()))

    def drain(self) -> None:
        """Show what is there, without waiting for streams that somebody still holds open."""
        for fd in list(self._open):
            while fd in self._open and self._read(fd):
                pass
            if fd in self._open:
                self._end(fd)

    def _read(self, fd: int) -> bool:
        _, prefixer, target = self._open[fd]
        try:
            piece = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return False
        if not piece:
            self._end(fd)
            return False
        self._write(target, prefixer.take(piece))
        return True

    def _end(self, fd: int) -> None:
        pipe, prefixer, target = self._open.pop(fd)
        self._write(target, prefixer.finish())
        self._selector.unregister(pipe)
        pipe.close()

    def _write(self, target: int, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view and not self.broken:
                view = view[os.write(target, view) :]
        except BrokenPipeError:
            self.broken = signal.SIGPIPE
