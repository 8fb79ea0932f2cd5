"""Messages between the launcher of a job on several hosts and the agents that it starts there.

The agent's stdin carries orders: a length in decimal digits, a newline, and that many bytes of
JSON; from the start of the ranks on, lines with a signal's number, "slots N", or nothing, which is
a pulse. Its stdout carries the output of its ranks, and notes between it: the job's mark, JSON, and
a newline. The mark holds random bytes, so output of ranks does not contain it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from pycoll.untrusted import read_json

_BEGIN = b"\x1e"
_DIGITS_MAX = 12


def new_mark() -> str:
    """Return the mark of a new job."""
    return f"{_BEGIN.decode()}pycoll-{os.urandom(16).hex()} "


def write_order(descriptor: int, order: dict[str, Any]) -> None:
    """Send an order to an agent. Raises BrokenPipeError if it has ended."""
    data = json.dumps(order).encode()
    _write(descriptor, b"%d\n" % len(data) + data)


def read_order(descriptor: int) -> Any:
    """Wait for the next order. Raises EOFError if the launcher has ended, ValueError for other
    bytes. Reads no byte past the order."""
    digits = b""
    while not digits.endswith(b"\n"):
        piece = os.read(descriptor, 1)
        if not piece:
            raise EOFError("the launcher has ended")
        digits += piece
        if len(digits) > _DIGITS_MAX:
            raise ValueError("its first line is no length")
    data = bytearray()
    length = int(digits)
    while len(data) < length:
        piece = os.read(descriptor, min(length - len(data), 1 << 20))
        if not piece:
            raise EOFError("the launcher has ended")
        data += piece
    return read_json(data)


def control_line(signum: int = 0, slots: int | None = None) -> bytes:
    """Encode a signal, a number of slots, or with neither a pulse."""
    if slots is not None:
        return b"slots %d\n" % slots
    return b"%d\n" % signum if signum else b"\n"


def read_control(line: bytes) -> tuple[int, int | None]:
    """Decode the result of ``control_line`` without its newline, as its arguments; a line in
    another form is a pulse."""
    word, _, number = line.rpartition(b" ")
    if not number.isdigit() or len(number) > _DIGITS_MAX:
        return 0, None
    if word == b"slots":
        return 0, int(number)
    return int(number) if not word else 0, None


def write_note(mark: str, note: dict[str, Any]) -> None:
    """Send a note to the launcher, from an agent, on stdout."""
    _write(1, mark.encode() + json.dumps(note).encode() + b"\n")


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


class NoteFilter:
    """Takes notes out of the bytes of a stream and passes them to ``take``."""

    def __init__(self, mark: str, take: Callable[[Any], object]) -> None:
        self._mark = mark.encode()
        self._take = take
        # The beginning of a mark, or a note without its end.
        self._held = bytearray()

    def rest(self, piece: bytes) -> bytes:
        """Return the bytes that belong to the ranks' output."""
        if not self._held and _BEGIN not in piece:
            return piece
        # Only the new piece can hold the end of a long note.
        if self._held.startswith(self._mark) and b"\n" not in piece:
            self._held += piece
            return b""
        data, shown = bytes(self._held) + piece, b""
        self._held.clear()
        while data:
            before, mark, after = data.partition(self._mark)
            shown += before if mark else b""
            if not mark:
                cut = self._beginning_of_mark(data)
                shown += data[:cut]
                self._held += data[cut:]
                break
            note, newline, data = after.partition(b"\n")
            if not newline:
                self._held += mark + note
                break
            self._take(read_json(note))
        return shown

    def _beginning_of_mark(self, data: bytes) -> int:
        """Return where the longest end of ``data`` begins that may be the beginning of a mark."""
        at = data.rfind(_BEGIN)
        return at if at >= 0 and self._mark.startswith(data[at:]) else len(data)

    def end(self) -> bytes:
        """Return what is left at the end of the stream, as output."""
        held = bytes(self._held)
        self._held.clear()
        return held
