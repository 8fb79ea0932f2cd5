"""One rank of ``pycoll run``: a process in a group of its own, within the launcher's session.

In the launcher's session, since Linux schedules sessions as groups (autogroup): a rank that yields
its core reaches only ranks of its own session, and with more ranks than cores every small operation
then waits for the scheduler's ticks. In a group of its own, so that it ends with all that it
started. Without a controlling terminal, so that it is stopped neither for reading its input from
the terminal's background nor for writing to it.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import termios
from collections.abc import Mapping, Sequence

from pycoll.errors import InvalidArgumentError


class Piped(enum.Flag):
    """Which of a rank's streams are pipes to the launcher; the others are the launcher's own."""

    NONE = 0
    STDOUT = enum.auto()
    STDERR = enum.auto()
    BOTH = STDOUT | STDERR

    @classmethod
    def for_rank(cls, number: int, ranks: int, prefix: bool) -> Piped:
        """The streams that the launcher must read to keep lines whole.

        Ranks that write to one file by themselves tear each other's lines. A single rank keeps its
        own streams. Of several, the first keeps those that are a terminal, for programs that ask
        whether they have one, as progress bars do.
        """
        if prefix:
            return cls.BOTH
        if ranks == 1:
            return cls.NONE
        if number != 0:
            return cls.BOTH
        piped = cls.NONE
        for descriptor, stream in ((1, cls.STDOUT), (2, cls.STDERR)):
            if not os.isatty(descriptor):
                piped |= stream
        return piped


def resolve_command(command: Sequence[str]) -> list[str]:
    """The command with its program found: a .py file, or "-m", runs with this Python.

    Raises InvalidArgumentError if there is no such program.
    """
    if not command:
        raise InvalidArgumentError("command is empty: name a .py file or a program to run")
    program = command[0]
    if program == "-m":
        return [sys.executable, *command]
    if program.endswith(".py"):
        if not os.path.isfile(program):
            raise InvalidArgumentError(f"command: there is no file {program!r}")
        return [sys.executable, *command]
    found = shutil.which(program)
    if found is None:
        raise InvalidArgumentError(
            f"command: {program!r} is no program on PATH; a script needs its path and the right "
            "to be executed, or the ending .py"
        )
    return [found, *command[1:]]


class RankProcess:
    """Starts the command. To be made by one thread; what other threads do meanwhile does not matter
    to the child, which makes system calls only."""

    def __init__(
        self,
        number: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        piped: Piped,
        guard: int,
    ) -> None:
        """``guard`` is told the group's number. ``piped``: what of its output are pipes to us.

        Raises InvalidArgumentError if the command cannot be run, OSError if there is no room for
        its descriptors.
        """
        self.number = number
        #: Exit status, or minus the signal; None while it runs.
        self.status: int | None = None
        #: By the launcher.
        self.stopped = False
        #: Readable once it has ended; -1 where the kernel has none.
        self.pidfd = -1
        try:
            # A thread of ours may run meanwhile (of a restarted rank's launch), and the child only
            # makes system calls.
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdin=None if number == 0 else subprocess.DEVNULL,
                stdout=subprocess.PIPE if Piped.STDOUT in piped else None,
                stderr=subprocess.PIPE if Piped.STDERR in piped else None,
                preexec_fn=lambda: _settle(guard),  # noqa: PLW1509
            )
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            raise InvalidArgumentError(
                f"command: {command[0]!r} cannot be run: {error.strerror}"
            ) from None
        with contextlib.suppress(OSError, AttributeError):
            self.pidfd = os.pidfd_open(self.process.pid)

    def tell(self, signum: int) -> None:
        """Send a signal to the whole group, if there is one."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signum)

    def kill(self) -> None:
        """SIGKILL to the whole group, unless it has ended and may be reaped."""
        if self.status is None:
            self.tell(signal.SIGKILL)

    def look(self) -> bool:
        """Whether it has ended; sets ``status`` then. Does not reap it: see ``release``."""
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        result = os.waitid(os.P_PID, self.process.pid, options)
        if result is None:
            return False
        exited = result.si_code == os.CLD_EXITED
        self.status = result.si_status if exited else -result.si_status
        return True

    def release(self) -> None:
        """Wait for its end and reap it; until here it is a zombie, so nobody gets its number."""
        self.process.wait()
        if self.pidfd >= 0:
            os.close(self.pidfd)

    def describe(self) -> str:
        """How it failed, for a message."""
        status = self.status or 0
        if status >= 0:
            return f"failed with exit status {status}"
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = "unknown"
        return f"was killed by signal {-status} ({name})"


def _settle(guard: int) -> None:
    """In the child: a group of its own, known to the guard before the command runs."""
    if _leave_terminal():
        os.setpgid(0, 0)
    else:
        os.setsid()
    os.write(guard, b"%d\n" % os.getpid())


def _leave_terminal() -> bool:
    """Have no controlling terminal from here on; False if one is there and cannot be left so.

    Only this process leaves it: it leads no session.
    """
    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
    except OSError as error:
        return error.errno == errno.ENXIO
    try:
        fcntl.ioctl(terminal, termios.TIOCNOTTY)
    except OSError:
        return False
    finally:
        os.close(terminal)
    return True
