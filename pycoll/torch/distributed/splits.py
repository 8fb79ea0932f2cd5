"""What ranks send each other in an all_to_all, and what they expect."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pycoll.communicator import Communicator
from pycoll.rows import check_rows


def is_uniform(
    comm: Communicator, sent: Sequence[int], expected: Sequence[int], rows: int, room: int
) -> bool:
    """Whether all ranks send equally many rows to all: then they need not be told of splits.

    Called by all ranks with the rows that go to and come from each, of ``rows`` that this one has
    and ``room`` that it has room for. Where what one rank sends is not what another expects, all
    raise the same ValueError, and nothing has moved.
    """
    size = comm.size
    mine = check_rows(sent, "input_split_sizes", size)
    wanted = check_rows(expected, "output_split_sizes", size)
    for name, given, what, there in (
        ("input_split_sizes", mine, "input", rows),
        ("output_split_sizes", wanted, "output", room),
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
