"""The world of a Horovod-like program: who takes part, and what runs its operations.

It stands on communicators split off pycoll's world, so pycoll's own functions can be used beside
it. Each set of ranks has one communicator and one coordinator; set 0 is everybody.
"""

from __future__ import annotations

import atexit
import os
import threading
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

import pycoll
from pycoll.bootstrap import roster
from pycoll.communicator import Communicator
from pycoll.errors import PeerLostError, TimeoutError
from pycoll.torch import variables
from pycoll.torch.coordinator import Coordinator
from pycoll.torch.errors import HorovodInternalError
from pycoll.torch.tasks import Collective, Task
from pycoll.torch.timeline import Timeline
from pycoll.torch.variables import Variables

if TYPE_CHECKING:
    from pycoll.torch.process_sets import ProcessSet

#: The longest wait of an operation where PYCOLL_TIMEOUT_S says nothing: one rank may evaluate or
#: save for long while the others wait with their next gradients.
TIMEOUT_S = 1800.0
STALL_GRACE_S = 0.2
#: How often a process of an elastic job tries to join, each time in another world.
_JOINS = 16
_LOST = (PeerLostError, TimeoutError, HorovodInternalError)


class World:
    """The sets of ranks and their coordinators, by number."""

    def __init__(self, comm: Communicator, owns_pycoll: bool, wishes: Variables) -> None:
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
        self._wishes = _alike(comm, wishes)
        self.everybody = Coordinator(comm, range(comm.size), self.timeline, self._wishes)
        self._sets: dict[int, tuple[list[int], Coordinator | None]] = {
            0: (list(range(comm.size)), self.everybody)
        }
        self._next = 1
        self._changes = 0

    def coordinator(self, number: int | None, what: ProcessSet) -> Coordinator:
        """That of a set. ValueError if there is none, or this rank is not part of it."""
        found = None if number is None else self._sets.get(number)
        if found is None:
            raise ValueError(f"{what} is not registered: pass it to hvd.add_process_set first")
        if found[1] is None:
            raise ValueError(f"rank {self.rank} is not part of {what}")
        return found[1]

    def add_set(self, ranks: list[int]) -> int:
        """Make a set, on all ranks at once; gives its number."""
        if any(ranks == known for known, _ in self._sets.values()):
            raise ValueError(f"a process set of ranks {ranks} is registered already")

        def split(comm: Communicator) -> Communicator | None:
            return comm.split(0 if comm.rank in ranks else None)

        comm = self._together(Collective({"process set": ranks}, split))
        coordinator = None
        if comm is not None:
            coordinator = Coordinator(comm, ranks, self.timeline, self._wishes)
        number, self._next = self._next, self._next + 1
        self._sets[number] = (ranks, coordinator)
        return number

    def remove_set(self, number: int) -> None:
        """Close a set, on all ranks at once."""
        self._together(Collective({"remove process set": number}, lambda _: None))
        _, coordinator = self._sets.pop(number)
        if coordinator is not None:
            coordinator.close()

    def _together(self, task: Task) -> Any:
        """Run something that all ranks do in the same order."""
        with self._lock:
            name = f"change.{self._changes}"
            self._changes += 1
        self.everybody.submit(task, name, waits=True)
        return waited(task)

    def finish(self) -> None:
        """Complete steps of optimizers that wait for the next forward pass.

        Where that fails, it is told by a warning: whoever leaves is not to be held up.
        """
        for _, coordinator in self._sets.values():
            try:
                if coordinator is not None:
                    coordinator.finish_adopted()
            except HorovodInternalError as error:
                warnings.warn(
                    f"hvd.shutdown() while gradients were under way: the last step is lost, and "
                    f"parameters keep the values that they had before it ({error})",
                    stacklevel=4,
                )

    def close(self) -> None:
        """Leave all sets; what is under way fails."""
        for _, coordinator in reversed(self._sets.values()):
            if coordinator is not None:
                coordinator.close()
        self.timeline.stop()
        if self._owns_pycoll:
            pycoll.finalize()


def _alike(comm: Communicator, wishes: Variables) -> Variables:
    """With rank 0's word for what has to be the same on all ranks."""
    mine = [-1 if one is None else one for one in (wishes.fusion_bytes, wishes.cache)]
    fusion, cache = (int(one) for one in comm.broadcast(np.array(mine, np.int64)))
    return wishes._replace(
        fusion_bytes=None if fusion < 0 else fusion, cache=None if cache < 0 else cache
    )


class _State:
    """The one world of this process."""

    def __init__(self) -> None:
        self.world: World | None = None
        self.pid = 0


_state = _State()


def waited(task: Task) -> Any:
    """The result of a task, once it is there; its error otherwise."""
    if not task.done:
        home = task.home
        assert home is not None, "a task is waited for that nobody submitted"
        if not home.wait(task, home.warn_after_s if task.warns else None):
            _tell_of_waiting(home, task)
            home.wait(task, None)
    if task.error is not None:
        raise task.error
    if task.order is not None:
        task.order.receive(task.result)
    return task.result


def _tell_of_waiting(home: Coordinator, task: Task) -> None:
    """Warn of a task that waits for long, unless the agreement has done so."""
    # The ranks may have told each other a moment before; they cannot while one takes no part.
    if not (home.wait(task, STALL_GRACE_S) or task.stalled):
        warnings.warn(
            f"{task.key} has been waiting {home.warn_after_s:g} s for other ranks, at least one of "
            "which has nothing to reduce meanwhile: do all ranks call it, under the same name?",
            RuntimeWarning,
            stacklevel=5,
        )


def needed() -> World:
    """The world. ValueError before init."""
    if _state.world is None:
        raise ValueError("hvd has not been initialized; call hvd.init() first")
    return _state.world


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Join the world; to be called by every rank. Does nothing if that was done already.

    ``comm``: nothing for all ranks of the launcher's world (found as by ``pycoll.init``), a list of
    those ranks that take part, or a communicator of mpi4py. ``process_sets``: a list of ProcessSet
    to register, alike on all ranks, or "dynamic"; sets can be added later in any case.

    ``HOROVOD_*`` variables are honoured as variables.py says; rank 0 warns of those that do nothing
    here. Raises what ``pycoll.init`` raises, and ValueError for a rank that is not in ``comm`` and
    for variables that cannot be read.
    """
    if _state.world is not None and _state.pid == os.getpid():
        return
    for attempts_left in reversed(range(_JOINS if roster.inside() else 1)):
        try:
            _enter(comm, process_sets)
            return
        except _LOST:
            # Of an elastic job a rank may be lost at any time; the launcher makes another world.
            if attempts_left == 0 or pycoll.is_initialized():
                raise


def _enter(comm: Any, process_sets: Any) -> None:
    """init(), once. Of a world that is lost meanwhile it leaves nothing."""
    owns = not pycoll.is_initialized()
    try:
        _build(comm, process_sets, owns)
    except _LOST:
        if owns:
            _leave()
            pycoll.finalize()
        raise


def _build(comm: Any, process_sets: Any, owns: bool) -> None:
    wishes = variables.read()
    chosen = None if comm is None or hasattr(comm, "Get_rank") else list(comm)
    if owns:
        limit = None if "PYCOLL_TIMEOUT_S" in os.environ else wishes.give_up_s or TIMEOUT_S
        pycoll.init(comm=None if chosen is not None else comm, timeout_s=limit)
    base = pycoll.world()
    inside = not chosen or base.rank in chosen
    own = base.split(0 if inside else None, chosen.index(base.rank) if chosen and inside else 0)
    if own is None:
        raise ValueError(f"rank {base.rank} is not among the ranks {chosen} of hvd.init(comm=...)")
    _state.world = World(own, owns, wishes)
    _state.pid = os.getpid()
    if own.rank == 0:
        variables.tell_once()
    if wishes.timeline and wishes.timeline != "DYNAMIC":
        path = variables.timeline_path(wishes.timeline, own.rank)
        _state.world.timeline.start(path, own.rank, wishes.mark_cycles)
    if process_sets and process_sets != "dynamic":
        _register_all(process_sets)


def _register_all(process_sets: Sequence[ProcessSet]) -> None:
    from pycoll.torch.process_sets import add_process_set

    for one in process_sets:
        add_process_set(one)


def shutdown() -> None:
    """Leave the world; operations under way fail. Afterwards init() may be called again.

    Steps that an optimizer with ``model=`` still has to do are done before. Happens by itself when
    the process ends, without those. Without a world it does nothing.
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
    """Whether init() was called, and shutdown() not since."""
    return _state.world is not None


def rank() -> int:
    """This process's rank."""
    return needed().rank


def size() -> int:
    """How many ranks there are."""
    return needed().size


def local_rank() -> int:
    """This rank's place among the ranks of its host."""
    return needed().local_rank


def local_size() -> int:
    """How many ranks are on this host."""
    return needed().local_size


def cross_rank() -> int:
    """This host's place among the hosts that have this local rank."""
    return needed().cross_rank


def cross_size() -> int:
    """How many hosts have this local rank."""
    return needed().cross_size


def is_homogeneous() -> bool:
    """Whether all hosts have equally many ranks."""
    return needed().homogeneous


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Record this rank's operations to ``file_path`` in Chrome's trace format; see timeline.py.

    Ranks of one folder need paths of their own. ValueError if a record is open already.
    """
    world = needed()
    world.timeline.start(str(file_path), world.rank, mark_cycles)


def stop_timeline() -> None:
    """Complete the record; without one it does nothing."""
    needed().timeline.stop()
