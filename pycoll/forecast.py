"""What every algorithm would take on hosts that are not here, by the model that also chooses.

``pycoll explain --hosts 128 --local-size 8 --alpha 2us --beta 50GB/s`` shows it: times against
message size in that world, and of one message in worlds of up to `RANKS_MAX` ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from pycoll.collective import Collective
from pycoll.errors import InvalidArgumentError
from pycoll.model import Link, Parameters
from pycoll.pictures import Curve, Panel, draw_panels
from pycoll.select import bytes_text, candidates, choose, predict, seconds_text
from pycoll.topology import Topology

#: The largest world that is forecast.
RANKS_MAX = 16384
#: Message sizes of the curves: 8 B to 1 GiB.
SIZES = tuple(1 << power for power in range(3, 31, 3))
#: Columns of a table; together with the longest name they fit 100 characters.
_COLUMNS = 6
_WIDTH = 8


class Times(NamedTuple):
    """What one message takes in one world: name to seconds, and which name is chosen."""

    of: Mapping[str, float]
    chosen: str


@dataclass(frozen=True)
class Asked:
    """A world of ``hosts`` with ``local_size`` ranks each, and the message that is followed."""

    collective: Collective
    hosts: int
    local_size: int
    nbytes: int

    @property
    def ranks(self) -> int:
        """In all."""
        return self.hosts * self.local_size

    def sizes(self) -> list[int]:
        """Bytes of the messages that are compared; a barrier's have none."""
        if self.collective is Collective.BARRIER:
            return []
        return sorted({*SIZES, self.nbytes} - {0})

    def worlds(self) -> list[int]:
        """Numbers of hosts, doubled from 1 on as far as ranks may go, and the one asked for."""
        numbers = {self.hosts}
        hosts = 1
        while hosts * self.local_size <= RANKS_MAX:
            numbers.add(hosts)
            hosts *= 2
        return sorted(number for number in numbers if number * self.local_size > 1)


@dataclass(frozen=True)
class Forecast:
    """Times by message size in the world asked for, and by number of ranks for its message.

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
    """Other latencies (s) and seconds per byte between hosts and, ``local``, inside them.

    ``flow``: of one rank, however idle its host's link. ``rails``: links that a host has, of beta
    each; messages are spread over all. A link whose latency changes keeps the share of it that
    handling one segment takes.
    """
    given = (alpha, beta, local_alpha, local_beta, flow, rails)
    if all(value is None for value in given):
        return parameters
    across = _with_values(parameters.across, alpha, beta)
    if beta is not None:
        # What was measured to be carried in the long run, or by one rank, says nothing about
        # another link.
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
        origin=f"{parameters.origin}, but for those given",
    )


def _with_values(link: Link, alpha: float | None, beta: float | None) -> Link:
    if alpha is not None:
        faster = alpha / link.alpha
        link = link._replace(alpha=alpha, overhead=link.overhead * faster, call=link.call * faster)
    if beta is not None:
        # What is given holds for messages of every length.
        link = link._replace(beta=beta, spill=0.0, reach=0.0)
    return link


def forecast(asked: Asked, parameters: Parameters) -> Forecast:
    """Predict all of it; a few seconds for the largest worlds.

    InvalidArgumentError for less than two ranks and for more than `RANKS_MAX`.
    """
    if not 2 <= asked.ranks <= RANKS_MAX:
        raise InvalidArgumentError(
            f"{asked.hosts} hosts of {asked.local_size} are {asked.ranks} ranks; a forecast is "
            f"of 2 to {RANKS_MAX}"
        )

    def times(topology: Topology, nbytes: int) -> Times:
        kind = asked.collective
        names = candidates(kind, topology)
        seconds = {name: predict(kind, name, topology, nbytes, parameters) for name in names}
        return Times(seconds, choose(kind, topology, nbytes, parameters=parameters).name)

    world = Topology.even(asked.ranks, asked.hosts)
    worlds = [Topology.even(hosts * asked.local_size, hosts) for hosts in asked.worlds()]
    return Forecast(
        asked,
        {nbytes: times(world, nbytes) for nbytes in asked.sizes()},
        {one.size: times(one, asked.nbytes) for one in worlds},
    )


# What is shown


def tables(found: Forecast) -> list[str]:
    """Both tables, best algorithms of the message asked for first; a star marks what is chosen."""
    asked, lines = found.asked, []
    word = asked.collective.name.lower()
    if found.by_bytes:
        lines += [f"{word} on {_world(asked)}, predicted time by message size (* chosen)"]
        sizes = thinned(sorted(found.by_bytes), asked.nbytes)
        columns = {bytes_text(nbytes): found.by_bytes[nbytes] for nbytes in sizes}
        lines += [*_table(columns, found), ""]
    message = f" of {bytes_text(asked.nbytes)}" if found.by_bytes else ""
    head = f"{word}{message} on hosts of {asked.local_size}"
    lines.append(f"{head}, predicted time by ranks (* chosen)")
    ranks = thinned(sorted(found.by_ranks), asked.ranks)
    return lines + _table({str(number): found.by_ranks[number] for number in ranks}, found)


def thinned(values: Sequence[int], kept: int) -> list[int]:
    """As many as a table has columns, evenly spread: the first, the last, and ``kept`` if there."""
    last = len(values) - 1
    if last < _COLUMNS:
        return list(values)
    places = {round(i * last / (_COLUMNS - 1)) for i in range(_COLUMNS)}
    if kept in values and values.index(kept) not in places:
        wanted = values.index(kept)
        places.remove(min(places - {0, last}, key=lambda place: abs(place - wanted)))
        places.add(wanted)
    return [values[place] for place in sorted(places)]


def _world(asked: Asked) -> str:
    hosts = "1 host" if asked.hosts == 1 else f"{asked.hosts} hosts"
    return f"{asked.ranks} ranks on {hosts} of {asked.local_size}"


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


def draw(path: Path, found: Forecast) -> None:
    """Curves of all algorithms by message size and by ranks; what is chosen lies pale below."""
    asked = found.asked
    panels = []
    if found.by_bytes:
        panels.append(_panel(found.by_bytes))
    what = f", {bytes_text(asked.nbytes)}" if found.by_bytes else ""
    panels.append(
        replace(
            _panel(found.by_ranks),
            x_label=f"ranks, {asked.local_size} per host{what}",
            x_text=lambda number: f"{number:g}",
        )
    )
    title = f"{asked.collective.name.lower()} on {_world(asked)}, predicted"
    draw_panels(path, panels, title)


_CHOSEN = "chosen"


def _panel(rows: Mapping[int, Times]) -> Panel:
    curves: dict[str, Curve] = {
        _CHOSEN: [(place, times.of[times.chosen]) for place, times in rows.items()]
    }
    for name in dict.fromkeys(name for times in rows.values() for name in times.of):
        curves[name] = [
            (place, times.of[name]) for place, times in rows.items() if name in times.of
        ]
    return Panel("time", curves, y_text=seconds_text, below=_CHOSEN)
