"""The choice of an algorithm: a pure function of values agreed at start-up, equal on all ranks.

The model predicts a time for each candidate, and the shortest time wins. Among equal times the
first algorithm of the table wins. Between hosts, of the algorithms within DRAW of the shortest
time, the one with the fewest steps wins. Measured rows override the model where they apply.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from pycoll.algorithms import SERVED, TABLE, Algorithm, lookup
from pycoll.cost.copying import choose_copies
from pycoll.cost.loads import SCHEDULE_SIZE_MAX
from pycoll.cost.model import DEFAULT, Link, Parameters, Profile
from pycoll.cost.profiles import profile
from pycoll.errors import InvalidArgumentError
from pycoll.schedule.collectives import REDUCING, Collective
from pycoll.schedule.copies import USUAL
from pycoll.schedule.topology import Topology

#: Hierarchies that are candidates in addition to the default one.
HIERARCHIES: dict[Collective, tuple[str, ...]] = {
    Collective.ALL_REDUCE: (
        "hierarchical:direct+halving_doubling",
        "hierarchical:direct+tree",
        "hierarchical:direct+recursive_multiplying",
        "hierarchical:direct+direct",
        "hierarchical:binomial+recursive_multiplying",
    ),
    Collective.BROADCAST: ("hierarchical:binomial+tree", "hierarchical:chain+chain"),
    Collective.REDUCE: ("hierarchical:binomial+tree",),
    Collective.REDUCE_SCATTER: ("hierarchical:direct+halving_doubling",),
    Collective.ALL_GATHER: ("hierarchical:direct+bruck",),
}
#: Hierarchies that are candidates where some ranks serve.
SERVED_HIERARCHIES = ("hierarchical:direct+servers", "hierarchical:direct+servers_mixed")
#: Hierarchies that are candidates for data that travels as codes between hosts.
CODED: dict[Collective, tuple[str, ...]] = {
    Collective.ALL_REDUCE: ("hierarchical:direct+direct",),
    Collective.BROADCAST: ("hierarchical", "hierarchical:chain+chain"),
    Collective.REDUCE_SCATTER: ("hierarchical:direct+direct",),
    Collective.ALL_GATHER: ("hierarchical", "hierarchical:direct+direct"),
}
#: The memory of arrays: peers on the host read shared memory in place; copies of ordinary memory
#: pass through slots.
ORDINARY, SHARED = MEMORIES = ("ordinary", "shared")
#: Between hosts, times that exceed the shortest by at most this share of it count as equal.
DRAW = 0.1
#: Texts mention the cost of combining a byte if it exceeds this share of the cost of moving it.
_HIDDEN = 0.1


class Measured(NamedTuple):
    """A row of a tuning table: ``name`` is best for messages of up to ``nbytes_max`` bytes."""

    collective: Collective
    size: int
    nbytes_max: int
    name: str


class Choice(NamedTuple):
    """The chosen algorithm.

    ``alternatives``: the other candidates with their predicted seconds, best first.
    """

    name: str
    predicted_s: float
    reason: str
    alternatives: tuple[tuple[str, float], ...]


@lru_cache(maxsize=256)
def candidates(
    collective: Collective,
    topology: Topology,
    deterministic: bool = False,
    commutes: bool = True,
    among: tuple[str, ...] | None = None,
) -> tuple[str, ...]:
    """The names of the algorithms to predict.

    Hierarchies are candidates if there are several hosts, or domains that take their place
    (`followed_topology`). ``deterministic`` or not ``commutes`` exclude algorithms without the
    required fold order. ``among`` restricts the names; "hierarchical" stands for all hierarchies.
    """
    several = len(topology.hosts) > 1
    if topology.servers:
        return _server_candidates(collective, topology, deterministic, commutes, among)
    names = []
    for name, one in TABLE[collective].items():
        if among is not None and name not in among:
            continue
        if collective in REDUCING and not _keeps(one, deterministic, commutes):
            continue
        if not one.needs_topology:
            names.append(name)
        elif several:
            names += [name, *HIERARCHIES.get(collective, ())]
    return tuple(names)


def coded_candidates(
    collective: Collective, topology: Topology, deterministic: bool = False
) -> tuple[str, ...]:
    """The names of the algorithms to predict for a call with a codec.

    They are hierarchies where there are several hosts and ranks share one. ``deterministic``
    excludes reductions that do not fold in rank order, and so all hierarchies of these.
    """
    strict = deterministic and collective in REDUCING
    if 1 < len(topology.hosts) < topology.size and not strict:
        return CODED[collective]
    return tuple(
        name
        for name, one in TABLE[collective].items()
        if one.coded and one.levels is None and (one.rank_ordered or not strict)
    )


def _server_candidates(
    collective: Collective,
    topology: Topology,
    deterministic: bool,
    commutes: bool,
    among: tuple[str, ...] | None,
) -> tuple[str, ...]:
    """The candidates where some ranks serve.

    Hierarchies are candidates if there are several hosts and workers share one.
    """
    names = list(SERVED[collective])
    if len(topology.hosts) > 1 and any(len(host) > 1 for host in topology.workers.hosts):
        names += [name for name in SERVED_HIERARCHIES if names]
    return tuple(
        name
        for name in names
        if (among is None or name in among)
        and _keeps(lookup(collective, name), deterministic, commutes)
    )


def _keeps(algorithm: Algorithm, deterministic: bool, commutes: bool) -> bool:
    if deterministic:
        return algorithm.rank_ordered
    return commutes or algorithm.keeps_order


def followed_topology(topology: Topology, parameters: Parameters) -> Topology:
    """The topology that schedules follow: domains take the place of hosts on one host.

    Where ranks share cores, schedules ignore domains: the work per core decides the time.
    """
    return topology if parameters.per_core > 1 else topology.by_domain


def _followed_links(topology: Topology, parameters: Parameters) -> tuple[Topology, Parameters]:
    """``followed_topology``, and the parameters of its links."""
    groups = followed_topology(topology, parameters)
    if topology.servers:
        parameters = parameters.of_servers
    return groups, parameters if groups is topology else parameters.of_domains


def choose(
    collective: Collective,
    topology: Topology,
    nbytes: int,
    *,
    deterministic: bool = False,
    commutes: bool = True,
    among: Iterable[str] | None = None,
    parameters: Parameters = DEFAULT,
    measured: Sequence[Measured] = (),
) -> Choice:
    """The algorithm for a message of ``nbytes`` (formulas.py defines the message).

    ``deterministic`` requires the exact fold in rank order, ``commutes=False`` operands in rank
    order. The first row of ``measured`` that fits decides without the model. Raises
    InvalidArgumentError if nbytes is negative or no algorithm is left.
    """
    if nbytes < 0:
        raise InvalidArgumentError(f"nbytes is {nbytes}; it must not be negative")
    allowed = None if among is None else tuple(among)
    topology, parameters = _followed_links(topology, parameters)
    names = candidates(collective, topology, deterministic, commutes, allowed)
    if not names:
        raise InvalidArgumentError(
            f"no algorithm for {collective.name.lower()} of {topology.size} ranks is left: "
            f"deterministic={deterministic}, commutes={commutes}, among={allowed}"
        )
    return _choose(collective, topology, nbytes, names, parameters, tuple(measured))


def choose_coded(
    collective: Collective,
    topology: Topology,
    nbytes: int,
    *,
    deterministic: bool = False,
    parameters: Parameters = DEFAULT,
    ratio: float = 1.0,
) -> Choice:
    """The algorithm for a message of ``nbytes`` whose data travels as codes.

    ``ratio``: the bytes of codes for each byte of values.
    """
    names = coded_candidates(collective, topology, deterministic)
    return _choose_coded(collective, topology, nbytes, names, parameters, ratio)


@lru_cache(maxsize=4096)
def _choose_coded(
    collective: Collective,
    topology: Topology,
    nbytes: int,
    names: tuple[str, ...],
    parameters: Parameters,
    ratio: float,
) -> Choice:
    times = [
        (name, coded_links(collective, name, topology, nbytes, ratio, parameters)) for name in names
    ]
    return _shortest(collective, topology, times)


def coded_links(
    collective: Collective,
    name: str,
    topology: Topology,
    nbytes: int,
    ratio: float,
    parameters: Parameters,
) -> float:
    """The predicted seconds of the links, where codes have ``ratio`` times the bytes of values.

    Hierarchies send values inside hosts. Codes are never read in place.
    """
    algorithm = lookup(collective, name)
    shape = profile(algorithm, topology, parameters.per_core > 1)._replace(exposes=False)
    inside, across = shape.terms(nbytes, parameters.segment_bytes)
    if algorithm.levels is None:
        inside = inside.shrunk(ratio)
    if parameters.per_core > 1:
        inside = shape.turns.share_cores(inside, parameters.per_core, 1.0)
    links = parameters.inside.seconds(inside, nbytes)
    return links + parameters.across.seconds(across.shrunk(ratio), nbytes)


@lru_cache(maxsize=4096)
def _choose(
    collective: Collective,
    topology: Topology,
    nbytes: int,
    names: tuple[str, ...],
    parameters: Parameters,
    measured: tuple[Measured, ...],
) -> Choice:
    times = [(name, predict(collective, name, topology, nbytes, parameters)) for name in names]
    for row in measured:
        fits = (row.collective, row.size) == (collective, topology.size)
        if fits and nbytes <= row.nbytes_max and row.name in names:
            best, reason = row.name, f"measured best up to {bytes_text(row.nbytes_max)}"
            break
    else:
        return _shortest(collective, topology, times)
    return _make_choice(best, reason, times)


def _shortest(collective: Collective, topology: Topology, times: list[tuple[str, float]]) -> Choice:
    times = sorted(times, key=lambda pair: pair[1])
    return _make_choice(*_best(collective, topology, times), times)


def _make_choice(best: str, reason: str, times: list[tuple[str, float]]) -> Choice:
    others = sorted((pair for pair in times if pair[0] != best), key=lambda pair: pair[1])
    return Choice(best, dict(times)[best], reason, tuple(others))


def _best(
    collective: Collective, topology: Topology, times: list[tuple[str, float]]
) -> tuple[str, str]:
    """The name and the reason; ``times`` are sorted.

    Between hosts fewer steps win a draw. Segments arrive in bursts there, and a rank answers after
    a whole burst. The model has no such delay.
    """
    if len(times) == 1:
        return times[0][0], "the only one"
    shortest, seconds = times[0]
    if len(topology.hosts) > 1:
        close = [name for name, other in times if other <= seconds * (1 + DRAW)]
        steps = {
            name: lookup(collective, name).cost(topology.size, topology).steps for name in close
        }
        best = min(close, key=steps.__getitem__)
        if steps[best] < steps[shortest]:
            return best, f"fewest steps within {DRAW:.0%} of the shortest predicted time"
    return shortest, f"shortest predicted time of {len(times)}"


def predict(
    collective: Collective,
    name: str,
    topology: Topology,
    nbytes: int,
    parameters: Parameters = DEFAULT,
    memory: str = SHARED,
) -> float:
    """The predicted seconds from the common start to the end of the last rank.

    ``memory``: a value of MEMORIES. Choices assume shared memory, whatever arrays a rank has.
    """
    moved = 0 if collective is Collective.BARRIER else nbytes
    groups, links = _followed_links(topology, parameters)
    # choose() may pass a topology whose hosts are domains. Only the links show that.
    domains = links.across.reach > 0
    one_host = domains or len(groups.hosts) == 1
    # Between hosts no side is counted, so one profile serves all sizes.
    copies = choose_copies(collective, groups.size, nbytes, links) if one_host else USUAL
    shape = profile(lookup(collective, name), groups, parameters.per_core > 1, domains, copies)
    if memory == ORDINARY:
        shape = shape._replace(exposes=False)
    return shape.seconds(moved, links)


def explain_text(
    collective: Collective,
    topology: Topology,
    nbytes: int,
    *,
    algorithm: str | None = None,
    parameters: Parameters = DEFAULT,
    measured: Sequence[Measured] = (),
    memory: str = SHARED,
) -> str:
    """The algorithm that runs, its predicted time and the reasons, in a few lines.

    ``memory``: the memory of the arrays, a value of MEMORIES; the choice does not depend on it.
    """
    if memory not in MEMORIES:
        raise InvalidArgumentError(f"memory is {memory!r}: expected {' or '.join(MEMORIES)}")
    choice = choose(collective, topology, nbytes, parameters=parameters, measured=measured)
    name = choice.name if algorithm is None else algorithm
    one = lookup(collective, name)
    seconds = predict(collective, name, topology, nbytes, parameters, memory)
    groups = followed_topology(topology, parameters)
    cost = one.cost(topology.size, groups)
    shape = profile(one, groups)
    summary = one.summary if groups is topology else one.summary.replace("hosts", "domains")
    reason = choice.reason if algorithm is None else f"requested; {choice.name} would be chosen"
    moved = f"sends {_amount(cost.sent, nbytes)}, receives {_amount(cost.received, nbytes)}"
    if collective in REDUCING:
        moved += f", combines {_amount(cost.reduced, nbytes)}"
    lines = [
        f"{collective.name.lower()} of {bytes_text(nbytes)} over {_world(topology)}",
        f"  algorithm  {name}: {summary} ({one.source})",
        f"  predicted  {seconds_text(seconds)}{_bandwidth(nbytes, seconds)}",
        f"  why        {reason}",
        f"  steps      {cost.steps}",
        f"  per rank   {moved}" if collective is not Collective.BARRIER else "",
        _tiles(shape, nbytes, _followed_links(topology, parameters)[1].segment_bytes),
        f"  memory     {memory}: copied through slots" if memory == ORDINARY else "",
        *_links(topology, parameters),
    ]
    names = [other for other, _ in choice.alternatives] + [choice.name]
    times = [(one, predict(collective, one, topology, nbytes, parameters, memory)) for one in names]
    others = sorted((pair for pair in times if pair[0] != name), key=lambda pair: pair[1])
    for number, (other, other_s) in enumerate(others[:4]):
        label = "others" if number == 0 else ""
        ratio = f"{other_s / seconds:.2f}x" if seconds > 0 else ""
        lines.append(f"  {label:<10} {other}: {seconds_text(other_s)} {ratio}".rstrip())
    return "\n".join(line for line in lines if line)


def registered_text(nbytes: int, refusal: str) -> str:
    """One line about the memory that an RDMA device reads in place.

    ``nbytes``: registered bytes; ``refusal``: the reason why no more could be registered, or "".
    """
    more = f"; more is copied: {refusal}" if refusal else ""
    return f"  registered {bytes_text(nbytes)} of arrays{more}"


def _tiles(shape: Profile, nbytes: int, segment_bytes: int) -> str:
    tiles, length = shape.tiles(nbytes, segment_bytes), bytes_text(segment_bytes)
    return f"  tiles      {tiles} of at most {length} in each of {shape.chunks} chunks"


def _links(topology: Topology, parameters: Parameters) -> list[str]:
    groups, links = _followed_links(topology, parameters)
    several = len(groups.hosts) > 1
    how = "schedule" if several else "cost formulas"
    if several and topology.size > SCHEDULE_SIZE_MAX:
        how = f"schedules of up to {SCHEDULE_SIZE_MAX} ranks, extrapolated by cost formulas"
    word = "hosts" if groups is topology else "domains"
    kinds = [(f"inside {word}", parameters.inside)]
    if several:
        kinds.append((f"across {word}", links.across))
    return [f"  model      {how}; values: {parameters.origin}"] + [
        f"  {'links' if number == 0 else '':<10} {word}: {_link_text(link)}"
        for number, (word, link) in enumerate(kinds)
    ]


def _link_text(link: Link) -> str:
    return f"{latencies_text(link)}, {rates_text(link)}"


def latencies_text(link: Link, segment: str = "segment") -> str:
    """The text of the costs of a link that do not depend on bytes."""
    call = f"{seconds_text(link.call)} per call, " if link.call else ""
    return f"{call}{seconds_text(link.alpha)} latency, {seconds_text(link.overhead)} per {segment}"


def rates_text(link: Link) -> str:
    """The text of the rates at which a link moves and combines bytes."""
    combining = (
        f"combines {1e-9 / link.gamma:.3g} GB/s"
        if link.gamma > _HIDDEN * link.beta
        else "combines at no extra cost"
    )
    others = f"{_far(link)}{_long_run(link)}{_alone(link)}{_in_place(link)}"
    return f"{1e-9 / link.beta:.3g} GB/s{others}, {combining}"


def _far(link: Link) -> str:
    if link.spill == 0:
        return ""
    return f" (above {bytes_text(link.cache_bytes)} down to {1e-9 / (link.beta + link.spill):.3g})"


def _long_run(link: Link) -> str:
    return f" ({1e-9 / link.sustained:.3g} sustained)" if link.sustained else ""


def _in_place(link: Link) -> str:
    return f" ({1e-9 / link.reach:.3g} if read in place)" if link.reach else ""


def _alone(link: Link) -> str:
    return f" ({1e-9 / link.flow:.3g} from one rank)" if link.flow > link.beta else ""


def _world(topology: Topology) -> str:
    hosts = len(topology.hosts)
    workers, servers = topology.size - topology.servers, topology.servers
    ranks = f"{workers} {'rank' if workers == 1 else 'ranks'}"
    if servers:
        ranks += f" and {servers} {'server' if servers == 1 else 'servers'}"
    return f"{ranks} on {hosts} {'host' if hosts == 1 else 'hosts'}{_domains(topology)}"


def _domains(topology: Topology) -> str:
    """The text for the levels inside hosts, the smallest domains first."""
    counts = [f"{len(set(labels))} domains" for labels in topology.inner]
    return f" in {', in '.join(counts)}" if counts else ""


def _amount(share: Fraction, nbytes: int) -> str:
    value = float(share)
    return f"{bytes_text(round(value * nbytes))} ({value:.3g} n)"


def _bandwidth(nbytes: int, seconds: float) -> str:
    return f" (algbw {nbytes / seconds / 1e9:.3g} GB/s)" if nbytes and seconds > 0 else ""


def seconds_text(seconds: float) -> str:
    """The time with three digits and a suitable unit."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale * 0.9995:  # a value that rounds to 1000 takes the next larger unit
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def bytes_text(nbytes: int) -> str:
    """The size in its largest binary unit with three digits, or four from 1000 on."""
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            amount = nbytes / scale
            return f"{amount:.{3 if amount < 1000 else 4}g} {unit}"
    return f"{nbytes} B"
