"""The algorithms: one table that maps a collective and a name to the builder of a schedule.

Every builder is a pure function of the size and, where it needs them, a root and a topology. A
builder uses no message sizes, devices or transports. `lookup` finds an algorithm by the name that
users type.
"""

from __future__ import annotations

from difflib import get_close_matches
from functools import lru_cache

from pycoll.algorithms import hierarchical, servers
from pycoll.algorithms.algorithm import Algorithm
from pycoll.algorithms.table import ENTRIES
from pycoll.errors import InvalidArgumentError
from pycoll.schedule.collectives import Collective

__all__ = ["HIERARCHIES", "SERVED", "TABLE", "Algorithm", "lookup"]

#: All algorithms except the hierarchical ones.
FLAT: dict[Collective, dict[str, Algorithm]] = {
    kind: {one.name: one for one in ENTRIES if one.collective is kind} for kind in Collective
}

#: The meaning of the name "hierarchical": the algorithm inside hosts and the one across hosts.
HIERARCHIES: dict[Collective, tuple[str, str]] = {
    Collective.ALL_REDUCE: ("direct", "ring"),
    Collective.REDUCE: ("direct", "binomial"),
    Collective.BROADCAST: ("direct", "binomial"),
    Collective.REDUCE_SCATTER: ("direct", "ring"),
    Collective.ALL_GATHER: ("direct", "ring"),
    Collective.GATHER: ("direct", "direct"),
    Collective.SCATTER: ("direct", "direct"),
    Collective.BARRIER: ("direct", "dissemination"),
}

TABLE: dict[Collective, dict[str, Algorithm]] = {
    collective: dict(entries) for collective, entries in FLAT.items()
}
for _collective, (_inner, _outer) in HIERARCHIES.items():
    TABLE[_collective]["hierarchical"] = hierarchical.compose(FLAT, _collective, _inner, _outer)

#: The algorithms for a world in which some ranks serve; TABLE has those for all other worlds.
SERVED: dict[Collective, dict[str, Algorithm]] = {
    kind: {one.name: one for one in servers.ENTRIES if one.collective is kind}
    for kind in Collective
}
#: The algorithms of which hierarchies consist.
_PARTS = {kind: {**FLAT[kind], **SERVED[kind]} for kind in Collective}


@lru_cache(maxsize=256)
def lookup(collective: Collective, name: str) -> Algorithm:
    """The algorithm with this name; the form "hierarchical:INNER+OUTER" is accepted too.

    Raises InvalidArgumentError that lists the names known for the collective.
    """
    if found := TABLE[collective].get(name) or SERVED[collective].get(name):
        return found
    kind, _, pair = name.partition(":")
    inner, plus, outer = pair.partition("+")
    if kind == "hierarchical" and plus and collective in HIERARCHIES:
        try:
            return hierarchical.compose(_PARTS, collective, inner, outer)
        except KeyError as error:
            name = str(error.args[0])
    raise InvalidArgumentError(_unknown(collective, name))


def _unknown(collective: Collective, name: str) -> str:
    known = sorted({**TABLE[collective], **SERVED[collective]})
    if collective in HIERARCHIES:
        known.append("hierarchical:INNER+OUTER")
    near = get_close_matches(name.split(":", maxsplit=1)[0], known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    word = collective.name.lower()
    return f"algorithm {name!r} does not exist for {word}{hint}; there are: {', '.join(known)}"
