"""A worker that trains digits with the servers of its job; it prints a line of JSON."""

from __future__ import annotations

import json
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn

import pycoll.torch as hvd
from pycoll import ps

BATCH, RATE = 32, 0.1


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def trained(steps: int, rate: float, **words: Any) -> tuple[nn.Sequential, float]:
    """A network after steps on this rank's share, and the share of the test set that is right."""
    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    mine = torch.arange(300 + hvd.rank(), len(images), hvd.size())
    draw = torch.Generator().manual_seed(hvd.rank())
    net = network()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=rate, momentum=0.5),
        net.named_parameters(),
        architecture="ps",
        **words,
    )
    for _ in range(steps):
        batch = mine[torch.randint(len(mine), (BATCH,), generator=draw)]
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(images[batch]), labels[batch]).backward()
        optimizer.step()
    with torch.no_grad():
        right = net(images[:300]).argmax(1) == labels[:300]
    hvd.barrier()
    return net, float(right.double().mean())


def told(**words: Any) -> str:
    try:
        trained(1, RATE, **words)
    except (ValueError, hvd.HorovodInternalError) as error:
        return str(error)
    return "nothing"


def main() -> None:
    torch.set_num_threads(1)
    hvd.init()
    facts: dict[str, Any] = {}
    plain, _ = trained(20, RATE, policy="bsp")
    found, _ = trained(20, RATE, consistency="bsp")
    pairs = zip(found.parameters(), plain.parameters(), strict=True)
    alike = all(torch.equal(one, other) for one, other in pairs)
    facts["bits are those of the synchronous way"] = alike
    for consistency in ("asp", ps.SSP(2)):
        _, facts[str(consistency)] = trained(120, RATE, consistency=consistency)
    facts["differ"] = told(consistency="asp" if hvd.rank() else ps.SSP(2))
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
