"""The ranks of harness.ProcessWorld: forks of a process that has imported what they need.

    python -m worker DESCRIPTOR MODULES...

The interpreter and the imports take longer than most of these tests. The socket with this
descriptor brings a ``RankTask`` for each rank, pickled. Back go pairs of a process number and an
exit code: None when the rank has begun, and the code when it has ended.
"""

from __future__ import annotations

import importlib
import os
import pickle
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pycoll

MESSAGE_BYTES_MAX = 1 << 17


class RankTask(NamedTuple):
    """What a rank does.

    ``call`` is the pickled triple of a module, a function of it, and the arguments that follow the
    communicator. ``paths`` are searched for modules. ``environment`` replaces that of the process.
    The rank prints to the file ``output`` and writes its pickled result to the file ``result``.
    """

    call: bytes
    paths: Sequence[str]
    environment: Mapping[str, str]
    output: str
    result: str


def serve(control: socket.socket) -> RankTask | None:
    """Fork a process for each task; returns the task in the rank, None where no more tasks come."""
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([control, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            for ended in _ended():
                control.send(pickle.dumps(ended))
        if control not in ready:
            continue
        message = control.recv(MESSAGE_BYTES_MAX)
        if not message:
            return None
        number = os.fork()
        if number == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for end in (woken, wake, control.detach()):
                os.close(end)
            return RankTask(*pickle.loads(message))
        control.send(pickle.dumps((number, None)))


def _ended() -> list[tuple[int, int]]:
    """Processes that have ended since the last call, with their exit codes."""
    found = []
    while True:
        try:
            number, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if number == 0:
            return found
        found.append((number, os.waitstatus_to_exitcode(status)))


def run(task: RankTask) -> None:
    """One rank."""
    os.environ.clear()
    os.environ.update(task.environment)
    output = os.open(task.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    sys.path[:0] = [path for path in task.paths if path not in sys.path]
    module, name, args = pickle.loads(task.call)
    function = getattr(importlib.import_module(module), name)
    comm = pycoll.init()
    try:
        result = function(comm, *args)
    except Exception as error:
        result = error
    path = Path(task.result)
    path.with_suffix(".part").write_bytes(pickle.dumps(result))
    path.with_suffix(".part").rename(path)
    pycoll.finalize()


def main() -> None:
    descriptor, *modules = sys.argv[1:]
    for module in modules:
        importlib.import_module(module)
    task = serve(socket.socket(fileno=int(descriptor)))
    if task is not None:
        run(task)


if __name__ == "__main__":
    main()
