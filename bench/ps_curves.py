"""Draws loss against time for the consistencies of a store, while workers are unequally fast.

    .venv/bin/python bench/ps_curves.py --markdown docs/results/stragglers.md \\
        --plot docs/results/stragglers.svg

Four workers and a server on this host train softmax regression on scikit-learn's digits. A step
takes 10 ms, most of which is a pause, so that two cores are enough. There are two scenes:

* "tenth": each worker is 3 times slower in a random tenth of its steps;
* "one": one worker is 3 times slower in all its steps.

The table has the steps per second of all workers, the seconds until the loss over all samples is at
most ``--loss``, the last loss, and the pushes that Backup dropped. "asp" and SSP step once a push,
by a rate that is divided by the workers, so equally many gradients move the weights equally far.
A run takes two minutes. ``--quick`` takes a second for each curve of one scene: it shows that the
script works, and no figure counts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import page
from jobs import RUN_PYCOLL
from sklearn.datasets import load_digits

from pycoll.tools.pictures import Panel, check_picture, draw_panels

TITLE = "Loss against time with unequally fast workers"
WORKER = str(Path(__file__).resolve().parent / "ps_curves_worker.py")
WORKERS, SERVERS = 4, 1
SCENES = {"tenth": "slow in a random tenth of the steps", "one": "one slow worker"}
#: More seconds than a scene can take in addition to its curves.
_MORE_S = 120
#: The first time in a picture, and the ratio of times of neighbouring points.
_FIRST_MS, _RATIO = 64, 1.25
_SETTINGS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYCOLL_TIMEOUT_S": "60"}

Facts = Mapping[str, Any]


def run(scene: str, seconds: float) -> list[Facts]:
    """The facts of each consistency in a scene, as ps_curves_worker.py prints them."""
    head = [*RUN_PYCOLL, "-n", str(WORKERS), "--servers", str(SERVERS)]
    with tempfile.TemporaryDirectory() as folder:
        # The import of sklearn takes seconds, so not every worker does it.
        digits, path = load_digits(), os.path.join(folder, "digits.npz")
        np.savez(path, data=digits.data, target=digits.target)
        done = subprocess.run(
            [*head, sys.executable, WORKER, scene, str(seconds), path],
            env={**os.environ, **_SETTINGS},
            stdout=subprocess.PIPE,
            text=True,
            timeout=8 * seconds + _MORE_S,
            check=True,
        )
    return [json.loads(one[one.index("{") :]) for one in done.stdout.splitlines() if "{" in one]


def reached(curve: Sequence[tuple[float, float]], loss: float) -> str:
    """The seconds until the loss is reached, as a text."""
    return next((f"{when:.2f}" for when, found in curve if found <= loss), "not reached")


def rows_of(scene: str, facts: Sequence[Facts], seconds: float, loss: float) -> list[list[str]]:
    """The rows of a scene."""
    return [
        [
            SCENES[scene],
            one["consistency"],
            f"{one['steps'] / seconds:.0f}",
            reached(one["curve"], loss),
            f"{one['curve'][-1][1]:.4f}",
            str(one["dropped"]),
        ]
        for one in facts
    ]


def panel_of(facts: Sequence[Facts]) -> Panel:
    """The curves of a scene, at times that grow by a ratio."""
    curves = {}
    for one in facts:
        points, wanted = [], float(_FIRST_MS)
        for when, loss in one["curve"]:
            if 1e3 * when >= wanted:
                points.append((round(1e3 * when), loss))
                wanted = 1e3 * when * _RATIO
        curves[one["consistency"]] = points
    return Panel("loss", curves, x_label="time", x_text=lambda ms: f"{ms / 1000:.3g} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=12.0, help="length of a curve")
    parser.add_argument("--loss", type=float, default=0.25, help="the loss of the time to a loss")
    parser.add_argument("--quick", action="store_true", help="see above")
    parser.add_argument("--markdown", type=Path, help="a page whose section is replaced")
    parser.add_argument("--plot", type=Path, help="draw a .png, .pdf or .svg")
    options = parser.parse_args()
    if options.plot is not None:
        check_picture(options.plot)
    seconds = 1.0 if options.quick else options.seconds
    found = {scene: run(scene, seconds) for scene in (["one"] if options.quick else SCENES)}
    rows = [
        row
        for scene, facts in found.items()
        for row in rows_of(scene, facts, seconds, options.loss)
    ]
    head = ("workers", "consistency", "steps/s", f"s to a loss of {options.loss:g}")
    lines = page.table((*head, "last loss", "dropped pushes"), rows)
    print("\n".join(lines))
    if options.plot is not None:
        names = ", ".join(SCENES[scene] for scene in found)
        draw_panels(options.plot, [panel_of(facts) for facts in found.values()], f"{names}")
    if options.markdown is not None:
        text = [page.origin(), "", *lines]
        if options.plot is not None:
            place = os.path.relpath(options.plot, options.markdown.parent)
            text += ["", f"![loss against time by consistency]({place})"]
        page.write_section(options.markdown, TITLE, text)


if __name__ == "__main__":
    main()
