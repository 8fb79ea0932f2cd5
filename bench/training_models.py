"""The models of bench/training.py: sets of gradients of known models, and small real models.

A set has the tensors of a model with their sizes and in their order, each in its own module. Its
backward pass only writes each gradient. Real models compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

Shape = tuple[int, ...]


class Task(NamedTuple):
    """A model, and a function that computes the loss of this rank's batch with the model or its
    wrapper."""

    model: nn.Module
    loss: Callable[[Callable[..., torch.Tensor]], torch.Tensor]

    @property
    def nbytes(self) -> int:
        """The bytes of all gradients."""
        return sum(p.numel() * p.element_size() for p in self.model.parameters())


class _Write(torch.autograd.Function):
    """Returns its first argument; the gradient of the second one is half of its values."""

    @staticmethod
    def forward(ctx: Any, passed: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(parameter)
        return passed.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (parameter,) = ctx.saved_tensors
        return grads[0], parameter * 0.5


class _Tensors(nn.Module):
    """Tensors that belong together, for example a weight and its bias."""

    def __init__(self, shapes: tuple[Shape, ...]) -> None:
        super().__init__()
        made = [nn.Parameter(torch.rand(shape) / math.prod(shape)) for shape in shapes]
        self.tensors = nn.ParameterList(made)

    def forward(self, passed: torch.Tensor) -> torch.Tensor:
        for parameter in self.tensors:
            passed = _Write.apply(passed, parameter)
        return passed


def gradient_set(groups: list[tuple[Shape, ...]], rank: int) -> Task:
    """Make a set of gradients from shapes in the order of the forward pass."""
    model = nn.Sequential(*(_Tensors(group) for group in groups))
    x = torch.full((1,), 1.0 + rank)
    return Task(model, lambda forward: forward(x).sum())


def resnet50() -> list[tuple[Shape, ...]]:
    """Return the shapes of ResNet-50: 161 tensors, 102 MB."""
    groups: list[tuple[Shape, ...]] = [((64, 3, 7, 7),), ((64,), (64,))]
    inner = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            ways = [(width, inner, 1), (width, width, 3), (4 * width, width, 1)]
            if block == 0:
                ways.append((4 * width, inner, 1))
            for out, into, side in ways:
                groups += [((out, into, side, side),), ((out,), (out,))]
            inner = 4 * width
    return [*groups, ((1000, 2048), (1000,))]


def bert_base() -> list[tuple[Shape, ...]]:
    """Return the shapes of BERT-Base: 197 tensors, 436 MB."""
    wide = 768
    norm = ((wide,), (wide,))
    linear = ((wide, wide), (wide,))
    layer = [linear] * 4 + [
        norm,
        ((4 * wide, wide), (4 * wide,)),
        ((wide, 4 * wide), (wide,)),
        norm,
    ]
    return [((30522, wide),), ((512, wide),), ((2, wide),), norm, *layer * 12]


def mlp(width: int, rank: int) -> Task:
    """Make a perceptron of three layers; it has 25 million parameters if they are 2900 wide."""
    model = nn.Sequential(
        *(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()),
        nn.Linear(width, width),
    )
    x = torch.rand(16, width, generator=torch.Generator().manual_seed(rank))
    return Task(model, lambda forward: forward(x).square().mean())


class _Transformer(nn.Module):
    def __init__(self, layers: int, width: int, words: int, length: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Embedding(length, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, words)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        x = self.words(rows) + self.places.weight[: rows.shape[1]]
        for layer in self.layers:
            x = layer(x)
        found: torch.Tensor = self.head(x)
        return found


def transformer(layers: int, width: int, rank: int) -> Task:
    """Make a transformer that predicts the next one of 1000 words."""
    words, length = 1000, 32
    model = _Transformer(layers, width, words, length)
    rows = torch.randint(0, words, (4, length + 1), generator=torch.Generator().manual_seed(rank))

    def loss(forward: Callable[..., torch.Tensor]) -> torch.Tensor:
        found = forward(rows[:, :-1])
        return nn.functional.cross_entropy(found.flatten(0, 1), rows[:, 1:].flatten())

    return Task(model, loss)


#: The functions that make a model for a rank, by the model's name.
TASKS: dict[str, Callable[[int], Task]] = {
    "ResNet-50, gradients": lambda rank: gradient_set(resnet50(), rank),
    "BERT-Base, gradients": lambda rank: gradient_set(bert_base(), rank),
    "MLP, 25 M": lambda rank: mlp(2900, rank),
    "transformer": lambda rank: transformer(6, 384, rank),
    # Small enough for a test.
    "few gradients": lambda rank: gradient_set(resnet50()[:20], rank),
    "small transformer": lambda rank: transformer(2, 32, rank),
}


def made(name: str, rank: int) -> Task:
    """Make the model with the same parameters on all ranks."""
    torch.manual_seed(1)
    return TASKS[name](rank)
