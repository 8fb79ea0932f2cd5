"""Ranks that are processes with torch in them: forked from one that has imported it.

The import takes seconds of a core in every process, and these tests start forty.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

from harness import HANG_S

os.environ.setdefault("OMP_NUM_THREADS", "1")
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch._dynamo", "torch.nn.parallel", "pycoll.torch"])


def run_ranks(size: int, target: Callable[..., None], *args: Any) -> list[int | None]:
    """Call ``target(rank, size, *args)`` in a process for each rank; their exit codes.

    One that does not end in time is killed.
    """
    processes = [_CONTEXT.Process(target=target, args=(r, size, *args)) for r in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(2 * HANG_S)
        if process.is_alive():
            process.kill()
            process.join()
    return [process.exitcode for process in processes]
