"""What there is to do with tensors: one class per operation, as data for the coordinator.

A task is made and checked by the caller, agreed upon by its key and terms, and run by the
coordinator on all ranks in the same order. ``fused`` tasks run in two halves: ``enter`` puts their
tensors on lists, each of which is reduced as one, and ``leave`` comes after that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pycoll.communicator import Communicator
from pycoll.torch.adasum import adasum
from pycoll.torch.ops import WORDS, Adasum, Average, ReduceOp, Sum, scaled
from pycoll.torch.streams import Order, order_of

if TYPE_CHECKING:
    from pycoll.torch.coordinator import Coordinator

Tensors = Sequence[torch.Tensor]
#: Sources and targets of what is reduced together, by pycoll's word for the reduction.
Lists = dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]]


class Task:
    """One operation of this rank. ``result`` or ``error`` is there once ``done`` is set."""

    kind = "task"
    terms: str
    fused = False
    #: Whether anything is left to do when all has travelled.
    puts = False
    # These are what most tasks have for all their lives; steps make tasks by the hundred.
    key = ""
    passing = False
    #: Whether to tell that it waits for long, and whether that was told.
    warns = True
    stalled = False
    #: The coordinator that it was submitted to, which sets ``done`` and tells those who wait.
    home: Coordinator | None = None
    #: Of tensors on a device: which streams wait for which; and the tensors.
    order: Order | None = None
    given: Tensors = ()
    done = False
    result: Any = None
    error: BaseException | None = None

    def __init__(self, terms: str, given: Tensors = ()) -> None:
        self.terms = terms
        self.order, self.given = order_of(given), given

    def run(self, comm: Communicator) -> Any:
        """All that travels; what may fail on this rank alone comes before the first exchange."""
        raise AssertionError("a kind of task says what it does")

    def put(self, found: Any) -> Any:
        """The result, of what ``run`` gave; other ranks have theirs, whatever fails here."""
        raise AssertionError("a kind of task that puts says how")


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's values in one piece, without history; its own memory where that is possible."""
    return tensor.detach().contiguous()


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's values in memory of their own, which nobody can refuse."""
    source = tensor.detach().resolve_conj().resolve_neg()
    return source.clone(memory_format=torch.contiguous_format)


def _kind_of(tensors: Tensors) -> dict[str, Any]:
    return {
        "dtype": [str(one.dtype).removeprefix("torch.") for one in tensors],
        "device": sorted({one.device.type for one in tensors}),
    }


def _terms(tensors: Tensors, first_axis: bool, **more: Any) -> str:
    """What must be alike on all ranks; without ``first_axis`` rows may differ.

    ValueError for tensors where pycoll does not reach.
    """
    strange = [one for one in tensors if one.device.type not in ("cpu", "cuda")]
    if strange:
        raise ValueError(
            f"a tensor is on {strange[0].device}, whose memory pycoll does not reach: pass one in "
            "host memory or on a CUDA device"
        )
    shapes = [list(one.shape) if first_axis else list(one.shape[1:]) for one in tensors]
    axes = {} if first_axis else {"dimensions": [one.dim() for one in tensors]}
    terms = {
        **axes,
        "shape" if first_axis else "shape of a row": shapes,
        **_kind_of(tensors),
        **more,
    }
    return json.dumps(terms)


class _Look(NamedTuple):
    """What follows from tensors' looks and the words of their reduction."""

    terms: str
    nbytes: int
    on_device: bool


_LOOKS_MAX = 8192
_REDUCTIONS_MAX = 256


class Reduction:
    """How values are combined, the same for many tensors; by ``reduction_of``.

    Inputs times ``prescale``, combined as ``word`` says, times ``postscale``.
    """

    def __init__(self, op: ReduceOp, prescale: float, postscale: float) -> None:
        self.op, self.prescale, self.postscale = op, prescale, postscale
        self.fused = op is not Adasum
        self.word = WORDS.get(op, "")
        #: Steps have the same tensors again and again, and to write the terms is most of making a
        #: task.
        self._looks: dict[Any, _Look] = {}

    def look_of(self, tensors: Tensors) -> _Look:
        """What follows from the tensors' looks."""
        key: Any
        if len(tensors) == 1:
            one = tensors[0]
            key = (one.shape, one.dtype, one.device)
        else:
            key = tuple((one.shape, one.dtype, one.device) for one in tensors)
        look = self._looks.get(key)
        if look is None:
            if len(self._looks) >= _LOOKS_MAX:
                self._looks.clear()
            look = self._looks[key] = self._look(tensors)
        return look

    def _look(self, tensors: Tensors) -> _Look:
        terms = _terms(
            tensors,
            True,
            op=self.op.name,
            prescale_factor=self.prescale,
            postscale_factor=self.postscale,
            joinable=self.op in (Average, Sum),
        )
        nbytes = sum(one.numel() * one.element_size() for one in tensors)
        return _Look(terms, nbytes, tensors[0].is_cuda)


_reductions: dict[tuple[ReduceOp, float, float], Reduction] = {}


def reduction_of(op: ReduceOp, prescale: float = 1.0, postscale: float = 1.0) -> Reduction:
    """The one Reduction of these."""
    key = (op, prescale, postscale)
    found = _reductions.get(key)
    if found is None:
        if len(_reductions) >= _REDUCTIONS_MAX:
            _reductions.clear()
        found = _reductions[key] = Reduction(op, prescale, postscale)
    return found


def _place(value: torch.Tensor, output: torch.Tensor) -> None:
    """Copy; whoever made the output in inference mode may have left that meanwhile."""
    if not output.is_inference() or torch.is_inference_mode_enabled():
        output.detach().copy_(value)
        return
    with torch.inference_mode():
        output.detach().copy_(value)


def _is_ready(tensor: torch.Tensor) -> bool:
    """Whether a tensor can be reduced as it is."""
    return tensor.is_contiguous() and not tensor.requires_grad


class AllReduce(Task):
    """Combine tensors element by element; ``outputs`` may be the inputs themselves."""

    kind = "allreduce"
    puts = True

    def __init__(self, inputs: Tensors, outputs: Tensors, reduction: Reduction) -> None:
        # Without super().__init__(): of all tasks these are made most often by far. nbytes: of what
        # travels.
        self.terms, self.nbytes, on_device = reduction.look_of(inputs)
        if on_device:
            self.order, self.given = order_of(inputs), [*inputs, *outputs]
        self.fused = reduction.fused
        self._inputs, self._outputs, self._reduction = inputs, outputs, reduction
        self._held: Tensors = ()

    @classmethod
    def of_zeros(cls, terms: str) -> AllReduce:
        """What a joined rank gives."""
        told = json.loads(terms)
        zeros = [
            torch.zeros(shape, dtype=getattr(torch, dtype), device=told["device"][0])
            for shape, dtype in zip(told["shape"], told["dtype"], strict=True)
        ]
        scales = told["prescale_factor"], told["postscale_factor"]
        return cls(zeros, zeros, reduction_of(ReduceOp[told["op"]], *scales))

    def enter(self, lists: Lists) -> None:
        """Put every tensor on the list of its reduction."""
        reduction = self._reduction
        found = lists.get(reduction.word)
        if found is None:
            found = lists[reduction.word] = [], []
        sources, targets = found
        outputs = self._outputs
        if self._inputs is outputs and reduction.prescale == 1.0 and all(map(_is_ready, outputs)):
            # Most of what steps reduce: nothing has to be made of it.
            sources += outputs
            targets += outputs
            self._held = outputs
            return
        self._held = held = []
        for given, output in zip(self._inputs, outputs, strict=True):
            source = scaled(plain(given), reduction.prescale)
            target = output.detach()
            if not target.is_contiguous():
                target = torch.empty_like(source)
            same = source.data_ptr() == target.data_ptr()
            sources.append(target if same else source)
            targets.append(target)
            held.append(target)

    def enter_apart(self, lists: Lists) -> None:
        """As ``enter``, by copies."""
        sources, targets = lists.setdefault(self._reduction.word, ([], []))
        self._held = [scaled(_apart(one), self._reduction.prescale) for one in self._inputs]
        sources += self._held
        targets += self._held

    def leave(self) -> Tensors:
        """After the reduction: scale, put in place, and give the outputs."""
        scale = self._reduction.postscale
        outputs, held, self._held = self._outputs, self._held, ()
        if held is outputs and scale == 1.0:
            return outputs
        for reduced, output in zip(held, outputs, strict=True):
            value = scaled(reduced, scale)
            if value.data_ptr() != output.data_ptr():
                _place(value, output)
        return outputs

    def run(self, comm: Communicator) -> list[torch.Tensor]:
        """By itself: Adasum, which is no collective but a sequence of messages."""
        sources = [scaled(plain(one), self._reduction.prescale) for one in self._inputs]
        return [adasum(comm, one) for one in sources]

    def put(self, found: list[torch.Tensor]) -> list[torch.Tensor]:
        """Into the outputs."""
        for value, output in zip(found, self._outputs, strict=True):
            _place(scaled(value, self._reduction.postscale), output)
        return list(self._outputs)


class AllGather(Task):
    """Join tensors along axis 0; gives the tensors and every rank's rows of each."""

    kind = "allgather"

    def __init__(self, inputs: Tensors) -> None:
        super().__init__(_terms(inputs, False), inputs)
        self._inputs = inputs

    def run(self, comm: Communicator) -> tuple[list[torch.Tensor], list[list[int]]]:
        """One exchange of all lengths, then the tensors."""
        sources = [plain(one) for one in self._inputs]
        mine = torch.tensor([[len(one) if one.dim() else 1 for one in sources]], device="cpu")
        rows = comm.all_gather(mine, lengths=[1] * comm.size).t().tolist()
        joined = [
            comm.all_gather(one, lengths=lengths)
            for one, lengths in zip(sources, rows, strict=True)
        ]
        return joined, rows


class Broadcast(Task):
    """The root's tensor for all; ``output`` may be the input itself. ``root`` counts in comm."""

    kind = "broadcast"
    puts = True

    def __init__(self, given: torch.Tensor, output: torch.Tensor, root: int, name: int) -> None:
        super().__init__(_terms([given], True, root_rank=name), [given, output])
        self._given, self._output, self._root = given, output, root

    def run(self, comm: Communicator) -> torch.Tensor:
        """Straight into the output where it is in one piece."""
        source, target = plain(self._given), self._output.detach()
        if not target.is_contiguous() or target.is_conj() or target.is_neg():
            target = torch.empty_like(source)
        elif source.data_ptr() == target.data_ptr():
            source = target
        return comm.broadcast(source, self._root, out=target)

    def put(self, found: torch.Tensor) -> torch.Tensor:
        """Into the output, where it is not there."""
        if found.data_ptr() != self._output.data_ptr():
            _place(found, self._output)
        return self._output


class AllToAll(Task):
    """Rows to every rank; gives the received rows and how many came from each."""

    kind = "alltoall"

    def __init__(self, given: torch.Tensor, splits: list[int]) -> None:
        super().__init__(_terms([given], False), [given])
        self._given, self._splits = given, splits

    def run(self, comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        """The splits themselves go first, so that everybody knows what came."""
        source = plain(self._given)
        received = comm.all_to_all(torch.tensor(self._splits, dtype=torch.int32, device="cpu"))
        return comm.all_to_all(source, self._splits), received


class ReduceScatter(Task):
    """Combine tensors and keep this rank's rows of each."""

    kind = "reducescatter"
    puts = True

    def __init__(self, inputs: Tensors, how: Reduction) -> None:
        scales = {"prescale_factor": how.prescale, "postscale_factor": how.postscale}
        super().__init__(_terms(inputs, True, op=how.op.name, **scales), inputs)
        self._inputs, self._reduction = inputs, how

    def run(self, comm: Communicator) -> list[torch.Tensor]:
        """One after the other."""
        how = self._reduction
        sources = [scaled(plain(one), how.prescale) for one in self._inputs]
        return [comm.reduce_scatter(one, how.word) for one in sources]

    def put(self, found: list[torch.Tensor]) -> list[torch.Tensor]:
        """Scaled."""
        return [scaled(one, self._reduction.postscale) for one in found]


class Barrier(Task):
    """Nothing but the agreement, which ends when all have come."""

    kind = "barrier"
    terms = "{}"

    def __init__(self) -> None:
        """There is nothing to say."""

    def run(self, comm: Communicator) -> None:
        """All are here already."""


class Collective(Task):
    """Something else that all ranks do at the same place, as making a process set."""

    kind = "collective"

    def __init__(self, terms: dict[str, Any], function: Callable[[Communicator], Any]) -> None:
        super().__init__(json.dumps(terms))
        self._function = function

    def run(self, comm: Communicator) -> Any:
        """What the function gives."""
        return self._function(comm)
