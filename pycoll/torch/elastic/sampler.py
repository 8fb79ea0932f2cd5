"""A data set's samples, shared among however many ranks there are."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch

from pycoll.torch import world


class ElasticSampler(torch.utils.data.Sampler):
    """This rank's share of a data set, less what all ranks have had in this epoch.

    ``record_batch`` after each batch, ``set_epoch`` at the end of each epoch. A sampler in a
    TorchState goes on after a failure where the last commit was. The shares are equally long: the
    first samples come twice where the number of ranks does not divide.

    ``remaining_indices`` are what was left for all ``num_replicas`` ranks at the last ``reset``, in
    their order; of them ``num_samples`` come here, ``total_size`` to all ranks together.
    """

    def __init__(self, dataset: Any, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch with all samples, in an order of its own."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Every rank has had a batch of this size."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """How far it has come."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on from there."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Share what is left among the ranks that there are now."""
        self.num_replicas, self.rank = world.size(), world.rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        left = self.remaining_indices
        missing = self.total_size - len(left)
        every = left + (left * missing)[:missing]
        self.indices = every[self.rank :: self.num_replicas]
        return iter(list(self.indices))

    def __len__(self) -> int:
        return self.num_samples
