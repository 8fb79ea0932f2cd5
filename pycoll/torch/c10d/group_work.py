"""The Work handles of torch.distributed, implemented over those of pycoll."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Work as TorchWork

from pycoll.comm.work import Work
from pycoll.device.device_work import DeviceWork
from pycoll.errors import InvalidArgumentError, PycollError, TimeoutError
from pycoll.torch.c10d.watcher import Watcher


def translate_error(error: BaseException) -> BaseException:
    """The error that programs for torch catch in place of an error of pycoll.

    InvalidArgumentError, which is a ValueError, stays itself; other errors of pycoll become
    DistBackendError. Programs recognise a deadline by the words "Timed out" in the text.
    """
    if not isinstance(error, PycollError) or isinstance(error, InvalidArgumentError):
        return error
    prefix = "pycoll: Timed out at its deadline: " if isinstance(error, TimeoutError) else ""
    failure: BaseException = dist.DistBackendError(f"{prefix}{error}")
    failure.__cause__ = error
    return failure


class Pending(TorchWork):
    """An operation under way.

    ``works``: the Works of pycoll to wait for. ``finish`` runs once, after the last of them, in the
    thread that waits first. ``outputs``: the value of the future. ``source``: the sender of a
    receive, if it is known; else the Work returns it. Any thread may call any method.
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
        """Wait until the operation is done; a ``timeout`` of 0 means no limit.

        Raises DistBackendError if the operation fails or the timeout passes.
        """
        seconds = timeout.total_seconds() if timeout else 0.0
        self._settle(seconds if seconds > 0 else None)
        if self._error is not None:
            raise self._error
        return True

    def settle(self) -> None:
        """Wait, then complete the future. A failure is set in the future and not raised."""
        self._settle(None)
        if self._error is None:
            self._future.set_result(self._outputs)
        else:
            self._future.set_exception(self._error)

    def is_completed(self) -> bool:
        """Whether it has ended. Its tensors have their values then, or wait() raises."""
        if not self._done and all(work.done() for work in list(self._works)):
            self._settle(None)
        return self._done

    def is_success(self) -> bool:
        """Whether it has ended without a failure."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Any:
        """The error of a failed operation, else None."""
        self.is_completed()
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The tensors it writes to."""
        return self._outputs

    def parts(self) -> list[Work]:
        """The Works that it still waits for."""
        return list(self._works)

    def synchronize(self) -> None:
        """Wait without a timeout."""
        self.wait()

    def source_rank(self) -> int:
        """The sender of a receive that has ended."""
        return self._source

    #: The name under which torch calls it.
    _source_rank = source_rank

    def get_future(self) -> Any:
        """A torch.futures.Future of the outputs; the same one every time."""
        with self._future_lock:
            if self._future is None:
                self._future = torch.futures.Future()
                self._watcher.watch(self, self._future)
        return self._future

    def _settle(self, timeout: float | None) -> None:
        """Wait for all Works and finish, once. After a timeout the wait can be repeated."""
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
                        raise translate_error(error) from error
                    self._error = translate_error(error)
                    self._done = True
                    return
                self._works.pop(0)
                if isinstance(told, int):  # a receive from any rank returns its sender
                    self._source = told
        finally:
            self._lock.release()

    def _run_finish(self) -> None:
        try:
            if self._finish is not None:
                self._finish()
        except BaseException as error:
            self._error = translate_error(error)


class Launched(Pending):
    """An operation on CUDA tensors: streams wait for it, and the host does not.

    Each call of wait() makes the current stream of the caller wait. The future is complete at once,
    as futures of torch for devices are: reading its value makes the stream of the reader wait. The
    thread of the communicator detects failures, and the next call raises them.
    """

    _finished: Any = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Make the current stream wait for the operation; the host does not wait for the device."""
        with self._lock:
            try:
                self._join(timeout.total_seconds() if timeout else None)
            except BaseException as error:
                self._error = translate_error(error)
                raise self._error from error
        return True

    def is_completed(self) -> bool:
        """Whether the device has run the operation, or it failed."""
        try:
            return self._error is not None or all(work.done() for work in self._works)
        except Exception as error:
            self._error = translate_error(error)
            return True

    def get_future(self) -> Any:
        """A torch.futures.Future of the outputs; the same one every time."""
        with self._future_lock:
            if self._future is None:
                device = self._outputs[0].device
                self._future = torch.futures.Future(devices=[device])
                # A new stream, so that the future depends on this operation alone.
                with torch.cuda.stream(torch.cuda.Stream(device)):
                    self.settle()
        return self._future

    def _settle(self, timeout: float | None) -> None:
        with self._lock:
            try:
                self._join(timeout)
            except BaseException as error:
                self._error = translate_error(error)

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
    """The handle of an operation: ``Launched`` if its Works are on a device, else ``Pending``."""
    on_device = any(isinstance(work, DeviceWork) for work in works)
    return (Launched if on_device else Pending)(works, outputs, watcher, finish, source)


def completed_handle(outputs: list[torch.Tensor], watcher: Watcher) -> Pending:
    """The handle of an operation that has already run."""
    return Pending([], outputs, watcher)
