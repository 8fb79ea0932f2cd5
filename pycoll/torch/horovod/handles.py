"""Handles: the integers that stand for operations under way in the interface of Horovod."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from pycoll.torch.horovod.horovod_world import wait_for
from pycoll.torch.horovod.process_sets import ProcessSet, controller_of
from pycoll.torch.horovod.tasks import Task

_numbers = itertools.count()
#: The open handles. Threads read and change one entry at a time, which is atomic for a dict.
_tasks: dict[int, tuple[Task, Callable[[Any], Any]]] = {}


def start_task(
    task: Task, name: str | None, process_set: ProcessSet, finish: Callable[[Any], Any]
) -> int:
    """Submit a task; return a handle whose ``synchronize`` returns ``finish(result)``."""
    controller_of(process_set).submit(task, name)
    number = next(_numbers)
    _tasks[number] = (task, finish)
    return number


def run(task: Task, name: str | None, process_set: ProcessSet) -> Any:
    """Submit a task and wait for its result."""
    controller_of(process_set).submit(task, name, waits=True)
    return wait_for(task)


def poll(handle: int) -> bool:
    """Return whether ``synchronize(handle)`` would return at once.

    Arguments: ``handle``, the result of an operation whose name has ``_async``.

    Errors: ValueError for a value that is not an open handle.

    Cost: none; the call sends nothing.

    >>> handle = hvd.allreduce_async(torch.ones(2))
    >>> _ = hvd.synchronize(hvd.allreduce_async(torch.ones(2)))
    >>> hvd.poll(handle)  # operations end in their order
    True
    """
    found = _tasks.get(handle)
    if found is None:
        raise ValueError(f"handle is {handle!r}, which was never given out or is synchronized")
    return found[0].done


def synchronize(handle: int) -> Any:
    """Wait for an operation and return its result.

    Arguments: ``handle``, the result of an operation whose name has ``_async``.

    Result: that of the operation without ``_async``; None if the handle was synchronized before.
    For tensors on a device, the current stream waits for the operation, and the host does not wait
    for the device.

    Errors: HorovodInternalError where the operation failed.

    Cost: the rest of the operation.

    >>> handle = hvd.allreduce_async(torch.ones(2), name="loss")
    >>> hvd.synchronize(handle)
    tensor([1., 1.])
    """
    found = _tasks.pop(handle, None)
    if found is None:
        return None
    task, finish = found
    if task.done and task.error is None and task.order is None:
        return finish(task.result)
    return finish(wait_for(task))
