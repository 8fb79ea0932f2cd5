"""Collectives on GPUs: ranks as threads of this process, on one device or on all of them.

    python bench/gpu.py [--ranks 2 --ranks 4] [--protocol auto --protocol pattern] [--codec int8]
        [--json FILE]

Times are those of the slowest rank by the device's clock, for replayed graphs and for eager calls,
and the host's time per eager call. Every result is compared. The benchmark first lets pycoll choose
the protocol, and then measures short messages in each protocol alone, and messages with codecs. A
result with a codec must have the bits of arrays in host memory. A failure is reported in its
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
from typing import Any

import numpy as np

import pycoll
from pycoll.tools.bench import cuda
from pycoll.tools.bench.metrics import bus_factor
from pycoll.tools.codec_words import codec_of

SIZES = [8, 4 << 10, 64 << 10, 1 << 20, 64 << 20, 256 << 20]
#: Longest message for single protocols; only Simple is meant for longer ones.
PROTOCOL_BYTES_MAX = 1 << 20
#: The codecs that are measured by default, and the longest message: the host computes it, too.
CODECS = ["bf16", "int8"]
CODEC_BYTES_MAX = 64 << 20
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
        self, nbytes: int, replayed: bool, words: dict[str, Any]
    ) -> tuple[float, float, int]:
        """Return the median seconds of an all_reduce in place, on the device and on the host, and
        the number of wrong elements. ``words``: further arguments of the call."""
        batch = 20 if nbytes <= 1 << 20 else 2
        with self.stream:
            values = np.arange(nbytes // 4, dtype=np.float32) % 1000
            x = cuda.array(values)
            exact = values * self.comm.size
            expected = self.comm.all_reduce(values, **words) if words else exact
            # No rank may allocate memory while another rank's kernel waits for it.
            self.comm.barrier()
            self.comm.all_reduce(x, out=x, **words)
            wrong = int(np.count_nonzero(x.get() != expected))
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

    def _calls(self, x: cuda.Array, batch: int, words: dict[str, Any]) -> Callable[[], None]:
        def step() -> None:
            for _ in range(batch):
                self.comm.all_reduce(x, out=x, **words)

        return step

    def _graph(self, x: cuda.Array, batch: int, words: dict[str, Any]) -> Callable[[], None]:
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


def measure_all(
    size: int, sizes: list[int], protocol: str, limit: tuple[float, str], codec: str = ""
) -> list[dict[str, Any]]:
    """Measure all sizes on ``size`` ranks and print each line. ``limit`` is that of ``rate_of``.

    ``codec``: the word of a codec, or nothing.
    """
    rate, what = limit
    os.environ["PYCOLL_DEVICE_PROTOCOL"] = protocol
    if protocol != "auto":
        sizes = [one for one in sizes if one <= PROTOCOL_BYTES_MAX]
    if codec:
        sizes = [one for one in sizes if one <= CODEC_BYTES_MAX]
    arguments = {"compress": codec_of(codec)} if codec else {}
    chosen = f"with {codec}" if codec else "as chosen" if protocol == "auto" else f"in {protocol}"
    devices = cuda.driver().count()
    where = "one device each" if size <= devices else f"{size} ranks share {devices}"
    lines: list[dict[str, Any]] = []
    communicators: list[pycoll.Communicator] = []
    with ThreadPoolExecutor(size) as pool:
        print(
            f"# all_reduce, float32, in place, {chosen}: {size} threads, {where}; "
            f"{what} {rate / 1e9:.0f} GB/s\n"
            f"#{'bytes':>11}{'way':>8}{'us':>10}{'host us':>10}{'busbw GB/s':>12}{'of limit':>10}"
            f"{'#wrong':>8}",
            flush=True,
        )
        for nbytes, way in itertools.product(sizes, ("graph", "call")):
            if not communicators:
                communicators = pycoll.local_world(size, timeout_s=TIMEOUT_S)
                ranks = list(pool.map(Rank, communicators))
            futures = [pool.submit(one.measure, nbytes, way == "graph", arguments) for one in ranks]
            errors = [error for one in futures if (error := one.exception()) is not None]
            if not errors:
                each = [one.result() for one in futures]
                line = line_of(size, nbytes, way, rate, each)
                lines.append({**line, "protocol": protocol, "codec": codec})
                continue
            print(f"{nbytes:>12}{way:>8}  FAILED: {str(errors[0])[:300]}", flush=True)
            line = {"ranks": size, "bytes": nbytes, "way": way, "wrong": -1}
            lines.append({**line, "protocol": protocol, "codec": codec})
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
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--protocol", action="append")
    parser.add_argument("--codec", action="append")
    parser.add_argument("--json", type=Path)
    words = parser.parse_args()
    ways = [(one, "") for one in words.protocol or []] + [
        ("auto", one) for one in words.codec or []
    ]
    if not ways:
        ways = [(one, "") for one in ("auto", "pattern", "ll", "simple")]
        ways += [("auto", one) for one in CODECS]
    limit = rate_of()
    lines = [
        line
        for protocol, codec in ways
        for size in words.ranks or [2, 4]
        for line in measure_all(size, words.sizes, protocol, limit, codec)
    ]
    if words.json is not None:
        words.json.write_text(json.dumps(lines, indent=1) + "\n")
    return 1 if any(line["wrong"] for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
