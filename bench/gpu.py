"""Collectives on GPUs: ranks as threads of this process, on one device or on all of them.

    python bench/gpu.py [--ranks 2 --ranks 4] [--json FILE]

Times are the device's, of the slowest rank, from replayed graphs and from eager calls; every result
is compared. Ranks that share a device are reported as such: they say nothing about links. Has never
run on hardware.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import pycoll
from pycoll.bench import cuda
from pycoll.bench.metrics import bus_factor

SIZES = [8, 4 << 10, 64 << 10, 1 << 20, 64 << 20, 256 << 20]
SAMPLES = 11


class Rank:
    """One communicator with its device, stream and clock."""

    def __init__(self, comm: pycoll.Communicator) -> None:
        self.comm = comm
        self.stream = cuda.Stream(comm.rank % cuda.driver().count())
        self.clock = cuda.Clock(self.stream)

    def measure(self, nbytes: int, replayed: bool) -> tuple[float, int]:
        """Median seconds of an all_reduce in place, and wrong elements."""
        batch = 20 if nbytes <= 1 << 20 else 2
        with self.stream:
            values = np.arange(nbytes // 4, dtype=np.float32) % 1000
            x = cuda.array(values)
            self.comm.all_reduce(x, out=x)
            wrong = int(np.count_nonzero(x.get() != values * self.comm.size))
            step = self._graph(x, batch) if replayed else self._calls(x, batch)
            times = []
            for _ in range(SAMPLES):
                self.stream.synchronize()
                self.comm.barrier()
                self.clock.start()
                step()
                times.append(self.clock.stop() / batch)
        return statistics.median(times), wrong

    def _calls(self, x: cuda.Array, batch: int) -> Callable[[], None]:
        def step() -> None:
            for _ in range(batch):
                self.comm.all_reduce(x, out=x)

        return step

    def _graph(self, x: cuda.Array, batch: int) -> Callable[[], None]:
        with self.stream.capture() as graph:
            self._calls(x, batch)()
        return graph.launch


def sweep(size: int, sizes: list[int]) -> list[dict[str, Any]]:
    """All sizes on ``size`` ranks; prints as it goes."""
    communicators = pycoll.local_world(size)
    devices = cuda.driver().count()
    where = "one device each" if size <= devices else f"{size} ranks share {devices}"
    lines = []
    with ThreadPoolExecutor(size) as pool:
        ranks = list(pool.map(Rank, communicators))
        with ranks[0].stream:
            rate = cuda.copy_bandwidth()
        print(
            f"# all_reduce, float32, in place: {size} threads, {where}; copy {rate / 1e9:.0f} GB/s"
        )
        print(f"#{'bytes':>11}{'way':>8}{'us':>10}{'busbw GB/s':>12}{'of limit':>10}{'#wrong':>8}")
        for nbytes in sizes:
            for way in ("graph", "call"):
                each = list(pool.map(lambda r, n=nbytes, w=way: r.measure(n, w == "graph"), ranks))
                seconds, wrong = max(e[0] for e in each), sum(e[1] for e in each)
                busbw = nbytes / seconds * bus_factor("all_reduce", size) / 1e9
                # Of one device that all share: every input read once, every output written once.
                share = 2 * nbytes * size / rate / seconds if devices == 1 else None
                shown = "" if share is None else f"{share:.0%}"
                print(
                    f"{nbytes:>12}{way:>8}{seconds * 1e6:>10.2f}{busbw:>12.2f}{shown:>10}{wrong:>8}"
                )
                line = {"ranks": size, "bytes": nbytes, "way": way, "seconds": seconds}
                lines.append({**line, "busbw": busbw, "of_limit": share, "wrong": wrong})
    for comm in communicators:
        comm.close()
    return lines


def main() -> int:
    """The exit status: whether every result was right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, action="append")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--json", type=Path)
    words = parser.parse_args()
    lines = [line for size in words.ranks or [2, 4] for line in sweep(size, words.sizes)]
    if words.json is not None:
        words.json.write_text(json.dumps(lines, indent=1) + "\n")
    return 1 if any(line["wrong"] for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
