"""Learns vectors of users and items from ratings; the servers hold a row for each.

No process knows how many users there are: a row is made on the servers when it is first pushed. A
batch moves the rows that occur in it, and no other one. The servers step each row by Adagrad.

    pycoll run -n 2 --servers 2 examples/servers_embedding.py
"""

from __future__ import annotations

import numpy as np

import pycoll
import pycoll.ps

DIM = 8
BATCH = 512
STEPS = 150


def main() -> None:
    comm = pycoll.init()
    # Ratings come from hidden vectors, so that there is something to find.
    hidden = np.random.default_rng(0).standard_normal((2, 300, 3)).astype(np.float32)
    names = np.random.default_rng(1).integers(0, 1 << 60, (2, 300))
    draw = np.random.default_rng([2, comm.rank])
    with pycoll.ps.connect(consistency=pycoll.ps.SSP(2)) as store:
        store.set_optimizer(pycoll.ps.Adagrad(lr=0.2))
        users = store.table("users", dim=DIM, init="normal:0.3", seed=1)
        items = store.table("items", dim=DIM, init="normal:0.3", seed=2)
        first = last = 0.0
        for step in range(STEPS):
            chosen = draw.integers(0, 300, (2, BATCH))
            ratings = (hidden[0][chosen[0]] * hidden[1][chosen[1]]).sum(1)
            user_ids, item_ids = names[0][chosen[0]], names[1][chosen[1]]
            u, v = users.pull(user_ids), items.pull(item_ids)
            error = (u * v).sum(1) - ratings
            users.push(user_ids, v * error[:, None] / 8)
            items.push(item_ids, u * error[:, None] / 8)
            store.clock()
            last = float(np.mean(error**2))
            first = last if step == 0 else first
        comm.barrier()
        if comm.rank == 0:
            print(f"{comm.size} workers: squared error {first:.3f} at first, {last:.3f} at last")
        comm.barrier()


if __name__ == "__main__":
    main()
