"""The ranks of harness.ProcessWorld: forks of a process that has imported what they need.

    python -m worker DESCRIPTOR

The connection with this descriptor brings a ``RankTask`` for each rank. Back go pairs of a process
number and an exit code: None when the process has begun, and the code when it has ended. Python's
own fork server is not suitable: its processes skip the exit handlers of an interpreter. A process
also has only one such server, so all ranks would have one hash seed.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NamedTuple

import pycoll

#: The imports that ranks need first: helpers of tests, ``pycoll.init``, and plans. torch is not
#: among them, since pycoll behaves differently once torch is imported.
PRELOADED = (
    "harness",
    "hypothesis",
    "numpy",
    "oracle",
    "pytest",
    "pycoll.algorithms",
    "pycoll.bootstrap.connect",
    "pycoll.bootstrap.rendezvous.torch_store",
    "pycoll.bootstrap.subcommunicators",
    "pycoll.comm.start_tuning",
    "pycoll.comm.world",
    "pycoll.plan.lowering",
)


class RankTask(NamedTuple):
    """What a rank does.

    ``call`` is the pickled triple of a module, a function of it, and the arguments that follow the
    communicator. ``paths`` are searched for modules first. ``environment`` replaces that of the
    process. The rank prints to the file ``output``, and writes its pickled result to ``result``.
    """

    call: bytes
    paths: Sequence[str]
    folder: str
    environment: Mapping[str, str]
    output: str
    result: str


def serve(control: Connection) -> RankTask | None:
    """Fork a process for each task. Returns the task in the rank, None once no more can come."""
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready = wait([control, woken])
        if woken in ready:
            os.read(woken, 4096)
            for ended in ended_children():
                control.send(ended)
        if control not in ready:
            continue
        try:
            task: RankTask = control.recv()
        except EOFError:
            return None
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for end in (woken, wake):
                os.close(end)
            control.close()
            return task
        control.send((pid, None))


def ended_children() -> Iterator[tuple[int, int]]:
    """Processes that have ended since the last call, with their exit codes."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, os.waitstatus_to_exitcode(status)


def run(task: RankTask) -> None:
    """One rank."""
    os.environ.clear()
    os.environ.update(task.environment)
    os.chdir(task.folder)
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
    for module in PRELOADED:
        importlib.import_module(module)
    task = serve(Connection(int(sys.argv[1])))
    if task is not None:
        run(task)


if __name__ == "__main__":
    main()
