"""The speed of the reduction kernels: GB/s of every dtype, reduction and instruction set.

    .venv/bin/python bench/kernels.py --markdown bench/RESULTS.md

A kernel combines two arrays into the first one, as an all_reduce in place does. GB/s are bytes of
the result per second. The table also has memcpy of as many bytes, whose samples are interleaved
with those of the kernels. All figures are medians. Arrays fit into the second-level cache
(``--bytes``), since that is where the engines combine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import page

from pycoll import _core
from pycoll.errors import PycollError
from pycoll.types import OPS, DType, ReduceOp, numpy_dtype, wire_form

TITLE = "Reduction kernels"
#: Seconds of a sample.
_SAMPLE_S = 3e-4


@dataclass(frozen=True)
class Line:
    """GB/s of one reduction by instruction set, and of memcpy in the same rounds."""

    dtype: str
    op: str
    speeds: dict[str, float]
    memcpy: float


def speed(run: Callable[[int], None], nbytes: int, rounds: int) -> Iterator[float]:
    """Yield samples in GB/s."""
    begin = time.perf_counter()
    run(1)
    times = max(1, int(_SAMPLE_S / max(time.perf_counter() - begin, 1e-7)))
    for _ in range(rounds):
        begin = time.perf_counter()
        run(times)
        yield nbytes * times / (time.perf_counter() - begin) / 1e9


def measure(dtype: DType, word: str, nbytes: int, rounds: int) -> Line:
    """Measure one reduction with every instruction set, and memcpy, in rotation."""
    a, b = (np.empty(nbytes, np.uint8) for _ in range(2))
    a.fill(0)
    b.fill(0)
    target = _core.view(a.view(numpy_dtype(dtype)))
    sources = [target, _core.view(b.view(numpy_dtype(dtype)))]
    op = OPS[word]

    def kernel(isa: str) -> Callable[[int], None]:
        return lambda times: _core.combine(target, sources, op, isa, times)

    def memcpy(times: int) -> None:
        for _ in range(times):
            np.copyto(a, b)

    runs: dict[str, Callable[[int], None]] = {isa: kernel(isa) for isa in _core.isas()}
    runs["memcpy"] = memcpy
    turns = zip(*(speed(run, nbytes, rounds) for run in runs.values()), strict=True)
    columns = zip(*turns, strict=True)
    speeds = dict(zip(runs, map(statistics.median, columns), strict=True))
    return Line(dtype.word, word, speeds, speeds.pop("memcpy"))


def lines_of(dtypes: Sequence[str], ops: Sequence[str], nbytes: int, rounds: int) -> Iterator[Line]:
    """Measure every reduction that combines elements as they are. Averages are left out: they are
    sums of their wire form."""
    for dtype in DType:
        if dtypes and dtype.word not in dtypes:
            continue
        try:
            numpy_dtype(dtype)
        except PycollError as error:
            print(f"# {dtype.word}: left out, {error}", file=sys.stderr)
            continue
        for word, op in OPS.items():
            if op == ReduceOp.AVG or wire_form(dtype, op) or not _core.defined(dtype, op):
                continue
            if not ops or word in ops:
                yield measure(dtype, word, nbytes, rounds)


def cells(line: Line) -> list[str]:
    """Return a row of the table; the share of memcpy is that of the fastest kernel."""
    best = max(line.speeds.values())
    shown = [f"{speed:.3g}" for speed in line.speeds.values()]
    return [line.dtype, line.op, *shown, f"{line.memcpy:.3g}", f"{best / line.memcpy:.2f}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", type=int, default=1 << 16, help="of each array")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtype", action="append", default=[], help="only these")
    parser.add_argument("--op", action="append", default=[], help="only these")
    parser.add_argument("--markdown", type=Path, help="put the table on this page")
    options = parser.parse_args()
    head = ["dtype", "op", *_core.isas(), "memcpy", "best / memcpy"]
    print(f"# GB/s of the result, arrays of {options.bytes} bytes")
    print("".join(f"{word:>15}" for word in head))
    rows = []
    for line in lines_of(options.dtype, options.op, options.bytes, options.rounds):
        rows.append(cells(line))
        print("".join(f"{word:>15}" for word in rows[-1]), flush=True)
    if options.markdown is not None:
        what = (
            f"GB/s of the result, two arrays of {options.bytes} bytes combined into the first, one "
            "core, with each instruction set; memcpy of as many bytes in the same turns; medians."
        )
        lines = [page.origin(), "", what, "", *page.table(head, rows)]
        page.write_section(options.markdown, TITLE, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
