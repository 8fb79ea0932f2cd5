"""One rank of a world that inside.py starts: ``python tests/rdma/rank_of_guest.py JOB``."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import pycoll
from pycoll.compress import BF16, FP8, Block, Codec, Feedback, PowerSGD, RandomK, Sign, TopK

#: Elements of float32: inline, one packet, several packets, one segment, several tiles, uneven.
COUNTS = (1, 50, 1000, 5003, 16384, 300_007)


class FailedError(Exception):
    """A check found something wrong."""


def values(rank: int, count: int, seed: int) -> Any:
    """Whole numbers, so that sums are exact; different per rank and element."""
    return np.random.default_rng([seed, rank]).integers(-99, 99, count).astype(np.float32)


def same(found: Any, wanted: Any, what: str) -> None:
    if not np.array_equal(np.asarray(found), np.asarray(wanted)):
        raise FailedError(f"{what}: wrong result")


def reachable(array: Any) -> Any:
    """A copy in memory of pycoll.empty()."""
    made = pycoll.empty(array.shape, array.dtype)
    made[...] = array
    return made


def one_of_each(
    comm: pycoll.Communicator, count: int, place: Callable[[Any], Any] = np.array
) -> int:
    """Every collective once with about ``count`` elements; how many were checked.

    What is sent lies where ``place`` copies it to.
    """
    rank, size = comm.rank, comm.size
    all_values = [place(values(r, count, count)) for r in range(size)]
    mine, root = all_values[rank], size - 1
    total = np.sum(all_values, axis=0)
    same(comm.all_reduce(mine), total, "all_reduce")
    same(comm.all_reduce(mine, "max"), np.max(all_values, axis=0), "all_reduce max")
    reduced = comm.reduce(mine, root=root)
    if rank == root:
        same(reduced, total, "reduce")
    sent = all_values[root] if rank == root else place(np.zeros_like(mine))
    same(comm.broadcast(sent, root=root), all_values[root], "broadcast")
    same(comm.all_gather(mine), np.concatenate(all_values), "all_gather")
    gathered = comm.gather(mine, root=root)
    if rank == root:
        same(gathered, np.concatenate(all_values), "gather")
    blocks = [place(values(r, count * size, 7).reshape(size, count)) for r in range(size)]
    same(comm.reduce_scatter(blocks[rank]), np.sum(blocks, axis=0)[rank : rank + 1], "rs")
    same(comm.all_to_all(blocks[rank]), np.stack([b[rank] for b in blocks]), "all_to_all")
    whole = blocks[root] if rank == root else None
    part = comm.scatter(whole, root=root)
    same(part, blocks[root][rank : rank + 1], "scatter")
    same(comm.scan(mine), np.sum(all_values[: rank + 1], axis=0), "scan")
    comm.barrier()
    return 11


def messages(comm: pycoll.Communicator) -> int:
    """Tagged messages round a ring."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for count in COUNTS:
        request = comm.isend(values(comm.rank, count, 3), after, tag=count)
        found = np.zeros(count, np.float32)
        comm.recv(found, before, tag=count)
        request.wait()
        same(found, values(before, count, 3), "message")
    return len(COUNTS)


def collectives(comm: pycoll.Communicator) -> None:
    """All collectives with every count."""
    checked = 0
    for count in COUNTS:
        started = time.monotonic()
        checked += one_of_each(comm, count)
        # Shown if this run fails or hangs: how far it got, and how fast.
        print(f"{count} elements: {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
    checked += messages(comm)
    print(f"{checked} results over {comm.transport_names()}")


def large(comm: pycoll.Communicator) -> None:
    """4 MiB summed twice, where packets may get lost."""
    everyone = [values(r, 1 << 20, 5) for r in range(comm.size)]
    for _ in range(2):
        same(comm.all_reduce(everyone[comm.rank]), np.sum(everyone, axis=0), "all_reduce")
    print(f"2 sums of 4 MiB over {comm.transport_names()}")


def arrays(comm: pycoll.Communicator, place: Callable[[Any], Any] = reachable) -> None:
    """All collectives on 1 MiB, and sums of 8 MiB in place, of memory that devices may read where
    it lies; tells how much of it is registered."""
    checked = one_of_each(comm, 1 << 18, place)
    everyone = [values(r, 1 << 21, 5) for r in range(comm.size)]
    for _ in range(2):
        mine = place(everyone[comm.rank])
        same(comm.all_reduce(mine, out=mine), np.sum(everyone, axis=0), "all_reduce in place")
    told = comm.explain("all_reduce", 1 << 23).splitlines()[-1]
    print(f"{checked + 2} results over {comm.transport_names()};{told}")


def arrays_of_numpy(comm: pycoll.Communicator) -> None:
    """The same of NumPy's own."""
    arrays(comm, np.array)


def kept(comm: pycoll.Communicator) -> None:
    """Sums of 8 MiB of ordinary memory that is registered, in place; tells how much of it was, and
    that nothing is when it is over."""
    everyone = [values(r, 1 << 21, 5) for r in range(comm.size)]
    for _ in range(2):
        mine = everyone[comm.rank].copy()
        with comm.register(mine) as held:
            same(comm.all_reduce(mine, out=mine), np.sum(everyone, axis=0), "all_reduce in place")
            told = comm.explain("all_reduce", 1 << 23).splitlines()[-1]
            print(f"{held.nbytes} B kept;{told}")
        same(comm.all_reduce(mine, out=mine), np.sum(everyone, axis=0) * comm.size, "copied")
    print(comm.explain("all_reduce", 1 << 23).splitlines()[-1])


def codes(comm: pycoll.Communicator) -> None:
    """Sums as codes, with residuals; tells the digest of all results."""
    found = hashlib.sha256()
    codecs: tuple[Codec, ...] = (BF16(), FP8(), Block("int8"), Block("int4"), Sign(), TopK(0.1))
    for codec in (*codecs, RandomK(0.1, seed=3), PowerSGD(2)):
        for shape in ((75, 67), (60_007,)):
            feedback, count = Feedback(), int(np.prod(shape))
            for step in range(2):
                mine = values(comm.rank, count, step).reshape(shape)
                found.update(comm.all_reduce(mine, compress=codec, feedback=feedback).tobytes())
    print(f"{found.hexdigest()} over {comm.transport_names()}")


def loop(comm: pycoll.Communicator) -> None:
    """Sums until something happens; then tells what."""
    mine = values(comm.rank, 20_000, 1)
    comm.all_reduce(mine)
    print("running", flush=True)
    try:
        while True:
            comm.all_reduce(mine)
    except pycoll.PycollError as error:
        print(json.dumps({"error": type(error).__name__, "text": str(error)}))


JOBS: dict[str, Callable[[pycoll.Communicator], None]] = {
    "arrays": arrays,
    "arrays of NumPy": arrays_of_numpy,
    "codes": codes,
    "collectives": collectives,
    "kept": kept,
    "large": large,
    "loop": loop,
}


def run(name: str) -> None:
    """Do a job as the rank that the environment names."""
    job = JOBS[name]
    started = time.monotonic()
    if job is codes:  # which travel between hosts only
        os.environ["PYCOLL_HOST_ID"] = f"host {os.environ['PYCOLL_RANK']}"
    pycoll.init()
    print(f"joined after {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
    job(pycoll.world())
    if job is not loop:
        pycoll.finalize()


if __name__ == "__main__":
    run(sys.argv[1])
