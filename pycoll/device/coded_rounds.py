"""The rounds of a collective with a codec on devices: kernels around collectives of bytes.

An all_reduce on one host is six launches in one stream: a kernel encodes the parts of the other
ranks; an all_to_all of bytes brings them to their owners; a kernel folds each part in full
precision and in rank order, and another one encodes the sum once; an all_gather of bytes brings the
codes to all ranks; a kernel decodes them. So the bits are those of arrays in host memory on one
host.

A reduce_scatter ends with the fold. An all_gather and a broadcast encode what a rank sends, itself
included, and decode what arrives.

Where several hosts have several ranks each, the values of a host are summed up first. Rank l of a
host gets, in full precision, the parts of all ranks l from the ranks of its host, and encodes the
sums for these. Then the owners fold one row for each host.

Each array of a list has codes of its own. Those for one rank lie end to end, so a list takes as
many exchanges as one array, and neighbouring steps of one kind share launches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pycoll import _core
from pycoll.device.device_codes import FLOAT_BYTES, Codes, Floats, Parts, align, cut
from pycoll.schedule.collectives import Collective
from pycoll.types import DType

if TYPE_CHECKING:
    from pycoll.comm.plans import CallPlan
    from pycoll.device.device_copies import Copy
    from pycoll.schedule.topology import Topology

#: The exchanges of each collective.
_EXCHANGES = {
    Collective.ALL_REDUCE: (Collective.ALL_TO_ALL, Collective.ALL_GATHER),
    Collective.REDUCE_SCATTER: (Collective.ALL_TO_ALL,),
    Collective.ALL_GATHER: (Collective.ALL_GATHER,),
    Collective.BROADCAST: (Collective.BROADCAST,),
}


class Exchange(NamedTuple):
    """A collective of bytes. ``lanes``: the most lanes that any rank's plan has."""

    compiled: CallPlan
    lanes: int
    counts: list[int]


class Ends(NamedTuple):
    """The memory of one array.

    ``rests``: the address of its residual, or 0. ``masks``: the address of velocities that become 0
    where a codec sends the value, or 0.
    """

    values: Floats
    result: Floats
    rests: int
    masks: int = 0


class Round(NamedTuple):
    """An exchange with the address and bytes of its memory, and the steps before and after it."""

    source: tuple[int, int]
    target: tuple[int, int]
    before: list[Copy]
    after: list[Copy]


#: The ranks of each host; equally many.
Hosts = tuple[tuple[int, ...], ...]


def hosts_of(topology: Topology, collective: Collective) -> Hosts:
    """Return the hosts whose ranks sum up their values before they encode; empty if none do.

    These hosts have equally many ranks, and the ranks with one local rank ascend in the order of
    hosts.
    """
    hosts = topology.hosts
    reduces = collective in (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER)
    if not reduces or len(hosts) == 1 or topology.servers or not topology.is_even:
        return ()
    across = list(zip(*hosts, strict=True))
    is_ordered = all(list(ranks) == sorted(ranks) for ranks in across)
    return hosts if is_ordered and len(across) > 1 else ()


def parts_of(codec: _core.Codec, count: int, hosts: Hosts, size: int) -> Parts:
    """Return the parts of an all_reduce. Those of ranks with one local rank are neighbours."""
    owners = [rank for ranks in zip(*hosts, strict=True) for rank in ranks] or range(size)
    of_ranks = sorted(range(size), key=lambda part: owners[part])
    return Parts(codec, cut(count, size), of_ranks)


class CodedCall(NamedTuple):
    """A collective with a codec, without its memory.

    ``arrays``: how each array is cut. ``divisor``: of the sums, or 0. ``hosts``: see ``hosts_of``.
    """

    collective: Collective
    arrays: Sequence[Parts]
    rank: int
    root: int
    divisor: int
    hosts: Hosts

    @property
    def stride(self) -> int:
        """The bytes of the codes of all arrays for one rank."""
        return sum(one.nbytes for one in self.arrays)

    @property
    def nbytes(self) -> int:
        """The bytes of the codes of all parts."""
        return len(self.arrays[0].lengths) * self.stride

    @property
    def slots(self) -> list[int]:
        """The bytes that a part of each array takes as float32."""
        return [align(FLOAT_BYTES * max(one.lengths)) for one in self.arrays]

    @property
    def shelf(self) -> int:
        """The bytes that the parts of all ranks with one local rank take as float32."""
        return len(self.hosts) * sum(self.slots)

    @property
    def exchange_bytes(self) -> int:
        """The bytes of the largest exchange of a rank."""
        return max(self.nbytes, len(self.hosts[0]) * self.shelf if self.hosts else 0)

    @property
    def scratch(self) -> int:
        """The bytes of memory that the call needs apart from its arrays."""
        sums = sum(self.slots) if self.collective is Collective.ALL_REDUCE else 0
        return 2 * self.exchange_bytes + self.shelf + sums

    def exchanges(self) -> Iterator[tuple[Collective, list[int]]]:
        """Yield the collectives of bytes with their counts, in order."""
        size = len(self.arrays[0].lengths)
        if self.hosts:
            homes = {rank: host for host, ranks in enumerate(self.hosts) for rank in ranks}
            places = {rank: place for ranks in self.hosts for place, rank in enumerate(ranks)}
            pairs = [(one, other) for one in range(size) for other in range(size)]
            inside = [self.shelf * (homes[one] == homes[other]) for one, other in pairs]
            across = [self.stride * (places[one] == places[other]) for one, other in pairs]
            yield Collective.ALL_TO_ALL, inside
            yield Collective.ALL_TO_ALL, across
        for one in _EXCHANGES[self.collective][1 if self.hosts else 0 :]:
            blocks = {Collective.ALL_TO_ALL: size * size, Collective.ALL_GATHER: size}.get(one, 1)
            yield one, [self.stride] * blocks

    def rounds(self, ends: Sequence[Ends], scratch: int) -> list[Round]:
        """Return the rounds of a call, one for each of its exchanges.

        ``ends``: the memory of each array. ``scratch``: the address of ``self.scratch`` bytes. A
        round uses the memory of the one before, which has ended by then.
        """
        if self.collective is Collective.ALL_GATHER:
            return [_gather_round(self, ends, scratch)]
        if self.collective is Collective.BROADCAST:
            return [_broadcast(self, ends, scratch)]
        if self.collective is Collective.REDUCE_SCATTER:
            return _reduce_rounds(self, ends, scratch)
        total = Floats(scratch + 2 * self.exchange_bytes + self.shelf, DType.FLOAT32)
        folded, replies = [], []
        for parts, one, nbytes in zip(self.arrays, ends, self.slots, strict=True):
            begin = parts.begin(parts.of_ranks[self.rank])
            folded.append(one._replace(result=total))
            replies.append(Ends(total, one.result, one.rests and one.rests + FLOAT_BYTES * begin))
            total = total._replace(address=total.address + nbytes)
        return [*_reduce_rounds(self, folded, scratch), _gather_round(self, replies, scratch)]

    def cut(self, address: int) -> Iterator[Codes]:
        """Yield the codes of each array in the ``nbytes`` bytes at this address."""
        for one in self.arrays:
            yield Codes(address, self.stride)
            address += one.nbytes


def _reduce_rounds(call: CodedCall, ends: Sequence[Ends], scratch: int) -> list[Round]:
    """Return the rounds that bring each part to its owner, which folds it to its result."""
    if call.hosts:
        return [_sum_round(call, ends, scratch), _cross_round(call, ends, scratch)]
    sent, arrived = (scratch, call.nbytes), (scratch + call.nbytes, call.nbytes)
    made, rank = Round(sent, arrived, [], []), call.rank
    codes = zip(call.cut(sent[0]), call.cut(arrived[0]), strict=True)
    for parts, one, (mine, others) in zip(call.arrays, ends, codes, strict=True):
        part = parts.of_ranks[rank]
        own, rows = one.values.at(parts.begin(part)), (len(parts.lengths), rank, call.divisor)
        made.before.extend(parts.encode_all(one.values, one.rests, mine, rank))
        made.after.append(parts.fold(part, others, own, one.result, rows))
    return [made]


def _sum_round(call: CodedCall, ends: Sequence[Ends], scratch: int) -> Round:
    """Return the round after which each rank has the sums of its host on a shelf.

    A shelf has the parts of the ranks with one local rank, one for each host, array by array.
    """
    ranks, rows = len(call.hosts[0]), len(call.hosts)
    nbytes = ranks * call.shelf
    sent, arrived = (scratch, nbytes), (scratch + call.exchange_bytes, nbytes)
    made, offset = Round(sent, arrived, [], []), 0
    for parts, one, slot in zip(call.arrays, ends, call.slots, strict=True):
        for host, members in enumerate(call.hosts):
            for place, rank in enumerate(members):
                part = parts.of_ranks[rank]
                to = Floats(sent[0] + place * call.shelf + offset + host * slot, DType.FLOAT32)
                values = one.values.at(parts.begin(part))
                made.before.append(parts.total(parts.lengths[part], values, 0, 1, to))
        given = Floats(arrived[0] + offset, DType.FLOAT32)
        sums = Floats(scratch + 2 * call.exchange_bytes + offset, DType.FLOAT32)
        count = rows * slot // FLOAT_BYTES
        made.after.append(parts.total(count, given, call.shelf, ranks, sums))
        offset += rows * slot
    return made


def _cross_round(call: CodedCall, ends: Sequence[Ends], scratch: int) -> Round:
    """Return the round that brings the sums of hosts to the owners of parts, which fold them."""
    home = next(host for host, ranks in enumerate(call.hosts) if call.rank in ranks)
    place, nbytes = call.hosts[home].index(call.rank), len(call.hosts) * call.stride
    sent, arrived = (scratch, nbytes), (scratch + call.exchange_bytes, nbytes)
    made, shelf = Round(sent, arrived, [], []), scratch + 2 * call.exchange_bytes
    codes = zip(call.cut(sent[0]), call.cut(arrived[0]), strict=True)
    for parts, one, slot, (mine, others) in zip(call.arrays, ends, call.slots, codes, strict=True):
        for host, members in enumerate(call.hosts):
            part, sums = parts.of_ranks[members[place]], Floats(shelf, DType.FLOAT32)
            shelf += slot
            if host == home:
                rows = (len(call.hosts), home, call.divisor)
                made.after.append(parts.fold(part, others, sums, one.result, rows))
                continue
            left = one.rests and one.rests + FLOAT_BYTES * parts.begin(part)
            made.before.append(parts.encode(part, sums, left, mine.of(host), call.rank))
    return made


def _gather_round(call: CodedCall, ends: Sequence[Ends], scratch: int) -> Round:
    """Return the round that brings the codes of each rank's part to all ranks.

    Values and rests of ``ends`` are those of this rank's part.
    """
    sent, arrived = (scratch, call.stride), (scratch + call.exchange_bytes, call.nbytes)
    made = Round(sent, arrived, [], [])
    codes = zip(call.cut(sent[0]), call.cut(arrived[0]), strict=True)
    for parts, one, (own, every) in zip(call.arrays, ends, codes, strict=True):
        part = parts.of_ranks[call.rank]
        made.before.append(parts.encode(part, one.values, one.rests, own, call.rank))
        made.after.extend(parts.decode(every, one.result))
    return made


def _broadcast(call: CodedCall, ends: Sequence[Ends], scratch: int) -> Round:
    """Return the round that brings the codes of the root's values to all ranks."""
    codes, is_root = (scratch, call.nbytes), call.rank == call.root
    made = Round(codes if is_root else (0, 0), codes, [], [])
    for parts, one, place in zip(call.arrays, ends, call.cut(codes[0]), strict=True):
        if is_root:
            made.before.append(parts.encode(0, one.values, one.rests, place, call.rank))
        made.after.extend(parts.decode(place, one.result))
    return made
