"""The consistency of a store: which pushes a pull sees, and by how many clocks workers may differ.

    "bsp"              a pull sees all pushes of the rounds before, and none of this one
    BSP(elastic=True)  as "bsp", but rounds go on without workers that are gone
    "asp"              a push is applied when it arrives, and no worker waits
    SSP(staleness)     as "asp", but a worker is at most ``staleness`` clocks ahead of the slowest
    Backup(share)      as "bsp", but a round ends with the first workers; later pushes are dropped

``SSP(0)``, ``Backup(1.0)`` and ``BSP()`` are "bsp". A worker's clock of a part counts its ended
rounds.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from pycoll.errors import InvalidArgumentError

_WORDS = (
    '"bsp", "asp", pycoll.ps.BSP(elastic=True), pycoll.ps.SSP(staleness) or pycoll.ps.Backup(share)'
)
_ELASTIC = "BSP(elastic=True)"
#: The largest staleness; a larger one is "asp".
STALENESS_MAX = 1 << 20


class Consistency(NamedTuple):
    """The rule by which a shard ends rounds.

    ``folds``: pushes of a round are kept, and applied in rank order when it ends. ``staleness``:
    how many rounds a reader may be ahead of the version that it reads; None is any number.
    ``share``: the share of the workers that end a round. ``elastic``: a worker that is gone leaves
    nothing in open rounds, which end with the others.
    """

    name: str
    folds: bool
    staleness: int | None
    share: float = 1.0
    elastic: bool = False

    def needed(self, workers: int) -> int:
        """Return how many of ``workers`` have to end a round before it ends."""
        # A share such as 0.9 has no exact double: 0.9 * 10 must be 9, and not 9 + 1.
        return max(1, math.ceil(self.share * workers - 1e-9))

    @property
    def survives_workers(self) -> bool:
        """Whether the other workers go on without one that is gone."""
        return self.name != "bsp" or self.elastic

    def __str__(self) -> str:
        if self.name == "ssp":
            return f"SSP({self.staleness})"
        if self.elastic:
            return _ELASTIC
        return f"Backup({self.share!r})" if self.name == "backup" else self.name


ASP = Consistency("asp", False, None)


def BSP(*, elastic: bool = False) -> Consistency:  # noqa: N802
    """Return the consistency in which all workers end each round together.

    Arguments: ``elastic``, whether rounds go on without workers that are gone. Then all servers
    that hold a part discard the pushes of such a worker in rounds that have not ended. The round
    ends with the workers that take part, and a mean is divided by their number. False is "bsp":
    calls that wait for such a worker raise PeerLostError.

    Result: the consistency, for ``connect`` and ``serve_store``.

    Errors: InvalidArgumentError for anything but True and False.

    Cost: a push waits for no other worker; a pull waits for the end of a round.

    >>> str(pycoll.ps.BSP(elastic=True)), str(pycoll.ps.BSP())
    ('BSP(elastic=True)', 'bsp')
    """
    if not isinstance(elastic, bool):
        raise InvalidArgumentError(f"elastic is {elastic!r}: expected True or False")
    return Consistency("bsp", True, 0, elastic=elastic)


def SSP(staleness: int) -> Consistency:  # noqa: N802
    """Return the consistency in which a worker is at most ``staleness`` clocks ahead.

    Arguments: ``staleness``, a whole number from 0 to 2**20; 0 is "bsp".

    Result: the consistency, for ``connect`` and ``serve_store``.

    Errors: InvalidArgumentError for anything else.

    Cost: a pull waits for workers that are more than ``staleness`` clocks behind.

    Source: Ho et al., "More effective distributed ML via a stale synchronous parallel parameter
    server", NIPS 2013.

    >>> str(pycoll.ps.SSP(3)), str(pycoll.ps.SSP(0))
    ('SSP(3)', 'bsp')
    """
    is_whole = isinstance(staleness, int) and not isinstance(staleness, bool)
    if not is_whole or not 0 <= staleness <= STALENESS_MAX:
        raise InvalidArgumentError(
            f"staleness is {staleness!r}: expected a whole number from 0 to {STALENESS_MAX}"
        )
    return Consistency("ssp", False, staleness) if staleness else BSP()


def Backup(share: float) -> Consistency:  # noqa: N802
    """Return the consistency in which a round ends with the first ``share`` of the workers.

    Arguments: ``share``, a number above 0 and at most 1; a round ends with ceil(share * workers)
    workers, and pushes that come later for it are dropped. While workers wait in ``checkpoint``, a
    round also ends with all the others. 1 is "bsp".

    A late worker joins the round of the others, so workers end different numbers of rounds with the
    same number of calls. Where each makes a fixed number of calls, a late one may need the others
    for its last rounds: they close the store before they wait for it in any other way.

    Result: the consistency, for ``connect`` and ``serve_store``.

    Errors: InvalidArgumentError for anything else.

    Cost: what late workers push is lost.

    Source: Chen et al., "Revisiting distributed synchronous SGD", 2016 (arXiv 1604.00981).

    >>> pycoll.ps.Backup(0.9).needed(10)
    9
    """
    is_number = isinstance(share, int | float) and not isinstance(share, bool)
    if not is_number or not 0 < share <= 1:
        raise InvalidArgumentError(f"share is {share!r}: expected a number above 0, at most 1")
    return Consistency("backup", True, 0, float(share)) if share < 1 else BSP()


def consistency_of(given: Any) -> Consistency:
    """Return the consistency of an argument. Raises InvalidArgumentError that lists them."""
    if isinstance(given, Consistency):
        return given
    rule = {"bsp": BSP(), "asp": ASP}.get(given) if isinstance(given, str) else None
    if rule is None:
        raise InvalidArgumentError(f"consistency is {given!r}: expected {_WORDS}")
    return rule


def consistency_from(text: str) -> Consistency:
    """Return the consistency that ``str`` wrote. Raises ValueError for another text."""
    name, _, rest = text.partition("(")
    if text == _ELASTIC:
        return BSP(elastic=True)
    try:
        if name == "SSP":
            return SSP(int(rest.removesuffix(")")))
        if name == "Backup":
            return Backup(float(rest.removesuffix(")")))
        return consistency_of(text)
    except ValueError:
        raise ValueError(f"{text!r} is no consistency: expected {_WORDS}") from None
