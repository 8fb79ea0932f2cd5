"""The cost of collectives whose data travels as codes: fewer bytes, and the time of the codec.

A rank encodes what it sends once, and decodes what it receives and what it has encoded for all:

    all_reduce       n + (2p - 1)/p n     of n bytes among p ranks
    reduce_scatter   2 (p - 1)/p n
    all_gather       n/p + n
    broadcast        2 n                  at the root

In a hierarchy p is the number of hosts and n the part of the busiest rank of a host. The codec and
the link work one after the other: what overlaps is not counted.

Source: Agarwal et al., "On the utility of gradient compression in distributed training systems",
MLSys 2022 (arXiv 2103.00543), which compares a codec's time with the bytes that it saves.
"""

from __future__ import annotations

from typing import NamedTuple

from pycoll.algorithms import lookup
from pycoll.cost.model import Parameters, Terms
from pycoll.cost.profiles import profile
from pycoll.cost.selection import bytes_text, choose, choose_coded, predict, seconds_text
from pycoll.schedule.collectives import Collective
from pycoll.schedule.topology import Topology


class CodedCost(NamedTuple):
    """The seconds of a message with a codec: of the links, and of the codec on the busiest core."""

    links: float
    codec: float

    @property
    def seconds(self) -> float:
        """The predicted time of the whole message."""
        return self.links + self.codec


def coded_cost(
    collective: Collective,
    name: str,
    topology: Topology,
    nbytes: int,
    ratio: float,
    parameters: Parameters,
) -> CodedCost:
    """The cost of a message of ``nbytes`` by the algorithm ``name``.

    ``ratio``: the bytes of codes for each byte of values.
    """
    algorithm = lookup(collective, name)
    # Codes are never read in place.
    shape = profile(algorithm, topology, parameters.per_core > 1)._replace(exposes=False)
    inside, across = shape.terms(nbytes, parameters.segment_bytes)
    if algorithm.levels is None:
        inside = _shrunk(inside, ratio)
    if parameters.per_core > 1:
        inside = shape.turns.shared(inside, parameters.per_core, 1.0)
    links = parameters.inside.seconds(inside, nbytes)
    links += parameters.across.seconds(_shrunk(across, ratio), nbytes)
    share = _coded_share(collective, topology, algorithm.levels is not None)
    return CodedCost(links, share * nbytes * parameters.codec * max(parameters.per_core, 1.0))


def _shrunk(terms: Terms, ratio: float) -> Terms:
    return terms._replace(
        moved=terms.moved * ratio,
        flow=terms.flow * ratio,
        carried=terms.carried * ratio,
        touched=terms.touched * ratio,
    )


def _coded_share(collective: Collective, topology: Topology, between_hosts: bool) -> float:
    """The bytes that the busiest rank encodes and decodes, in units of the message."""
    ranks, part = topology.size, 1.0
    if between_hosts:
        ranks = len(topology.hosts)
        if collective is not Collective.BROADCAST:
            part = 1 / min(len(members) for members in topology.hosts)
    if collective is Collective.ALL_REDUCE:
        return part * (1 + (2 * ranks - 1) / ranks)
    if collective is Collective.REDUCE_SCATTER:
        return part * 2 * (ranks - 1) / ranks
    return part * (1 / ranks + 1) if collective is Collective.ALL_GATHER else 2.0


def coded_text(
    collective: Collective,
    topology: Topology,
    nbytes: int,
    codec: str,
    ratio: float,
    parameters: Parameters,
) -> str:
    """The algorithm, the bytes and the time with a codec, and whether it pays, in a few lines."""
    name = choose_coded(collective, topology, nbytes, parameters=parameters).name
    cost = coded_cost(collective, name, topology, nbytes, ratio, parameters)
    plain = choose(collective, topology, nbytes, parameters=parameters).name
    without = predict(collective, plain, topology, nbytes, parameters)
    algorithm = lookup(collective, name)
    where = "between hosts" if algorithm.levels is not None else "between all ranks"
    pays = cost.seconds < without
    if pays:
        advice = f"it pays: {without / cost.seconds:.3g} times as fast as without"
    else:
        advice = "leave the codec out: encoding takes longer than the bytes that it saves"
    rate = f"{1e-9 / parameters.codec:.3g} GB/s"
    return "\n".join(
        [
            f"{collective.name.lower()} of {bytes_text(nbytes)} with {codec}",
            f"  algorithm  {name}: {algorithm.summary}; codes {where}",
            f"  bytes      {ratio:.3g} of those of float32",
            f"  predicted  {seconds_text(cost.seconds)}: {seconds_text(cost.links)} to move, "
            f"{seconds_text(cost.codec)} to encode and decode at {rate}",
            f"  without    {seconds_text(without)} by {plain}",
            f"  advice     {advice}",
            f"  model      values: {parameters.origin}; the codec's rate is built in",
        ]
    )
