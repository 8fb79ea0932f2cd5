"""Run ready tasks, and handle failures of this rank alone.

Once a task is ready, the other ranks run it. So a failure here is one of three:

    pycoll refuses a tensor      nothing has been sent, so the runner tries again with copies. If
                                 pycoll refuses the copies too, the reason is equal on all ranks,
                                 and the task fails on all ranks
    torch cannot make a tensor   this rank leaves the world, and the other ranks get an error that
                                 says so: they are inside the task and cannot complete it
    a result cannot be stored    the task fails on this rank only: the other ranks have its result
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pycoll.comm.communicator import Communicator
from pycoll.errors import InvalidArgumentError, PycollError
from pycoll.torch.horovod.horovod_errors import HorovodInternalError
from pycoll.torch.horovod.streams import Streams, run_in_order
from pycoll.torch.horovod.tasks import AllReduce, Lists, Task
from pycoll.torch.memory.storages import SharedStorages


class Runner:
    """Runs the tasks of a controller, in one thread at a time.

    ``ranks``: the global rank of each rank of ``comm``.
    """

    def __init__(self, comm: Communicator, ranks: Sequence[int]) -> None:
        self._comm = comm
        self._rank = ranks[comm.rank]
        self._storages = SharedStorages() if comm.shares_arrays else None
        self._streams: Streams = {}
        #: Whether tasks may have tensors on devices.
        self.on_devices = False

    def reduce(self, batch: list[AllReduce]) -> list[tuple[Task, Any]]:
        """Run all-reduces as one list; return each task with its result.

        A task that failed on this rank alone has its error set, and the result None. Raises
        InvalidArgumentError, equal on all ranks, where nothing was reduced.
        """
        if not self.on_devices:
            return self._reduce_batch(batch)
        with run_in_order(batch, self._streams):
            return self._reduce_batch(batch)

    def run(self, task: Task) -> Any:
        """Run any other task and return its result; None if the task has an error instead."""
        if not self.on_devices:
            return self._run(task)
        with run_in_order([task], self._streams):
            return self._run(task)

    def _reduce_batch(self, batch: list[AllReduce]) -> list[tuple[Task, Any]]:
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
                self._note_put_error(task, error)
            results.append((task, result))
        return results

    def _reduce(self, batch: list[AllReduce], enter: Callable[[AllReduce, Lists], None]) -> None:
        """Prepare all tasks, then reduce. Errors of preparation come before any message is sent."""
        lists: Lists = {}
        for task in batch:
            try:
                enter(task, lists)
            except Exception as error:
                raise self._run_error(task, error) from error
        if self._storages is not None:
            for sources, targets in lists.values():
                for source, target in zip(sources, targets, strict=True):
                    if source is target:
                        self._storages.move_own(target)
        if len(lists) == 1:
            for word, (sources, targets) in lists.items():
                self._comm.all_reduce(sources, word, out=targets)
            return
        with self._comm.group():
            for word, (sources, targets) in lists.items():
                self._comm.all_reduce(sources, word, out=targets)

    def _run(self, task: Task) -> Any:
        try:
            found = task.run(self._comm)
        except (PycollError, ValueError):
            raise
        except Exception as error:
            raise self._run_error(task, error) from error
        try:
            return task.put(found) if task.puts else found
        except Exception as error:
            self._note_put_error(task, error)
            return None

    def _run_error(self, task: Task, error: Exception) -> HorovodInternalError:
        return HorovodInternalError(
            f"rank {self._rank} left, since {task.key} failed there: {error}"
        )

    def _note_put_error(self, task: Task, error: Exception) -> None:
        task.error = HorovodInternalError(
            f"{task.key} ran, but rank {self._rank} could not put its result in place: {error}"
        )
        task.error.__cause__ = error
