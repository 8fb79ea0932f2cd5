"""Sparse tensors in all_reduce: everybody's entries are gathered and added up."""

from __future__ import annotations

import torch

from pycoll.communicator import Communicator


def reduce_sparse(comm: Communicator, tensor: torch.Tensor, word: str) -> None:
    """The sum or average of all ranks' COO tensors, in place. ValueError for other reductions."""
    if word not in ("sum", "avg"):
        raise ValueError(f"op is {word}: sparse tensors know SUM and AVG")
    given = tensor.detach().coalesce()
    indices = comm.all_gather(given.indices().t().contiguous())
    values = comm.all_gather(given.values().contiguous())
    if word == "avg":
        values = values / comm.size
    total = torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=False)
    # A detached sparse tensor has entries of its own, so that copying to it would be lost.
    with torch.no_grad():
        tensor.copy_(total.coalesce())
