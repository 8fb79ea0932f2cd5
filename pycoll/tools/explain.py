"""The text of ``pycoll explain``: a choice, the plan of a rank, forecasts, measured times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pycoll.config import Config
from pycoll.cores import core_count
from pycoll.cost.forecast import Asked, forecast, tables, with_links
from pycoll.cost.model import Parameters
from pycoll.cost.selection import choose, explain_text
from pycoll.cost.tuning_file import local_parameters
from pycoll.errors import InvalidArgumentError
from pycoll.schedule.collectives import Collective
from pycoll.schedule.topology import Topology, even_domains
from pycoll.tools.forecast_picture import draw
from pycoll.tools.pictures import check_picture

_SIZE = 8


@dataclass(frozen=True)
class Question:
    """The request of a command line.

    ``size``: ranks; the default is ``hosts`` times ``local_size``, or 8 without ``local_size``.
    ``links``: the arguments of `with_links`. ``local_size`` or ``picture`` request a forecast.
    ``measured``: compare with times on this machine, whose cores the ranks may have to share.
    ``servers``: further ranks that serve these, each on a host of its own. ``domains``: the
    domains of a host over which its ranks are spread evenly. ``memory``: the memory of the arrays.
    ``compress``: the words of codecs to explain as well.
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
    servers: int = 0
    domains: int = 1
    memory: str = "shared"
    compress: tuple[str, ...] = ()

    @property
    def kind(self) -> Collective:
        """The collective as an enumerator."""
        return Collective[self.collective.upper()]

    @property
    def message_bytes(self) -> int:
        """The message in bytes; 0 for a barrier."""
        return 0 if self.kind is Collective.BARRIER else self.nbytes

    @property
    def ranks(self) -> int:
        """The number of ranks; raises InvalidArgumentError if the options contradict each other."""
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
        """The topology; raises InvalidArgumentError for fewer ranks than hosts or domains."""
        workers = even_domains(Topology.even(self.ranks, self.hosts), self.domains)
        if self.servers == 0:
            return workers
        if self.kind is not Collective.ALL_REDUCE:
            raise InvalidArgumentError(
                f"--servers is {self.servers}, and {self.collective} has no algorithm with servers"
            )
        apart = range(self.hosts, self.hosts + self.servers)
        return Topology(((*workers.levels[0], *apart),)).serving(self.servers)

    def parameters(self) -> Parameters:
        """The values in use on this machine, with the links of the request."""
        here = with_links(local_parameters(Config.read(), self.hosts > 1), **self.links)
        if not self.measured:
            return here
        return here.with_ranks_per_core(self.ranks / core_count())

    def forecast_request(self) -> Asked | None:
        """The world of a forecast; None if no forecast is requested."""
        if self.local_size is None and self.picture is None:
            return None
        if self.servers:
            raise InvalidArgumentError(
                "--servers has no forecast of larger worlds: leave out --local-size and --plot, or "
                "--servers"
            )
        if self.ranks % self.hosts:
            raise InvalidArgumentError(
                f"--plot needs the same number of ranks on each host, and {self.ranks} ranks do "
                f"not divide by {self.hosts} hosts; give --local-size"
            )
        local = self.ranks // self.hosts
        return Asked(self.kind, self.hosts, local, self.message_bytes, self.domains)


def explanation(question: Question) -> str:
    """The choice and its prediction, the rows of a rank if requested, and a forecast if requested.

    The picture of a forecast is drawn. Raises InvalidArgumentError for an impossible request before
    anything is computed.
    """
    if question.measured:
        check_measurable(question)
    coded = codec_texts(question)
    asked, parameters = question.forecast_request(), question.parameters()
    if question.picture is not None:
        check_picture(question.picture)
    found = None if asked is None else forecast(asked, parameters)
    kind, topology, nbytes = question.kind, question.topology, question.message_bytes
    name = question.algorithm
    memory = question.memory
    text = explain_text(
        kind, topology, nbytes, algorithm=name, parameters=parameters, memory=memory
    )
    parts = [text, *coded]
    if question.rank is not None:
        name = name or choose(kind, topology, nbytes, parameters=parameters).name
        parts.append(_plan_text(question, name, question.rank))
    if found is not None:
        parts.append("\n".join(tables(found)))
    if found is not None and question.picture is not None:
        draw(question.picture, found)
        parts.append(f"picture: {question.picture}")
    return "\n\n".join(parts)


def codec_texts(question: Question) -> list[str]:
    """A text for each codec of the request.

    Raises InvalidArgumentError for words that are no codecs, for a collective that takes none, and
    for options that exclude codecs.
    """
    if not question.compress:
        return []
    from pycoll.comm.codecs import model_codec
    from pycoll.cost.codec_costs import coded_text
    from pycoll.tools.codec_words import codec_of

    given = {
        "--algorithm": question.algorithm is not None,
        "--rank": question.rank is not None,
        "--measured": question.measured,
        "--servers": question.servers > 0,
    }
    for word, is_there in given.items():
        if is_there:
            raise InvalidArgumentError(
                f"--compress excludes {word}: the choice with a codec is that of the model, and "
                "codes pass no servers"
            )
    kind, nbytes, parameters = question.kind, question.message_bytes, question.parameters()
    return [
        coded_text(
            kind,
            question.topology,
            nbytes,
            repr(codec),
            model_codec(kind, nbytes, codec),
            parameters,
        )
        for codec in map(codec_of, question.compress)
    ]


def check_measurable(question: Question) -> None:
    """Raises InvalidArgumentError for a request that this machine alone cannot measure."""
    given = any(value is not None for value in question.links.values())
    plain = question.hosts == 1 and question.collective != "barrier" and not question.servers
    plain = plain and question.domains == 1
    if not plain or given:
        raise InvalidArgumentError(
            "--measured needs a collective with a message, on one host without servers, over its "
            "own links and domains"
        )


def comparison(question: Question) -> Iterator[str]:
    """Predicted and measured times on this machine, line by line."""
    from pycoll.tools.tune.machine_links import comparison_lines

    yield from comparison_lines(
        question.collective,
        question.ranks,
        question.nbytes,
        question.algorithm,
        Config.read(),
        question.parameters(),
        question.memory,
    )


def _plan_text(question: Question, algorithm: str, rank: int) -> str:
    from pycoll import _core
    from pycoll.comm.plans import plan_bytes

    size = question.topology.size
    if rank >= size:
        raise InvalidArgumentError(f"rank is {rank}, it must be below size, which is {size}")
    nbytes = question.message_bytes
    plan = plan_bytes(question.collective, size, rank, nbytes, question.topology, algorithm)
    return str(_core.Plan(plan))
