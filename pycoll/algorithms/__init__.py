"""The algorithms: one table from collective and name to what builds a schedule.

Every builder is a pure function of the size (a root, a topology); it knows no bytes, no device and
no transport. `lookup` finds one by the name that users type.
"""

from __future__ import annotations

from difflib import get_close_matches
from functools import lru_cache

from pycoll.algorithms import hierarchical
from pycoll.algorithms.algorithm import Algorithm
from pycoll.algorithms.table import ENTRIES
from pycoll.collective import Collective
from pycoll.errors import InvalidArgumentError

__all__ = ["HIERARCHIES", "TABLE", "Algorithm", "lookup"]

#: What there is but hierarchies.
FLAT: dict[Collective, dict[str, Algorithm]] = {
    kind: {one.name: one for one in ENTRIES if one.collective is kind} for kind in Collective
}

#: What "hierarchical" means: the algorithms inside hosts and across them.
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


@lru_cache(maxsize=256)
def lookup(collective: Collective, name: str) -> Algorithm:
    """The algorithm with this name, also "hierarchical:INNER+OUTER".

    Raises InvalidArgumentError listing the names that there are for the collective.
    """
    if found := TABLE[collective].get(name):
        return found
    kind, _, pair = name.partition(":")
    inner, plus, outer = pair.partition("+")
    if kind == "hierarchical" and plus and collective in HIERARCHIES:
        try:
            return hierarchical.compose(FLAT, collective, inner, outer)
        except KeyError as error:
            name = str(error.args[0])
    raise InvalidArgumentError(_unknown(collective, name))


def _unknown(collective: Collective, name: str) -> str:
    known = sorted(TABLE[collective])
    if collective in HIERARCHIES:
        known.append("hierarchical:INNER+OUTER")
    near = get_close_matches(name.split(":", maxsplit=1)[0], known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    word = collective.name.lower()
    return f"algorithm {name!r} does not exist for {word}{hint}; there are: {', '.join(known)}"
