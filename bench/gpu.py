"""Collectives on GPUs: ranks as threads of this process, on one device or on all of them.

    python bench/gpu.py [--ranks 2 --ranks 4] [--protocol auto --protocol pattern] [--codec int8]
        [--arrays 64] [--json FILE]

Times are those of the slowest rank by the device's clock, for replayed graphs and for eager calls,
and the host's time per eager call. Every result is compared. The benchmark first lets pycoll choose
the protocol, and then measures short messages in each protocol alone, and messages with codecs, as
one array and as lists. A result with a codec must have the bits of arrays in host memory. One rank
with a codec sends nothing, so its time is that of the codec's kernels. A failure is reported in its
line, and the other sizes run with new ranks. The header says which ranks share a device: their
figures do not describe links between devices.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import pycoll
from pycoll.tools.bench import cuda
from pycoll.tools.bench.metrics import bus_factor
from pycoll.tools.codec_words import codec_of

SIZES = [8, 4 << 10, 64 << 10, 1 << 20, 64 << 20, 256 << 20]
#: Longest message for single protocols; only Simple is meant for longer ones.
PROTOCOL_BYTES_MAX = 1 << 20
#: The codecs that are measured by default, the sizes, and the arrays of the list that one of them
#: reduces. The host computes the results, too.
CODECS = ["bf16", "int8", "sign"]
CODEC_SIZES = [4 << 10, 1 << 20, 64 << 20]
LISTED = ("int8", 64)
SAMPLES = 11
#: Limit of an operation in seconds: it ends a line if a rank never calls.
TIMEOUT_S = 15.0


class Rank:
    """One communicator with its device, stream and clock."""

    def __init__(self, comm: pycoll.Communicator) -> None:
        self.comm = comm
        self.stream = cuda.Stream(comm.rank % cuda.driver().count())
        self.clock = cuda.Clock(self.stream)

    def measure(
        self, nbytes: int, replayed: bool, arrays: int, words: dict[str, Any]
    ) -> tuple[float, float, int]:
        """Return the median seconds of an all_reduce in place, on the device and on the host, and
        the number of wrong elements. ``arrays``: into how many the bytes are split. ``words``:
        further arguments of the call."""
        batch = 20 if nbytes <= 1 << 20 else 2
        with self.stream:
            values = np.array_split(np.arange(nbytes // 4, dtype=np.float32) % 1000, arrays)
            made = [cuda.array(one) for one in values]
            x = made[0] if arrays == 1 else made
            expected = [one * self.comm.size for one in values]
            if words:
                expected = [self.comm.all_reduce(one, **words) for one in values]
            # No rank may allocate memory while another rank's kernel waits for it.
            self.comm.barrier()
            self.comm.all_reduce(x, out=x, **words)
            wrong = sum(
                int(np.count_nonzero(one.get() != right))
                for one, right in zip(made, expected, strict=True)
            )
            step = self._graph(x, batch, words) if replayed else self._calls(x, batch, words)
            times, calls = [], []
            for _ in range(SAMPLES):
                self.stream.synchronize()
                self.comm.barrier()
                self.clock.start()
                begin = time.perf_counter()
                step()
                calls.append((time.perf_counter() - begin) / batch)
                times.append(self.clock.stop() / batch)
        return statistics.median(times), statistics.median(calls), wrong

    def _calls(self, x: Any, batch: int, words: dict[str, Any]) -> Callable[[], None]:
        def step() -> None:
            for _ in range(batch):
                self.comm.all_reduce(x, out=x, **words)

        return step

    def _graph(self, x: Any, batch: int, words: dict[str, Any]) -> Callable[[], None]:
        with self.stream.capture() as graph:
            self._calls(x, batch, words)()
        return graph.launch


def rate_of() -> tuple[float, str]:
    """Return the limit in bytes per second and its name: copies within one device, or from the
    first to the second device."""
    with cuda.Stream():
        if cuda.driver().count() > 1:
            return cuda.link_bandwidth(1), "copy from 0 to 1"
        return cuda.copy_bandwidth(), "copy"


def line_of(size: int, nbytes: int, way: str, rate: float, each: list[Any]) -> dict[str, Any]:
    """Print one line of the table and return its figures."""
    seconds, host = max(one[0] for one in each), max(one[1] for one in each)
    wrong = sum(one[2] for one in each)
    busbw = nbytes / seconds * bus_factor("all_reduce", size) / 1e9
    share = None
    if cuda.driver().count() == 1:
        # On a device that all ranks share, the limit is to read every input byte and to write every
        # output byte once.
        share = 2 * nbytes * size / rate / seconds
    elif size <= cuda.driver().count():
        share = busbw * 1e9 / rate
    shown = "" if share is None else f"{share:.0%}"
    called = "" if way == "graph" else f"{host * 1e6:.2f}"
    rates = f"{busbw:>12.2f}{shown:>10}"
    print(f"{nbytes:>12}{way:>8}{seconds * 1e6:>10.2f}{called:>10}{rates}{wrong:>8}", flush=True)
    line = {"ranks": size, "bytes": nbytes, "way": way, "seconds": seconds, "host_s": host}
    return {**line, "busbw": busbw, "of_limit": share, "wrong": wrong}


class Way(NamedTuple):
    """How messages are sent. ``codec``: the word of a codec, or nothing."""

    protocol: str
    codec: str = ""
    arrays: int = 1

    def __str__(self) -> str:
        words = [f"with {self.codec}" if self.codec else ""]
        if not self.codec:
            words = ["as chosen" if self.protocol == "auto" else f"in {self.protocol}"]
        return ", ".join([*words, *([f"lists of {self.arrays} arrays"] if self.arrays > 1 else [])])

    def sizes(self) -> list[int]:
        """Return the sizes that are measured by default."""
        if self.codec:
            return CODEC_SIZES
        most = SIZES[-1] if self.protocol == "auto" else PROTOCOL_BYTES_MAX
        return [one for one in SIZES if one <= most]

    def ranks(self) -> list[int]:
        """Return the numbers of ranks that are measured by default."""
        return [1, 2, 4] if self.codec else [2, 4]


def measure_all(
    size: int, sizes: list[int], by: Way, limit: tuple[float, str]
) -> list[dict[str, Any]]:
    """Measure all sizes on ``size`` ranks and print each line. ``limit`` is that of ``rate_of``."""
    rate, what = limit
    protocol, codec, arrays = by
    os.environ["PYCOLL_DEVICE_PROTOCOL"] = protocol
    # A mean: sums of sums would overflow, and blocks with infinities take less time to encode.
    arguments = {"compress": codec_of(codec), "op": "avg"} if codec else {}
    devices = cuda.driver().count()
    where = "one device each" if size <= devices else f"{size} ranks share {devices}"
    lines: list[dict[str, Any]] = []
    communicators: list[pycoll.Communicator] = []
    with ThreadPoolExecutor(size) as pool:
        print(
            f"# all_reduce, float32, in place, {by}: {size} threads, {where}; "
            f"{what} {rate / 1e9:.0f} GB/s\n"
            f"#{'bytes':>11}{'way':>8}{'us':>10}{'host us':>10}{'busbw GB/s':>12}{'of limit':>10}"
            f"{'#wrong':>8}",
            flush=True,
        )
        for nbytes, way in itertools.product(sizes, ("graph", "call")):
            if not communicators:
                communicators = pycoll.local_world(size, timeout_s=TIMEOUT_S)
                ranks = list(pool.map(Rank, communicators))
            words = (nbytes, way == "graph", arrays, arguments)
            futures = [pool.submit(one.measure, *words) for one in ranks]
            errors = [error for one in futures if (error := one.exception()) is not None]
            if not errors:
                each = [one.result() for one in futures]
                line = line_of(size, nbytes, way, rate, each)
                lines.append({**line, **by._asdict()})
                continue
            print(f"{nbytes:>12}{way:>8}  FAILED: {str(errors[0])[:300]}", flush=True)
            line = {"ranks": size, "bytes": nbytes, "way": way, "wrong": -1}
            lines.append({**line, **by._asdict()})
            for comm in communicators:
                comm.close()
            communicators = []
    for comm in communicators:
        comm.close()
    return lines


def main() -> int:
    """Run the benchmark; returns 0 if every result was right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, action="append")
    parser.add_argument("--sizes", type=int, nargs="+")
    parser.add_argument("--protocol", action="append")
    parser.add_argument("--codec", action="append")
    parser.add_argument("--arrays", type=int, default=1)
    parser.add_argument("--json", type=Path)
    words = parser.parse_args()
    ways = [Way(one, "", words.arrays) for one in words.protocol or []]
    ways += [Way("auto", one, words.arrays) for one in words.codec or []]
    if not ways:
        ways = [Way(one) for one in ("auto", "pattern", "ll", "simple")]
        ways += [Way("auto", one) for one in CODECS] + [Way("auto", *LISTED)]
    limit = rate_of()
    lines = [
        line
        for way in ways
        for size in words.ranks or way.ranks()
        for line in measure_all(size, words.sizes or way.sizes(), way, limit)
    ]
    if words.json is not None:
        words.json.write_text(json.dumps(lines, indent=1) + "\n")
    return 1 if any(line["wrong"] for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
