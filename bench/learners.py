"""The tasks that bench/accuracy.py and bench/time_to_loss.py train, and the methods they compare.

Digits are scikit-learn's 1,797 images of 8 x 8 points, which a perceptron of two layers learns.
Characters are those of the texts of Python's help (pydoc_data.topics), a part of the standard
library; a transformer predicts the next one. Each rank has a share of the data of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from pycoll.compress import BF16, Block, Codec, Feedback, PowerSGD, Sign, TopK
from pycoll.optim import DiLoCo

#: Images that are not trained with.
_TEST_IMAGES = 597
_DIGITS_BATCH = 32
#: Every other character of the text becomes the last of the alphabet's numbers.
_ALPHABET = " abcdefghijklmnopqrstuvwxyz0123456789.,:;()[]_'\"-="
#: Characters that are trained with, and those behind them, which are not.
_TEXT, _TEST_TEXT = 360_000, 40_000


class Task(NamedTuple):
    """A model with equal parameters on all ranks, and this rank's data."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    #: The loss of this rank's next batch.
    loss: Callable[[], torch.Tensor]
    #: The share of right predictions, and the loss, on data that no rank trains with. The argument
    #: has other values for the parameters, or is None.
    score: Callable[[Sequence[torch.Tensor] | None], tuple[float, float]]

    @property
    def nbytes(self) -> int:
        """The bytes of all gradients."""
        return sum(one.numel() * one.element_size() for one in self.model.parameters())


class Shape(NamedTuple):
    """The sizes of a transformer, and the sequences of a batch on each rank."""

    layers: int
    width: int
    length: int
    batch: int


SMALL = Shape(1, 32, 32, 8)
WIDE = Shape(4, 128, 32, 4)


def digits(seed: int, rank: int, size: int) -> Task:
    """Make the task of the digits; ``seed`` decides parameters, batches and the test images."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.data / 16.0, dtype=torch.float32)
    labels = torch.tensor(found.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    test, train = order[:_TEST_IMAGES], order[_TEST_IMAGES:][rank::size]
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    chosen = torch.Generator().manual_seed(1000 * seed + rank)

    def loss() -> torch.Tensor:
        batch = train[torch.randint(len(train), (_DIGITS_BATCH,), generator=chosen)]
        return nn.functional.cross_entropy(model(images[batch]), labels[batch])

    score = _scored(model, images[test], labels[test])
    return Task(model, torch.optim.SGD(model.parameters(), lr=0.5), loss, score)


class Characters(nn.Module):
    """Predicts, for each character of a sequence, the next one."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, letters = shape.width, len(_ALPHABET) + 1
        self.letters = nn.Embedding(letters, width)
        self.places = nn.Parameter(torch.randn(shape.length, width) / 8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(shape.layers)
        )
        self.norm, self.scores = nn.LayerNorm(width), nn.Linear(width, letters)
        mask = nn.Transformer.generate_square_subsequent_mask(shape.length)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the scores of all characters as the next one, at each place."""
        x = self.letters(rows) + self.places
        for layer in self.layers:
            x = layer(x, src_mask=self.mask, is_causal=True)
        found: torch.Tensor = self.scores(self.norm(x))
        return found.flatten(0, 1)


def text() -> torch.Tensor:
    """Return the numbers of the first characters of Python's help, its topics by name."""
    from pydoc_data.topics import topics

    words = (word for name in sorted(topics) for word in topics[name].lower().split())
    numbers = {letter: number for number, letter in enumerate(_ALPHABET)}
    found = " ".join(words)[: _TEXT + _TEST_TEXT]
    return torch.tensor([numbers.get(letter, len(_ALPHABET)) for letter in found])


def characters(
    seed: int, rank: int, size: int, shape: Shape = SMALL, tests: int = 128, adam: float = 0.0
) -> Task:
    """Make the task of the characters; it is scored on ``tests`` sequences.

    ``adam``: the learning rate of Adam; 0 stands for plain SGD, which suits all codecs.
    """
    every = text()
    share = _TEXT // size
    mine = every[rank * share : (rank + 1) * share]
    starts = torch.linspace(0, _TEST_TEXT - shape.length - 1, tests).long()
    unseen = _rows(every[_TEXT:], starts, shape.length)
    torch.manual_seed(seed)
    model = Characters(shape)
    chosen = torch.Generator().manual_seed(1000 * seed + rank)

    def loss() -> torch.Tensor:
        begin = torch.randint(share - shape.length - 1, (shape.batch,), generator=chosen)
        rows = _rows(mine, begin, shape.length)
        return nn.functional.cross_entropy(model(rows[:, :-1]), rows[:, 1:].flatten())

    score = _scored(model, unseen[:, :-1], unseen[:, 1:].flatten())
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if adam:
        optimizer = torch.optim.Adam(model.parameters(), lr=adam)
    return Task(model, optimizer, loss, score)


def _rows(numbers: torch.Tensor, starts: torch.Tensor, length: int) -> torch.Tensor:
    """Return a row of ``length`` characters, and the next one, from each start on."""
    return numbers[starts[:, None] + torch.arange(length + 1)]


def _scored(
    model: nn.Module, inputs: torch.Tensor, wanted: torch.Tensor
) -> Callable[[Sequence[torch.Tensor] | None], tuple[float, float]]:
    names = [name for name, _ in model.named_parameters()]

    def score(values: Sequence[torch.Tensor] | None = None) -> tuple[float, float]:
        with torch.no_grad():
            if values is None:
                found = model(inputs)
            else:
                held = dict(zip(names, values, strict=True))
                found = torch.func.functional_call(model, held, (inputs,))
            right = (found.argmax(1) == wanted).double().mean()
            return float(right), float(nn.functional.cross_entropy(found, wanted))

    return score


# Methods


class Averaging:
    """Steps by the average of all ranks' gradients; they travel as codes if there is a codec."""

    def __init__(
        self, comm: Any, optimizer: torch.optim.Optimizer, codec: Codec | None, keeps: bool
    ) -> None:
        self._comm, self._optimizer, self._codec = comm, optimizer, codec
        self._parameters = [one for group in optimizer.param_groups for one in group["params"]]
        #: None without a codec, or where ``keeps`` is False.
        self.feedback = Feedback() if keeps and codec is not None else None

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self._optimizer.zero_grad()

    def step(self) -> None:
        """Average the gradients, then step. Collective."""
        gradients = [one.grad for one in self._parameters]
        self._comm.all_reduce(
            gradients, "avg", out=gradients, compress=self._codec, feedback=self.feedback
        )
        self._optimizer.step()

    def finish(self) -> None:
        """Do nothing: all ranks have equal parameters after each step."""


class Method(NamedTuple):
    """A way to train on all ranks: averages of gradients, or DiLoCo."""

    codec: Codec | None = None
    keeps: bool = True
    #: Arguments of DiLoCo; None for averages of gradients.
    diloco: Mapping[str, Any] | None = None

    def wrapped(self, comm: Any, optimizer: torch.optim.Optimizer) -> Any:
        """Return an object with ``zero_grad``, ``step`` and ``finish``."""
        if self.diloco is not None:
            return DiLoCo(optimizer, **self.diloco, comm=comm)
        return Averaging(comm, optimizer, self.codec, self.keeps)


METHODS = {
    "float32": Method(),
    "bf16": Method(BF16(), keeps=False),
    "int8": Method(Block("int8")),
    "int4": Method(Block("int4")),
    "sign": Method(Sign()),
    "top-k 1 %": Method(TopK(0.01)),
    "top-k 1 %, no feedback": Method(TopK(0.01), keeps=False),
    "PowerSGD 2": Method(PowerSGD(2)),
    "DiLoCo": Method(diloco={"every": 20, "outer": {"lr": 0.7, "momentum": 0.6, "nesterov": True}}),
}


def common(stepper: Any) -> Sequence[torch.Tensor] | None:
    """Return the parameters that all ranks have in common, where they are not those of the model.

    ``stepper``: as ``Method.wrapped`` returns it.
    """
    state = getattr(stepper, "local_state", None)
    found: Sequence[torch.Tensor] | None = None if state is None else state.anchors
    return found
