"""What an entry of the table of algorithms says."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pycoll.collective import ROOTED, Collective
from pycoll.costs import Cost
from pycoll.errors import InvalidArgumentError
from pycoll.schedule import Schedule
from pycoll.topology import Topology


class Levels(NamedTuple):
    """Costs inside hosts and across them; ``sharing`` groups go across over one host's link."""

    inside: Cost
    across: Cost
    sharing: int


class Algorithm(NamedTuple):
    """One algorithm for one collective.

    ``builder`` takes (size, only=), and root= or topology= where they matter. ``formula`` gives the
    cost; a test counts it against the schedules. ``rank_ordered``: every result is exactly the left
    fold ((x0 op x1) op x2) ..., whatever the size and root. ``keeps_order``: operands stand in rank
    order, however bracketed, if the root is 0, so that the operation need not commute.
    ``levels``: the cost inside hosts and across them, of algorithms that tell hosts apart.
    ``lends``: peers on a host read what is sent, or part of it, where it lies in reachable memory,
    even if the result comes to lie there too; a test compares plans.
    """

    collective: Collective
    name: str
    builder: Callable[..., Schedule]
    formula: Callable[..., Cost]
    summary: str
    source: str
    rank_ordered: bool = False
    keeps_order: bool = False
    levels: Callable[[Topology], Levels] | None = None
    lends: bool = True

    @property
    def needs_topology(self) -> bool:
        """Whether it tells hosts apart."""
        return self.levels is not None

    def build(
        self,
        size: int,
        *,
        root: int = 0,
        only: int | None = None,
        topology: Topology | None = None,
    ) -> Schedule:
        """The schedule, or with ``only`` that rank's transfers, made without listing the others'.

        Raises InvalidArgumentError for a size, root or rank out of range, or a topology that is
        missing or of another size.
        """
        if size < 1:
            raise InvalidArgumentError(f"size is {size}; it must be at least 1")
        for name, rank in (("root", root), ("only", only)):
            if rank is not None and not 0 <= rank < size:
                raise InvalidArgumentError(f"{name} is {rank}; it must be a rank below {size}")
        options: dict[str, object] = {"only": only}
        if self.collective in ROOTED:
            options["root"] = root
        if self.needs_topology:
            options["topology"] = self._fitting(size, topology)
        return self.builder(size, **options)

    def cost(self, size: int, topology: Topology | None = None) -> Cost:
        """What it costs; rooted collectives with root 0."""
        if self.needs_topology:
            return self.formula(size, topology=self._fitting(size, topology))
        return self.formula(size)

    def _fitting(self, size: int, topology: Topology | None) -> Topology:
        if topology is None or topology.size != size:
            given = "none" if topology is None else f"one of {topology.size} ranks"
            raise InvalidArgumentError(
                f"{self.name} {self.collective.name.lower()} of {size} ranks needs a topology "
                f"of {size} ranks; got {given}"
            )
        return topology
