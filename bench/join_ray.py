"""The driver of a job of Ray, for bench/join.py: its ranks join, and write what they have seen.

join_ray.py ADDRESS RANKS FOLDER

Joining begins when Ray has started the task of the last rank.
"""

from __future__ import annotations

import json
import secrets
import sys
import time
from pathlib import Path


def main() -> None:
    """Run the ranks in tasks of the cluster."""
    import ray

    address, ranks, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    name = f"join-{secrets.token_hex(8)}"

    def join(rank: int) -> None:
        began = time.monotonic()
        import pycoll
        from pycoll.integrations import ray as pycoll_ray

        comm = pycoll_ray.init(name, rank, ranks)
        ready = time.monotonic()
        comm.barrier()
        (folder / f"rank{rank}").write_text(json.dumps({"began": began, "ready": ready}))
        pycoll.finalize()

    ray.init(address=address, log_to_driver=False)
    ray.get([ray.remote(join).remote(rank) for rank in range(ranks)])


main()
