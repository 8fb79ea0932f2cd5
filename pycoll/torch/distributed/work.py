"""Handles of torch.distributed over those of pycoll."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work as TorchWork

from pycoll.device_work import DeviceWork
from pycoll.errors import InvalidArgumentError, PycollError, TimeoutError
from pycoll.torch.distributed.watcher import Watcher
from pycoll.work import Work


def translated(error: BaseException) -> BaseException:
    """What torch's programs catch for an error of pycoll: DistBackendError, or ValueError.

    Programs tell a deadline from other failures by the words "Timed out" in the text.
    """
    if not isinstance(error, PycollError) or isinstance(error, InvalidArgumentError):
        return error
    prefix = "pycoll: Timed out at its deadline: " if isinstance(error, TimeoutError) else ""
    failure: BaseException = dist.DistBackendError(f"{prefix}{error}")
    failure.__cause__ = error
    return failure


class Pending(TorchWork):
    """An operation under way.

    ``finish`` runs once, after the last of ``works``, in the thread that waits first; ``outputs``
    are what the future gives. ``source``: of a receive whose sender is known; else its Work tells.
    Any thread may call any method.
    """

    def __init__(
        self,
        works: Sequence[Work],
        outputs: list[torch.Tensor],
        watcher: Watcher,
        finish: Callable[[], None] | None = None,
        source: int = -1,
    ) -> None:
        super().__init__()
        self._works = list(works)
        self._outputs = outputs
        self._watcher = watcher
        self._finish = finish
        self._source = source
        self._lock = threading.Lock()
        self._future_lock = threading.Lock()
        self._done = False
        self._error: BaseException | None = None
        self._future: Any = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until it is done. DistBackendError if it fails or ``timeout`` passes; 0 is no limit."""
        seconds = timeout.total_seconds() if timeout else 0.0
        self._settle(seconds if seconds > 0 else None)
        if self._error is not None:
            raise self._error
        return True

    def settle(self) -> None:
        """Wait, and complete the future; a failure goes into the future only."""
        self._settle(None)
        if self._error is None:
            self._future.set_result(self._outputs)
        else:
            self._future.set_exception(self._error)

    def is_completed(self) -> bool:
        """Whether it has ended; its tensors have their values then, or wait() raises."""
        if not self._done and all(work.done() for work in list(self._works)):
            self._settle(None)
        return self._done

    def is_success(self) -> bool:
        """Whether it is done and has not failed."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Any:
        """Why it failed, if it did."""
        self.is_completed()
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The tensors it writes to."""
        return self._outputs

    def parts(self) -> list[Work]:
        """What it waits for."""
        return list(self._works)

    def synchronize(self) -> None:
        """As wait()."""
        self.wait()

    def source_rank(self) -> int:
        """For a receive, when it has ended: whom it is from."""
        return self._source

    #: The same as torch asks for it.
    _source_rank = source_rank

    def get_future(self) -> Any:
        """A torch.futures.Future of the outputs; the same one every time."""
        with self._future_lock:
            if self._future is None:
                self._future = torch.futures.Future()
                self._watcher.watch(self, self._future)
        return self._future

    def _settle(self, timeout: float | None) -> None:
        """Wait for all parts and finish, once. A wait that was too short can be repeated."""
        if not self._lock.acquire(timeout=-1 if timeout is None else timeout):
            text = f"pycoll: Timed out after {timeout:g} s: the operation is not done"
            raise dist.DistBackendError(text)
        try:
            while not self._done:
                if not self._works:
                    self._run_finish()
                    self._done = True
                    return
                try:
                    told = self._works[0].wait(timeout)
                except BaseException as error:
                    if timeout is not None and not self._works[0].done():
                        raise translated(error) from error
                    self._error = translated(error)
                    self._done = True
                    return
                self._works.pop(0)
                if isinstance(told, int):  # of receives from anybody
                    self._source = told
        finally:
            self._lock.release()

    def _run_finish(self) -> None:
        try:
            if self._finish is not None:
                self._finish()
        except BaseException as error:
            self._error = translated(error)


class Launched(Pending):
    """An operation on CUDA tensors: streams wait for it, and the host does not.

    wait() lets the caller's current stream wait, as often as it is called. The future is complete
    at once, for torch's futures of devices are: whoever takes its value lets his stream wait.
    Failures are found by the communicator's thread, and raised by what is called then.
    """

    _finished: Any = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Order the current stream behind it; the host waits for nothing, whatever ``timeout``."""
        with self._lock:
            try:
                self._join(timeout.total_seconds() if timeout else None)
            except BaseException as error:
                self._error = translated(error)
                raise self._error from error
        return True

    def is_completed(self) -> bool:
        """Whether the device has run it, or it failed."""
        try:
            return self._error is not None or all(work.done() for work in self._works)
        except Exception as error:
            self._error = translated(error)
            return True

    def get_future(self) -> Any:
        """A torch.futures.Future of the outputs; the same one every time."""
        with self._future_lock:
            if self._future is None:
                device = self._outputs[0].device
                self._future = torch.futures.Future(devices=[device])
                # A stream that waits for nothing else.
                with torch.cuda.stream(torch.cuda.Stream(device)):
                    self.settle()
        return self._future

    def _settle(self, timeout: float | None) -> None:
        with self._lock:
            try:
                self._join(timeout)
            except BaseException as error:
                self._error = translated(error)

    def _join(self, timeout: float | None) -> None:
        for work in self._works:
            work.wait(timeout or None)
        if self._finish is None:
            return
        stream = torch.cuda.current_stream(self._outputs[0].device)
        if self._finished is None:
            self._finish()
            self._finished = stream.record_event()
        else:
            stream.wait_event(self._finished)


def pending(
    works: Sequence[Work],
    outputs: list[torch.Tensor],
    watcher: Watcher,
    finish: Callable[[], None] | None = None,
    source: int = -1,
) -> Pending:
    """The handle for operations of one kind."""
    on_device = any(isinstance(work, DeviceWork) for work in works)
    return (Launched if on_device else Pending)(works, outputs, watcher, finish, source)


def completed(outputs: list[torch.Tensor], watcher: Watcher) -> Pending:
    """A work whose operation has run already."""
    return Pending([], outputs, watcher)
