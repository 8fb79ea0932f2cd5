"""Checks of splits in all_to_all; see c10d_checks, which takes them in."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch_ranks import raised


def rows(each: int) -> torch.Tensor:
    """``each`` rows for every rank, which tell whence and where."""
    size, rank = dist.get_world_size(), dist.get_rank()
    return (torch.arange(size).repeat_interleave(each) + 10 * rank).reshape(-1, 1)


def came(each: int) -> list[list[int]]:
    return [[10 * r + dist.get_rank()] for r in range(dist.get_world_size()) for _ in range(each)]


def check_rows_that_nobody_expects() -> None:
    """The last rank expects one row more of rank 0 and, the second time, one less of itself."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return
    even, last = [2] * size, size - 1
    more = [3, *even[1:]]
    for wrong in (more, [3, *even[1:-1], 1]):
        wanted = wrong if rank == last else even
        output = torch.full((sum(wanted), 1), -1)
        told = f"rank 0 sends 2 rows to rank {last}, which expects 3"
        text = raised(ValueError, dist.all_to_all_single, output, rows(2), wanted, even)
        assert told in text, text
        outputs = list(output.split(wanted))
        text = raised(ValueError, dist.all_to_all, outputs, list(rows(2).split(even)))
        assert told in text and torch.all(output == -1), text
    found = torch.empty_like(rows(2))
    dist.all_to_all_single(found, rows(2))
    assert found.tolist() == came(2)


def check_one_kind_of_sizes_is_enough() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for others in (1, 2, 3):
        found, even = torch.empty_like(rows(2)), [2] * size
        mine = others if rank == 0 else 3
        dist.all_to_all_single(
            found, rows(2), even if mine & 1 else None, even if mine & 2 else None
        )
        assert found.tolist() == came(2), others
    wrong = torch.empty(2 * size, 2, dtype=torch.int64)
    assert "whose rows are not those of input" in raised(
        ValueError, dist.all_to_all_single, wrong, rows(2)
    )
    one = torch.tensor(1)
    assert "whose rows" in raised(ValueError, dist.all_to_all_single, one, one)
    for name, value in (("input_split_sizes", [2] * size), ("output_split_sizes", [1] * size)):
        words = {"input_split_sizes": [1] * size, "output_split_sizes": [1] * size, name: value}
        output = torch.empty((size if name[0] == "i" else 2 * size, 1), dtype=torch.int64)
        text = raised(ValueError, dist.all_to_all_single, output, rows(1), **words)
        assert f"{name} add up to {sum(value)}, but" in text, text
