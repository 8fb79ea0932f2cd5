"""The entry type of the table of algorithms."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pycoll.algorithms.formulas import Cost
from pycoll.errors import InvalidArgumentError
from pycoll.schedule.collectives import ROOTED, Collective
from pycoll.schedule.language import Schedule
from pycoll.schedule.topology import Topology


class Levels(NamedTuple):
    """Costs inside hosts and across hosts.

    ``sharing`` is the number of groups that send across hosts over the link of one host.
    """

    inside: Cost
    across: Cost
    sharing: int


class Algorithm(NamedTuple):
    """One algorithm for one collective.

    ``builder`` takes (size, only=), and root= or topology= where they matter. ``formula`` gives the
    cost; a test compares it with the schedules. ``summary`` is one line for users; ``source`` names
    the paper.

    ``rank_ordered``: every result is exactly the left fold ((x0 op x1) op x2) ..., for every size
    and root. ``keeps_order``: if the root is 0, operands are combined in rank order with any
    bracketing, so the operation need not commute. ``levels``: the cost inside hosts and across
    hosts, for hierarchies. ``serves``: some ranks may serve, as the topology says.

    ``exposes``: peers on a host read at least part of the sent data in place from reachable memory,
    even if the result is written to the same memory. A test compares the flag with the plans.

    ``coded``: data may travel as the codes of a codec. Then every value is encoded at most twice on
    its way, and all ranks that share a result hold the same bits. A test compares the flag with the
    proof of the plans. A hierarchy encodes data between hosts only. Algorithms of one collective
    that are no hierarchies and cut the data otherwise than the first one are not coded: the blocks
    of a codec begin with chunks, so the bits would depend on the choice.
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
    exposes: bool = True
    serves: bool = False
    coded: bool = False

    @property
    def needs_topology(self) -> bool:
        """Whether the builder needs a topology."""
        return self.levels is not None or self.serves

    def encode(self, schedule: Schedule, topology: Topology) -> Schedule:
        """The schedule with codes: between hosts in a hierarchy, else between all ranks.

        Raises InvalidArgumentError unless the algorithm is ``coded``.
        """
        if not self.coded:
            raise InvalidArgumentError(
                f"{self.name} {self.collective.name.lower()} takes no codec: values would be "
                "rounded more than twice, or differ between ranks or from other algorithms"
            )
        return schedule._replace(coded=self._labels(schedule.size, topology))

    def sends_codes_only(self, topology: Topology) -> bool:
        """Whether ``encode`` makes codes of all data that travels."""
        return len(set(self._labels(topology.size, topology))) == topology.size

    def _labels(self, size: int, topology: Topology) -> tuple[int, ...]:
        return tuple(range(size)) if self.levels is None else topology.levels[0]

    def build(
        self,
        size: int,
        *,
        root: int = 0,
        only: int | None = None,
        topology: Topology | None = None,
    ) -> Schedule:
        """Builds the schedule, or only the transfers of rank ``only`` without listing all others.

        Raises InvalidArgumentError if the size, root or rank is out of range. Raises it as well if
        the topology is missing, has another size, or has servers that the algorithm does not know.
        """
        if size < 1:
            raise InvalidArgumentError(f"size is {size}; it must be at least 1")
        for name, rank in (("root", root), ("only", only)):
            if rank is not None and not 0 <= rank < size:
                raise InvalidArgumentError(f"{name} is {rank}; it must be a rank below {size}")
        if topology is not None and topology.servers and not self.serves:
            raise InvalidArgumentError(
                f"{self.name} {self.collective.name.lower()} knows no servers, and "
                f"{topology.servers} of {size} ranks serve; take an algorithm with servers"
            )
        options: dict[str, object] = {"only": only}
        if self.collective in ROOTED:
            options["root"] = root
        if self.needs_topology:
            options["topology"] = self._fitting(size, topology)
        return self.builder(size, **options)

    def cost(self, size: int, topology: Topology | None = None) -> Cost:
        """The cost for ``size`` ranks; for rooted collectives, the cost with root 0."""
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
