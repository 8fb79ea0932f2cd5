"""A rank that moves from one communicator to the next, with the members that somebody else names.

Each rank has a handle, a text that says where others meet it. A coordinator outside collects the
handles and gives all members of the next communicator the same list of them, and a number that it
has never used. The first member of the list serves the meeting, at the place in its handle.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence

from pycoll import errors
from pycoll.bootstrap.connect import Bring
from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.discovery.limits import check_alone
from pycoll.bootstrap.discovery.network import listen_in_range
from pycoll.bootstrap.forks import end_with_process
from pycoll.bootstrap.joining import Joined, connect_and_close
from pycoll.bootstrap.rendezvous.exchange import Exchange, SoloExchange
from pycoll.bootstrap.rendezvous.meeting import Meeting, address_of, offer
from pycoll.bootstrap.rendezvous.store import StoreExchange, serve_store
from pycoll.config import RANKS_MAX, Config

#: Seconds between attempts to enter a meeting whose first member still serves an earlier one.
_PAUSE_S = 0.05
_OPERATION = "reconfigure"


class Regrouping:
    """One rank's handle, and the listener at which the others meet this rank if it comes first.

    ``handle`` is secret: it admits its reader to the meetings of this rank. The listener stays open
    until ``close``. One thread at a time uses the object. Raises TransportError if this rank can
    listen nowhere.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self._listener = end_with_process(listen_in_range(None, config.port_range))
        try:
            self._meeting = offer(config, self._listener)
        except BaseException:
            self._listener.close()
            raise
        self.handle = self._meeting.to_bytes().decode()
        self._numbers: set[int] = set()

    def join(
        self, number: int, handles: Sequence[str], name: str, bring: Bring, deadline: Deadline
    ) -> Joined:
        """Connect to the other members: rank r is the one with ``handles[r]``.

        ``number``: equal on all members, and new. ``name``: the communicator's, equal on all.
        ``bring``: see ``connect``. Raises InvalidArgumentError for wrong arguments, before anything
        is sent; TimeoutError that names the members that did not come; the errors of ``connect``.
        """
        rank = self.check(number, handles)
        self._numbers.add(number)
        size = len(handles)
        config = self.config
        check_alone(rank, size, config, serves=rank == 0, together=False)
        exchange = self._exchange(f"{_OPERATION} {number}", rank, handles, deadline)
        connected = connect_and_close(exchange, config, name, deadline, bring=bring)
        return Joined(rank, size, *connected, _OPERATION)

    def check(self, number: int, handles: Sequence[str]) -> int:
        """Return this rank's place in ``handles``. Raises InvalidArgumentError as ``join`` does."""
        if number in self._numbers:
            raise errors.InvalidArgumentError(
                f"uuid {number} was already used by this process: pass a number that no earlier "
                "call had"
            )
        if not 1 <= len(handles) <= RANKS_MAX:
            raise errors.InvalidArgumentError(
                f"handles has {len(handles)} entries: expected one per rank, 1 to {RANKS_MAX}"
            )
        if len(set(handles)) != len(handles):
            raise errors.InvalidArgumentError("handles names a rank twice: expected it once")
        if self.handle not in handles:
            raise errors.InvalidArgumentError(
                "handles lacks the handle of this process: a process that is left out does not call"
            )
        return handles.index(self.handle)

    def close(self) -> None:
        """Close the listener: the handle leads nowhere from now on."""
        self._listener.close()

    def _exchange(
        self, job: str, rank: int, handles: Sequence[str], deadline: Deadline
    ) -> Exchange:
        size = len(handles)
        if size == 1:
            return SoloExchange()
        # Members that were given different lists must not form a communicator.
        digest = hashlib.sha256("\0".join(handles).encode()).hexdigest()
        job = f"{job} {digest[:32]}"
        if rank == 0:
            # The store owns its listener; this object keeps the other one for later meetings.
            listener = self._listener.dup()
            return serve_store(listener, _OPERATION, self._meeting.secret, job, size, deadline)
        try:
            meeting = Meeting.from_bytes(handles[0].encode())
        except (ValueError, TypeError) as error:
            raise errors.InvalidArgumentError(
                f"handles[0] is no handle of this backend: {error}"
            ) from None
        address = address_of(meeting, self.config)
        refused = False
        while not (refused and deadline.passed()):
            try:
                return StoreExchange(address, meeting.secret, job, rank, size, deadline)
            except errors.InvalidArgumentError:
                # The first member may still wait in an earlier meeting, for a rank that is lost.
                refused = True
                time.sleep(_PAUSE_S)
            except errors.TimeoutError:
                if not refused:
                    raise
        raise errors.TimeoutError(
            f"rank 0 did not open the meeting within {deadline.seconds:.3g} s: it is in another "
            "one, or has other handles; all members need equal lists and one new uuid",
            rank=0,
            ranks=[0],
            operation=_OPERATION,
        )
