"""A rank of a job with a store: it serves, or counts its pushes until it is told to end.

    store_rank.py RANK SIZE ADDRESS SERVERS REPLICAS CONSISTENCY SECONDS HOST

A worker pushes whole numbers to its own element of an array, for some seconds. It prints what the
servers acknowledged, what they hold in the end, and the longest wait of a push.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import time

import numpy as np

import pycoll
import pycoll.ps

SECRET = "a secret of the tests"
#: More than one part, so that each push is several messages.
COUNT = (pycoll.ps.messages.PART_BYTES_MAX // 8) + 1000


def work(comm: pycoll.Communicator, seconds: float) -> dict[str, object]:
    """Push until the time is over, wait for the other workers, and read."""
    with pycoll.ps.connect(comm) as store:
        store.init("count", np.zeros(COUNT, np.int64))
        store.init("done", np.zeros(comm.size, np.int64))
        print("ready", flush=True)
        own = np.zeros(COUNT, np.int64)
        own[[comm.rank, -1 - comm.rank]] = 1
        acknowledged, longest = 0, 0.0
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            begun = time.monotonic()
            store.push("count", own)
            longest = max(longest, time.monotonic() - begun)
            acknowledged += 1
            store.clock()
        mine = np.zeros(comm.size, np.int64)
        mine[comm.rank] = 1
        store.push("done", mine)
        value = store.pull("count")
        facts = store.stats()
        gone = sorted({rank for one in facts["shards"] for rank in one["gone"]})
        while store.pull("done").sum() < len(store.workers) - len(gone):
            time.sleep(0.02)
            # The others may still push, and must not wait for this worker's clock.
            store.clock()
            gone = sorted({rank for one in store.stats()["shards"] for rank in one["gone"]})
        return {
            "rank": comm.rank,
            "acknowledged": acknowledged,
            "held": [int(value[comm.rank]), int(value[-1 - comm.rank])],
            "longest": longest,
            "view": facts["view"],
            "gone": gone,
            "transports": sorted(set(facts["servers"].values())),
        }


def main() -> None:
    # A rank that hangs says where, ahead of the test's own deadline.
    faulthandler.dump_traceback_later(60)
    rank, size = int(sys.argv[1]), int(sys.argv[2])
    servers = [int(one) for one in sys.argv[4].split(",")]
    comm = pycoll.init(
        rank=rank,
        size=size,
        address=sys.argv[3],
        secret=SECRET,
        transports=sys.argv[8],
    )
    consistency = pycoll.ps.consistency.consistency_from(sys.argv[6])
    try:
        if rank in servers:
            pycoll.ps.serve_store(comm, servers, replicas=int(sys.argv[5]), consistency=consistency)
            print(json.dumps({"rank": rank, "served": True}), flush=True)
        else:
            print(json.dumps(work(comm, float(sys.argv[7]))), flush=True)
    except pycoll.PycollError as error:
        facts = {"rank": rank, "error": type(error).__name__, "text": str(error)}
        print(json.dumps({**facts, "at": error.rank}), flush=True)


if __name__ == "__main__":
    main()
