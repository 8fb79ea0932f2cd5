"""Order tasks on CUDA tensors: the controller runs them in streams of its own.

    caller's stream         |--makes x--|  event                waits for the end |--reads x--|
    controller's stream                    |..waits..|--reduction--|  event

So no host thread blocks. The result is ready for the stream that is current in ``synchronize``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

#: The streams of a controller, by device.
Streams = dict[torch.device, Any]


class Order:
    """The stream order of one task: it waits for its tensors, and readers wait for its result."""

    def __init__(self, device: torch.device) -> None:
        """Make the task wait for the work that the current stream holds now."""
        self.device = device
        self._ready = torch.cuda.current_stream(device).record_event()
        self._ended: Any = None

    def hold(self) -> None:
        """Make the current stream wait until the tensors of the task are ready."""
        torch.cuda.current_stream(self.device).wait_event(self._ready)

    def end(self, tensors: Sequence[torch.Tensor]) -> None:
        """Record the end of the task, whose work the current stream holds.

        Keeps the memory of ``tensors``, which the task uses, until then.
        """
        stream = torch.cuda.current_stream(self.device)
        self._ended = stream.record_event()
        for one in tensors:
            one.record_stream(stream)

    def receive(self, result: Any) -> None:
        """Make the current stream wait for the end of the task, and keep the memory of ``result``.

        ``result``: the result of the task.
        """
        if self._ended is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(self._ended)
            for one in _tensors_in(result):
                one.record_stream(stream)


def _tensors_in(result: Any) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        if result.is_cuda:
            yield result
    elif isinstance(result, list | tuple):
        for one in result:
            yield from _tensors_in(one)


def order_of(tensors: Sequence[torch.Tensor]) -> Order | None:
    """The order of a task on these tensors; None for tensors in host memory."""
    first = tensors[0] if tensors else None
    return Order(first.device) if first is not None and first.is_cuda else None


@contextmanager
def run_in_order(tasks: Sequence[Any], streams: Streams) -> Iterator[None]:
    """Run the tasks inside ``with``, in one of ``streams`` where they are on a device."""
    orders = [task.order for task in tasks if task.order is not None]
    if not orders:
        yield
        return
    device = orders[0].device
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)
    with torch.cuda.stream(streams[device]):
        for order in orders:
            order.hold()
        yield
        for task in tasks:
            if task.order is not None:
                task.order.end(task.given)
