"""Parameter servers: ranks that combine the values of others and contribute none themselves.

    n workers, k servers          push: fold at the owner       pull: from the owner
    apart:    servers own all     w0 w1 w2 -> s0 (shard 0)      s0 -> w0 w1 w2
                                  w0 w1 w2 -> s1 (shard 1)      s1 -> w0 w1 w2
    mixed:    workers own some    and w0 w2 -> w1 (a shard)     w1 -> w0 w2

Push is a reduction of each shard to its owner, pull a broadcast from it. Shards are parts of equal
length of the whole message, so servers are balanced whatever tensors it holds. The owner folds the
values in rank order of the workers: the bits are those of any rank-ordered algorithm.

With one link of B bytes/s per rank, apart takes max(n/B, n/k n/B) for a message of n bytes on n
ranks and k servers. Mixed divides the message so that all links are busy equally long. Of
n^2 + kn - 2k equal parts a server owns 2(n-1) and a worker n-k. So mixed takes
2n(n-1)/(n^2 + kn - 2k) times the message over B. Without servers every worker owns a part: a server
next to each worker, which is the direct exchange.

Where ranks share a host, `hierarchical:direct+servers` first reduces inside hosts.

Source: Jiang et al., "A unified architecture for accelerating distributed DNN training in
heterogeneous GPU/CPU clusters" (BytePS), OSDI 2020; Li et al., "Scaling distributed machine
learning with the parameter server", OSDI 2014.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from math import ceil, floor

from pycoll.algorithms.algorithm import Algorithm
from pycoll.algorithms.formulas import Cost, cost
from pycoll.algorithms.pattern import finish
from pycoll.errors import InvalidArgumentError
from pycoll.schedule.collectives import Collective
from pycoll.schedule.language import REDUCE, Schedule, Transfer
from pycoll.schedule.topology import Topology

BYTEPS = "Jiang et al. (BytePS), OSDI 2020"
#: A mixed split has at most this number of parts, or `_PARTS_PER_RANK` for each rank if that is
#: more: every part is a message of its own.
PARTS_MAX = 256
_PARTS_PER_RANK = 4
_WORKER_PARTS_MAX = 8
#: Among the splits whose busiest rank sends at most this multiple of the best, the one with the
#: fewest parts wins.
CLOSE = Fraction(101, 100)


@lru_cache(maxsize=256)
def shares(workers: int, servers: int) -> tuple[int, int]:
    """The parts that each server and each worker owns in a mixed split.

    BytePS's optimal shares have the ratio 2(n-1) / (n-k). The result is the nearest ratio of small
    whole numbers, so that the message falls into few equal parts.
    """
    if servers == 0:
        return 0, 1
    if servers >= workers:
        return 1, 0
    ratio = Fraction(2 * (workers - 1), workers - servers)
    most = max(PARTS_MAX, _PARTS_PER_RANK * (workers + servers))
    splits = [(1, 0)]
    for of_worker in range(1, _WORKER_PARTS_MAX + 1):
        for of_server in (floor(ratio * of_worker), ceil(ratio * of_worker)):
            if servers * of_server + workers * of_worker <= most:
                splits.append((of_server, of_worker))
    loads = {split: _load(workers, servers, split) for split in splits}
    bound = CLOSE * min(loads.values())
    near = [split for split, load in loads.items() if load <= bound]
    return min(near, key=lambda split: servers * split[0] + workers * split[1])


def _load(workers: int, servers: int, split: tuple[int, int]) -> Fraction:
    """The bytes that the busiest rank sends, in units of the message; it receives as much."""
    of_server, of_worker = split
    parts = servers * of_server + workers * of_worker
    by_worker = parts + (workers - 2) * of_worker
    by_server = workers * of_server if servers else 0
    return Fraction(max(by_worker, by_server), parts)


def owners(workers: int, servers: int, split: tuple[int, int]) -> list[int]:
    """The owner of every part: a run of parts for each server, then one for each worker."""
    of_server, of_worker = split
    ranks = [rank for rank in range(workers, workers + servers) for _ in range(of_server)]
    return ranks + [rank for rank in range(workers) for _ in range(of_worker)]


def exchange(workers: int, owned: Sequence[int], only: int | None) -> Iterator[Transfer]:
    """Every worker sends each part to its owner, which folds it and sends it to every worker.

    A worker starts with another owner than its neighbours, so that not all send to one owner at
    once. The parts of one owner come from all workers in the same order.
    """
    turned: dict[int, list[int]] = {}
    for chunk, owner in enumerate(owned):
        turned.setdefault(owner, []).append(chunk)
    places = list(turned)
    for source in range(workers):
        first = source % len(places)
        for owner in (*places[first:], *places[:first]):
            if owner != source and only in (None, source, owner):
                for chunk in turned[owner]:
                    before = source < owner
                    yield Transfer(0, chunk, source, owner, REDUCE, before=before)
    for owner, chunks in turned.items():
        for distance in range(workers):
            worker = (owner + distance) % workers
            if worker != owner and only in (None, owner, worker):
                for chunk in chunks:
                    yield Transfer(1, chunk, owner, worker)


def apart(size: int, *, topology: Topology, only: int | None = None) -> Schedule:
    """All_reduce through servers apart from the workers (Li et al. 2014).

    Cost: 2 steps; a worker sends and receives n bytes, each of k servers w/k n bytes for w workers.
    """
    workers, servers = size - topology.servers, topology.servers
    if servers == 0:
        raise InvalidArgumentError(
            f"servers all_reduce of {size} ranks needs at least one server, and none of the ranks "
            "serves: start some (pycoll run --servers 2), or take servers_mixed or direct"
        )
    owned = owners(workers, servers, (1, 0))
    return _schedule(size, servers, owned, only)


def mixed(size: int, *, topology: Topology, only: int | None = None) -> Schedule:
    """All_reduce through servers and workers in BytePS's optimal shares (Jiang et al. 2020).

    Cost: 2 steps; with w workers and k < w servers every rank sends 2n w(w-1)/(w^2+kw-2k) bytes,
    rounded as `shares` says.
    """
    workers, servers = size - topology.servers, topology.servers
    owned = owners(workers, servers, shares(workers, servers))
    return _schedule(size, servers, owned, only)


def _schedule(size: int, servers: int, owned: list[int], only: int | None) -> Schedule:
    return finish(
        Collective.ALL_REDUCE,
        size,
        exchange(size - servers, owned, only),
        parts=len(owned),
        only=only,
        servers=servers,
    )


def apart_cost(size: int, *, topology: Topology) -> Cost:
    """2 a + max(1, w/k) n b + w/k n c, for w workers and k servers."""
    return _cost(size, topology.servers, (1, 0))


def mixed_cost(size: int, *, topology: Topology) -> Cost:
    """2 a + 2n w(w-1)/(w^2+kw-2k) b + 2n w(w-1)/(w^2+kw-2k) c, for w workers and k servers."""
    return _cost(size, topology.servers, shares(size - topology.servers, topology.servers))


def _cost(size: int, servers: int, split: tuple[int, int]) -> Cost:
    """The cost of a split, by the busiest rank of each kind of work."""
    workers = size - servers
    of_server, of_worker = split
    parts = servers * of_server + workers * of_worker
    if size == 1 or parts == 0:
        return cost(0, 0, 0, 0, max(parts, 1))
    by_server = workers * of_server if servers else 0
    reduced = max((workers - 1) * of_worker, by_server)
    most = _load(workers, servers, split)
    return cost(2, most, most, Fraction(reduced, parts), parts)


ENTRIES: tuple[Algorithm, ...] = (
    Algorithm(
        Collective.ALL_REDUCE,
        "servers",
        apart,
        apart_cost,
        "to servers apart from the workers, and back",
        "Li et al., OSDI 2014",
        rank_ordered=True,
        keeps_order=True,
        serves=True,
    ),
    Algorithm(
        Collective.ALL_REDUCE,
        "servers_mixed",
        mixed,
        mixed_cost,
        "to servers and workers in optimal shares, and back",
        BYTEPS,
        rank_ordered=True,
        keeps_order=True,
        serves=True,
    ),
)
