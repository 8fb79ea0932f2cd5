"""How long the policy auto plans: the gradients of real models, on links of several speeds.

The figures are processor time, so that other programs on the machine matter less.

    python bench/planning.py
"""

from __future__ import annotations

import itertools
import statistics
import time
from pathlib import Path

from pycoll.gradients.chooser import decide
from pycoll.gradients.communication_plan import IN, OUT, Gradient, Rate, Rates, Stage
from pycoll.gradients.compare import read_gradients
from pycoll.gradients.policies import Policy

FOLDER = Path(__file__).resolve().parent / "survey"
#: The time of the communication over that of the backward pass.
RATIOS = (0.5, 1.0, 2.0)
REPEATS = 5


def rates_of(gradients: list[Gradient], ratio: float, servers: bool) -> Rates:
    """Links on which all gradients take ``ratio`` times the backward pass."""
    beta = ratio * gradients[-1].ready_s / sum(one.nbytes for one in gradients)
    half = Rate(5e-5, beta / 2)
    leg = Rate(3e-5, 1.1 * beta)
    push_pull = (Stage(leg, (OUT,)), Stage(leg, (IN,), 3e-5)) if servers else ()
    return Rates(Rate(1e-4, beta), half, half, 20e-6, 0.0, 10e-6, push_pull)


def main() -> None:
    """Print the median time of a plan, by model, link and architectures."""
    print(f"{'model':<12} {'gradients':>9} {'ratio':>6} {'architectures':<14} {'plan':>8}")
    for path in sorted(FOLDER.glob("layers-*.csv")):
        gradients = read_gradients(path)
        ready = [0.0, *(one.ready_s for one in gradients)]
        forward_s = [(now - before) / 2 for before, now in itertools.pairwise(ready)]
        for ratio, servers in itertools.product(RATIOS, (False, True)):
            rates, took = rates_of(gradients, ratio, servers), []
            for _ in range(REPEATS):
                begin = time.process_time()
                decide(Policy(), gradients, rates, forward_s)
                took.append(time.process_time() - begin)
            word = ", ".join(rates.architectures)
            print(
                f"{path.stem.removeprefix('layers-'):<12} {len(gradients):>9} {ratio:>6} "
                f"{word:<14} {1e3 * statistics.median(took):>5.1f} ms"
            )


if __name__ == "__main__":
    main()
