"""A rank of bench/join.py: joins by its library and writes what it has seen to a folder.

join_worker.py LIBRARY FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def memory_bytes() -> int:
    """Return this process's part of anonymous and shared memory."""
    found = 0
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in ("Pss_Anon", "Pss_Shmem"):
            found += int(rest.split()[0]) * 1024
    return found


def main() -> None:
    """Join, wait for the others, and write the times, the memory and the descriptors."""
    library, folder = sys.argv[1], Path(sys.argv[2])
    began = time.monotonic()
    joined: Any
    if library == "pycoll":
        import pycoll

        joined = pycoll.init()
        ready = time.monotonic()
        joined.barrier()
        rank = joined.rank
    else:
        from mpi4py import MPI

        joined = MPI.COMM_WORLD
        ready = time.monotonic()
        joined.Barrier()
        rank = joined.Get_rank()
    seen = {
        "began": began,
        "ready": ready,
        "memory": memory_bytes(),
        "descriptors": len(os.listdir("/proc/self/fd")) - 1,
    }
    (folder / f"rank{rank}").write_text(json.dumps(seen))
    # A rank that ends gives its part of a shared page to the others.
    if library == "pycoll":
        joined.barrier()
    else:
        joined.Barrier()


main()
