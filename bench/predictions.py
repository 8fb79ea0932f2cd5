"""How near are predicted and measured times of collectives on this machine?

    pycoll tune
    python bench/predictions.py [--quick] [--markdown docs/results/two-cores.md]

For every main collective and both kinds of memory (docs/shared-arrays.md), from 64 KiB to 64 MiB,
it prints the time that the model predicts by the values in use, and the median of the measured
times. A prediction counts as near if it is within 30 % of the measured time. Run it on an idle
machine, after `pycoll tune`; it takes about two minutes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import page

from pycoll.config import Config
from pycoll.cores import core_count
from pycoll.cost.selection import MEMORIES, bytes_text, seconds_text
from pycoll.cost.tuning_file import local_parameters
from pycoll.tools.tune.machine_links import Compared, Comparison, compare_sizes

TITLE = "Predicted and measured times"
KIB, MIB = 1 << 10, 1 << 20
COLLECTIVES = (
    *("all_reduce", "broadcast", "all_gather", "reduce_scatter"),
    *("reduce", "gather", "scatter", "all_to_all"),
)
#: Predictions within this share of the measured time are near.
BOUND = 0.30
#: Most ranks of the jobs.
RANKS_MAX = 8
HEAD = ("collective", "memory", "bytes", "algorithm", "predicted", "measured", "pred. / meas.")


def found_of(words: argparse.Namespace, config: Config) -> Iterator[tuple[str, str, Compared]]:
    """Measure every row: the collective, the memory, and both times."""
    parameters = local_parameters(config, False).with_ranks_per_core(words.ranks / core_count())
    for collective in COLLECTIVES[:2] if words.quick else COLLECTIVES:
        for memory in MEMORIES:
            asked = Comparison(
                collective,
                words.ranks,
                64 * KIB,
                256 * KIB if words.quick else 64 * MIB,
                memory=memory,
                jobs=1 if words.quick else 2,
                budget_s=0.02 if words.quick else 0.2,
            )
            for one in compare_sizes(asked, config, parameters):
                yield collective, memory, one


def cells(collective: str, memory: str, one: Compared) -> list[str]:
    """Return the row of a table."""
    times = (seconds_text(one.predicted_s), seconds_text(one.measured_s), f"{one.ratio:.2f}")
    return [collective, memory, bytes_text(one.nbytes), one.algorithm, *times]


def summary(found: Sequence[tuple[str, str, Compared]], memory: str) -> str:
    """Return one line about the rows of one kind of memory."""
    ratios = [one.ratio for _, kind, one in found if kind == memory]
    near = sum(abs(ratio - 1) <= BOUND for ratio in ratios)
    return (
        f"{memory} memory: {near} of {len(ratios)} predictions ({near / len(ratios):.0%}) are "
        f"within {BOUND:.0%} of the measured time; predicted / measured is {min(ratios):.2f} to "
        f"{max(ratios):.2f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two collectives and few sizes")
    parser.add_argument("--ranks", type=int, default=max(2, min(RANKS_MAX, core_count())))
    parser.add_argument("--markdown", type=Path, help="put the table on this page")
    words = parser.parse_args()
    config = Config.read()
    origin = f"values: {local_parameters(config, False).origin}"
    print(f"# {words.ranks} ranks, {origin}")
    found = []
    for row in found_of(words, config):
        found.append(row)
        print("  ".join(cells(*row)), flush=True)
    lines = [summary(found, memory) for memory in MEMORIES]
    for line in lines:
        print(f"# {line}")
    if words.markdown is not None:
        text = [page.origin(), "", f"{words.ranks} ranks, float32, {origin}.", ""]
        text += [*page.table(HEAD, [cells(*row) for row in found])]
        for line in lines:
            text += ["", line + "."]
        page.write_section(words.markdown, TITLE, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
