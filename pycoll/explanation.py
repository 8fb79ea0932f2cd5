"""What ``pycoll explain`` prints: a choice, a rank's plan, forecasts, predictions beside times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pycoll.bootstrap.cores import core_count
from pycoll.collective import Collective
from pycoll.config import Config
from pycoll.errors import InvalidArgumentError
from pycoll.forecast import Asked, draw, forecast, tables, with_links
from pycoll.model import Parameters
from pycoll.pictures import check_picture
from pycoll.select import choose, explain_text
from pycoll.topology import Topology
from pycoll.tuning import local_parameters

_SIZE = 8


@dataclass(frozen=True)
class Question:
    """What is asked on the command line.

    ``size``: ranks; by default ``hosts`` times ``local_size``, or 8 without that. ``links``: what
    `with_links` takes. ``local_size`` or ``picture`` ask for a forecast. ``measured``: of this
    machine, whose cores the ranks may have to share.
    """

    collective: str
    nbytes: int
    hosts: int = 1
    size: int | None = None
    local_size: int | None = None
    algorithm: str | None = None
    rank: int | None = None
    links: Mapping[str, float | None] = field(default_factory=dict)
    picture: Path | None = None
    measured: bool = False

    @property
    def kind(self) -> Collective:
        """The collective."""
        return Collective[self.collective.upper()]

    @property
    def moved(self) -> int:
        """Bytes of the message."""
        return 0 if self.kind is Collective.BARRIER else self.nbytes

    @property
    def ranks(self) -> int:
        """InvalidArgumentError if there are two answers."""
        if self.local_size is None:
            return _SIZE if self.size is None else self.size
        together = self.hosts * self.local_size
        if self.size not in (None, together):
            raise InvalidArgumentError(
                f"--size is {self.size}, but {self.hosts} hosts of {self.local_size} ranks "
                f"are {together}"
            )
        return together

    @property
    def topology(self) -> Topology:
        """InvalidArgumentError for fewer ranks than hosts."""
        return Topology.even(self.ranks, self.hosts)

    def parameters(self) -> Parameters:
        """The values in use here, but for the links that are given."""
        here = with_links(local_parameters(Config.read(), self.hosts > 1), **self.links)
        if not self.measured:
            return here
        return here.crowded(self.ranks / core_count())

    def asked(self) -> Asked | None:
        """The world of a forecast; None where none is wanted."""
        if self.local_size is None and self.picture is None:
            return None
        if self.ranks % self.hosts:
            raise InvalidArgumentError(
                f"--plot needs as many ranks on each host, and {self.ranks} ranks on "
                f"{self.hosts} hosts are not; give --local-size"
            )
        return Asked(self.kind, self.hosts, self.ranks // self.hosts, self.moved)


def explanation(question: Question) -> str:
    """Choice and prediction; for a rank the rows it will run; a forecast, whose picture is drawn.

    InvalidArgumentError for what cannot be, before anything is computed.
    """
    if question.measured:
        check_measurable(question)
    asked, parameters = question.asked(), question.parameters()
    if question.picture is not None:
        check_picture(question.picture)
    found = None if asked is None else forecast(asked, parameters)
    kind, topology, nbytes = question.kind, question.topology, question.moved
    name = question.algorithm
    parts = [explain_text(kind, topology, nbytes, algorithm=name, parameters=parameters)]
    if question.rank is not None:
        name = name or choose(kind, topology, nbytes, parameters=parameters).name
        parts.append(_plan_text(question, name, question.rank))
    if found is not None:
        parts.append("\n".join(tables(found)))
    if found is not None and question.picture is not None:
        draw(question.picture, found)
        parts.append(f"picture: {question.picture}")
    return "\n\n".join(parts)


def check_measurable(question: Question) -> None:
    """InvalidArgumentError for what this machine alone cannot show."""
    given = any(value is not None for value in question.links.values())
    if question.hosts != 1 or question.collective == "barrier" or given:
        raise InvalidArgumentError(
            "--measured needs a collective with a message, on one host, over its own links"
        )


def comparison(question: Question) -> Iterator[str]:
    """Predicted and measured times on this machine, line by line."""
    from pycoll.bench.tune import predicted_and_measured

    yield from predicted_and_measured(
        question.collective,
        question.ranks,
        question.nbytes,
        question.algorithm,
        Config.read(),
        question.parameters(),
    )


def _plan_text(question: Question, algorithm: str, rank: int) -> str:
    from pycoll import _core
    from pycoll.plans import plan_bytes

    size = question.ranks
    if rank >= size:
        raise InvalidArgumentError(f"rank is {rank}, it must be below size, which is {size}")
    plan = plan_bytes(question.collective, size, rank, question.moved, question.topology, algorithm)
    return str(_core.Plan(plan))
