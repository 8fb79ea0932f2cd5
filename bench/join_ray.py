"""The driver of jobs of Ray, for bench/join.py: their ranks join, and write what they have seen.

join_ray.py ADDRESS RANKS FOLDER

The ranks are new tasks, and joining begins when Ray has started the last of them. Where FOLDER is
"-", the ranks are actors that live on: each line of the input names the folder of one job, and is
answered by "joined".
"""

from __future__ import annotations

import json
import secrets
import sys
import time
from pathlib import Path


def join(name: str, rank: int, ranks: int, folder: str) -> None:
    """Join the world of this name as a rank, and leave it."""
    began = time.monotonic()
    import pycoll
    from pycoll.integrations import ray as pycoll_ray

    comm = pycoll_ray.init(name, rank, ranks)
    ready = time.monotonic()
    comm.barrier()
    seen = json.dumps({"began": began, "ready": ready})
    (Path(folder) / f"rank{rank}").write_text(seen)
    pycoll.finalize()


class Actor:
    """A rank of many jobs."""

    def join(self, name: str, rank: int, ranks: int, folder: str) -> None:
        """Join as ``join`` does."""
        join(name, rank, ranks, folder)


def main() -> None:
    """Run one job in tasks of the cluster, or many in actors."""
    import ray

    address, ranks, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    ray.init(address=address, log_to_driver=False)
    if folder != "-":
        task, name = ray.remote(join), secrets.token_hex(8)
        ray.get([task.remote(name, rank, ranks, folder) for rank in range(ranks)])
        return
    actors = [ray.remote(num_cpus=1)(Actor).remote() for _ in range(ranks)]
    for line in sys.stdin:
        name = secrets.token_hex(8)
        words = enumerate(actors)
        ray.get([one.join.remote(name, rank, ranks, line.strip()) for rank, one in words])
        print("joined", flush=True)


main()
