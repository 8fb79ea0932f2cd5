"""A rank of a job whose store is restored and checkpointed, until the process is killed.

    checkpoint_rank.py RANK SIZE ADDRESS SERVERS PATH TRANSPORT

A worker prints what it found, and then its clock after each checkpoint.
"""

from __future__ import annotations

import faulthandler
import json
import sys

import numpy as np

import pycoll
import pycoll.ps

#: More than one part, so that each push is several messages.
COUNT = (pycoll.ps.messages.PART_BYTES_MAX // 8) + 1000


def work(comm: pycoll.Communicator, path: str) -> None:
    """Restore; then push three times and checkpoint, again and again."""
    with pycoll.ps.connect(comm) as store:
        clock = store.restore(path, missing_ok=True) or 0
        store.init("count", np.zeros(COUNT, np.int64))
        held = store.pull("count")
        ends = held[-1:-3:-1]
        assert (held[:2] == ends).all(), "parts of an array are of one moment"
        print(json.dumps({"clock": clock, "held": held[:2].tolist()}), flush=True)
        own = np.zeros(COUNT, np.int64)
        own[[comm.rank, -1 - comm.rank]] = 1
        while True:
            for _ in range(3):
                store.push("count", own)
            store.clock()
            clock += 1
            store.checkpoint(path)
            print(json.dumps({"clock": clock}), flush=True)


def main() -> None:
    # A rank that hangs says where, ahead of the test's own deadline.
    faulthandler.dump_traceback_later(60)
    rank, servers = int(sys.argv[1]), [int(one) for one in sys.argv[4].split(",")]
    comm = pycoll.init(
        rank=rank,
        size=int(sys.argv[2]),
        address=sys.argv[3],
        secret="a secret of the tests",
        transports=sys.argv[6],
    )
    if rank in servers:
        pycoll.ps.serve_store(comm, servers, consistency="bsp")
    else:
        work(comm, sys.argv[5])


if __name__ == "__main__":
    main()
