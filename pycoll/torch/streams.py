"""CUDA tensors in tasks: the coordinator's thread is not the caller's, and has streams of its own.

    caller's stream   |--makes x--|  event                     waits for the end |--reads x--|
    a stream of ours                 |..waits..|--reduction--|  event

So nothing blocks a host, and a result is there for the stream that is current in ``synchronize``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

#: A coordinator's streams, by device.
Streams = dict[torch.device, Any]


class Order:
    """What one task's tensors have to wait for, and what has to wait for them."""

    def __init__(self, device: torch.device) -> None:
        """Behind what the current stream holds now."""
        self.device = device
        self._ready = torch.cuda.current_stream(device).record_event()
        self._ended: Any = None

    def hold(self) -> None:
        """Let the current stream wait until the tensors are there."""
        torch.cuda.current_stream(self.device).wait_event(self._ready)

    def end(self, tensors: Sequence[torch.Tensor]) -> None:
        """The current stream holds the task's work, which these tensors are needed for."""
        stream = torch.cuda.current_stream(self.device)
        self._ended = stream.record_event()
        for one in tensors:
            one.record_stream(stream)

    def receive(self, result: Any) -> None:
        """Let the current stream wait for the task's work, which has given ``result``."""
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
    """None for tensors in host memory."""
    first = tensors[0] if tensors else None
    return Order(first.device) if first is not None and first.is_cuda else None


@contextmanager
def ordered(tasks: Sequence[Any], streams: Streams) -> Iterator[None]:
    """The tasks' work is done within, in one of ``streams`` where it is on a device."""
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
