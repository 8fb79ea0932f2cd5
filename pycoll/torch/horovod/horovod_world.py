"""The world of a Horovod program: its ranks, and the controllers that run its operations.

Its communicators are split off the world of pycoll, so the functions of pycoll can be used in
addition. Each process set has one communicator and one controller (class Controller); set 0 has
all ranks.
"""

from __future__ import annotations

import atexit
import os
import threading
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

import pycoll
from pycoll.bootstrap.rendezvous import elastic_worker
from pycoll.comm.communicator import Communicator
from pycoll.errors import PeerLostError, TimeoutError
from pycoll.torch.horovod import variables
from pycoll.torch.horovod.controller import Controller
from pycoll.torch.horovod.horovod_errors import HorovodInternalError
from pycoll.torch.horovod.tasks import Collective, Task
from pycoll.torch.horovod.timeline import Timeline
from pycoll.torch.horovod.variables import Variables

if TYPE_CHECKING:
    from pycoll.torch.horovod.process_sets import ProcessSet

#: The timeout of operations where PYCOLL_TIMEOUT_S is not set. It is long, since one rank may
#: evaluate or save while the others wait with their next gradients.
TIMEOUT_S = 1800.0
#: A caller waits this much longer before it warns, since a stall warning may just be on its way.
STALL_GRACE_S = 0.2
#: The number of times that a process of an elastic job tries to join, each time another world.
_JOINS = 16
_LOST = (PeerLostError, TimeoutError, HorovodInternalError)


class World:
    """The process sets and their controllers, by number."""

    def __init__(self, comm: Communicator, owns_pycoll: bool, settings: Variables) -> None:
        self.rank = comm.rank
        self.size = comm.size
        self.local_rank = comm.local_rank
        self.local_size = comm.local_size
        self.cross_rank = comm.cross_rank
        self.cross_size = comm.cross_size
        self.homogeneous = len({len(host) for host in comm.hosts}) == 1
        self.timeline = Timeline()
        self._owns_pycoll = owns_pycoll
        self._lock = threading.Lock()
        self._settings = _alike(comm, settings)
        self.everybody = Controller(comm, range(comm.size), self.timeline, self._settings)
        self._sets: dict[int, tuple[list[int], Controller | None]] = {
            0: (list(range(comm.size)), self.everybody)
        }
        self._next = 1
        self._changes = 0

    def controller(self, number: int | None, what: ProcessSet) -> Controller:
        """The controller of a set. ValueError for an unknown set, or one without this rank."""
        found = None if number is None else self._sets.get(number)
        if found is None:
            raise ValueError(f"{what} is not registered: pass it to hvd.add_process_set first")
        if found[1] is None:
            raise ValueError(f"rank {self.rank} is not part of {what}")
        return found[1]

    def add_set(self, ranks: list[int]) -> int:
        """Make a process set and return its number. Collective."""
        if any(ranks == known for known, _ in self._sets.values()):
            raise ValueError(f"a process set of ranks {ranks} is registered already")

        def split(comm: Communicator) -> Communicator | None:
            return comm.split(0 if comm.rank in ranks else None)

        comm = self._together(Collective({"process set": ranks}, split))
        controller = None
        if comm is not None:
            controller = Controller(comm, ranks, self.timeline, self._settings)
        number, self._next = self._next, self._next + 1
        self._sets[number] = (ranks, controller)
        return number

    def remove_set(self, number: int) -> None:
        """Close a process set. Collective."""
        self._together(Collective({"remove process set": number}, lambda _: None))
        _, controller = self._sets.pop(number)
        if controller is not None:
            controller.close()

    def _together(self, task: Task) -> Any:
        """Run a task that all ranks submit in the same order."""
        with self._lock:
            name = f"change.{self._changes}"
            self._changes += 1
        self.everybody.submit(task, name, waits=True)
        return wait_for(task)

    def finish(self) -> None:
        """Complete deferred steps of optimizers.

        A failure only warns, so that it does not keep the program from leaving the world.
        """
        for _, controller in self._sets.values():
            try:
                if controller is not None:
                    controller.finish_adopted()
            except HorovodInternalError as error:
                warnings.warn(
                    f"hvd.shutdown() while gradients were under way: the last step is lost, and "
                    f"parameters keep the values that they had before it ({error})",
                    stacklevel=4,
                )

    def close(self) -> None:
        """Leave all process sets; operations under way fail."""
        for _, controller in reversed(self._sets.values()):
            if controller is not None:
                controller.close()
        self.timeline.stop()
        if self._owns_pycoll:
            pycoll.finalize()


def _alike(comm: Communicator, settings: Variables) -> Variables:
    """Replace the settings that must be equal on all ranks by those of rank 0."""
    mine = [-1 if one is None else one for one in (settings.fusion_bytes, settings.cache)]
    fusion, cache = (int(one) for one in comm.broadcast(np.array(mine, np.int64)))
    return settings._replace(
        fusion_bytes=None if fusion < 0 else fusion, cache=None if cache < 0 else cache
    )


class _State:
    """Holds the world of this process; there is at most one."""

    def __init__(self) -> None:
        self.world: World | None = None
        self.pid = 0


_state = _State()


def wait_for(task: Task) -> Any:
    """Wait for a task and return its result, or raise its error."""
    if not task.done:
        home = task.home
        assert home is not None, "a task must be submitted before it is waited for"
        if not home.wait(task, home.warn_after_s if task.warns else None):
            _tell_of_waiting(home, task)
            home.wait(task, None)
    if task.error is not None:
        raise task.error
    if task.order is not None:
        task.order.receive(task.result)
    return task.result


def _tell_of_waiting(home: Controller, task: Task) -> None:
    """Warn of a task that waits for long, unless the negotiation has done so."""
    # The negotiation may have warned a moment before. It cannot warn while a rank runs no rounds.
    if not (home.wait(task, STALL_GRACE_S) or task.stalled):
        warnings.warn(
            f"{task.key} has been waiting {home.warn_after_s:g} s for other ranks, at least one of "
            "which has nothing to reduce meanwhile: do all ranks call it, under the same name?",
            RuntimeWarning,
            stacklevel=5,
        )


def current_world() -> World:
    """The world of this process. ValueError before init."""
    if _state.world is None:
        raise ValueError("hvd has not been initialized; call hvd.init() first")
    return _state.world


def enter(comm: Any, register: Callable[[], None]) -> None:
    """Join the world of ranks, as ``hvd.init`` says; a second call does nothing.

    ``register`` runs in every attempt to join, once the world is there.
    """
    if _state.world is not None and _state.pid == os.getpid():
        return
    for attempts_left in reversed(range(_JOINS if elastic_worker.inside() else 1)):
        try:
            _enter(comm, register)
            return
        except _LOST:
            # An elastic job may lose a rank at any time; the launcher then forms another world.
            if attempts_left == 0 or pycoll.is_initialized():
                raise


def _enter(comm: Any, register: Callable[[], None]) -> None:
    """Try to join once. If a rank is lost meanwhile, release everything and raise."""
    owns = not pycoll.is_initialized()
    try:
        _build(comm, owns)
        register()
    except _LOST:
        if owns:
            _leave()
            pycoll.finalize()
        raise


def _build(comm: Any, owns: bool) -> None:
    settings = variables.read()
    chosen = None if comm is None or hasattr(comm, "Get_rank") else list(comm)
    if owns:
        limit = None if "PYCOLL_TIMEOUT_S" in os.environ else settings.give_up_s or TIMEOUT_S
        pycoll.init(comm=None if chosen is not None else comm, timeout_s=limit)
    base = pycoll.world()
    inside = not chosen or base.rank in chosen
    place = chosen.index(base.rank) if chosen and inside else 0
    # A duplicate has the servers of the world, a split has none.
    own = base.dup() if not chosen else base.split(0 if inside else None, place)
    if own is None:
        raise ValueError(f"rank {base.rank} is not among the ranks {chosen} of hvd.init(comm=...)")
    _state.world = World(own, owns, settings)
    _state.pid = os.getpid()
    if own.rank == 0:
        variables.tell_once()
    if settings.timeline and settings.timeline != "DYNAMIC":
        path = variables.timeline_path(settings.timeline, own.rank)
        _state.world.timeline.start(path, own.rank, settings.mark_cycles)


def shutdown() -> None:
    """Leave the world; operations under way fail. Afterwards init() may be called again.

    Finishes the deferred steps of optimizers with ``model=`` first; where that fails, it warns. The
    end of the process also leaves the world, but without these steps. Without a world the function
    does nothing.

    Errors: none. Cost: the deferred steps; threads and connections are closed.

    >>> hvd.shutdown()
    >>> hvd.is_initialized()
    False
    """
    if _state.world is not None and _state.pid == os.getpid():
        _state.world.finish()
    _leave()


def _leave() -> None:
    world, _state.world = _state.world, None
    if world is not None and _state.pid == os.getpid():
        world.close()


atexit.register(_leave)


def is_initialized() -> bool:
    """Return whether init() was called, without a later shutdown().

    Errors and cost: none.

    >>> hvd.is_initialized()
    True
    """
    return _state.world is not None


def rank() -> int:
    """Return the rank of this process, from 0.

    Errors: ValueError before init(). Cost: none.

    >>> hvd.rank()
    0
    """
    return current_world().rank


def size() -> int:
    """Return the number of ranks.

    Errors: ValueError before init(). Cost: none.

    >>> hvd.size()
    1
    """
    return current_world().size


def local_rank() -> int:
    """Return the position of this rank among the ranks of its host, from 0.

    Errors: ValueError before init(). Cost: none.

    >>> hvd.local_rank()
    0
    """
    return current_world().local_rank


def local_size() -> int:
    """Return the number of ranks on this host.

    Errors: ValueError before init(). Cost: none.

    >>> hvd.local_size()
    1
    """
    return current_world().local_size


def cross_rank() -> int:
    """Return the position of this host among the hosts with this local rank, from 0.

    Errors: ValueError before init(). Cost: none.

    >>> hvd.cross_rank()
    0
    """
    return current_world().cross_rank


def cross_size() -> int:
    """Return the number of hosts with this local rank.

    Errors: ValueError before init(). Cost: none.

    >>> hvd.cross_size()
    1
    """
    return current_world().cross_size


def is_homogeneous() -> bool:
    """Return whether all hosts have equally many ranks.

    Errors: ValueError before init(). Cost: none.

    >>> hvd.is_homogeneous()
    True
    """
    return current_world().homogeneous


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Start to record the operations of this rank in the trace format of Chrome; see timeline.py.

    Arguments: ``file_path``, the file to write, which each rank must name differently in a shared
    folder; ``mark_cycles``, whether to mark the rounds of the negotiation.

    Errors: ValueError before init() and while a record is open; OSError for a file that cannot be
    written.

    Cost: a few lines of text for each tensor and operation, until ``stop_timeline``.

    >>> hvd.start_timeline(os.devnull)
    >>> hvd.stop_timeline()
    """
    world = current_world()
    world.timeline.start(str(file_path), world.rank, mark_cycles)


def stop_timeline() -> None:
    """Complete the record of start_timeline(); without one it does nothing.

    Errors: ValueError before init(). Cost: the end of the file is written.

    >>> hvd.stop_timeline()
    """
    current_world().timeline.stop()
