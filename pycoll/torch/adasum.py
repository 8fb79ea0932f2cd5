"""Adasum: a sum that adapts to how much gradients agree.

Of two gradients a and b, what they have in common counts once:

    (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b

so orthogonal gradients add up, and equal ones give their average. More ranks combine in pairs, then
pairs of pairs, which is why their number is a power of two.
"""

from __future__ import annotations

import torch

from pycoll.communicator import Communicator


def adasum(comm: Communicator, mine: torch.Tensor) -> torch.Tensor:
    """The adaptive sum of all ranks' tensors, with the same bits on every rank.

    ``mine`` is in one piece. Takes log2(size) exchanges of the whole tensor.
    """
    total = mine
    other = torch.empty_like(mine)
    distance = 1
    while distance < comm.size:
        peer = comm.rank ^ distance
        with comm.group():
            comm.isend(total, peer)
            comm.irecv(other, peer)
        low, high = (total, other) if comm.rank < peer else (other, total)
        total = combined(low, high)
        distance *= 2
    return total.clone() if total is mine else total


def combined(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The adaptive sum of two tensors; products are added up in float64."""
    wide_a, wide_b = a.double().flatten(), b.double().flatten()
    dot = torch.dot(wide_a, wide_b)
    squares_a, squares_b = torch.dot(wide_a, wide_a), torch.dot(wide_b, wide_b)
    share_a = 1 - dot / (2 * squares_a) if squares_a > 0 else 1.0
    share_b = 1 - dot / (2 * squares_b) if squares_b > 0 else 1.0
    return (share_a * wide_a + share_b * wide_b).reshape(a.shape).to(a.dtype)
