"""ElasticSampler: shares the samples of a data set among a changing number of ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch

from pycoll.torch.horovod import horovod_world


class ElasticSampler(torch.utils.data.Sampler):
    """Iterates over this rank's share of the samples that no rank has processed in this epoch.

    Call ``record_batch`` after each batch and ``set_epoch`` at the end of each epoch. A sampler in
    a TorchState continues after a failure from the last commit. The shares of all ranks are equally
    long: where the number of ranks does not divide the samples, the first samples occur twice.

    Arguments: ``dataset``, any object with a length; ``shuffle``, whether each epoch has a random
    order; ``seed``, the seed of that order, equal on all ranks.

    Attributes: ``remaining_indices``, the samples that were left for all ``num_replicas`` ranks at
    the last ``reset``, in their order; ``num_samples``, the samples of this rank among these;
    ``total_size``, the samples of all ranks together.

    Errors: ValueError before ``hvd.init()``.

    Cost: a list of all indices in memory.

    >>> sampler = hvd.elastic.ElasticSampler(range(4), shuffle=False)
    >>> sampler.record_batch(0, 3)
    >>> sampler.reset()
    >>> list(sampler)
    [3]
    """

    def __init__(self, dataset: Any, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch with all samples; ``shuffle`` gives each epoch an order of its own."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that every rank has processed a batch of this size; ``batch_idx`` is ignored."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """The epoch and the number of samples that all ranks have processed in it."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue from a ``state_dict``."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Share the remaining samples among the ranks of the current world."""
        self.num_replicas, self.rank = horovod_world.size(), horovod_world.rank()
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
