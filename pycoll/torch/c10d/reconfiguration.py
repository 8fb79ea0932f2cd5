"""A process group whose members change: torch's ``reconfigure``, from torch 2.14 on."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.recovery.regrouping import Regrouping
from pycoll.comm.communicator import Communicator
from pycoll.comm.start_tuning import tuning_text
from pycoll.config import Config
from pycoll.errors import PycollError
from pycoll.torch.c10d.group_work import Pending, completed_handle, translate_error
from pycoll.torch.c10d.other_backends import NAME, Origin, named_backends
from pycoll.torch.c10d.process_group import PycollProcessGroup
from pycoll.torch.c10d.watcher import Watcher


class ReconfigurableGroup(PycollProcessGroup):
    """A group made with ``enable_reconfigure=True``; it has no communicator until reconfigure().

    A coordinator, such as torchft's, collects the handles of the members and gives each of them the
    same list with a new uuid. Until then, and after abort(), collectives raise DistBackendError.
    One thread at a time calls reconfigure() and abort().
    """

    supports_reconfigure = True

    def __init__(self, rank: int, size: int, config: Config, origin: Origin) -> None:
        self._comm: Communicator | None = None
        self._place = rank, size
        self._why = "it has not been configured yet"
        self._seconds = origin.timeout.total_seconds()
        self._regrouping = Regrouping(config)
        super()._begin(rank, size, origin)

    @property
    def communicator(self) -> Communicator:
        """The communicator of the present members. Raises DistBackendError where there is none."""
        if self._comm is None:
            raise dist.DistBackendError(
                f"pycoll: the process group has no members: {self._why}; call reconfigure"
            )
        return self._comm

    @communicator.setter
    def communicator(self, comm: Communicator) -> None:
        self._comm = comm

    def getRank(self) -> int:  # noqa: N802
        """The rank among the present members; before the first call that of init_process_group."""
        return self._place[0]

    def getSize(self) -> int:  # noqa: N802
        """The number of present members; before the first call that of init_process_group."""
        return self._place[1]

    def get_reconfigure_handle(self) -> str:
        """The text by which others meet this process. It is secret, and stays the same."""
        return self._regrouping.handle

    def reconfigure(self, opts: Any) -> Pending:
        """Leave the present members, and connect to those of ``opts.handles``.

        ``opts``: a torch.distributed.ReconfigureOptions. ``uuid``: equal on all members, and new.
        ``handles``: a list gives ranks by position; a set is sorted. ``timeout``: the longest wait,
        by default the group's. ``hints`` must be empty.

        Members in an operation of the old communicator raise DistBackendError. Returns a completed
        Work, since the method waits. Raises DistBackendError, a RuntimeError: for wrong options
        the group stays as it is; where members do not come, it has none until the next call.
        """
        handles = opts.handles
        listed = sorted(handles) if isinstance(handles, set) else list(handles)
        try:
            if opts.hints:
                raise ValueError(f"hints is {dict(opts.hints)!r}: the backend pycoll has none")
            self._regrouping.check(opts.uuid, listed)
        except ValueError as error:
            raise dist.DistBackendError(f"pycoll: reconfigure: {error}") from error
        self._leave(f"reconfigure with uuid {opts.uuid} has failed")
        seconds = opts.timeout.total_seconds() if opts.timeout else 0.0
        try:
            self._enter(int(opts.uuid), listed, Deadline(seconds if seconds > 0 else self._seconds))
        except PycollError as error:
            failure = translate_error(error)
            if failure is error:
                failure = dist.DistBackendError(f"pycoll: reconfigure: {error}")
            raise failure from error
        return completed_handle([], self._watcher)

    def abort(self) -> None:
        """End all operations, here and on the other members; reconfigure() is possible after it."""
        self._leave("it was aborted")

    def shutdown(self) -> None:
        """Leave the members for good."""
        self._leave("it was shut down")
        self._regrouping.close()

    def get_error(self) -> Any:
        """SUCCESS: operations report their failures themselves, and abort() is none."""
        return torch._C._distributed_c10d.ErrorType.SUCCESS

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later operations, and of later calls of reconfigure()."""
        self._seconds = timeout.total_seconds()
        if self._comm is not None:
            super().set_timeout(timeout)

    def _make_part(self, comm: Communicator, origin: Origin | None) -> PycollProcessGroup:
        return PycollProcessGroup(comm, origin)

    def _made_for(self, kind: str) -> Any:
        other = named_backends(self).get(kind, NAME)
        if other != NAME:
            raise ValueError(
                f"a tensor is on {kind}, whose backend is {other!r}: a process group made with "
                f"enable_reconfigure has the backend {NAME!r} alone"
            )
        return super()._made_for(kind)

    def _leave(self, why: str) -> None:
        comm, self._comm, self._why = self._comm, None, why
        if comm is not None:
            comm.close()
        self._watcher.close()
        self._watcher = Watcher()

    def _enter(self, uuid: int, handles: Sequence[str], deadline: Deadline) -> None:
        name = f"torch/{self._name}/{uuid}"
        joined = self._regrouping.join(uuid, handles, name, tuning_text, deadline)
        config = self._regrouping.config._replace(timeout_s=self._seconds)
        self._place = joined.rank, joined.size
        self._take(Communicator(joined, config, name))
