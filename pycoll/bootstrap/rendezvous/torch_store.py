"""An exchange over a key-value store of torch: torchrun's, or that of torch.distributed.

The store may outlive worlds and processes, so the presence of a key does not show that a process is
still there. Each attempt of a rank to join has its own nonce. The rank writes it to the key
``seat/<rank>``, its seat. Rank 0 proposes a meeting: a nonce of the meeting, and the nonces of all
seats. A rank takes part in the meeting that lists its own nonce.

Rank 0 writes its first blob after all other ranks have written theirs in that meeting. Until then
rank 0 may propose another meeting when a seat changes. From then on all ranks use this meeting.
"""

from __future__ import annotations

import importlib
import json
import os
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from pycoll import errors
from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.discovery.host import process_identity, process_name, still_runs
from pycoll.bootstrap.rendezvous.exchange import POLL_S
from pycoll.bootstrap.rendezvous.frames import list_ranks
from pycoll.untrusted import json_object, read_json

#: ``nonce`` is empty once the world is complete. A failed attempt leaves its nonce on the seat: a
#: meeting that lists it stays incomplete until the rank writes a new nonce.
_SEAT = {"nonce": str, "name": str, "process": str}
_MEETING = {"nonce": str, "seats": list}
_FAILURE = {"rank": int, "text": str}


class TorchStoreExchange:
    """One attempt of a rank to join; see exchange.Exchange. One thread uses it.

    The constructor raises InvalidArgumentError if another process, which still runs on this host,
    has the rank's seat.
    """

    secret = b""
    brief = True

    def __init__(self, store: Any, rank: int, size: int, deadline: Deadline) -> None:
        self.rank = rank
        self.size = size
        self._store = store
        self._deadline = deadline
        self._round = 0
        self._nonce = os.urandom(16).hex()
        self._meeting = ""
        self._met = False
        self._proposed: list[str] = []
        #: Whether others made this attempt fail: ranks that did not come or reported errors, or
        #: another process with this rank.
        self._failed_by_others = False
        self._me = {"name": process_name(), "process": process_identity()}
        owner = self._seat_of(rank)
        if owner is not None and self._is_other(owner) and still_runs(owner["process"]):
            raise self._contest_error(owner)
        self._sit(self._nonce)

    def prolong(self, deadline: Deadline) -> None:
        """Wait until ``deadline`` in later rounds."""
        self._deadline = deadline

    def all_gather(self, blob: bytes) -> list[bytes]:
        """See Exchange. Raises TimeoutError with the missing ranks, and the errors of ``check``."""
        number, self._round = self._round, self._round + 1
        if number == 0:
            self._meet(blob)
        else:
            self._store.set(self._key(number, self.rank), blob)
        keys = [self._key(number, rank) for rank in range(self.size)]
        while not self._store.check(keys):
            self.check()
            if self._deadline.passed():
                raise self._late([r for r in range(self.size) if not self._store.check([keys[r]])])
            time.sleep(POLL_S)
        return [bytes(self._store.get(key)) for key in keys]

    def alarm(self, text: str) -> None:
        """Make the other ranks raise TransportError with this text at once."""
        self._report(self._meeting if self._met else self._nonce, text)

    def check(self) -> None:
        """Raise the failure that a rank of the meeting has reported, if any."""
        failure = self._read(f"{self._meeting}/failure", _FAILURE) if self._met else None
        if failure is not None:
            raise self._to_error(failure)

    def close(self) -> None:
        """End the attempt after the world is complete: clear the nonce on the own seat, which keeps
        the process's name."""
        owner = self._seat_of(self.rank)
        if owner is not None and owner["nonce"] == self._nonce:
            self._sit("")

    def abandon(self) -> None:
        """Report this rank's failure to the others, unless other ranks caused it. Without a report
        a rank that comes late, or again, waits for the next attempt and does not fail."""
        if not self._failed_by_others:
            self.alarm(f"rank {self.rank} broke off while the ranks were joining")

    def _meet(self, blob: bytes) -> None:
        """Find the meeting of this attempt and write ``blob`` there."""
        seen = -1
        while True:
            news = int(self._store.add("news", 0))
            if news != seen:
                seen = news
                self._look_at_own_seat()
                if self.rank == 0:
                    self._propose()
                else:
                    self._follow(blob)
            if self._meeting and self._is_complete():
                break
            if self._deadline.passed():
                raise self._late(self._missing())
            time.sleep(POLL_S)
        self._met = True
        if self.rank == 0:
            self._store.set(self._key(0, 0), blob)

    def _is_complete(self) -> bool:
        """Return whether the meeting is final. For rank 0 it is once all others have written their
        blobs; for the others once rank 0 has written its blob too, since until then rank 0 may
        propose another meeting."""
        first = 1 if self.rank == 0 else 0
        return bool(self._store.check([self._key(0, r) for r in range(first, self.size)]))

    def _propose(self) -> None:
        """Rank 0: propose a meeting of the current nonces, if every seat has one and one of them
        has changed since the last proposal."""
        seats = [self._seat_of(rank) for rank in range(self.size)]
        nonces = ["" if seat is None else str(seat["nonce"]) for seat in seats]
        for nonce in nonces[1:]:
            self._raise_failure_of(nonce, nonces)
        if all(nonces) and nonces != self._proposed:
            self._proposed, self._meeting = nonces, os.urandom(16).hex()
            self._publish("meeting", {"nonce": self._meeting, "seats": nonces})

    def _follow(self, blob: bytes) -> None:
        """Other ranks: join the meeting that rank 0 proposed last, if it lists this attempt."""
        first = self._seat_of(0)
        if first is not None:
            self._raise_failure_of(first["nonce"], ())
        proposed = self._read("meeting", _MEETING)
        if proposed is None or proposed["seats"][self.rank : self.rank + 1] != [self._nonce]:
            return
        if proposed["nonce"] != self._meeting:
            self._meeting = proposed["nonce"]
            self._store.set(self._key(0, self.rank), blob)

    def _raise_failure_of(self, nonce: str, others: Any) -> None:
        """Raise the failure that the attempt ``nonce`` of another rank has reported.

        It is raised once per rank: when this rank tries again, the other rank's seat may still hold
        the failed attempt. Rank 0 forwards the failure to the attempts ``others``.
        """
        failure = self._read(f"{nonce}/failure", _FAILURE) if nonce else None
        heard = f"{nonce}/heard/{self.rank}"
        if failure is None or self._store.check([heard]):
            return
        self._store.set(heard, b"")
        for other in others:
            if other not in ("", nonce, self._nonce):
                self._report(other, failure["text"], failure["rank"])
        raise self._to_error(failure)

    def _to_error(self, failure: Mapping[str, Any]) -> errors.TransportError:
        self._failed_by_others = True
        rank = failure["rank"]
        return errors.TransportError(failure["text"], rank=rank, ranks=[rank], operation="init")

    def _look_at_own_seat(self) -> None:
        failure = self._read(f"{self._nonce}/failure", _FAILURE)
        if failure is not None:
            raise self._to_error(failure)
        owner = self._seat_of(self.rank)
        if owner is not None and owner["nonce"] not in ("", self._nonce) and self._is_other(owner):
            raise self._contest_error(owner)

    def _contest_error(self, owner: Mapping[str, Any]) -> errors.InvalidArgumentError:
        text = (
            f"two processes claim rank {self.rank}, {owner['name']} and {self._me['name']}; give "
            "each process its own RANK, and where a script starts processes that import it, as "
            "mp.spawn and DataLoader workers do, join under if __name__ == '__main__'"
        )
        self._failed_by_others = True
        if owner["nonce"]:
            self._report(owner["nonce"], text)
        return errors.InvalidArgumentError(
            text, rank=self.rank, ranks=[self.rank], operation="init"
        )

    def _is_other(self, owner: Mapping[str, Any]) -> bool:
        return any(owner[name] != text for name, text in self._me.items())

    def _missing(self) -> list[int]:
        """Return the ranks whose nonce or blob is missing for a meeting."""
        if self._meeting:
            given = [self._store.check([self._key(0, rank)]) for rank in range(self.size)]
            silent = [rank for rank in range(1, self.size) if not given[rank]]
        else:
            seats = [self._seat_of(rank) for rank in range(self.size)]
            silent = [r for r, seat in enumerate(seats) if seat is None or not seat["nonce"]]
        return silent or [0]

    def _late(self, missing: list[int]) -> errors.TimeoutError:
        self._failed_by_others = True
        return errors.TimeoutError(
            f"init waited {self._deadline.seconds:.3g} s for {list_ranks(missing)} of "
            f"{self.size} (PYCOLL_INIT_TIMEOUT_S sets the limit)",
            ranks=missing,
            operation="init",
        )

    def _key(self, number: int, rank: int) -> str:
        return f"{self._meeting}/{number}/{rank}"

    def _seat_of(self, rank: int) -> dict[str, Any] | None:
        return self._read(f"seat/{rank}", _SEAT)

    def _sit(self, nonce: str) -> None:
        self._publish(f"seat/{self.rank}", {"nonce": nonce, **self._me})

    def _report(self, of: str, text: str, rank: int | None = None) -> None:
        """Report a failure of the attempt or meeting ``of``. Only the first report is kept: later
        failures follow from it."""
        if not self._store.check([f"{of}/failure"]):
            self._publish(
                f"{of}/failure", {"rank": self.rank if rank is None else rank, "text": text}
            )

    def _publish(self, key: str, value: Mapping[str, Any]) -> None:
        """Set the key, and make all waiting ranks read the seats again."""
        self._store.set(key, json.dumps(value))
        self._store.add("news", 1)

    def _read(self, key: str, types: Mapping[str, type]) -> dict[str, Any] | None:
        """Return the object at ``key``; None if the key is missing or holds no such object."""
        if not self._store.check([key]):
            return None
        try:
            return json_object(read_json(bytes(self._store.get(key))), types)
        except ValueError:
            return None


def open_torch_store(
    host: str, port: int, prefix: str, rank: int, size: int, serve: bool, deadline: Deadline
) -> TorchStoreExchange:
    """Connect to torchrun's store, or serve it, and begin an attempt to join there.

    Every key starts with ``prefix``. Raises InvalidArgumentError if torch cannot be imported and
    TransportError if the store cannot be reached.
    """
    try:
        distributed = importlib.import_module("torch.distributed")
    except ImportError as error:
        raise errors.InvalidArgumentError(
            f"torchrun's variables are set, but its store needs torch ({error}); install torch or "
            "set PYCOLL_ADDRESS and PYCOLL_SECRET"
        ) from None
    try:
        store = distributed.TCPStore(
            host,
            port,
            world_size=None,
            is_master=serve,
            timeout=timedelta(seconds=max(deadline.remaining(), 1.0)),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        raise errors.TransportError(
            f"cannot reach torchrun's store at {host}:{port}: {str(error).splitlines()[0]}",
            operation="init",
        ) from None
    return TorchStoreExchange(distributed.PrefixStore(prefix, store), rank, size, deadline)
