"""Runs a host discovery script repeatedly to learn how many ranks may run, as horovodrun does.

The script prints a line for each host, ``name`` or ``name:slots``. Ranks are started on this
machine only, so every name must be a name of this machine.
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

#: Seconds between the script's end and its next start.
PAUSE_S = 1.0
#: A script that runs for more seconds is killed.
SCRIPT_S = 30.0


def slots_of(text: str) -> int:
    """Return the sum of the slots of all lines. Raises InvalidArgumentError for a line in another
    form and for a host that is not this machine."""
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
    """Runs the script with the owner's selector and thread, and never blocks for it.

    Calls ``found(slots)`` when the number has changed. Calls ``complain(text)`` once for each
    different failure; the last number then stays in force.
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

    def advance(self) -> None:
        """Start the script if it is due, and kill it if it takes too long."""
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
        """Return the seconds until ``advance`` has to be called."""
        return max(0.0, self._due - time.monotonic())

    def close(self) -> None:
        """Kill the script if it runs."""
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
            # The script has closed its output and still runs.
            self._kill(process)
            return process.wait()

    @staticmethod
    def _kill(process: subprocess.Popen[bytes]) -> None:
        """Kill the script with all processes of its session's group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def _fail(self, text: str) -> None:
        if text != self._failure:
            self._failure = text
            self._complain(f"the host discovery script {shlex.join(self._line)}: {text}")


def command_of(script: str) -> list[str]:
    """Split the script's command line into words. Raises InvalidArgumentError if it is empty."""
    words = shlex.split(script)
    if not words:
        raise InvalidArgumentError("the host discovery script is empty: expected a command")
    return words
