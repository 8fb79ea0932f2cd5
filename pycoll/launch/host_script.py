"""Runs a host discovery script repeatedly to learn which hosts may run ranks, as horovodrun does.

The script prints a line for each host, ``name``, ``name:slots`` or ``name slots=n``.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shlex
import signal
import subprocess
import time
from collections.abc import Callable

from pycoll.errors import InvalidArgumentError
from pycoll.launch.host_list import parse_line

#: Seconds between the script's end and its next start.
PAUSE_S = 1.0
#: A script that runs for more seconds is killed.
SCRIPT_S = 30.0


def read_hosts(text: str) -> dict[str, int]:
    """Return the slots of each host that the script has printed, in its order; hosts without slots
    are left out. Raises InvalidArgumentError for a line in another form and for a host twice."""
    found: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        host = parse_line(words, f"line {number}", 0)
        if host.name in found:
            raise InvalidArgumentError(f"line {number}: host {host.name} is named twice")
        found[host.name] = host.slots
    return {name: slots for name, slots in found.items() if slots > 0}


class HostScript:
    """Runs the script with the owner's selector and thread, and never blocks for it.

    Calls ``found(hosts)``, the slots by host, when they have changed. Calls ``complain(text)`` once
    for each different failure; the last hosts then stay in force.
    """

    def __init__(
        self,
        script: str,
        selector: selectors.BaseSelector,
        found: Callable[[dict[str, int]], object],
        complain: Callable[[str], object],
    ) -> None:
        self._line = command_of(script)
        self._selector, self._found, self._complain = selector, found, complain
        self._process: subprocess.Popen[bytes] | None = None
        self._said = bytearray()
        self._due = 0.0
        self._hosts: dict[str, int] | None = None
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
            hosts = read_hosts(self._said.decode(errors="replace"))
        except InvalidArgumentError as error:
            self._fail(str(error))
            return
        if hosts != self._hosts:
            self._hosts = hosts
            self._found(hosts)

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
