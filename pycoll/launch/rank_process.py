"""One rank of ``pycoll run``: a process in its own process group, within the launcher's session.

All ranks share the launcher's session because Linux schedules sessions as groups (autogroup): a
rank that yields its core yields only to ranks of its own session. With a session per rank and more
ranks than cores, every small operation would wait for the scheduler's ticks. Each rank has its own
group, so that the launcher can end the rank with all processes that it has started. A rank has no
controlling terminal. So the kernel does not stop it when it uses the terminal in the background.
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
from pathlib import Path
from typing import NamedTuple

from pycoll.errors import InvalidArgumentError


class Piped(enum.Flag):
    """The streams of a rank that are pipes to the launcher; the others are the launcher's own."""

    NONE = 0
    STDOUT = enum.auto()
    STDERR = enum.auto()
    BOTH = STDOUT | STDERR

    @classmethod
    def for_rank(cls, number: int, ranks: int, prefix: bool) -> Piped:
        """Return the streams that the launcher must read to keep lines whole.

        Ranks that write to one file directly tear each other's lines. A single rank writes
        directly. Of several ranks, rank 0 keeps the streams that are a terminal, for programs that
        check for one, as progress bars do.
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


class Streams(NamedTuple):
    """The standard streams of a rank. ``piped``: those that are pipes to the launcher. ``reads``:
    whether it has the launcher's stdin. ``folder``: where files "stdout" and "stderr" take its
    output instead; it is made if it is missing."""

    piped: Piped = Piped.NONE
    reads: bool = False
    folder: str | None = None

    def open_output(self, stream: Piped, undo: contextlib.ExitStack) -> int | None:
        """Return a stream for ``subprocess.Popen``; ``undo`` closes a file that it opens."""
        if self.folder is None:
            return subprocess.PIPE if stream in self.piped else None
        os.makedirs(self.folder, exist_ok=True)
        path = os.path.join(self.folder, "stdout" if stream is Piped.STDOUT else "stderr")
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        undo.callback(os.close, file)
        return file


def resolve_command(command: Sequence[str]) -> list[str]:
    """Return the command with the path of its program; a .py file, or "-m", runs with this Python.

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
            f"command: {program!r} is no program on PATH; a script needs its path and execute "
            "permission, or the ending .py"
        )
    return [found, *command[1:]]


def program_of(command: Sequence[str]) -> str:
    """Return the name of what a command runs, without its folder and arguments: the script or
    module of Python, else the program."""
    name = Path(command[0]).name
    words = command[1:] if name.startswith("python") else command
    for place, word in enumerate(words):
        if word == "-m":
            return " ".join(words[place : place + 2])
        if word == "-c":
            return name
        if not word.startswith("-"):
            return Path(word).name
    return name


def own_python(code: str) -> list[str]:
    """Return the command of a Python that runs ``code`` with the same package as this process.

    With "-m" Python would prefer a package in the current folder, for example the source tree
    without its native module. ``code`` finds ``sys`` imported.
    """
    root = str(Path(__file__).resolve().parents[2])
    paths = f"sys.path = [{root!r}, *(path for path in sys.path if path)]"
    return [sys.executable, "-c", f"import sys\n{paths}\n{code}"]


class RankProcess:
    """The process of one rank, started by the constructor. One thread uses it.

    Other threads of the launcher may run meanwhile: before the command runs, the child makes system
    calls only.
    """

    def __init__(
        self,
        number: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        streams: Streams,
        guard: int,
    ) -> None:
        """Start the command. ``guard`` is the descriptor to which the child writes its group.

        Raises InvalidArgumentError if the command cannot be run, OSError if no descriptors are free
        for its pipes.
        """
        self.number = number
        #: Exit status, or minus the signal; None while it runs.
        self.status: int | None = None
        #: Whether the launcher has stopped it.
        self.stopped = False
        #: Readable once the process has ended; -1 where the kernel has no pidfds.
        self.pidfd = -1
        try:
            # The store's thread runs already when a rank is restarted. preexec_fn is safe even so,
            # since it makes system calls only.
            with contextlib.ExitStack() as undo:
                self.process = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=None if streams.reads else subprocess.DEVNULL,
                    stdout=streams.open_output(Piped.STDOUT, undo),
                    stderr=streams.open_output(Piped.STDERR, undo),
                    preexec_fn=lambda: _prepare_child(guard),  # noqa: PLW1509
                )
        except OSError as error:
            if error.filename is not None and error.filename != command[0]:
                raise InvalidArgumentError(
                    f"output_filename={streams.folder!r}: {error.strerror}"
                ) from None
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            raise InvalidArgumentError(
                f"command: {command[0]!r} cannot be run: {error.strerror}"
            ) from None
        with contextlib.suppress(OSError, AttributeError):
            self.pidfd = os.pidfd_open(self.process.pid)

    def send_signal(self, signum: int) -> None:
        """Send a signal to the whole group, if the group still exists."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signum)

    def kill(self) -> None:
        """Send SIGKILL to the whole group, unless the rank has ended and may be reaped already."""
        if self.status is None:
            self.send_signal(signal.SIGKILL)

    def has_ended(self) -> bool:
        """Return whether it has ended, and set ``status`` then. ``release`` reaps it."""
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        result = os.waitid(os.P_PID, self.process.pid, options)
        if result is None:
            return False
        exited = result.si_code == os.CLD_EXITED
        self.status = result.si_status if exited else -result.si_status
        return True

    def release(self) -> None:
        """Wait for its end and reap it. Until then it is a zombie, whose number is not reused."""
        self.process.wait()
        if self.pidfd >= 0:
            os.close(self.pidfd)

    def describe(self) -> str:
        """Return how it failed, for a message."""
        status = self.status or 0
        if status >= 0:
            return f"failed with exit status {status}"
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = "unknown"
        return f"was killed by signal {-status} ({name})"


def _prepare_child(guard: int) -> None:
    """In the child: make a process group and tell the guard before the command runs."""
    if _leave_terminal():
        os.setpgid(0, 0)
    else:
        os.setsid()
    os.write(guard, b"%d\n" % os.getpid())


def _leave_terminal() -> bool:
    """Give up the controlling terminal; returns False if there is one and TIOCNOTTY fails.

    Only this process loses the terminal, since it leads no session.
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
