"""What fails first, if anything does: each step alone, told as it goes, from one rank on.

Run as a script; ``--count-max`` limits its arrays.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

import pycoll
from pycoll.bench.cuda import Array, Stream, array

#: Of an operation; a rank that never comes is told of after so long.
TIMEOUT_S = 10.0


class Rank:
    def __init__(self, comm: pycoll.Communicator) -> None:
        self.comm = comm
        self.stream = Stream()

    def reduce(self, algorithm: str | None, count: int) -> bool:
        """Whether the sum is right, of exact numbers."""
        with self.stream:
            x = array(np.arange(count, dtype=np.float32) % 97 + self.comm.rank)
            self.comm.barrier()
            made: Array = self.comm.all_reduce(x, algorithm=algorithm)
            size = self.comm.size
            expected = np.arange(count) % 97 * size + size * (size - 1) / 2
            return bool((made.get() == expected).all())

    def replay(self) -> bool:
        with self.stream:
            x = array(np.ones(100, np.float32))
            self.comm.all_reduce(x)
            self.stream.synchronize()
            self.comm.barrier()
            with self.stream.capture() as graph:
                self.comm.all_reduce(x, out=x)
            self.comm.barrier()
            for _ in range(5):
                graph.launch()
            return bool((x.get() == float(self.comm.size**5)).all())


def told(what: str, outcomes: list[Any], begin: float) -> bool:
    good = all(one is True for one in outcomes)
    print(f"{'ok' if good else 'FAILED':<7}{what:<44}{time.monotonic() - begin:6.2f} s", flush=True)
    for rank, one in enumerate(outcomes):
        if one is not True:
            print(f"  rank {rank}: {'wrong result' if one is False else repr(one)}", flush=True)
    return good


def each(pool: ThreadPoolExecutor, what: str, ranks: list[Rank], call: Any) -> bool:
    begin = time.monotonic()
    futures = [pool.submit(call, rank) for rank in ranks]
    return told(what, [one.exception() or one.result() for one in futures], begin)


def check(size: int, most: int) -> bool:
    """All steps on so many ranks; ends at the first that fails."""
    with ThreadPoolExecutor(size) as pool:
        comms = pycoll.local_world(size, timeout_s=TIMEOUT_S)
        ranks = [Rank(comm) for comm in comms]
        steps: list[tuple[str, Any]] = [("8 B", lambda one: one.reduce(None, 2))]
        if size > 1:
            steps += [
                ("LL, one_shot", lambda one: one.reduce("one_shot", 1000)),
                ("LL, ring", lambda one: one.reduce("ring", min(most, 10_001))),
                ("Simple, direct", lambda one: one.reduce("direct", min(most, 1 << 20))),
                ("Simple, tree", lambda one: one.reduce("tree", min(most, 300_000))),
            ]
        steps.append(("graph", Rank.replay))
        good = all(each(pool, f"{size} ranks, {what}", ranks, call) for what, call in steps)
        for comm in comms:
            comm.close()
        return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count-max", type=int, default=1 << 20, help="elements of an array")
    most = parser.parse_args().count_max
    outcomes = [check(size, most) for size in (1, 2, 4)]
    return 0 if all(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
