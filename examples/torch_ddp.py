"""Trains a small transformer under torch's DistributedDataParallel with the backend "pycoll".

    pycoll run -n 2 examples/torch_ddp.py
    torchrun --nproc-per-node 2 examples/torch_ddp.py

The model learns to reverse a sequence of digits. The option --backend gloo runs the same program on
torch's own backend. The option --device cuda runs it on GPUs, which are assigned to ranks
round-robin.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycoll.torch  # noqa: F401  # registers the backend

DIGITS, LENGTH, WIDTH, BATCH = 10, 6, 64, 64


class Reverser(nn.Module):
    """Reads a sequence of digits and predicts the digit at every position of its reverse."""

    def __init__(self) -> None:
        super().__init__()
        self.digits = nn.Embedding(DIGITS, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) / 8)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.scores = nn.Linear(WIDTH, DIGITS)

    def forward(self, sequence: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.scores(self.layers(self.digits(sequence) + self.places))
        return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="pycoll")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = parser.parse_args()

    dist.init_process_group(options.backend)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = torch.device(options.device)
    if options.device == "cuda":
        device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    model = DistributedDataParallel(Reverser().to(device))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    random = torch.Generator().manual_seed(dist.get_rank())

    begin = time.perf_counter()
    for step in range(options.steps):
        sequence = torch.randint(DIGITS, (BATCH, LENGTH), generator=random).to(device)
        scores = model(sequence)
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), sequence.flip(1).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 50 == 49:
            print(f"step {step + 1}: loss {loss.item():.3f}")

    sequence = torch.randint(DIGITS, (500, LENGTH), generator=random).to(device)
    right = (model(sequence).argmax(2) == sequence.flip(1)).float().mean()
    dist.all_reduce(right, dist.ReduceOp.AVG)
    if dist.get_rank() == 0:
        seconds = time.perf_counter() - begin
        print(
            f"{dist.get_world_size()} ranks on {options.backend}: {right.item():.1%} right", end=""
        )
        print(f" after {options.steps} steps in {seconds:.1f} s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
