"""Makes the shared memory transport between the ranks of one host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pycoll import errors
from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.discovery.identity import Identity, shares_memory
from pycoll.bootstrap.handshake import scope_of
from pycoll.bootstrap.local_rendezvous import (
    LocalAddress,
    Party,
    close_all,
    descriptors_of,
    of_thread,
    pass_around,
)


class Ends:
    """A rank's shm transport and local address, made before it knows its neighbours.

    ``failure`` is the error if they could not be made. It matters only if there are neighbours.
    """

    def __init__(self, make: Callable[[], Any] | None) -> None:
        self.shm: Any = None
        self.local_address: LocalAddress | None = None
        self.failure: errors.PycollError | OSError | None = None
        if make is None:
            return
        try:
            self.shm = make()
            self.local_address = LocalAddress()
        except (errors.PycollError, OSError) as error:
            self.failure = error

    @property
    def local_address_name(self) -> str:
        """The name of the local address, for the identity; empty without one."""
        return "" if self.local_address is None else self.local_address.name

    def close(self) -> None:
        """Close the local address and drop the reference to the transport."""
        if self.local_address is not None:
            self.local_address.close()
        self.shm = None


class Neighbours:
    """This rank's shared memory with the other ranks of its host, for one call of ``connect``."""

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
        """The transport, or None if no other rank shares memory with this one."""
        return self._ends.shm if len(self._ranks) > 1 else None

    @property
    def failure(self) -> errors.PycollError | OSError | None:
        """The error that keeps this rank from sharing memory with its neighbours, or None."""
        return self._ends.failure if len(self._ranks) > 1 else None

    def meet(self, deadline: Deadline, check: Callable[[], None]) -> None:
        """Share memory with the ranks in other processes of the host, if there are any.

        If one rank of the host has no local address, all of them skip this step; that rank reports
        its failure in the next round. Raises TransportError, and every error of ``check``.
        """
        if len(self._threads) == len(self._ranks) or self._ends.local_address is None:
            return
        if not all(self._identities[rank].local_address for rank in self._ranks):
            return
        own = self._own()
        rendezvous_address = self._identities[self._party.rendezvous].local_address
        found = dict(
            pass_around(
                self._party, self._ends.local_address, rendezvous_address, own, deadline, check
            )
        )
        try:
            for peer in sorted(set(found) - set(self._threads)):
                self._ends.shm.attach(peer, *found.pop(peer), self._identities[peer].pid)
        finally:
            close_all(fd for descriptors in found.values() for fd in descriptors)

    def _own(self) -> list[int]:
        # A traceback may keep a caller's local variables alive, so no local holds the transport.
        return descriptors_of(self._ends.shm)

    def endpoint(self) -> dict[str, Any]:
        """Return the descriptors that ranks in the same process need, for the exchange."""
        if len(self._threads) < 2 or self._ends.shm is None:
            return {}
        return {"descriptors": [self._ends.shm.shared_file_fd(), self._ends.shm.doorbell_fd()]}

    def attach_threads(self, endpoints: Sequence[Mapping[str, Any]]) -> None:
        """Share memory with the ranks in this process."""
        for peer in self._threads:
            if peer != self._rank:
                shared_file, doorbell = map(int, endpoints[peer]["descriptors"])
                found = of_thread(shared_file, doorbell)
                self._ends.shm.attach(peer, *found, self._identities[peer].pid)
