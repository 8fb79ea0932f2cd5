"""Shared memory between the ranks of one host, while it is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pycoll import errors
from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.handshake import scope_of
from pycoll.bootstrap.hub import Door, Party, close_all, descriptors_of, of_thread, pass_around
from pycoll.bootstrap.identity import Identity, shares_memory


class Ends:
    """What a rank makes before it knows its neighbours: its memory, and a door for the others.

    ``failure`` says why it could not; that matters only if there are neighbours.
    """

    def __init__(self, make: Callable[[], Any] | None) -> None:
        self.shm: Any = None
        self.door: Door | None = None
        self.failure: errors.PycollError | OSError | None = None
        if make is None:
            return
        try:
            self.shm = make()
            self.door = Door()
        except (errors.PycollError, OSError) as error:
            self.failure = error

    @property
    def door_name(self) -> str:
        """For the exchange; empty without a door."""
        return "" if self.door is None else self.door.name

    def close(self) -> None:
        """Close the door. The memory is whoever took it."""
        if self.door is not None:
            self.door.close()
        self.shm = None


class Neighbours:
    """This rank's shared memory with others of its host; belongs to one call of ``connect``."""

    def __init__(
        self,
        rank: int,
        identities: Sequence[Identity],
        ends: Ends,
        key: bytes,
        communicator_id: str,
    ) -> None:
        mine = identities[rank]
        self._rank = rank
        self._identities = identities
        self._ends = ends
        self._ranks = [r for r, other in enumerate(identities) if shares_memory(mine, other)]
        self._threads = [r for r in self._ranks if identities[r].process == mine.process]
        names = [identity.name for identity in identities]
        self._party = Party(rank, self._ranks, names, key, scope_of("", communicator_id))

    @property
    def shm(self) -> Any:
        """The transport, or None without a neighbour."""
        return self._ends.shm if len(self._ranks) > 1 else None

    @property
    def failure(self) -> errors.PycollError | OSError | None:
        """Why this rank cannot have the neighbours that it has."""
        return self._ends.failure if len(self._ranks) > 1 else None

    def meet(self, deadline: Deadline, check: Callable[[], None]) -> None:
        """Share memory with those in other processes, if there are any.

        Where one of the host's ranks has no door, none of them does anything: that rank knows why,
        and tells. Raises TransportError, and what ``check`` raises.
        """
        if len(self._threads) == len(self._ranks) or self._ends.door is None:
            return
        if not all(self._identities[rank].door for rank in self._ranks):
            return
        own = self._own()
        hub_door = self._identities[self._party.hub].door
        found = dict(pass_around(self._party, self._ends.door, hub_door, own, deadline, check))
        try:
            for peer in sorted(set(found) - set(self._threads)):
                self._ends.shm.attach(peer, *found.pop(peer), self._identities[peer].pid)
        finally:
            close_all(fd for descriptors in found.values() for fd in descriptors)

    def _own(self) -> list[int]:
        # An exception may keep a caller's variables for a while: the transport is in none.
        return descriptors_of(self._ends.shm)

    def endpoint(self) -> dict[str, Any]:
        """What threads of the same process need."""
        if len(self._threads) < 2 or self._ends.shm is None:
            return {}
        return {"descriptors": [self._ends.shm.segment_fd(), self._ends.shm.doorbell_fd()]}

    def attach_threads(self, endpoints: Sequence[Mapping[str, Any]]) -> None:
        """Share memory with those in this process."""
        for peer in self._threads:
            if peer != self._rank:
                segment, doorbell = map(int, endpoints[peer]["descriptors"])
                found = of_thread(segment, doorbell)
                self._ends.shm.attach(peer, *found, self._identities[peer].pid)
