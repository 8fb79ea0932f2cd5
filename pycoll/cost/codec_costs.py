"""The cost of collectives whose data travels as codes: fewer bytes, and the time of the codec.

With a codec that keeps every element, the values that a rank encodes and decodes are, of n bytes
among p ranks:

                     encoded      decoded
    all_reduce       n            (2p - 1)/p n
    reduce_scatter   (p - 1)/p n  (p - 1)/p n
    all_gather       n/p          n
    broadcast        n            n            at the root

In a hierarchy p is the number of hosts and n the part of the busiest rank of a host. The codec
works on one piece of a message while the link moves another. So a message of k pieces takes the
longer of both times, and the k-th part of the shorter one. Where ranks share cores, nothing
overlaps.

Codecs of places and values are sequences of collectives: an all_to_all of codes to the owners of
parts, and an all_gather of the folded parts. Each begins with a message of heads, which has space
for short codes; longer ones follow in a second message. On several hosts with several ranks, an
all_to_all of values inside hosts goes before. Then one rank of each host encodes each shard of the
sums. Where all ranks send the same places, an all_reduce of the values follows the heads. The
codec works before and after them.

Source: Agarwal et al., "On the utility of gradient compression in distributed training systems",
MLSys 2022 (arXiv 2103.00543), which compares a codec's time with the bytes that it saves.
"""

from __future__ import annotations

from typing import NamedTuple

from pycoll.algorithms import lookup
from pycoll.cost.codec_rates import CodecRate, origin_of
from pycoll.cost.model import Parameters
from pycoll.cost.profiles import profile
from pycoll.cost.selection import (
    bytes_text,
    choose,
    choose_coded,
    followed_topology,
    predict,
    seconds_text,
)
from pycoll.schedule.collectives import Collective
from pycoll.schedule.topology import Topology, single_host

#: Ways in which codes travel: by a plan of the executor; as places and values of their own on each
#: rank; as values at places that all ranks have in common.
DENSE, PLACES, COMMON = "dense", "places", "common"
#: The bytes of a number in the heads of messages, and the numbers in those of replies.
NUMBER_BYTES = 8
_REPLY_NUMBERS = 4
#: The bytes of codes behind a head, for one rank and for all of them.
_INLINE_BYTES = 1024
_INLINE_BYTES_OF_ALL = 32 << 10


class Coded(NamedTuple):
    """The facts of a codec that the model uses.

    ``name``: that of its rates. ``ratio``: the bytes of codes of one rank for each byte of float32.
    ``way``: DENSE, PLACES or COMMON.
    """

    name: str
    ratio: float
    way: str = DENSE


class CodedCost(NamedTuple):
    """The cost of a message with a codec.

    ``by``: the algorithm, in words. ``links``: seconds of the links. ``codec``: seconds of the
    codec on the busiest core. ``pieces``: into how many pieces the message is cut, on which links
    and codec work at the same time. ``wire``: see ``wire_bytes``.
    """

    by: str
    links: float
    codec: float
    pieces: int
    wire: float

    @property
    def seconds(self) -> float:
        """The predicted time of the whole message."""
        shorter, longer = sorted((self.links, self.codec))
        return longer + shorter / self.pieces


def rate_of(name: str, parameters: Parameters) -> CodecRate:
    """The rates of the codec of this name."""
    return next(one for one in parameters.codecs if one.name == name)


def wire_bytes(
    collective: Collective, name: str, topology: Topology, nbytes: int, parameters: Parameters
) -> float:
    """The bytes of a message that leave the busiest host; on one host, the busiest rank."""
    algorithm = lookup(collective, name)
    if len(topology.hosts) == 1:
        groups = followed_topology(topology, parameters)
        return float(algorithm.cost(topology.size, groups).sent) * nbytes
    return profile(algorithm, topology).terms(nbytes)[1].carried


def coded_cost(
    collective: Collective, topology: Topology, nbytes: int, coded: Coded, parameters: Parameters
) -> CodedCost:
    """The cost of a message of ``nbytes`` with a codec, by the algorithms that would run."""
    if coded.way != DENSE:
        return _composed_cost(topology, nbytes, coded, parameters)
    ratio = coded.ratio
    choice = choose_coded(collective, topology, nbytes, parameters=parameters, ratio=ratio)
    name, links = choice.name, choice.predicted_s
    algorithm = lookup(collective, name)
    encoded, decoded = _shares(collective, topology, algorithm.levels is not None)
    core_s = rate_of(coded.name, parameters).seconds(encoded * nbytes, decoded * nbytes)
    shape = profile(algorithm, topology, parameters.per_core > 1)
    pieces = 1 if parameters.per_core > 1 else shape.tiles(nbytes, parameters.segment_bytes)
    where = "between hosts" if algorithm.levels is not None else "between all ranks"
    wire = wire_bytes(collective, name, topology, nbytes, parameters) * ratio
    by = f"{name}: {algorithm.summary}; codes {where}"
    return CodedCost(by, links, core_s * max(parameters.per_core, 1.0), pieces, wire)


def _composed_cost(
    topology: Topology, nbytes: int, coded: Coded, parameters: Parameters
) -> CodedCost:
    """The cost of an all_reduce that is a sequence of collectives."""
    size, hosts = topology.size, len(topology.hosts)
    links = wire = 0.0

    def add(collective: Collective, moved: float, among: Topology = topology) -> None:
        nonlocal links, wire
        length = round(moved)
        if length <= 0:
            return
        name = choose(collective, among, length, parameters=parameters).name
        links += predict(collective, name, among, length, parameters)
        if len(among.hosts) == hosts:
            wire += wire_bytes(collective, name, among, length, parameters)

    space = inline_bytes(size)
    heads, slow = NUMBER_BYTES * (2 + size) + space, max(parameters.per_core, 1.0)
    add(Collective.ALL_TO_ALL, heads * size)
    rate = rate_of(coded.name, parameters)
    if coded.way == COMMON:
        add(Collective.ALL_REDUCE, coded.ratio * nbytes)
        by = "an all_reduce of the values at common places"
        return CodedCost(by, links, rate.seconds(nbytes, nbytes) * slow, 1, wire)
    by = "an all_to_all of codes to the owners of parts, an all_gather of the sums"
    shards, column = 1, topology
    if 1 < hosts < size:
        shards = min(len(members) for members in topology.hosts)
        column = Topology.even(hosts, hosts)
        add(Collective.ALL_TO_ALL, nbytes, single_host(max(map(len, topology.hosts))))
        add(Collective.ALL_TO_ALL, heads * size)
        by = f"sums inside hosts, {by}"
    # All columns move codes at the same time, over the same links.
    codes, owners = coded.ratio * nbytes, shards * column.size
    add(Collective.ALL_TO_ALL, codes - space * owners, column)
    add(Collective.ALL_GATHER, (NUMBER_BYTES * _REPLY_NUMBERS + space) * size)
    # At worst no two ranks send the same place; longer sums travel as plain values.
    sums = min(column.size * coded.ratio, 1.0) * nbytes
    add(Collective.ALL_GATHER, sums - space * owners)
    core_s = rate.seconds(nbytes / shards, (1 + 1 / shards) * nbytes)
    return CodedCost(by, links, core_s * slow, 1, wire)


def inline_bytes(size: int) -> int:
    """The bytes of codes behind a head, in the messages of composed codecs among ``size`` ranks.

    It depends on the ranks alone, so all of them send first messages of one length.
    """
    return min(_INLINE_BYTES, _INLINE_BYTES_OF_ALL // size // NUMBER_BYTES * NUMBER_BYTES)


def _shares(collective: Collective, topology: Topology, between_hosts: bool) -> tuple[float, float]:
    """The values that the busiest rank encodes, and decodes, in units of the message."""
    ranks, part = topology.size, 1.0
    if between_hosts:
        ranks = len(topology.hosts)
        if collective is not Collective.BROADCAST:
            part = 1 / min(len(members) for members in topology.hosts)
    others = (ranks - 1) / ranks
    encoded, decoded = {
        Collective.ALL_REDUCE: (1.0, 1.0 + others),
        Collective.REDUCE_SCATTER: (others, others),
        Collective.ALL_GATHER: (1 / ranks, 1.0),
        Collective.BROADCAST: (1.0, 1.0),
    }[collective]
    return part * encoded, part * decoded


def coded_text(
    collective: Collective,
    topology: Topology,
    nbytes: int,
    codec: str,
    coded: Coded,
    parameters: Parameters,
) -> str:
    """The algorithm, the bytes and the times with a codec and without, and whether it pays."""
    cost = coded_cost(collective, topology, nbytes, coded, parameters)
    plain = choose(collective, topology, nbytes, parameters=parameters).name
    plain_s = predict(collective, plain, topology, nbytes, parameters)
    plain_wire = wire_bytes(collective, plain, topology, nbytes, parameters)
    end = "host" if len(topology.hosts) > 1 else "rank"
    rate = rate_of(coded.name, parameters)
    overlap = "one after the other" if cost.pieces == 1 else f"overlapping in {cost.pieces} pieces"
    return "\n".join(
        [
            f"{collective.name.lower()} of {bytes_text(nbytes)} with {codec}",
            f"  algorithm  {cost.by}",
            f"  bytes      {bytes_text(round(cost.wire))} from each {end}, "
            f"{bytes_text(round(plain_wire))} without; codes take {coded.ratio:.3g} of float32",
            f"  links      {seconds_text(cost.links)}, {seconds_text(plain_s)} without, by {plain}",
            f"  codec      {seconds_text(cost.codec)} of a core, which encodes "
            f"{rate.encode * 1e-9:.3g} GB/s, decodes and adds {rate.decode_add * 1e-9:.3g} GB/s "
            f"({origin_of(rate)})",
            f"  predicted  {seconds_text(cost.seconds)}: links and codec {overlap}",
            f"  verdict    {_verdict(cost, plain_s)}",
            f"  model      values: {parameters.origin}",
        ]
    )


def _verdict(cost: CodedCost, plain_s: float) -> str:
    if cost.seconds < plain_s:
        return f"pays: {plain_s / cost.seconds:.3g}x"
    saved = plain_s - cost.links
    why = f"the codec takes {seconds_text(cost.codec)} to save {seconds_text(saved)} of the links"
    if saved <= 0:
        why = "the links take no less"
    return (
        f"does not pay here: {seconds_text(cost.seconds)} with it, {seconds_text(plain_s)} "
        f"without; {why}"
    )
