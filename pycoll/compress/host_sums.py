"""The ranks that encode, and the sums of a host's values that they encode.

In a job of several hosts, some hosts may have several ranks. Then the ranks of a host first add up
their values in full precision, and encode the sums:

    values of each rank  --all_to_all inside hosts-->  a shard of the host's sums on each rank
    shard                --codes between hosts------>  the folded parts of the shard

There are as many shards as each host has ranks at least; further ranks of a host encode nothing.
The ranks that encode the same shard are a column, one rank of each host. Without several hosts, or
with one rank on each, every rank encodes all of its own values, and all ranks are one column.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pycoll import _core
from pycoll.compress.codec import Array
from pycoll.compress.coded_exchange import Encoded, agree_first, owned_parts
from pycoll.compress.operands import Operands
from pycoll.types import ReduceOp


class Encoders:
    """The division of ``count`` values among the ranks that encode them and own them.

    Attributes: ``shard``, the values that this rank encodes; ``column``, the ranks that encode the
    same values, in the order of hosts, empty where this rank encodes nothing; ``parts``, the values
    that each rank owns; ``owners``, the ranks that encode and own; ``adds``, whether ranks of a
    host add up their values before.
    """

    def __init__(self, comm: Any, count: int) -> None:
        hosts = comm.hosts if len(comm.hosts) > 1 else [(rank,) for rank in range(comm.size)]
        self._hosts: Sequence[Sequence[int]] = hosts
        self._shards = owned_parts(count, min(map(len, hosts)))
        self.adds = any(len(ranks) > 1 for ranks in hosts)
        nothing = slice(count, count)
        self.shard = nothing
        self.column: tuple[int, ...] = ()
        self.parts: list[slice] = [nothing] * comm.size
        self.owners: list[int] = []
        for number, shard in enumerate(self._shards):
            column = tuple(ranks[number] for ranks in hosts)
            self.owners += column
            if comm.rank in column:
                self.shard, self.column = shard, column
            for owner, part in zip(
                column, owned_parts(shard.stop - shard.start, len(hosts)), strict=True
            ):
                self.parts[owner] = slice(shard.start + part.start, shard.start + part.stop)

    def encode(self, make: Callable[[], list[Array]]) -> Encoded:
        """Return the codes for each rank, or the error of ``make``.

        Raises the error where ranks have exchanged nothing before: then the call is refused.
        """
        made = Encoded(lambda: (make(), 0))
        if made.error is not None and not self.adds:
            raise made.error
        return made

    def own(self, comm: Any) -> slice:
        """Return the values that this rank owns."""
        rank: int = comm.rank
        return self.parts[rank]

    def add_up(self, comm: Any, values: Array) -> Array:
        """Return this rank's shard of the host's sums, folded in rank order. Collective."""
        rows = [[0] * comm.size for _ in range(comm.size)]
        lengths = [shard.stop - shard.start for shard in self._shards]
        for ranks in self._hosts:
            for sender in ranks:
                for receiver, length in zip(ranks, lengths, strict=False):
                    rows[sender][receiver] = length
        received = comm.all_to_all(values, lengths=rows)
        length = self.shard.stop - self.shard.start
        blocks = received.reshape(-1, length) if length else []
        if len(blocks) < 2:
            return received
        total = np.empty(length, values.dtype)
        views = [_core.view(block) for block in blocks]
        _core.combine(_core.view(total), views, ReduceOp.SUM, _core.isas()[-1])
        return total


def add_up_in_hosts(comm: Any, given: Operands, name: str, facts: Sequence[Any]) -> Encoders:
    """Let ``given`` hold the values that this rank encodes, and return the ranks that encode.

    Where ranks of a host add up their values, the call is collective and compares ``facts`` before.
    """
    encoders = Encoders(comm, given.layout.ends[-1])
    if encoders.adds:
        strays = given.memory.strays(encoders.shard)
        agree_first(comm, name, facts)
        values = given.values if strays is None else given.values + strays
        given.take_shard(encoders.shard, encoders.add_up(comm, values))
    return encoders
