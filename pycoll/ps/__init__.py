"""Parameter servers: ranks that hold or combine values of the workers, and run no user's program.

    pycoll run -n 4 --servers 2 train.py        workers are ranks 0-3, servers ranks 4 and 5

    import pycoll                               # train.py
    pycoll.init()
    mean = pycoll.all_reduce(gradient, "avg", algorithm="ps")

Under any other launcher the last ranks run a script that calls ``pycoll.ps.serve()``, or
``python -m pycoll.ps``. ``pycoll.size()`` counts workers, ``pycoll.servers()`` names the servers.

The same servers hold stores, keyed arrays that workers push to and pull from at their own pace:

    store = pycoll.ps.connect(consistency="asp")
    store.init("w", weights)
    store.push("w", gradient)
    store.pull("w", out=weights)

``store.set_optimizer(SGD(lr=0.1))`` lets the servers step by the gradients that are pushed.
``store.table("emb", dim=64)`` is a table of rows by id, made when they are first used.

On any other communicator some ranks call ``serve_store(comm, servers=...)``, and the others
``connect(comm)``.
"""

from __future__ import annotations

from pycoll.ps.consistency import BSP, SSP, Backup
from pycoll.ps.keyed_store import Store, StoreWork
from pycoll.ps.serving import connect, serve, serve_store
from pycoll.ps.values.row_table import Table
from pycoll.ps.values.server_optimizers import SGD, Adagrad, Adam, Optimizer

__all__ = [
    "BSP",
    "SGD",
    "SSP",
    "Adagrad",
    "Adam",
    "Backup",
    "Optimizer",
    "Store",
    "StoreWork",
    "Table",
    "connect",
    "serve",
    "serve_store",
]
