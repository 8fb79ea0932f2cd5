"""Check the split sizes of an all_to_all between the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pycoll.arrays.rows import check_rows
from pycoll.comm.communicator import Communicator


def is_uniform(
    comm: Communicator, sent: Sequence[int], expected: Sequence[int], rows: int, capacity: int
) -> bool:
    """Whether all ranks send equally many rows to all ranks, so that no splits are needed.

    Collective. ``sent`` and ``expected``: the number of rows to and from each rank. ``rows``: the
    rows of the input. ``capacity``: the rows of the output. Where a rank sends another number of
    rows than the receiver expects, all ranks raise the same ValueError before any row moves.
    """
    size = comm.size
    mine = check_rows(sent, "input_split_sizes", size)
    wanted = check_rows(expected, "output_split_sizes", size)
    for name, given, what, there in (
        ("input_split_sizes", mine, "input", rows),
        ("output_split_sizes", wanted, "output", capacity),
    ):
        if sum(given) != there:
            raise ValueError(f"{name} add up to {sum(given)}, but {what} has {there} rows")
    told = comm.all_gather(np.array(mine + wanted, np.int64), lengths=[2 * size] * size)
    table = told.reshape(size, 2, size)
    for source, target in np.argwhere(table[:, 0] != table[:, 1].T)[:1]:
        raise ValueError(
            f"all_to_all: rank {source} sends {table[source, 0, target]} rows to rank {target}, "
            f"which expects {table[target, 1, source]}"
        )
    return bool(np.all(table == table[0, 0, 0]))
