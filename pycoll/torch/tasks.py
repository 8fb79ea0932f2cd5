"""What there is to do with tensors: one class per operation, as data for the coordinator.

A task is made and checked by the caller, agreed upon by its key and terms, and run by the
coordinator's thread on all ranks in the same order. ``fused`` tasks run in two halves, ``enter``
within a group of the communicator and ``leave`` after it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pycoll.communicator import Communicator
from pycoll.torch.adasum import adasum
from pycoll.torch.ops import WORDS, Adasum, Average, ReduceOp, Sum, scaled

Tensors = Sequence[torch.Tensor]


class Task:
    """One operation of this rank. ``result`` or ``error`` is there once ``done`` is set."""

    kind = "task"
    fused = False

    def __init__(self, terms: dict[str, Any]) -> None:
        self.key = ""
        self.passing = False
        #: When whoever waits is to tell so, and whether that was told.
        self.warn_after_s: float | None = None
        self.stalled = False
        self.terms = json.dumps(terms)
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self, comm: Communicator) -> Any:
        """Do it, and give the result."""
        raise AssertionError("a kind of task says what it does")

    def complete(self, result: Any) -> None:
        """It has succeeded."""
        self.result = result
        self.done.set()

    def fail(self, error: BaseException) -> None:
        """It has failed."""
        self.error = error
        self.done.set()


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's values in one piece, without history; its own memory where that is possible."""
    return tensor.detach().contiguous()


def _kind_of(tensors: Tensors) -> dict[str, Any]:
    return {
        "dtype": [str(one.dtype).removeprefix("torch.") for one in tensors],
        "device": sorted({one.device.type for one in tensors}),
    }


def _terms(tensors: Tensors, first_axis: bool, **more: Any) -> dict[str, Any]:
    """What must be alike on all ranks; without ``first_axis`` rows may differ."""
    shapes = [list(one.shape) if first_axis else list(one.shape[1:]) for one in tensors]
    axes = {} if first_axis else {"dimensions": [one.dim() for one in tensors]}
    return {
        **axes,
        "shape" if first_axis else "shape of a row": shapes,
        **_kind_of(tensors),
        **more,
    }


class AllReduce(Task):
    """Combine tensors element by element; ``outputs`` may be the inputs themselves."""

    kind = "allreduce"

    def __init__(
        self, inputs: Tensors, outputs: Tensors, op: ReduceOp, prescale: float, postscale: float
    ) -> None:
        super().__init__(
            _terms(
                inputs,
                True,
                op=op.name,
                prescale_factor=prescale,
                postscale_factor=postscale,
                joinable=op in (Average, Sum),
            )
        )
        self.fused = op != Adasum
        #: What travels.
        self.nbytes = sum(one.numel() * one.element_size() for one in inputs)
        self._inputs, self._outputs = inputs, outputs
        self._op, self._prescale, self._postscale = op, prescale, postscale
        self._held: list[torch.Tensor] = []

    @classmethod
    def of_zeros(cls, terms: str) -> AllReduce:
        """What a joined rank gives."""
        told = json.loads(terms)
        zeros = [
            torch.zeros(shape, dtype=getattr(torch, dtype))
            for shape, dtype in zip(told["shape"], told["dtype"], strict=True)
        ]
        scales = told["prescale_factor"], told["postscale_factor"]
        return cls(zeros, zeros, ReduceOp[told["op"]], *scales)

    def enter(self, comm: Communicator) -> None:
        """Start every tensor's reduction in the group that is open."""
        word, _ = self._word_and_scale(comm.size)
        self._held = []
        for given, output in zip(self._inputs, self._outputs, strict=True):
            source = scaled(plain(given), self._prescale)
            target = output.detach()
            if not target.is_contiguous():
                target = torch.empty_like(source)
            same = source.data_ptr() == target.data_ptr()
            comm.all_reduce(target if same else source, word, out=target)
            self._held.append(target)

    def leave(self, size: int) -> list[torch.Tensor]:
        """After the group: scale, put in place, and give the outputs."""
        _, scale = self._word_and_scale(size)
        for held, output in zip(self._held, self._outputs, strict=True):
            value = scaled(held, scale)
            if value.data_ptr() != output.data_ptr():
                output.detach().copy_(value)
        self._held = []
        return list(self._outputs)

    def run(self, comm: Communicator) -> list[torch.Tensor]:
        """By itself: Adasum, which is no collective but a sequence of messages."""
        if self.fused:
            self.enter(comm)
            return self.leave(comm.size)
        for given, output in zip(self._inputs, self._outputs, strict=True):
            value = adasum(comm, scaled(plain(given), self._prescale))
            output.detach().copy_(scaled(value, self._postscale))
        return list(self._outputs)

    def _word_and_scale(self, size: int) -> tuple[str, float]:
        """The average is the engine's own where nothing else has to be multiplied anyway."""
        if self._op == Average and self._postscale != 1.0:
            return WORDS[Sum], self._postscale / size
        return WORDS[self._op], self._postscale


class AllGather(Task):
    """Join tensors along axis 0; gives the tensors and every rank's rows of each."""

    kind = "allgather"

    def __init__(self, inputs: Tensors) -> None:
        super().__init__(_terms(inputs, False))
        self._inputs = inputs

    def run(self, comm: Communicator) -> tuple[list[torch.Tensor], list[list[int]]]:
        """One exchange of all lengths, then the tensors."""
        mine = torch.tensor([[one.shape[0] if one.dim() else 1 for one in self._inputs]])
        rows = comm.all_gather(mine, lengths=[1] * comm.size).t().tolist()
        joined = [
            comm.all_gather(plain(one), lengths=lengths)
            for one, lengths in zip(self._inputs, rows, strict=True)
        ]
        return joined, rows


class Broadcast(Task):
    """The root's tensor for all; ``output`` may be the input itself. ``root`` counts in comm."""

    kind = "broadcast"

    def __init__(self, given: torch.Tensor, output: torch.Tensor, root: int, name: int) -> None:
        super().__init__(_terms([given], True, root_rank=name))
        self._given, self._output, self._root = given, output, root

    def run(self, comm: Communicator) -> torch.Tensor:
        """Straight into the output where it is in one piece."""
        source, target = plain(self._given), self._output.detach()
        if not target.is_contiguous():
            target.copy_(comm.broadcast(source, self._root))
        elif source.data_ptr() == target.data_ptr():
            comm.broadcast(target, self._root, out=target)
        else:
            comm.broadcast(source, self._root, out=target)
        return self._output


class AllToAll(Task):
    """Rows to every rank; gives the received rows and how many came from each."""

    kind = "alltoall"

    def __init__(self, given: torch.Tensor, splits: list[int]) -> None:
        super().__init__(_terms([given], False))
        self._given, self._splits = given, splits

    def run(self, comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        """The splits themselves go first, so that everybody knows what came."""
        received = comm.all_to_all(torch.tensor(self._splits, dtype=torch.int32))
        return comm.all_to_all(plain(self._given), self._splits), received


class ReduceScatter(Task):
    """Combine tensors and keep this rank's rows of each."""

    kind = "reducescatter"

    def __init__(self, inputs: Tensors, op: ReduceOp, prescale: float, postscale: float) -> None:
        super().__init__(
            _terms(inputs, True, op=op.name, prescale_factor=prescale, postscale_factor=postscale)
        )
        self._inputs, self._op = inputs, op
        self._prescale, self._postscale = prescale, postscale

    def run(self, comm: Communicator) -> list[torch.Tensor]:
        """One after the other."""
        word, scale = WORDS[self._op], self._postscale
        if self._op == Average and scale != 1.0:
            word, scale = WORDS[Sum], scale / comm.size
        return [
            scaled(comm.reduce_scatter(scaled(plain(one), self._prescale), word), scale)
            for one in self._inputs
        ]


class Barrier(Task):
    """Nothing but the agreement, which ends when all have come."""

    kind = "barrier"

    def __init__(self) -> None:
        super().__init__({})

    def run(self, comm: Communicator) -> None:
        """All are here already."""


class Collective(Task):
    """Something else that all ranks do at the same place, as making a process set."""

    kind = "collective"

    def __init__(self, terms: dict[str, Any], function: Callable[[Communicator], Any]) -> None:
        super().__init__(terms)
        self._function = function

    def run(self, comm: Communicator) -> Any:
        """What the function gives."""
        return self._function(comm)
