"""Compare flat algorithms with levels on simulated hosts of 64 cores with domains. No rank runs.

    python bench/domains.py [--quick] [--markdown docs/results/domains.md]

For each host, collective and size it simulates the plans of every algorithm that the model may
choose (bench/simulated_host.py), and prints the time of three of them: the flat algorithm that the
model chooses without domains, the algorithm that it chooses with domains, and the quickest of all.
An algorithm is given up when it takes three times as long as the quickest so far.

The costs inside a domain and between caches are those that the model assumes; `HOSTS` says what
else is assumed. Nothing here is measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from math import inf
from pathlib import Path
from typing import NamedTuple

import page
from simulated_host import Distance, Host, simulate

from pycoll.algorithms import lookup
from pycoll.cost.copying import choose_copies
from pycoll.cost.model import DEFAULT, DOMAIN_BETA, FAR_ALPHA, FAR_BETA, Link
from pycoll.cost.selection import bytes_text, choose, seconds_text
from pycoll.plan.lowering import add_acknowledgements, lower_all
from pycoll.plan.plan_format import Plan, unpack
from pycoll.schedule.collectives import Collective
from pycoll.schedule.copies import Copies
from pycoll.schedule.topology import Topology, single_host, with_domains

TITLE = "Algorithms with and without levels, simulated"
KIB, MIB = 1 << 10, 1 << 20
RANKS = 64
SIZES = (64, KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB)
COLLECTIVES = (
    Collective.ALL_REDUCE,
    Collective.BROADCAST,
    Collective.REDUCE_SCATTER,
    Collective.ALL_GATHER,
    Collective.BARRIER,
)
#: The chosen algorithm is to be within this share of the quickest.
BOUND = 0.10
#: Algorithms are given up at this multiple of the quickest.
GIVEN_UP = 3.0


class Kind(NamedTuple):
    """A kind of host. ``caches`` and ``nodes``: last-level caches and memory domains, over which
    cores are spread evenly. ``memory``: the s/byte of a memory domain; 0: caches hold all arrays.
    """

    name: str
    caches: int
    nodes: int = 1
    memory: float = 0.0


#: Between memory domains, as multiples of what the distance inside a cache costs: a line takes
#: about 190 ns between sockets of EPYC and 20 ns inside a cache. Four links of 16 lanes join two
#: sockets. Eight channels of DDR4-3200 serve each.
NODE_ALPHA, NODE_BETA, NODE_LINK, MEMORY = 8.0, 3.0, 1 / 128e9, 1 / 190e9
HOSTS = (
    Kind("8 caches of 8 cores", 8),
    Kind("8 caches of 8 cores in 2 memory domains", 8, 2),
    Kind("the same, and arrays in memory", 8, 2, MEMORY),
)


def topology_of(kind: Kind, ranks: int = RANKS) -> Topology:
    """Return the topology of a rank on each core."""
    labels = [
        [rank * count // ranks for rank in range(ranks)] for count in (kind.caches, kind.nodes)
    ]
    return with_domains(single_host(ranks), *labels)


def host_of(kind: Kind, ranks: int = RANKS, core: Link = DEFAULT.inside) -> Host:
    """Return the host to simulate."""

    def distance(alpha: float, beta: float) -> Distance:
        return Distance(core.alpha * alpha, core.reach * beta, core.beta / 2 * beta)

    groups = topology_of(kind, ranks).inner
    distances = (distance(1, 1), distance(FAR_ALPHA, FAR_BETA), distance(NODE_ALPHA, NODE_BETA))
    links = (DOMAIN_BETA, NODE_LINK)
    count = len(groups)
    return Host(groups, distances[: count + 1], links[:count], core, kind.memory)


@cache
def plans_of(
    collective: Collective, name: str, topology: Topology, copies: Copies
) -> tuple[Plan, ...]:
    """Return the plans of all ranks."""
    schedule = lookup(collective, name).build(topology.size, topology=topology)
    return tuple(unpack(image) for image in lower_all(add_acknowledgements(schedule), copies))


class Row(NamedTuple):
    """The simulated times of one size. ``times``: seconds by algorithm, infinite where given up."""

    kind: Kind
    collective: Collective
    nbytes: int
    flat: str
    chosen: str
    predicted: float
    times: dict[str, float]

    @property
    def best(self) -> str:
        """The quickest algorithm; the chosen one if it is as quick."""
        return min(self.times, key=lambda name: (self.times[name], name != self.chosen))

    @property
    def ratio(self) -> float:
        """The time of the chosen algorithm, divided by that of the quickest."""
        return self.times[self.chosen] / self.times[self.best]


def row_of(kind: Kind, collective: Collective, nbytes: int, ranks: int = RANKS) -> Row:
    """Simulate every algorithm that the model may choose."""
    topology, host = topology_of(kind, ranks), host_of(kind, ranks)
    groups = topology.by_domain
    flat = choose(collective, single_host(ranks), nbytes).name
    choice = choose(collective, topology, nbytes)
    copies = choose_copies(collective, ranks, nbytes, DEFAULT)
    moved = 0 if collective is Collective.BARRIER else nbytes
    names = [choice.name, *(name for name, _ in choice.alternatives)]
    times: dict[str, float] = {}
    for name in names:
        # The two algorithms of the table are never given up.
        limit = inf if name in (choice.name, flat) else GIVEN_UP * min(times.values())
        plans = plans_of(collective, name, groups, copies)
        times[name] = simulate(host, plans, moved, limit)
    return Row(kind, collective, nbytes, flat, choice.name, choice.predicted_s, times)


def rows(
    kinds: Sequence[Kind], collectives: Sequence[Collective], sizes: Sequence[int], ranks: int
) -> Iterator[Row]:
    """Simulate a table."""
    for kind in kinds:
        for collective in collectives:
            # Caches hold short arrays on any host.
            mine = [nbytes for nbytes in sizes if nbytes >= MIB] if kind.memory else sizes
            if collective is Collective.BARRIER:
                mine = () if kind.memory else (0,)
            for nbytes in mine:
                yield row_of(kind, collective, nbytes, ranks)


HEAD = (
    "collective",
    "bytes",
    "flat",
    "",
    "chosen",
    "predicted",
    "",
    "quickest",
    "",
    "chosen / quickest",
)


def cells(row: Row) -> list[str]:
    """Return the row of a table."""
    return [
        row.collective.name.lower(),
        bytes_text(row.nbytes),
        row.flat,
        seconds_text(row.times[row.flat]),
        row.chosen,
        seconds_text(row.predicted),
        seconds_text(row.times[row.chosen]),
        row.best,
        seconds_text(row.times[row.best]),
        f"{row.ratio:.2f}",
    ]


def summary(found: Sequence[Row]) -> str:
    """Return one line about all rows."""
    near = sum(row.ratio <= 1 + BOUND for row in found)
    worst = max(found, key=lambda row: row.ratio)
    gains = [row.times[row.flat] / row.times[row.chosen] for row in found]
    return (
        f"The chosen algorithm is within {BOUND:.0%} of the quickest in {near} of {len(found)} "
        f"rows; the worst is {worst.ratio:.2f} ({worst.collective.name.lower()} of "
        f"{bytes_text(worst.nbytes)}). The flat algorithm takes {min(gains):.2f} to "
        f"{max(gains):.2f} times as long as the chosen one."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="16 cores and few sizes")
    parser.add_argument("--markdown", type=Path, help="put the tables on this page")
    options = parser.parse_args()
    kinds, ranks, sizes = HOSTS, RANKS, SIZES
    if options.quick:
        kinds, ranks, sizes = (Kind("4 caches of 4 cores", 4),), 16, (64, 64 * KIB, MIB)
    lines = []
    for kind in kinds:
        found = []
        for row in rows((kind,), COLLECTIVES, sizes, ranks):
            found.append(row)
            print("  ".join(cells(row)), flush=True)
        print(f"# {kind.name}: {summary(found)}", flush=True)
        lines += [f"### {kind.name}", "", summary(found), ""]
        lines += [*page.table(HEAD, [cells(row) for row in found]), ""]
    if options.markdown is not None:
        page.write_section(options.markdown, TITLE, lines[:-1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
