"""Rows that another process holds, by torch.distributed.rpc: the peer of the tables of bench/ps.py.

    rpc_rows.py RANK PORT ROWS

Rank 1 holds a tensor with a row for each id, and rank 0 pulls and pushes a hundredth of the rows.
Rank 0 prints the seconds of a pull and of a push as JSON.
"""

from __future__ import annotations

import functools
import json
import sys

import torch
from ps_worker import ROW_DIM, ROW_TURNS, ROWS_PER_ID, timed
from torch.distributed import rpc

#: Most seconds of one call.
_CALL_S = 60
_held: list[torch.Tensor] = []


def make(rows: int) -> None:
    """On rank 1: make the rows, all in memory."""
    _held.append(torch.ones(rows, ROW_DIM))


def pull(ids: torch.Tensor) -> torch.Tensor:
    """On rank 1: return rows."""
    return _held[0][ids]


def push(ids: torch.Tensor, gradients: torch.Tensor) -> None:
    """On rank 1: add to rows."""
    _held[0].index_add_(0, ids, gradients)


def work(rows: int) -> dict[str, float]:
    """On rank 0: take times, and check the rows."""
    rpc.rpc_sync("rank1", make, args=(rows,))
    ids = torch.randperm(rows)[: rows // ROWS_PER_ID]
    gradients = torch.ones(len(ids), ROW_DIM)
    seconds: dict[str, float] = {}
    for name, function, args in (("pull", pull, (ids,)), ("push", push, (ids, gradients))):
        call = functools.partial(rpc.rpc_sync, "rank1", function, args=args)
        call()
        seconds[name] = timed(call, ROW_TURNS)
    assert (rpc.rpc_sync("rank1", pull, args=(ids,)) == 2 + ROW_TURNS).all(), "a row is wrong"
    return seconds


def main() -> None:
    rank, port, rows = map(int, sys.argv[1:4])
    torch.set_num_threads(1)
    where = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://127.0.0.1:{port}", rpc_timeout=_CALL_S
    )
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=2, rpc_backend_options=where)
    if rank == 0:
        print(json.dumps(work(rows)), flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    main()
