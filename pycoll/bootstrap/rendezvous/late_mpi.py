"""Bounds the start of an MPI that begins after pycoll has joined by PMIx on several hosts.

The server of PMIx 5 counts the clients of a rank together. The client through which this rank
joined has left. The server may then take the rank's MPI off a fence of MPI_Init, which waits for
ever (docs/guides/starting/mpirun-srun.md). Nothing in this process can undo that. Importing
mpi4py.MPI begins MPI and keeps the interpreter's lock meanwhile, so a process of its own watches
the import.
If it takes longer than ``init()`` may take, the watcher tells the reason and ends this process, and
the launcher ends the job.

The watcher does not see an MPI that begins in another way, for example in a C library.
``PYCOLL_MPI_WATCH=0`` turns it off. This module uses Python's import system, and no name of mpi4py.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import select
import subprocess
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from pycoll.bootstrap.discovery.loaded_mpi import mpi_has_begun
from pycoll.config import is_on
from pycoll.doors import Door, expect

_MODULE = "mpi4py.MPI"
#: The program of the watcher. Its arguments are the process to end, the seconds, and the text. It
#: writes one byte when it watches. Its input ends when the import ends, or this process.
_WATCHER = """
import os, select, signal, sys
pid, seconds, text = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
os.write(1, b"1")
if not select.select([0], [], [], seconds)[0]:
    os.write(2, text.encode())
    os.kill(pid, signal.SIGTERM)
    if not select.select([0], [], [], 5)[0]:
        os.kill(pid, signal.SIGKILL)
"""
#: The longest wait for the byte of the watcher.
_STARTING_S = 10.0
_ADVICE = "import mpi4py.MPI before pycoll.init(), on all ranks"


def watch_late_mpi(rank: int, seconds: float) -> None:
    """Watch the first import of mpi4py.MPI, which may take ``seconds``.

    Nothing happens if ``PYCOLL_MPI_WATCH`` is 0, if MPI has begun, or if the import is watched
    already. Rank 0 warns when the import begins. Only this rank's process is ended, by SIGTERM and
    then by SIGKILL. Where the watcher does not start, one warning says so, and the import is not
    bounded.
    """
    if not is_on("mpi_watch"):
        return
    watched = any(isinstance(finder, _Finder) for finder in sys.meta_path)
    if not watched and _MODULE not in sys.modules and not mpi_has_begun():
        # First in the list, so that the import asks it before the finder that finds the module.
        sys.meta_path.insert(0, _Finder(rank, seconds))


class _Finder(MetaPathFinder):
    """Finds the module by the other finders, and has it loaded under watch."""

    def __init__(self, rank: int, seconds: float) -> None:
        self._rank, self._seconds = rank, seconds

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the others, with a loader that watches."""
        if fullname != _MODULE:
            return None
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None and not mpi_has_begun():
            if self._rank == 0:
                warnings.warn(
                    "MPI begins after pycoll has joined by PMIx on several hosts. Some versions of "
                    f"PMIx then let MPI_Init wait for ever: {_ADVICE}. The job ends if it takes "
                    f"longer than {self._seconds:.3g} s",
                    RuntimeWarning,
                    stacklevel=2,
                )
            spec.loader = _WatchedLoader(spec.loader, self._rank, self._seconds)
        return spec


class _WatchedLoader(Loader):
    """Loads the module by its own loader while a watcher runs."""

    def __init__(self, loader: Loader, rank: int, seconds: float) -> None:
        self._loader, self._rank, self._seconds = loader, rank, seconds

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Make the module."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module, which begins MPI."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        watcher = self._watch()
        try:
            self._loader.exec_module(module)
        finally:
            if watcher is not None and watcher.stdin is not None:
                watcher.stdin.close()
                watcher.wait()

    def _watch(self) -> subprocess.Popen[bytes] | None:
        text = (
            f"pycoll: rank {self._rank}: MPI has not begun within {self._seconds:.3g} s. pycoll "
            "joined before it, by PMIx on several hosts, where some versions of PMIx then let "
            f"MPI_Init wait for ever. This process ends now: {_ADVICE}\n"
        )
        words = [str(os.getpid()), str(self._seconds), text]
        started: list[subprocess.Popen[bytes]] = []
        door = Door(
            "watched imports of mpi4py.MPI",
            lambda: started.append(_start(words)),
            "The import may wait for ever.",
            "mpi4py",
            (),
        )
        return started[0] if door.is_open() else None


def _start(words: list[str]) -> subprocess.Popen[bytes]:
    """Start the watcher. Raise unless it watches."""
    watcher = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _WATCHER, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert watcher.stdout is not None
    ready = bool(select.select([watcher.stdout], [], [], _STARTING_S)[0])
    if not ready or watcher.stdout.read(1) != b"1":
        watcher.kill()
        watcher.communicate()
        expect(False, "the watcher does not start")
    watcher.stdout.close()
    return watcher
