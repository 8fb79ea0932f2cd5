"""How many ranks may run here: asked again and again of a script, as horovodrun does.

The script prints a line for each host, ``name`` or ``name:slots``. Ranks are started on this
machine only, so every name has to be one of its.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable

from pycoll.errors import InvalidArgumentError

#: Between the script's end and its next start.
PAUSE_S = 1.0
#: A script that takes longer is ended.
SCRIPT_S = 30.0


def slots_of(text: str) -> int:
    """The sum over the lines. InvalidArgumentError for other hosts and lines that are no such."""
    own = socket.gethostname()
    here = {"localhost", "127.0.0.1", own, own.split(".")[0]}
    total = 0
    for number, line in enumerate(text.splitlines(), 1):
        words = line.strip()
        if not words:
            continue
        name, _, count = words.partition(":") if ":" in words else (words, ":", "1")
        if not (count.isascii() and count.isdigit()):
            raise InvalidArgumentError(f'line {number} is {words!r}: expected "host:slots"')
        if name not in here:
            raise InvalidArgumentError(
                f"line {number} names the host {name!r}: ranks are started on this machine only, "
                f"which is {own!r} or 'localhost'"
            )
        total += int(count)
    return total


class HostSlots:
    """Runs the script in the owner's selector, in the owner's thread; never waits for it.

    ``found(slots)`` is called when the number has changed, ``complain(text)`` once for each
    different failure, after which the last number stays.
    """

    def __init__(
        self,
        script: str,
        selector: selectors.BaseSelector,
        found: Callable[[int], None],
        complain: Callable[[str], None],
    ) -> None:
        self._line = command_of(script)
        self._selector, self._found, self._complain = selector, found, complain
        self._process: subprocess.Popen[bytes] | None = None
        self._said = bytearray()
        self._due = 0.0
        self._slots: int | None = None
        self._failure = ""

    def turn(self) -> None:
        """Start it if it is time, and end it if it takes too long."""
        if time.monotonic() < self._due:
            return
        if self._process is not None:
            self._due = time.monotonic() + PAUSE_S
            self._kill(self._process)
            return
        self._said.clear()
        self._due = time.monotonic() + SCRIPT_S
        try:
            self._process = subprocess.Popen(
                self._line,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            self._due = time.monotonic() + PAUSE_S
            self._fail(f"cannot be run: {error.strerror}")
            return
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._selector.register(self._process.stdout, selectors.EVENT_READ, self._read)

    def patience(self) -> float:
        """Seconds until ``turn`` has to be called."""
        return max(0.0, self._due - time.monotonic())

    def close(self) -> None:
        """End the script."""
        if self._process is not None:
            self._kill(self._process)
            self._reap(self._process)

    def _read(self) -> None:
        process = self._process
        assert process is not None and process.stdout is not None
        try:
            piece = os.read(process.stdout.fileno(), 65536)
        except BlockingIOError:
            return
        self._said += piece
        if piece:
            return
        status = self._reap(process)
        if status != 0:
            self._fail(f"ended with status {status}")
            return
        try:
            slots = slots_of(self._said.decode(errors="replace"))
        except InvalidArgumentError as error:
            self._fail(str(error))
            return
        if slots != self._slots:
            self._slots = slots
            self._found(slots)

    def _reap(self, process: subprocess.Popen[bytes]) -> int:
        assert process.stdout is not None
        self._selector.unregister(process.stdout)
        process.stdout.close()
        self._process = None
        self._due = time.monotonic() + PAUSE_S
        try:
            return process.wait(PAUSE_S)
        except subprocess.TimeoutExpired:
            # It has closed its output and goes on.
            self._kill(process)
            return process.wait()

    @staticmethod
    def _kill(process: subprocess.Popen[bytes]) -> None:
        """With all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def _fail(self, text: str) -> None:
        if text != self._failure:
            self._failure = text
            self._complain(f"the host discovery script {shlex.join(self._line)}: {text}")


def command_of(script: str) -> list[str]:
    """The words of its command line. InvalidArgumentError if there are none."""
    words = shlex.split(script)
    if not words:
        raise InvalidArgumentError("the host discovery script is empty: expected a command")
    return words
