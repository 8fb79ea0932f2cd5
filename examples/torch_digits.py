"""Trains on scikit-learn's digits in a Horovod program; only the import names pycoll.

    pycoll run -n 2 examples/torch_digits.py

Every rank takes its share of each batch. pycoll averages the gradients while the backward pass
runs, so the loss equals that of one process with the whole batch, except for rounding. The option
--device cuda assigns the GPUs of a host to its ranks round-robin.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import pycoll.torch as hvd

BATCH = 240  # divides by the usual numbers of ranks


def data() -> tuple[TensorDataset, TensorDataset]:
    """The images and labels of the training set and of the test set."""
    digits = load_digits()
    images = torch.tensor(digits.data / 16.0, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1440], order[1440:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = parser.parse_args()

    hvd.init()
    torch.manual_seed(1 + hvd.rank())  # ranks start with different values until the broadcast
    torch.set_num_threads(1)
    device = torch.device(options.device)
    if options.device == "cuda":
        device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    train, test = data()
    sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(train, BATCH // hvd.size(), sampler=sampler)

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
        mean = hvd.allreduce(loss.detach(), name="loss").item()
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}: loss {mean:.3f}")

    # Every rank evaluates its share of the test set.
    images, labels = test[hvd.rank() :: hvd.size()]
    with torch.no_grad():
        right = (model(images.to(device)).argmax(1) == labels.to(device)).sum()
    share = hvd.allreduce(right, op=hvd.Sum, name="right").item() / len(test)
    if hvd.rank() == 0:
        print(f"{hvd.size()} ranks: {share:.1%} of {len(test)} unseen digits are right")


if __name__ == "__main__":
    main()
