"""Tasks: the operations on tensors, one class per operation, as data for the controller.

The caller makes and checks a task. The ranks negotiate it by its key and terms, and the controllers
run it in the same order on all ranks. ``fused`` tasks run in two halves: ``enter`` appends their
tensors to lists, each of which is reduced as one, and ``leave`` follows the reduction.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pycoll.comm.communicator import Communicator
from pycoll.torch.horovod.adasum import adasum
from pycoll.torch.horovod.scaled_ops import WORDS, Adasum, Average, ReduceOp, Sum, scale_tensor
from pycoll.torch.horovod.streams import Order, order_of

if TYPE_CHECKING:
    from pycoll.torch.horovod.controller import Controller

Tensors = Sequence[torch.Tensor]
#: The sources and targets of fused reductions, by the name of the reduction in pycoll.
Lists = dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]]


class Task:
    """One operation of this rank. ``result`` or ``error`` is set before ``done`` is."""

    kind = "task"
    terms: str
    fused = False
    #: Whether ``put`` has to run after ``run``.
    puts = False
    # Class attributes hold the values that most tasks keep, since steps make many tasks.
    key = ""
    passing = False
    #: Whether to warn if the task waits for long, and whether the negotiation has warned.
    warns = True
    stalled = False
    #: The controller that it was submitted to, which sets ``done`` and wakes waiting callers.
    home: Controller | None = None
    #: For tensors on a device: the order of streams, and the tensors.
    order: Order | None = None
    given: Tensors = ()
    done = False
    result: Any = None
    error: BaseException | None = None

    def __init__(self, terms: str, given: Tensors = ()) -> None:
        self.terms = terms
        self.order, self.given = order_of(given), given

    def run(self, comm: Communicator) -> Any:
        """Do all communication. Steps that may fail on this rank alone come before the first."""
        raise AssertionError("a subclass of Task implements run()")

    def put(self, found: Any) -> Any:
        """Make the result from that of ``run``. A failure here does not affect other ranks."""
        raise AssertionError("a subclass of Task with puts implements put()")


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, contiguous and without autograd history; its own memory where possible."""
    return tensor.detach().contiguous()


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of the tensor, of a form that pycoll always accepts."""
    source = tensor.detach().resolve_conj().resolve_neg()
    return source.clone(memory_format=torch.contiguous_format)


def _kind_of(tensors: Tensors) -> dict[str, Any]:
    return {
        "dtype": [str(one.dtype).removeprefix("torch.") for one in tensors],
        "device": sorted({one.device.type for one in tensors}),
    }


def _terms(tensors: Tensors, first_axis: bool, **more: Any) -> str:
    """The facts that must be equal on all ranks, as JSON.

    Without ``first_axis`` the number of rows may differ. Raises ValueError for tensors on devices
    that pycoll does not support.
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
    """The facts that follow from shapes, dtypes and devices of tensors, and their reduction."""

    terms: str
    nbytes: int
    on_device: bool


_LOOKS_MAX = 8192
_REDUCTIONS_MAX = 256


class Reduction:
    """A reduction with its scale factors, shared by many tensors; made by ``reduction_of``.

    The result is the inputs times ``prescale``, combined by ``word``, times ``postscale``.
    """

    def __init__(self, op: ReduceOp, prescale: float, postscale: float) -> None:
        self.op, self.prescale, self.postscale = op, prescale, postscale
        self.fused = op is not Adasum
        self.word = WORDS.get(op, "")
        #: Cached, since steps reduce the same tensors again, and writing the terms dominates the
        #: cost of making a task.
        self._looks: dict[Any, _Look] = {}

    def look_of(self, tensors: Tensors) -> _Look:
        """The facts about these tensors, from the cache where possible."""
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
    """The shared Reduction of these arguments."""
    key = (op, prescale, postscale)
    found = _reductions.get(key)
    if found is None:
        if len(_reductions) >= _REDUCTIONS_MAX:
            _reductions.clear()
        found = _reductions[key] = Reduction(op, prescale, postscale)
    return found


def _place(value: torch.Tensor, output: torch.Tensor) -> None:
    """Copy ``value`` to ``output``.

    The caller may have made the output in inference mode and have left that mode since.
    """
    if not output.is_inference() or torch.is_inference_mode_enabled():
        output.detach().copy_(value)
        return
    with torch.inference_mode():
        output.detach().copy_(value)


def _is_ready(tensor: torch.Tensor) -> bool:
    """Whether a tensor can be reduced in place without preparation."""
    return tensor.is_contiguous() and not tensor.requires_grad


class AllReduce(Task):
    """Combine tensors element by element; ``outputs`` may be the inputs themselves."""

    kind = "allreduce"
    puts = True

    def __init__(self, inputs: Tensors, outputs: Tensors, reduction: Reduction) -> None:
        # Does not call super().__init__(), since a program makes far more of these tasks than of
        # others. ``nbytes``: the length of the message.
        self.terms, self.nbytes, on_device = reduction.look_of(inputs)
        if on_device:
            self.order, self.given = order_of(inputs), [*inputs, *outputs]
        self.fused = reduction.fused
        self._inputs, self._outputs, self._reduction = inputs, outputs, reduction
        self._held: Tensors = ()

    @classmethod
    def of_zeros(cls, terms: str) -> AllReduce:
        """The task of a joined rank, which contributes zeros."""
        told = json.loads(terms)
        zeros = [
            torch.zeros(shape, dtype=getattr(torch, dtype), device=told["device"][0])
            for shape, dtype in zip(told["shape"], told["dtype"], strict=True)
        ]
        scales = told["prescale_factor"], told["postscale_factor"]
        return cls(zeros, zeros, reduction_of(ReduceOp[told["op"]], *scales))

    def enter(self, lists: Lists) -> None:
        """Append every tensor to the list of its reduction."""
        reduction = self._reduction
        found = lists.get(reduction.word)
        if found is None:
            found = lists[reduction.word] = [], []
        sources, targets = found
        outputs = self._outputs
        if self._inputs is outputs and reduction.prescale == 1.0 and all(map(_is_ready, outputs)):
            # The common case: gradients that need no preparation.
            sources += outputs
            targets += outputs
            self._held = outputs
            return
        self._held = held = []
        for given, output in zip(self._inputs, outputs, strict=True):
            source = scale_tensor(plain(given), reduction.prescale)
            target = output.detach()
            if not target.is_contiguous():
                target = torch.empty_like(source)
            same = source.data_ptr() == target.data_ptr()
            sources.append(target if same else source)
            targets.append(target)
            held.append(target)

    def enter_apart(self, lists: Lists) -> None:
        """``enter`` with copies of the tensors."""
        sources, targets = lists.setdefault(self._reduction.word, ([], []))
        self._held = [scale_tensor(_apart(one), self._reduction.prescale) for one in self._inputs]
        sources += self._held
        targets += self._held

    def leave(self) -> Tensors:
        """After the reduction: scale, store and return the outputs."""
        scale = self._reduction.postscale
        outputs, held, self._held = self._outputs, self._held, ()
        if held is outputs and scale == 1.0:
            return outputs
        for reduced, output in zip(held, outputs, strict=True):
            value = scale_tensor(reduced, scale)
            if value.data_ptr() != output.data_ptr():
                _place(value, output)
        return outputs

    def run(self, comm: Communicator) -> list[torch.Tensor]:
        """Run alone: Adasum is a sequence of messages, not a collective."""
        sources = [scale_tensor(plain(one), self._reduction.prescale) for one in self._inputs]
        return [adasum(comm, one) for one in sources]

    def put(self, found: list[torch.Tensor]) -> list[torch.Tensor]:
        """Store the results in the outputs."""
        for value, output in zip(found, self._outputs, strict=True):
            _place(scale_tensor(value, self._reduction.postscale), output)
        return list(self._outputs)


class AllGather(Task):
    """Join tensors along axis 0; gives the tensors and the rows of every rank in each."""

    kind = "allgather"

    def __init__(self, inputs: Tensors) -> None:
        super().__init__(_terms(inputs, False), inputs)
        self._inputs = inputs

    def run(self, comm: Communicator) -> tuple[list[torch.Tensor], list[list[int]]]:
        """Exchange all lengths at once, then gather the tensors."""
        sources = [plain(one) for one in self._inputs]
        mine = torch.tensor([[len(one) if one.dim() else 1 for one in sources]], device="cpu")
        rows = comm.all_gather(mine, lengths=[1] * comm.size).t().tolist()
        joined = [
            comm.all_gather(one, lengths=lengths)
            for one, lengths in zip(sources, rows, strict=True)
        ]
        return joined, rows


class Broadcast(Task):
    """Copy the tensor of the root to all ranks; ``output`` may be the input itself.

    ``root`` is a rank of the communicator, ``name`` the same rank in the world.
    """

    kind = "broadcast"
    puts = True

    def __init__(self, given: torch.Tensor, output: torch.Tensor, root: int, name: int) -> None:
        super().__init__(_terms([given], True, root_rank=name), [given, output])
        self._given, self._output, self._root = given, output, root

    def run(self, comm: Communicator) -> torch.Tensor:
        """Receive in the output itself where it is contiguous."""
        source, target = plain(self._given), self._output.detach()
        if not target.is_contiguous() or target.is_conj() or target.is_neg():
            target = torch.empty_like(source)
        elif source.data_ptr() == target.data_ptr():
            source = target
        return comm.broadcast(source, self._root, out=target)

    def put(self, found: torch.Tensor) -> torch.Tensor:
        """Store the result in the output, unless it was received there."""
        if found.data_ptr() != self._output.data_ptr():
            _place(found, self._output)
        return self._output


class AllToAll(Task):
    """Send rows to every rank; gives the received rows and their number from each rank."""

    kind = "alltoall"

    def __init__(self, given: torch.Tensor, splits: list[int]) -> None:
        super().__init__(_terms([given], False), [given])
        self._given, self._splits = given, splits

    def run(self, comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        """Send the splits first, so that every rank knows the number of rows that it receives."""
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
        """Reduce one tensor after the other."""
        how = self._reduction
        sources = [scale_tensor(plain(one), how.prescale) for one in self._inputs]
        return [comm.reduce_scatter(one, how.word) for one in sources]

    def put(self, found: list[torch.Tensor]) -> list[torch.Tensor]:
        """Scale the results."""
        return [scale_tensor(one, self._reduction.postscale) for one in found]


class Barrier(Task):
    """A barrier: its negotiation alone, which ends when all ranks have called."""

    kind = "barrier"
    terms = "{}"

    def __init__(self) -> None:
        """A barrier has constant terms."""

    def run(self, comm: Communicator) -> None:
        """Do nothing: all ranks have already called."""


class Collective(Task):
    """A function of the communicator that all ranks call together, such as making a process set."""

    kind = "collective"

    def __init__(self, terms: dict[str, Any], function: Callable[[Communicator], Any]) -> None:
        super().__init__(json.dumps(terms))
        self._function = function

    def run(self, comm: Communicator) -> Any:
        """Call the function and return its result."""
        return self._function(comm)
