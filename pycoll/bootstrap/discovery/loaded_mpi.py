"""The MPI in this process, if there is one: it uses the launcher's PMI as well."""

from __future__ import annotations

import os
import re
import sys
from typing import Any

_LIBRARY = re.compile(r"/libmpi(ch|_abi)?\.so[.0-9]*$")


def world_of_mpi4py(rank: int, size: int) -> Any:
    """Return mpi4py's COMM_WORLD, or None unless this thread can use it and has this place in it.

    Never imports mpi4py: that would initialize MPI. An MPI that does not know the launcher makes
    each process a world of one rank.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return None
    if mpi.Query_thread() != mpi.THREAD_MULTIPLE and not mpi.Is_thread_main():
        return None
    world = mpi.COMM_WORLD
    return world if (world.Get_rank(), world.Get_size()) == (rank, size) else None


def mpi_has_begun() -> bool:
    """Return whether MPI_Init has run in this process, by whatever program and with any MPI.

    MPI keeps saying so after MPI_Finalize. A library that is linked into another one under another
    name is not found.
    """
    return any(_has_begun(path) for path in _mapped_files(_LIBRARY))


def _mapped_files(pattern: re.Pattern[str]) -> set[str]:
    """Return the paths of this process's mapped files that match."""
    try:
        with open("/proc/self/maps") as file:
            paths = {line.rstrip("\n").partition("/") for line in file}
    except OSError:
        return set()
    return {f"/{path}" for _, slash, path in paths if slash and pattern.search(f"/{path}")}


def _has_begun(path: str) -> bool:
    import ctypes

    flag = ctypes.c_int(0)
    try:
        # The flag only asks for a library that is loaded: nothing is loaded here.
        ctypes.CDLL(path, os.RTLD_NOLOAD | os.RTLD_NOW).MPI_Initialized(ctypes.byref(flag))
    except (OSError, AttributeError):
        return False
    return flag.value != 0
