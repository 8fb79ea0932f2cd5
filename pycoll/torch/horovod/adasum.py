"""Adasum: a sum that adapts to the angle between gradients.

The Adasum of two gradients a and b counts their common direction once:

    (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b

Orthogonal gradients add up, and equal gradients give their average. More ranks combine in pairs,
then pairs of pairs, so their number must be a power of two.

Source: Maleki et al., "Scaling Distributed Training with Adaptive Summation" (2020).
"""

from __future__ import annotations

import torch

from pycoll.comm.communicator import Communicator


def adasum(comm: Communicator, mine: torch.Tensor) -> torch.Tensor:
    """The Adasum of the tensors of all ranks, with the same bits on every rank.

    ``mine`` must be contiguous, and the number of ranks a power of two. Cost: log2(size) exchanges
    of the whole tensor.
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
        total = combine(low, high)
        distance *= 2
    return total.clone() if total is mine else total


def combine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The Adasum of two tensors; the arithmetic is done in float64."""
    wide_a, wide_b = a.double().flatten(), b.double().flatten()
    dot = torch.dot(wide_a, wide_b)
    squares_a, squares_b = torch.dot(wide_a, wide_a), torch.dot(wide_b, wide_b)
    share_a = 1 - dot / (2 * squares_a) if squares_a > 0 else 1.0
    share_b = 1 - dot / (2 * squares_b) if squares_b > 0 else 1.0
    return (share_a * wide_a + share_b * wide_b).reshape(a.shape).to(a.dtype)
