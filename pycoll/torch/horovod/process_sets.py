"""Process sets: subsets of the ranks, each with a communicator and a negotiation of its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pycoll.torch.horovod import horovod_world

if TYPE_CHECKING:
    from pycoll.torch.horovod.controller import Controller


class ProcessSet:
    """A set of ranks that run operations together.

    Arguments: ``ranks_or_comm``, ranks of the whole world in any order, or a communicator of
    mpi4py.

    A process set can be used once ``init(process_sets=[...])`` or ``add_process_set`` has
    registered it. ``process_set_id`` is a number then, and None before. ``ranks``: the sorted
    ranks.

    Errors: ValueError for values that are not ranks and for a rank that occurs twice.

    Cost: none; registration costs.

    >>> str(hvd.ProcessSet([2, 0]))
    'ProcessSet(process_set_id=None, ranks=[0, 2])'
    """

    def __init__(self, ranks_or_comm: Any) -> None:
        self.process_set_id: int | None = None
        self.ranks: list[int] | None = _ranks_of(ranks_or_comm)

    def size(self) -> int | None:
        """The number of ranks in the set; None before registration."""
        return None if self.process_set_id is None else len(self._members())

    def rank(self) -> int | None:
        """The position of this rank in the set; None before registration.

        Raises ValueError if this rank is not in the set.
        """
        if self.process_set_id is None:
            return None
        members = self._members()
        if horovod_world.rank() not in members:
            raise ValueError(f"rank {horovod_world.rank()} is not part of {self}")
        return members.index(horovod_world.rank())

    def included(self) -> bool | None:
        """Whether this rank is in the set."""
        return None if self.ranks is None else horovod_world.rank() in self._members()

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    def _members(self) -> list[int]:
        horovod_world.current_world()
        assert self.ranks is not None, "only the global set has no ranks before init"
        return self.ranks


class _GlobalProcessSet(ProcessSet):
    """The set of all ranks; the default of all operations."""

    def __init__(self) -> None:
        super().__init__([])
        self.process_set_id = 0

    def _members(self) -> list[int]:
        self.ranks = list(range(horovod_world.size()))
        return self.ranks


def _ranks_of(ranks_or_comm: Any) -> list[int]:
    if hasattr(ranks_or_comm, "Get_group"):
        return _ranks_of_mpi(ranks_or_comm)
    ranks: list[Any] = list(ranks_or_comm) if isinstance(ranks_or_comm, Iterable) else [None]
    if any(isinstance(rank, bool) or not isinstance(rank, int) for rank in ranks):
        raise ValueError(
            f"ProcessSet of {ranks_or_comm!r}: expected ranks as whole numbers, or a communicator "
            "of mpi4py"
        )
    if len(set(ranks)) != len(ranks):
        raise ValueError(f"ProcessSet of {ranks}: a rank is in it twice")
    return sorted(ranks)


def _ranks_of_mpi(comm: Any) -> list[int]:
    from mpi4py import MPI

    group, everybody = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    found = group.Translate_ranks(list(range(group.Get_size())), everybody)
    return sorted(int(rank) for rank in found)


global_process_set: ProcessSet = _GlobalProcessSet()


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Join the world of ranks. Every rank calls it; a second call does nothing.

    The ``HOROVOD_*`` variables in docs/scheduling.md apply; rank 0 warns of those without effect.

    Arguments:
        ``comm``: None for all ranks of the launcher's world (found as by ``pycoll.init``), a list
            of the ranks that take part, or a communicator of mpi4py.
        ``process_sets``: a list of ``ProcessSet`` to register, equal on all ranks, or "dynamic".
            Process sets can be added later in any case.

    Errors: those of ``pycoll.init``. ValueError for a rank that is not in ``comm`` and for
    ``HOROVOD_*`` variables that cannot be parsed.

    Cost: connects the ranks and starts a thread per process set. In an elastic job a lost rank
    makes the function join the next world, up to 16 times.

    >>> hvd.init()
    >>> hvd.rank(), hvd.size()
    (0, 1)
    """
    given = [] if process_sets is None or process_sets == "dynamic" else process_sets

    def register() -> None:
        for one in given:
            add_process_set(one)

    horovod_world.enter(comm, register)


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a set of ranks; every rank of the world calls it with the same set.

    Arguments: ``process_set``, a ``ProcessSet`` or ranks.

    Result: the registered ``ProcessSet``.

    Errors: ValueError for an empty set, for ranks that do not exist, and for ranks that are
    registered already. HorovodInternalError where the ranks pass different sets.

    Cost: a split of the communicator, and a thread.

    >>> try:
    ...     even = hvd.add_process_set(range(0, hvd.size(), 2))
    ... except ValueError as error:  # on one rank this is the set of all ranks
    ...     print(error)
    a process set of ranks [0] is registered already
    """
    found = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    assert found.ranks is not None
    size = horovod_world.size()
    if not found.ranks or min(found.ranks) < 0 or max(found.ranks) >= size:
        raise ValueError(f"{found}: expected at least one rank, all from 0 to {size - 1}")
    found.process_set_id = horovod_world.current_world().add_set(found.ranks)
    return found


def remove_process_set(process_set: ProcessSet) -> bool:
    """Close a process set; every rank of the world calls it.

    Arguments: ``process_set``, a registered ``ProcessSet``.

    Result: True, or False without an effect for the global set and for unregistered sets.

    Errors: HorovodInternalError where the ranks pass different sets.

    Cost: one round of the negotiation; the thread of the set ends.

    >>> hvd.remove_process_set(hvd.ProcessSet([0]))
    False
    """
    number = process_set.process_set_id
    if not number:
        return False
    horovod_world.current_world().remove_set(number)
    process_set.process_set_id = None
    return True


def controller_of(process_set: ProcessSet) -> Controller:
    """The controller that runs the operations of a set. ValueError if this rank has none."""
    if process_set is global_process_set:
        return horovod_world.current_world().everybody
    if not isinstance(process_set, ProcessSet):
        raise ValueError(f"process_set is {process_set!r}: expected a ProcessSet")
    return horovod_world.current_world().controller(process_set.process_set_id, process_set)
