"""torch tensors: the row of the table in ``pycoll.arrays`` for them."""

from __future__ import annotations

import sys
from typing import Any

from pycoll import _core
from pycoll.device_view import DeviceView, stand_in
from pycoll.errors import InvalidArgumentError
from pycoll.types import DType

Shape = tuple[int, ...]


class Torch:
    """Tensors in host memory and on CUDA devices.

    Gradients do not flow through the core: ``refuse_history`` refuses the tensors that lose theirs.
    """

    def __init__(self) -> None:
        self.torch = torch = sys.modules["torch"]
        names = {DType.FLOAT8_E4M3: "float8_e4m3fn"}
        found = {dtype: getattr(torch, names.get(dtype, dtype.word), None) for dtype in DType}
        self.dtypes = {int(dtype): one for dtype, one in found.items() if one is not None}
        self.known = {one: dtype for dtype, one in self.dtypes.items()}
        self.capsule = torch.utils.dlpack.to_dlpack
        for kind in (torch.Tensor, torch.nn.Parameter):
            _core.learn_tensor(kind, torch.is_grad_enabled)
        _core.learn_negation(*negation_examples(torch))

    def refuse_history(self, x: Any, name: str) -> None:
        """InvalidArgumentError for a tensor whose gradient a new result would lose."""
        if x.requires_grad and self.torch.is_grad_enabled():
            raise InvalidArgumentError(
                f"{name} requires grad, and no gradient flows through collectives of the core: "
                "call allreduce, allgather, broadcast, reducescatter or alltoall of pycoll.torch, "
                f"which differentiate; or pass {name}.detach(), or call within torch.no_grad()"
            )

    def view(self, x: Any, name: str) -> _core.BufferView:
        """The elements, on the host in C order; a device packs by itself."""
        plain = x.resolve_conj().resolve_neg() if self._lazy(x) else x
        view = self._export(plain, name)
        return view if x.is_cuda or view.contiguous else _core.packed(view)

    def out(self, out: Any, name: str) -> _core.BufferView:
        """The memory as it is."""
        if self._lazy(out):
            raise InvalidArgumentError(
                f"{name} is a conjugated or negated view, not memory of its own: "
                f"pass {name}.resolve_conj().resolve_neg()"
            )
        return self._export(out, name)

    def empty(self, like: Any, shape: Shape, dtype: int) -> Any:
        """A tensor on the device of ``like``."""
        return like.new_empty(shape, dtype=self.dtypes[dtype])

    def result(self, memory: Any) -> _core.BufferView:
        """The memory of what ``empty`` gave."""
        return self._export(memory, "the result")

    def stream(self, x: Any) -> int:
        """torch's current stream of the tensor's device."""
        return int(self.torch.cuda.current_stream(x.device).cuda_stream)

    def finish(self, like: Any, memory: Any) -> Any:
        """The tensor itself."""
        return memory

    def _lazy(self, x: Any) -> bool:
        return bool(x.is_conj() or x.is_neg())

    def _export(self, x: Any, name: str) -> _core.BufferView:
        if x.device.type not in ("cpu", "cuda"):
            raise InvalidArgumentError(
                f"{name} is a torch tensor on {x.device}, whose memory pycoll does not reach: "
                f"pass {name}.cpu()"
            )
        if x.layout is not self.torch.strided:
            raise InvalidArgumentError(
                f"{name} is a torch tensor of layout {x.layout}: pass {name}.to_dense()"
            )
        if x.dtype not in self.known:
            words = ", ".join(dtype.word for dtype in DType)
            raise InvalidArgumentError(
                f"{name} has dtype {x.dtype}, which pycoll cannot move; it moves {words}"
            )
        plain = x.detach() if x.requires_grad else x
        if x.is_cuda:
            return stand_in(_device_view(plain, self.known, name))
        return _core.view(self.capsule(plain), name)


def negation_examples(torch: Any) -> tuple[list[Any], list[Any]]:
    """Tensors that differ in all but this: the first are as their memory says, the second negated.

    Only what torch promises makes them: the imaginary part of a conjugate is a negated view.
    """
    pairs = [torch.zeros(2, 3, dtype=torch.complex64), torch.ones(5, dtype=torch.complex128)]
    parts = [part for one in pairs for part in (one.real, one.imag, one.conj().real)]
    whole = [torch.zeros(1), torch.ones(4, dtype=torch.int64)[1:], torch.zeros(6)[::2]]
    learning = torch.zeros(2, requires_grad=True)
    plain = [*parts, *whole, torch.zeros(2, 3).T, torch.zeros(()), torch.zeros(0), learning]
    plain += [learning * 2, learning.detach(), torch.nn.Parameter(torch.ones(3)), *pairs]
    views = [one.conj().imag for one in pairs]
    negated = [*views, views[0].T, views[1][1:], views[0][0, 0], views[1].detach()]
    negated += [views[1][:0], views[0].as_strided((4,), (1,)), views[1].as_strided((3,), (1,), 0)]
    return plain, negated


def _device_view(x: Any, dtypes: dict[Any, int], name: str) -> DeviceView:
    """A torch tensor on a CUDA device, whose own interface does not know all types."""
    item = x.element_size()
    return DeviceView(
        name,
        int(x.data_ptr()),
        tuple(x.shape),
        tuple(stride * item for stride in x.stride()),
        DType(dtypes[x.dtype]),
        True,
        x,
        x.device.index,
    )
