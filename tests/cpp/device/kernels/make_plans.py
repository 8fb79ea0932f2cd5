"""Writes the plans of every collective and algorithm for 2 to 8 ranks, for the device's tests.

The file: for each schedule a line ``name size root``, then for each rank four bytes with a length
and the plan's bytes. Needs no native code.

    python tests/cpp/device/kernels/make_plans.py build/device.plans
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

from pycoll.algorithms import TABLE
from pycoll.plan.lowering import add_acknowledgements, lower_all
from pycoll.schedule.collectives import ROOTED
from pycoll.schedule.topology import Topology

SIZES = range(2, 9)


def main(path: Path) -> None:
    with path.open("wb") as file:
        for collective, algorithms in TABLE.items():
            for name, algorithm in algorithms.items():
                for size in SIZES:
                    root = size * 2 // 3 if collective in ROOTED else 0
                    topology = Topology.even(size, 2)
                    schedule = algorithm.build(size, root=root, topology=topology)
                    file.write(f"{collective.name.lower()}/{name} {size} {root}\n".encode())
                    for plan in lower_all(add_acknowledgements(schedule)):
                        file.write(struct.pack("<I", len(plan)) + plan)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
