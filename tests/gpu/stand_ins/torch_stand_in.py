"""What the backend of torch.distributed sees of CUDA tensors, with a torch that has no CUDA.

A CudaTensor says that it is on a device, and its memory is the driver's. What torch does to it runs
on the host, behind all that the rank's current stream holds by then; so whoever reads a tensor that
the stream was not ordered behind reads what was there before. Streams, events and futures of
devices are those of the driver, under torch's names.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from jax_stand_in import Event
from torch.utils._pytree import tree_map

from pycoll.tools.bench import cuda

DEVICE = torch.device("cuda", 0)
#: What a torch with CUDA says of such a tensor.
_ANSWERS = {
    torch.Tensor.device.__get__: DEVICE,  # type: ignore[attr-defined]  # a slot of C's
    torch.Tensor.is_cuda.__get__: True,  # type: ignore[attr-defined]
}
#: These read no element.
_LOOKS = {
    *(torch.Tensor.detach, torch.Tensor.view, torch.Tensor.stride, torch.Tensor.data_ptr),
    *(torch.Tensor.is_contiguous, torch.Tensor.numel, torch.Tensor.is_conj, torch.Tensor.is_neg),
    *(torch.Tensor.element_size, torch.Tensor.untyped_storage, torch.Tensor.t),
    torch.Tensor.shape.__get__,  # type: ignore[attr-defined]
    torch.Tensor.dtype.__get__,  # type: ignore[attr-defined]
    torch.Tensor.layout.__get__,  # type: ignore[attr-defined]
    torch.Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_sparse.__get__,  # type: ignore[attr-defined]
}
_held: list[tuple[cuda.Array, Event]] = []
_KINDS = (torch.float64, torch.float32, torch.int64, torch.uint8)
_BYTES = {kind: str(kind).removeprefix("torch.") for kind in _KINDS}


def _current() -> cuda.Stream:
    stream = cuda.current()
    assert stream is not None
    return stream


class CudaTensor(torch.Tensor):
    """A tensor over memory of the driver."""

    plain: torch.Tensor
    memory: cuda.Array

    @staticmethod
    def over(plain: torch.Tensor, memory: cuda.Array) -> CudaTensor:
        made: Any = torch.Tensor._make_subclass(CudaTensor, plain, False)
        made.plain, made.memory = plain, memory
        return made  # type: ignore[no-any-return]

    def record_stream(self, stream: Any) -> None:
        """The stand-in's allocator knows streams by the arrays that they were made on; to hold this
        one until the stream has come here is the same for whoever looks."""
        _held.append((self.memory, Event(stream.cuda_stream)))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ANSWERS:
            return _ANSWERS[func]
        words = kwargs or {}
        given: list[CudaTensor] = []

        def bare(one: Any) -> Any:
            if isinstance(one, CudaTensor):
                given.append(one)
                return one.plain
            return one

        args, words = tree_map(bare, (args, words))
        if func not in _LOOKS:
            _current().synchronize()
        return tree_map(lambda one: _wrapped(one, given), func(*args, **words))


def _wrapped(found: Any, given: list[CudaTensor]) -> Any:
    """A result: one of the arguments, a view of it, or new memory on the device."""
    if not isinstance(found, torch.Tensor) or isinstance(found, CudaTensor):
        return found
    for one in given:
        if found is one.plain:
            return one
        if found.untyped_storage().data_ptr() == one.plain.untyped_storage().data_ptr():
            return CudaTensor.over(found, one.memory)
    return on_device(found)


def on_device(values: torch.Tensor) -> CudaTensor:
    """The values in new memory of the device, put there in the current stream."""
    memory = cuda.Array((values.numel(),), _BYTES[values.dtype])
    if not memory.nbytes:
        return CudaTensor.over(torch.empty_like(values), memory)
    memory.put(values.contiguous().view(-1).numpy())
    space = (ctypes.c_byte * memory.nbytes).from_address(memory.address)
    plain = torch.frombuffer(space, dtype=values.dtype).view(values.shape)
    return CudaTensor.over(plain, memory)


def read(tensor: torch.Tensor) -> torch.Tensor:
    """Its values, behind what the current stream holds."""
    assert isinstance(tensor, CudaTensor)
    _current().synchronize()
    return tensor.plain.clone()


class StreamStandIn:
    """torch.cuda.Stream."""

    def __init__(self, device: Any = None, made: cuda.Stream | None = None) -> None:
        self.made = made or cuda.Stream()
        self.cuda_stream = self.made.number

    def record_event(self) -> Event:
        return Event(self.cuda_stream)

    def wait_event(self, event: Event) -> None:
        event.hold(self.cuda_stream)

    def synchronize(self) -> None:
        self.made.synchronize()


class FutureStandIn:
    """torch.futures.Future of devices: whoever takes its value lets his stream wait."""

    def __init__(self, devices: list[torch.device]) -> None:
        assert devices == [DEVICE]

    def set_result(self, value: Any) -> None:
        self._value, self.ready = value, Event(_current().number)

    def wait(self) -> Any:
        self.ready.hold(_current().number)
        return self._value

    value = wait

    def then(self, callback: Callable[[FutureStandIn], Any]) -> FutureStandIn:
        """As torch: the callback runs on a stream of its own, here at once."""
        made = FutureStandIn([DEVICE])
        with cuda.Stream():
            made.set_result(callback(self))
        return made


@contextmanager
def _on(stream: StreamStandIn) -> Iterator[None]:
    with stream.made:
        yield


@contextmanager
def stood_in() -> Iterator[None]:
    """torch.cuda and torch.futures are as above."""
    with (
        mock.patch.object(
            torch.cuda, "current_stream", lambda device=None: StreamStandIn(made=_current())
        ),
        mock.patch.object(torch.cuda, "Stream", StreamStandIn),
        mock.patch.object(torch.cuda, "stream", _on),
        mock.patch.object(torch.futures, "Future", FutureStandIn),
    ):
        yield
