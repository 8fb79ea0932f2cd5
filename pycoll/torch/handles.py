"""Handles: operations under way, as the whole numbers that Horovod's programs pass around."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from pycoll.torch.process_sets import ProcessSet, coordinator_of
from pycoll.torch.tasks import Task
from pycoll.torch.world import waited

_numbers = itertools.count()
#: Only ever read and changed one entry at a time, which dicts do as a whole.
_tasks: dict[int, tuple[Task, Callable[[Any], Any]]] = {}


def started(
    task: Task, name: str | None, process_set: ProcessSet, finish: Callable[[Any], Any]
) -> int:
    """Submit a task; its handle gives ``finish(result)``."""
    coordinator_of(process_set).submit(task, name)
    number = next(_numbers)
    _tasks[number] = (task, finish)
    return number


def run(task: Task, name: str | None, process_set: ProcessSet) -> Any:
    """Submit a task and wait for its result."""
    coordinator_of(process_set).submit(task, name, waits=True)
    return waited(task)


def poll(handle: int) -> bool:
    """Whether synchronize(handle) would return at once. ValueError for what is no open handle."""
    found = _tasks.get(handle)
    if found is None:
        raise ValueError(f"handle is {handle!r}, which was never given out or is synchronized")
    return found[0].done


def synchronize(handle: int) -> Any:
    """Wait for an operation and return its result; None if that was done before.

    Raises HorovodInternalError where the operation failed.
    """
    found = _tasks.pop(handle, None)
    if found is None:
        return None
    task, finish = found
    if task.done and task.error is None and task.order is None:
        return finish(task.result)
    return finish(waited(task))
