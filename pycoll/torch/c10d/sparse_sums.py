"""all_reduce of sparse tensors: gathers the entries of all ranks and adds them."""

from __future__ import annotations

import torch

from pycoll.comm.communicator import Communicator


def reduce_sparse(comm: Communicator, tensor: torch.Tensor, word: str) -> None:
    """Sum or average COO tensors over all ranks, in place. ValueError for other reductions."""
    if word not in ("sum", "avg"):
        raise ValueError(f"op is {word}: sparse tensors support SUM and AVG")
    given = tensor.detach().coalesce()
    indices = comm.all_gather(given.indices().t().contiguous())
    values = comm.all_gather(given.values().contiguous())
    if word == "avg":
        values = values / comm.size
    total = torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=False)
    # Copies to ``tensor`` itself: a detached sparse tensor has entries of its own, so the caller
    # would not see a copy to it.
    with torch.no_grad():
        tensor.copy_(total.coalesce())
