"""A rank of a job with a store: it serves, or counts its pushes until it is told to end.

    store_rank.py RANK SIZE ADDRESS SERVERS REPLICAS CONSISTENCY SECONDS HOST
    store_rank.py WORKER SECONDS      joins the store of PYCOLL_TICKET; WORKER is -1 for a new one

A worker pushes whole numbers to its own element of an array, for some seconds. It prints what the
servers acknowledged, what they hold in the end, and the longest wait of a push. With STORE_ROUNDS
it ends so many rounds together with the others, and prints the means that it got.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time

import numpy as np

import pycoll
import pycoll.ps
from pycoll.ps.server_threads import ServerThreads

SECRET = "a secret of the tests"
#: More than one part, so that each push is several messages.
COUNT = (pycoll.ps.messages.PART_BYTES_MAX // 8) + 1000
#: More than the ranks of any test.
RANKS = 32
#: Seconds between two pushes.
PAUSE_S = float(os.environ.get("STORE_PAUSE_S", "0"))
#: Whether a worker prints a line after each step.
TELLS = os.environ.get("STORE_TELLS") == "1"
#: A number of rounds, 0 for none.
ROUNDS = int(os.environ.get("STORE_ROUNDS", "0"))
#: "RANK:PEER": at SIGUSR1 server RANK breaks its connection with server PEER.
CUT = os.environ.get("STORE_CUT", "")
#: How many keys there are in addition to those of the counts; with any, there is a table too.
KEYS = int(os.environ.get("STORE_KEYS", "0"))


def cut_at_signal(peer: int) -> None:
    """Break the connection of this server with another one at SIGUSR1."""
    run = ServerThreads.run

    def running(server: ServerThreads) -> None:
        def cut(*_: object) -> None:
            threading.Thread(target=server._links[peer].close).start()

        signal.signal(signal.SIGUSR1, cut)
        print("serves", flush=True)
        run(server)

    ServerThreads.run = running  # type: ignore[method-assign]


def work(store: pycoll.ps.Store, seconds: float) -> dict[str, object]:
    """Push until the time is over, wait for the other workers, and read."""
    with store:
        rank = store.rank
        store.init("count", np.zeros(COUNT, np.int64))
        store.init("done", np.zeros(RANKS, np.int64))
        for number in range(KEYS):
            store.init(f"key {number}", np.zeros(1, np.int64))
        if KEYS:
            store.table("rows", dim=2)
        before = store.pull("count")
        print("ready", flush=True)
        if rank == 0:
            print(f"ticket {store.ticket()}", flush=True)
        own = np.zeros(COUNT, np.int64)
        own[[rank, -1 - rank]] = 1
        acknowledged, longest = 0, 0.0
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            begun = time.monotonic()
            store.push("count", own)
            longest = max(longest, time.monotonic() - begun)
            acknowledged += 1
            time.sleep(PAUSE_S)
            store.clock()
            if TELLS:
                print("step", flush=True)
        dropped = store.dropped
        mine = np.zeros(RANKS, np.int64)
        mine[rank] = 1
        tries = -1
        while tries != store.dropped:
            # Backup drops a push that comes too late for its round.
            tries = store.dropped
            store.push("done", mine)
        value = store.pull("count") - before
        facts = store.stats()
        gone = sorted({one for shard in facts["shards"] for one in shard["gone"]})
        while not all(store.pull("done")[int(one)] for one in facts["shards"][0]["clocks"]):
            time.sleep(0.02)
            # The others may still push, and must not wait for this worker's clock.
            store.clock()
            facts = store.stats()
            gone = sorted({one for shard in facts["shards"] for one in shard["gone"]})
        return {
            "rank": rank,
            "acknowledged": acknowledged,
            "dropped": dropped,
            "held": [int(value[rank]), int(value[-1 - rank])],
            "longest": longest,
            "view": facts["view"],
            "chains": [one["chain"] for one in facts["shards"]],
            "gone": gone,
            "transports": sorted(set(facts["servers"].values())),
        }


def share_of(rank: int) -> int:
    """What a worker pushes in each round: sums tell who is in them, and means are exact."""
    return 12 << 4 * rank


def exchange(store: pycoll.ps.Store, rounds: int) -> dict[str, object]:
    """End rounds by push_pull of a mean, and by clock of a sum."""
    with store:
        rank = store.rank
        store.init("mean", np.zeros(COUNT), update="mean")
        store.init("sum", np.zeros(RANKS, np.int64))
        own, part = np.full(COUNT, float(share_of(rank))), np.zeros(RANKS, np.int64)
        part[rank] = 1
        print("ready", flush=True)
        means, sums, longest = [], [], 0.0
        for _ in range(rounds):
            begun = time.monotonic()
            got = store.push_pull("mean", own)
            store.push("sum", part)
            store.clock()
            longest = max(longest, time.monotonic() - begun)
            # An element of each part.
            means.append([float(got[0]), float(got[-1])])
            sums.append(store.pull("sum").tolist())
            time.sleep(PAUSE_S)
        gone = sorted({one for shard in store.stats()["shards"] for one in shard["gone"]})
        facts = {"rank": rank, "means": means, "sums": sums, "longest": longest, "gone": gone}
        # No worker leaves ahead of the figures of the others.
        store.clock()
        return facts


def main() -> None:
    # A rank that hangs says where, ahead of the test's own deadline.
    faulthandler.dump_traceback_later(60)
    if "PYCOLL_TICKET" in os.environ:
        worker = int(sys.argv[1])
        ticket = os.environ["PYCOLL_TICKET"]
        store = pycoll.ps.connect(ticket=ticket, worker=None if worker < 0 else worker)
        print(json.dumps(work(store, float(sys.argv[2]))), flush=True)
        return
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
    if CUT.startswith(f"{rank}:"):
        cut_at_signal(int(CUT.partition(":")[2]))
    try:
        if rank in servers:
            pycoll.ps.serve_store(comm, servers, replicas=int(sys.argv[5]), consistency=consistency)
            print(json.dumps({"rank": rank, "served": True}), flush=True)
        else:
            store = pycoll.ps.connect(comm)
            facts = exchange(store, ROUNDS) if ROUNDS else work(store, float(sys.argv[7]))
            print(json.dumps(facts), flush=True)
    except pycoll.PycollError as error:
        failed = {"rank": rank, "error": type(error).__name__, "text": str(error)}
        print(json.dumps({**failed, "at": error.rank}), flush=True)


if __name__ == "__main__":
    main()
