"""Forecasts: the time of every algorithm on other hosts, as predicted by the selector's cost model.

``pycoll explain --hosts 128 --local-size 8 --alpha 2us --beta 50GB/s`` shows a forecast: times by
message size in that world, and times of one message in worlds of up to `RANKS_MAX` ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pycoll.cost.model import Link, Parameters
from pycoll.cost.selection import (
    bytes_text,
    candidates,
    choose,
    followed_topology,
    predict,
    seconds_text,
)
from pycoll.errors import InvalidArgumentError
from pycoll.schedule.collectives import Collective
from pycoll.schedule.topology import Topology, even_domains

#: The largest number of ranks of a forecast.
RANKS_MAX = 16384
#: Message sizes of the curves: 8 B to 1 GiB.
SIZES = tuple(1 << power for power in range(3, 31, 3))
#: Columns of a table and their width; with the longest name a line fits 100 characters.
_COLUMNS = 6
_WIDTH = 8


class Times(NamedTuple):
    """The predicted seconds of one message in one world, by algorithm, and the chosen algorithm."""

    of: Mapping[str, float]
    chosen: str


@dataclass(frozen=True)
class Asked:
    """A world of ``hosts`` with ``local_size`` ranks each, and a message of ``nbytes``.

    ``domains``: the domains of a host, over which its ranks are spread evenly.
    """

    collective: Collective
    hosts: int
    local_size: int
    nbytes: int
    domains: int = 1

    @property
    def ranks(self) -> int:
        """The number of all ranks."""
        return self.hosts * self.local_size

    def sizes(self) -> list[int]:
        """The message sizes of the comparison in bytes; empty for a barrier."""
        if self.collective is Collective.BARRIER:
            return []
        return sorted({*SIZES, self.nbytes} - {0})

    def worlds(self) -> list[int]:
        """The numbers of hosts: powers of two up to `RANKS_MAX` ranks, and the requested number."""
        numbers = {self.hosts}
        hosts = 1
        while hosts * self.local_size <= RANKS_MAX:
            numbers.add(hosts)
            hosts *= 2
        return sorted(number for number in numbers if number * self.local_size > 1)


@dataclass(frozen=True)
class Forecast:
    """Times by message size in the requested world, and by number of ranks for its message.

    ``by_bytes`` is empty for a barrier, whose messages have no size.
    """

    asked: Asked
    by_bytes: Mapping[int, Times]
    by_ranks: Mapping[int, Times]


def with_links(
    parameters: Parameters,
    *,
    alpha: float | None = None,
    beta: float | None = None,
    local_alpha: float | None = None,
    local_beta: float | None = None,
    flow: float | None = None,
    rails: float | None = None,
) -> Parameters:
    """Replaces the given values of links; None keeps a value.

    ``alpha``, ``beta``: latency (s) and s/byte between hosts. ``local_alpha``, ``local_beta``: the
    same inside hosts. ``flow``: s/byte of one rank, even if the link of its host is idle.
    ``rails``: the number of links of a host, each with beta; messages use all of them. If the
    latency of a link changes, its overheads change by the same factor.
    """
    given = (alpha, beta, local_alpha, local_beta, flow, rails)
    if all(value is None for value in given):
        return parameters
    across = _with_values(parameters.across, alpha, beta)
    if beta is not None:
        # Measured sustained and per-rank rates do not apply to another link.
        across = across._replace(sustained=0.0, flow=0.0)
    if flow is not None:
        across = across._replace(flow=flow)
    if rails is not None:
        across = across._replace(
            beta=across.beta / rails,
            spill=across.spill / rails,
            sustained=across.sustained / rails,
        )
    return parameters._replace(
        inside=_with_values(parameters.inside, local_alpha, local_beta),
        across=across,
        origin=f"{parameters.origin}, except those given",
    )


def _with_values(link: Link, alpha: float | None, beta: float | None) -> Link:
    if alpha is not None:
        faster = alpha / link.alpha
        link = link._replace(alpha=alpha, overhead=link.overhead * faster, call=link.call * faster)
    if beta is not None:
        # The given rate applies to messages of every length.
        link = link._replace(beta=beta, spill=0.0, reach=0.0)
    return link


def forecast(asked: Asked, parameters: Parameters) -> Forecast:
    """Predicts all times; takes a few seconds for the largest worlds.

    Raises InvalidArgumentError for fewer than two ranks and for more than `RANKS_MAX`.
    """
    if not 2 <= asked.ranks <= RANKS_MAX:
        raise InvalidArgumentError(
            f"{asked.hosts} hosts of {asked.local_size} are {asked.ranks} ranks; a forecast "
            f"needs 2 to {RANKS_MAX}"
        )

    def times(topology: Topology, nbytes: int) -> Times:
        kind = asked.collective
        names = candidates(kind, followed_topology(topology, parameters))
        seconds = {name: predict(kind, name, topology, nbytes, parameters) for name in names}
        return Times(seconds, choose(kind, topology, nbytes, parameters=parameters).name)

    def world_of(hosts: int) -> Topology:
        return even_domains(Topology.even(hosts * asked.local_size, hosts), asked.domains)

    world = world_of(asked.hosts)
    worlds = [world_of(hosts) for hosts in asked.worlds()]
    return Forecast(
        asked,
        {nbytes: times(world, nbytes) for nbytes in asked.sizes()},
        {one.size: times(one, asked.nbytes) for one in worlds},
    )


# Output


def tables(found: Forecast) -> list[str]:
    """Both tables of a forecast; a star marks the chosen algorithm.

    The algorithms are sorted by their time for the requested message.
    """
    asked, lines = found.asked, []
    word = asked.collective.name.lower()
    if found.by_bytes:
        lines += [f"{word} on {world_text(asked)}, predicted time by message size (* chosen)"]
        sizes = select_columns(sorted(found.by_bytes), asked.nbytes)
        columns = {bytes_text(nbytes): found.by_bytes[nbytes] for nbytes in sizes}
        lines += [*_table(columns, found), ""]
    message = f" of {bytes_text(asked.nbytes)}" if found.by_bytes else ""
    head = f"{word}{message} on hosts of {asked.local_size}"
    lines.append(f"{head}, predicted time by ranks (* chosen)")
    ranks = select_columns(sorted(found.by_ranks), asked.ranks)
    return lines + _table({str(number): found.by_ranks[number] for number in ranks}, found)


def select_columns(values: Sequence[int], kept: int) -> list[int]:
    """Selects as many values as a table has columns, evenly spaced.

    The first, the last and, if present, ``kept`` are always selected.
    """
    last = len(values) - 1
    if last < _COLUMNS:
        return list(values)
    places = {round(i * last / (_COLUMNS - 1)) for i in range(_COLUMNS)}
    if kept in values and values.index(kept) not in places:
        wanted = values.index(kept)
        places.remove(min(places - {0, last}, key=lambda place: abs(place - wanted)))
        places.add(wanted)
    return [values[place] for place in sorted(places)]


def world_text(asked: Asked) -> str:
    """The text for the world, for example "64 ranks on 8 hosts of 8"."""
    hosts = "1 host" if asked.hosts == 1 else f"{asked.hosts} hosts"
    domains = "" if asked.domains == 1 else f" with {asked.domains} domains"
    return f"{asked.ranks} ranks on {hosts} of {asked.local_size}{domains}"


def _table(columns: Mapping[str, Times], found: Forecast) -> list[str]:
    best = found.by_ranks[found.asked.ranks].of
    first = sorted(best, key=lambda name: best[name])
    names = list(dict.fromkeys([*first, *(n for times in columns.values() for n in times.of)]))
    width = max(map(len, names))
    lines = [" " * (width + 2) + "".join(f"{head:>{_WIDTH}} " for head in columns)]
    for name in names:
        cells = "".join(_cell(name, times) for times in columns.values())
        lines.append(f"  {name:<{width}}{cells}")
    return [line.rstrip() for line in lines]


def _cell(name: str, times: Times) -> str:
    if name not in times.of:
        return f"{'-':>{_WIDTH}} "
    star = "*" if name == times.chosen else " "
    return f"{seconds_text(times.of[name]):>{_WIDTH}}{star}"
