"""torch tensors: their entry of the table in ``pycoll.arrays.registry``."""

from __future__ import annotations

import sys
from typing import Any

from pycoll import _core
from pycoll.arrays.device_view import DeviceView, stand_in
from pycoll.errors import InvalidArgumentError
from pycoll.types import DType

Shape = tuple[int, ...]


class Torch:
    """Tensors in host memory and on CUDA devices.

    Gradients do not flow through the communicator. ``refuse_history`` refuses a tensor whose
    gradient would be lost.
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

    def refuse_history(self, x: Any, name: str) -> None:
        """Raise InvalidArgumentError for a tensor whose gradient a new result would lose."""
        if x.requires_grad and self.torch.is_grad_enabled():
            raise InvalidArgumentError(
                f"{name} requires grad, and no gradient flows through collectives of the core: "
                "call allreduce, allgather, broadcast, reducescatter or alltoall of pycoll.torch, "
                f"which differentiate; or pass {name}.detach(), or call within torch.no_grad()"
            )

    def view(self, x: Any, name: str) -> _core.BufferView:
        """Return the elements; on the host in C order. On a device the operation packs them."""
        plain = x.resolve_conj().resolve_neg() if self._lazy(x) else x
        view = self._export(plain, name)
        return view if x.is_cuda or view.contiguous else _core.packed(view)

    def out(self, out: Any, name: str) -> _core.BufferView:
        """Return the memory of ``out``, in its own order."""
        if self._lazy(out):
            raise InvalidArgumentError(
                f"{name} is a conjugated or negated view, not memory of its own: "
                f"pass {name}.resolve_conj().resolve_neg()"
            )
        return self._export(out, name)

    def empty(self, like: Any, shape: Shape, dtype: int) -> Any:
        """Return a new tensor on the device of ``like``."""
        return like.new_empty(shape, dtype=self.dtypes[dtype])

    def result(self, memory: Any) -> _core.BufferView:
        """Return the memory of a tensor from ``empty``."""
        return self._export(memory, "the result")

    def stream(self, x: Any) -> int:
        """Return torch's current stream of the device of ``x``."""
        return int(self.torch.cuda.current_stream(x.device).cuda_stream)

    def finish(self, like: Any, memory: Any) -> Any:
        """Return the tensor from ``empty``."""
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


def _device_view(x: Any, dtypes: dict[Any, int], name: str) -> DeviceView:
    """Return a view of a torch tensor on a CUDA device.

    It does not use ``__cuda_array_interface__``, which lacks some types.
    """
    item = x.element_size()
    return DeviceView(
        name,
        int(x.data_ptr()),
        tuple(x.shape),
        tuple(stride * item for stride in x.stride()),
        DType(dtypes[x.dtype]),
        writable=True,
        owner=x,
        ordinal=x.device.index,
    )
