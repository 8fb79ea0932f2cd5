"""The speed of the codecs: GB/s of float32 that are encoded, decoded, and decoded and added.

    .venv/bin/python bench/codecs.py --markdown bench/RESULTS.md

Each codec runs with every instruction set, in turns with a copy of as many bytes, on one core.
Arrays of ``--bytes`` fit into the second-level cache; those of ``--long`` do not fit into any.
Encoding also writes what the codes leave out, since error feedback needs it. Top-k adds residuals
and writes the sums in its pass. All figures are medians.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import page
from kernels import speed

from pycoll import _core

TITLE = "Codecs"
#: Names in the order of CodecKind of csrc/kernels/codecs.h.
KINDS = ("bf16", "int8", "int4", "fp8", "sign")
TOP_K = "top-k 1 %"
#: GB/s that encoding and decode-and-add reach at least with AVX-512 and with AVX2, arrays in cache;
#: 0: none.
TARGETS = {
    "avx512": {"int8": (10.0, 12.0), "sign": (15.0, 20.0), TOP_K: (6.0, 0.0)},
    "avx2": {"int8": (7.0, 12.0), "sign": (15.0, 20.0), TOP_K: (6.0, 0.0)},
}
#: The share of a copy's rate that both reach at least for arrays in memory.
LONG_SHARE = 0.8
_BLOCK = 256
_SHARE = 100


class Line(NamedTuple):
    """GB/s of one codec with one instruction set, and of a copy in the same rounds."""

    codec: str
    isa: str
    nbytes: int
    encode: float
    decode: float
    decode_add: float
    copy: float


def measure(name: str, isa: str, nbytes: int, rounds: int) -> Line:
    """Measure one codec in turns with a copy."""
    values = np.random.default_rng(1).standard_normal(nbytes // 4).astype(np.float32)
    rests, sums = np.zeros_like(values), np.zeros_like(values)
    codec = _core.Codec(KINDS.index(name), _BLOCK, False, 0, isa)
    codes = np.zeros(codec.nbytes(len(values)), np.uint8)
    told, view, left, total = map(_core.view, (codes, values, rests, sums))

    def copy(times: int) -> None:
        for _ in range(times):
            np.copyto(rests, values)

    runs: list[Callable[[int], Any]] = [
        lambda times: codec.encode(told, view, left, 0, times),
        lambda times: codec.decode(total, told, False, times),
        lambda times: codec.decode(total, told, True, times),
        copy,
    ]
    turns = zip(*(speed(run, nbytes, rounds) for run in runs), strict=True)
    return Line(name, isa, nbytes, *map(statistics.median, zip(*turns, strict=True)))


def measure_top_k(isa: str, nbytes: int, rounds: int) -> Line:
    """Measure the choice of the largest values, their spreading, and a sum of two codes."""
    values = np.random.default_rng(1).standard_normal(nbytes // 4).astype(np.float32)
    rests, sums = np.zeros_like(values), np.zeros_like(values)
    view, left, total = map(_core.view, (values, rests, sums))
    number = len(values) // _SHARE
    found = _core.largest_values(view, number, left, total, isa)
    kinds = (np.uint32, np.float32)
    codes = tuple(_core.view(np.frombuffer(a, b)) for a, b in zip(found, kinds, strict=True))

    def repeated(run: Callable[[], Any]) -> Callable[[int], Any]:
        def times(count: int) -> None:
            for _ in range(count):
                run()

        return times

    runs = [
        repeated(lambda: _core.largest_values(view, number, left, total, isa)),
        repeated(lambda: _core.spread_codes(total, 0, len(values), *codes)),
        repeated(lambda: _core.fold_codes([codes, codes], len(values), 2)),
        repeated(lambda: np.copyto(rests, values)),
    ]
    turns = zip(*(speed(run, nbytes, rounds) for run in runs), strict=True)
    return Line(TOP_K, isa, nbytes, *map(statistics.median, zip(*turns, strict=True)))


def verdict(line: Line, is_long: bool) -> str:
    """Return the targets of encoding and of decode-and-add, and whether both are reached."""
    if is_long:
        wanted = (LONG_SHARE * line.copy, LONG_SHARE * line.copy)
    else:
        wanted = TARGETS.get(line.isa, {}).get(line.codec, (0.0, 0.0))
    if not any(wanted):
        return "-"
    reached = line.encode >= wanted[0] and line.decode_add >= wanted[1]
    shown = " and ".join(f"{rate:.3g}" if rate else "-" for rate in wanted)
    return f"{shown}, {'reached' if reached else 'missed'}"


def cells(line: Line, is_long: bool) -> list[str]:
    """Return a row of the table."""
    shown = [f"{rate:.3g}" for rate in line[3:]]
    return [line.codec, line.isa, str(line.nbytes), *shown, verdict(line, is_long)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", type=int, default=1 << 16, help="of an array in cache")
    parser.add_argument("--long", type=int, default=1 << 28, help="of an array in memory; 0: none")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--markdown", type=Path, help="put the table on this page")
    options = parser.parse_args()
    head = ["codec", "kernel", "bytes", "encode", "decode", "decode and add", "copy", "target"]
    print("# GB/s of float32")
    print("  ".join(f"{word:>14}" for word in head))
    rows = []
    isas = [isa for isa in _core.isas() if isa not in ("reference", "avx512fp16")]
    for nbytes in filter(None, (options.bytes, options.long)):
        for name in (*KINDS, TOP_K):
            for isa in isas if nbytes == options.bytes else isas[-1:]:
                if name == TOP_K:
                    line = measure_top_k(isa, nbytes, options.rounds)
                else:
                    line = measure(name, isa, nbytes, options.rounds)
                rows.append(cells(line, nbytes == options.long))
                print("  ".join(f"{word:>14}" for word in rows[-1]), flush=True)
    if options.markdown is not None:
        what = (
            f"GB/s of float32, blocks of {_BLOCK} values, one core, in turns with a copy of as "
            "many bytes; medians. Encoding writes codes and rests. Decode-and-add of top-k adds "
            "the codes of two ranks."
        )
        note = (
            "The targets are those of encode and of decode-and-add; of arrays in memory "
            f"{LONG_SHARE:.0%} of the copy."
        )
        lines = [page.origin(), "", what, note, "", *page.table(head, rows)]
        page.write_section(options.markdown, TITLE, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
