"""Process sets: some of the ranks, with a communicator and an agreement of their own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pycoll.torch import world

if TYPE_CHECKING:
    from pycoll.torch.coordinator import Coordinator


class ProcessSet:
    """Ranks that run operations together, given by their numbers in the whole world.

    It can be used once ``init(process_sets=[...])`` or ``add_process_set`` has registered it:
    ``process_set_id`` is then a number, otherwise None.
    """

    def __init__(self, ranks_or_comm: Any) -> None:
        self.process_set_id: int | None = None
        self.ranks: list[int] | None = _ranks_of(ranks_or_comm)

    def size(self) -> int | None:
        """How many ranks it has; None before registration."""
        return None if self.process_set_id is None else len(self._members())

    def rank(self) -> int | None:
        """This rank's place in it; None before registration. ValueError if it is not included."""
        if self.process_set_id is None:
            return None
        members = self._members()
        if world.rank() not in members:
            raise ValueError(f"rank {world.rank()} is not part of {self}")
        return members.index(world.rank())

    def included(self) -> bool | None:
        """Whether this rank is part of it."""
        return None if self.ranks is None else world.rank() in self._members()

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    def _members(self) -> list[int]:
        world.needed()
        assert self.ranks is not None, "only the global set has no ranks before init"
        return self.ranks


class _GlobalProcessSet(ProcessSet):
    """All ranks; what operations use unless they are told otherwise."""

    def __init__(self) -> None:
        super().__init__([])
        self.process_set_id = 0

    def _members(self) -> list[int]:
        self.ranks = list(range(world.size()))
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


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a set of ranks, and return it; every rank of the world calls it with the same set.

    Raises ValueError for ranks that there are not, and for a set that is registered already;
    HorovodInternalError where the ranks name different sets.
    """
    found = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    assert found.ranks is not None
    size = world.size()
    if not found.ranks or min(found.ranks) < 0 or max(found.ranks) >= size:
        raise ValueError(f"{found}: expected at least one rank, all from 0 to {size - 1}")
    found.process_set_id = world.needed().add_set(found.ranks)
    return found


def remove_process_set(process_set: ProcessSet) -> bool:
    """Close a set; every rank of the world calls it. False for the global and unregistered sets."""
    number = process_set.process_set_id
    if not number:
        return False
    world.needed().remove_set(number)
    process_set.process_set_id = None
    return True


def coordinator_of(process_set: ProcessSet) -> Coordinator:
    """What runs the operations of a set. ValueError if it has none for this rank."""
    if process_set is global_process_set:
        return world.needed().everybody
    if not isinstance(process_set, ProcessSet):
        raise ValueError(f"process_set is {process_set!r}: expected a ProcessSet")
    return world.needed().coordinator(process_set.process_set_id, process_set)
