"""Runs tasks that are settled, and tells apart what fails on this rank alone.

Once a task is settled the other ranks run it, so a failure here is one of three:

    pycoll refuses a tensor   before anything travels: again, by copies. If these are refused, then
                              for what is alike on all ranks, and the task fails on all
    torch cannot make one     this rank leaves, and the others are told that it did: they are in the
                              task, and have nothing to go on with
    a result cannot be put    the task fails here alone: the others have its result
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pycoll.communicator import Communicator
from pycoll.errors import InvalidArgumentError, PycollError
from pycoll.torch.errors import HorovodInternalError
from pycoll.torch.storages import SharedStorages
from pycoll.torch.streams import Streams, ordered
from pycoll.torch.tasks import AllReduce, Lists, Task


class Runner:
    """What a coordinator runs tasks by, in one thread at a time; ``ranks`` are as there."""

    def __init__(self, comm: Communicator, ranks: Sequence[int]) -> None:
        self._comm = comm
        self._rank = ranks[comm.rank]
        self._storages = SharedStorages() if comm.shares_arrays else None
        self._streams: Streams = {}
        #: Whether there may be tensors on devices.
        self.on_devices = False

    def reduced(self, batch: list[AllReduce]) -> list[tuple[Task, Any]]:
        """All-reduces as one list: with their results, or with an error and None.

        Raises InvalidArgumentError, alike on all ranks, where nothing was reduced.
        """
        if not self.on_devices:
            return self._reduced(batch)
        with ordered(batch, self._streams):
            return self._reduced(batch)

    def ran(self, task: Task) -> Any:
        """The result of any other task; None if the task has an error instead."""
        if not self.on_devices:
            return self._ran(task)
        with ordered([task], self._streams):
            return self._ran(task)

    def _reduced(self, batch: list[AllReduce]) -> list[tuple[Task, Any]]:
        try:
            self._reduce(batch, AllReduce.enter)
        except InvalidArgumentError:
            self._reduce(batch, AllReduce.enter_apart)
        results: list[tuple[Task, Any]] = []
        for task in batch:
            result = None
            try:
                result = task.leave()
            except Exception as error:
                self._note_not_put(task, error)
            results.append((task, result))
        return results

    def _reduce(self, batch: list[AllReduce], enter: Callable[[AllReduce, Lists], None]) -> None:
        """All that was found wrong is found before anything is reduced."""
        lists: Lists = {}
        for task in batch:
            try:
                enter(task, lists)
            except Exception as error:
                raise self._not_run(task, error) from error
        if self._storages is not None:
            for sources, targets in lists.values():
                for source, target in zip(sources, targets, strict=True):
                    if source is target:
                        self._storages.settle_own(target)
        if len(lists) == 1:
            for word, (sources, targets) in lists.items():
                self._comm.all_reduce(sources, word, out=targets)
            return
        with self._comm.group():
            for word, (sources, targets) in lists.items():
                self._comm.all_reduce(sources, word, out=targets)

    def _ran(self, task: Task) -> Any:
        try:
            found = task.run(self._comm)
        except (PycollError, ValueError):
            raise
        except Exception as error:
            raise self._not_run(task, error) from error
        try:
            return task.put(found) if task.puts else found
        except Exception as error:
            self._note_not_put(task, error)
            return None

    def _not_run(self, task: Task, error: Exception) -> HorovodInternalError:
        return HorovodInternalError(
            f"rank {self._rank} left, since {task.key} failed there: {error}"
        )

    def _note_not_put(self, task: Task, error: Exception) -> None:
        task.error = HorovodInternalError(
            f"{task.key} ran, but rank {self._rank} could not put its result in place: {error}"
        )
        task.error.__cause__ = error
