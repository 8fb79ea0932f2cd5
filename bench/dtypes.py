"""The cost of sums of small types: all_reduce of equally many bytes of each floating-point type.

    .venv/bin/python bench/dtypes.py --markdown bench/RESULTS.md

The ranks are two processes with NumPy arrays over shared memory, and reduce in place. The rounds of
the types are interleaved. Each addition of a 16-bit or 8-bit type widens to float32 and rounds the
result. The table compares the bytes per second with those of float32. Ratios are medians over
rounds.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import page
from jobs import Effort, Entrant, Times, compare, ratio, start_jobs

from pycoll.tools.bench import report

TITLE = "Element types over shared memory"
WIDE = "float32"
#: Targets: the longest time of each type as a multiple of float32's time.
SLOWER_AT_MOST = {"float16": 1.3, "bfloat16": 1.3, "float8_e4m3": 2.0, "float8_e5m2": 2.0}
SIZES = (64 << 10, 1 << 20, 16 << 20)
RANKS = 2
COLLECTIVE = "all_reduce"


@dataclass(frozen=True)
class Result:
    """One measured size."""

    nbytes: int
    times: dict[str, Times]

    def slower(self, dtype: str) -> float:
        """Return the time of ``dtype`` divided by float32's."""
        found = ratio(self.times, dtype, WIDE)
        assert found is not None, dtype
        return found


def measure(sizes: Sequence[int], effort: Effort) -> Iterator[Result]:
    """Measure one size after the other, with the rounds of all types interleaved."""
    with tempfile.TemporaryDirectory() as folder:
        (job,) = start_jobs(RANKS, folder, ("pycoll",))
        try:
            dtypes = (WIDE, *SLOWER_AT_MOST)
            entrants = [Entrant(dtype, job, (("dtype", dtype),)) for dtype in dtypes]
            for nbytes in sizes:
                yield Result(nbytes, compare(entrants, COLLECTIVE, nbytes, effort))
        finally:
            job.close()


def cells(result: Result) -> list[str]:
    """Return a table's row: bytes, float32's time, and the other types' times relative to it."""
    shown = [str(result.nbytes), report.four_digits(result.times[WIDE].median * 1e6)]
    for dtype, most in SLOWER_AT_MOST.items():
        found = result.slower(dtype)
        shown.append(f"{found:.2f} of {most:g}, {'reached' if found <= most else 'missed'}")
    return shown


def head() -> list[str]:
    """Return the titles of the columns of ``cells``."""
    return ["bytes", f"{WIDE}, us", *(f"{dtype} / {WIDE}" for dtype in SLOWER_AT_MOST)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", type=int, action="append", help="only these sizes")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--budget-s", type=float, default=8.0, help="longest time for one size")
    parser.add_argument("--markdown", type=Path, help="put the table on this page")
    options = parser.parse_args()
    rows = []
    for result in measure(options.bytes or SIZES, Effort(options.rounds, options.budget_s)):
        rows.append(cells(result))
        print("  ".join(f"{k}: {v}" for k, v in zip(head(), rows[-1], strict=True)), flush=True)
    if options.markdown is not None:
        what = (
            f"{COLLECTIVE}, sum, in place, {RANKS} ranks, NumPy arrays, processes, interleaved "
            "samples: time of as many bytes over float32's (bench/dtypes.py says how)."
        )
        page.write_section(
            options.markdown, TITLE, [page.origin(), "", what, "", *page.table(head(), rows)]
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
