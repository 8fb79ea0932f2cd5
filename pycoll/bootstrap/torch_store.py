"""Meeting at a key-value store of torch's: torchrun's, or the one that torch.distributed was given.

The store may outlive worlds and processes, so a key says nothing of who is there now. Each attempt
of a rank to join has a nonce of its own, which lies on the rank's seat. Rank 0 proposes a meeting:
a nonce for it, and the nonces on all seats. A rank takes part in the meeting that holds its own
nonce. Rank 0 gives its first blob after all others have given theirs in that meeting, so until then
it may propose another one when a seat changes, and from then on the meeting stands for all.
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
from pycoll.bootstrap.exchange import POLL_S
from pycoll.bootstrap.frames import list_ranks
from pycoll.bootstrap.host import process_identity, process_name, still_runs
from pycoll.untrusted import json_object, read_json

#: ``nonce`` is empty once the world stands. An attempt that failed leaves it: a meeting that holds
#: it stays incomplete until the rank sits down again.
_SEAT = {"nonce": str, "name": str, "process": str}
_MEETING = {"nonce": str, "seats": list}
_FAILURE = {"rank": int, "text": str}


class TorchStoreExchange:
    """One attempt of a rank to join; see exchange.Exchange. One thread.

    Raises InvalidArgumentError if another process that still runs on this host has the rank's seat.
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
        #: Whether this attempt ended for want of others, or by their word.
        self._innocent = False
        self._me = {"name": process_name(), "process": process_identity()}
        owner = self._seat_of(rank)
        if owner is not None and self._is_other(owner) and still_runs(owner["process"]):
            raise self._contested(owner)
        self._sit(self._nonce)

    def all_gather(self, blob: bytes) -> list[bytes]:
        """See Exchange."""
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
        """The others raise TransportError with this text at once."""
        self._note(self._meeting if self._met else self._nonce, text)

    def check(self) -> None:
        """Raise what a rank of the meeting has told."""
        told = self._read(f"{self._meeting}/failure", _FAILURE) if self._met else None
        if told is not None:
            raise self._heard(told)

    def close(self) -> None:
        """The world stands: the attempt is over, and the seat tells whose it is."""
        owner = self._seat_of(self.rank)
        if owner is not None and owner["nonce"] == self._nonce:
            self._sit("")

    def abandon(self) -> None:
        """Leave word for the others, unless it was others for whom this rank failed: a rank that
        comes late, or again, then waits for the next attempt instead of failing once more."""
        if not self._innocent:
            self.alarm(f"rank {self.rank} broke off while the ranks were joining")

    def _meet(self, blob: bytes) -> None:
        """Find the meeting of this attempt, and give ``blob`` there."""
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
        """Whether all others have given their blobs: for rank 0 the moment to decide. The others
        wait for the decision too, since rank 0 may propose another meeting until then."""
        first = 1 if self.rank == 0 else 0
        return bool(self._store.check([self._key(0, r) for r in range(first, self.size)]))

    def _propose(self) -> None:
        """Rank 0: a meeting of those who sit there now, if all do and it is another one."""
        seats = [self._seat_of(rank) for rank in range(self.size)]
        nonces = ["" if seat is None else str(seat["nonce"]) for seat in seats]
        for nonce in nonces[1:]:
            self._hear_of(nonce, nonces)
        if all(nonces) and nonces != self._proposed:
            self._proposed, self._meeting = nonces, os.urandom(16).hex()
            self._tell("meeting", {"nonce": self._meeting, "seats": nonces})

    def _follow(self, blob: bytes) -> None:
        """Other ranks: the meeting that rank 0 proposed last, if it holds this attempt."""
        leader = self._seat_of(0)
        if leader is not None:
            self._hear_of(leader["nonce"], ())
        proposed = self._read("meeting", _MEETING)
        if proposed is None or proposed["seats"][self.rank : self.rank + 1] != [self._nonce]:
            return
        if proposed["nonce"] != self._meeting:
            self._meeting = proposed["nonce"]
            self._store.set(self._key(0, self.rank), blob)

    def _hear_of(self, nonce: str, others: Any) -> None:
        """Raise what the attempt ``nonce`` of another rank has told: once, since that rank may have
        begun no other one when this rank tries again. Rank 0 passes it on to the ``others``."""
        told = self._read(f"{nonce}/failure", _FAILURE) if nonce else None
        heard = f"{nonce}/heard/{self.rank}"
        if told is None or self._store.check([heard]):
            return
        self._store.set(heard, b"")
        for other in others:
            if other not in ("", nonce, self._nonce):
                self._note(other, told["text"], told["rank"])
        raise self._heard(told)

    def _heard(self, told: Mapping[str, Any]) -> errors.TransportError:
        self._innocent = True
        rank = told["rank"]
        return errors.TransportError(told["text"], rank=rank, ranks=[rank], operation="init")

    def _look_at_own_seat(self) -> None:
        told = self._read(f"{self._nonce}/failure", _FAILURE)
        if told is not None:
            raise self._heard(told)
        owner = self._seat_of(self.rank)
        if owner is not None and owner["nonce"] not in ("", self._nonce) and self._is_other(owner):
            raise self._contested(owner)

    def _contested(self, owner: Mapping[str, Any]) -> errors.InvalidArgumentError:
        text = (
            f"two processes claim rank {self.rank}, {owner['name']} and {self._me['name']}; give "
            "each process its own RANK, and where a script starts processes that import it, as "
            "mp.spawn and DataLoader workers do, join under if __name__ == '__main__'"
        )
        self._innocent = True
        if owner["nonce"]:
            self._note(owner["nonce"], text)
        return errors.InvalidArgumentError(
            text, rank=self.rank, ranks=[self.rank], operation="init"
        )

    def _is_other(self, owner: Mapping[str, Any]) -> bool:
        return any(owner[name] != text for name, text in self._me.items())

    def _missing(self) -> list[int]:
        """Those for whose sake there is no meeting yet."""
        if self._meeting:
            given = [self._store.check([self._key(0, rank)]) for rank in range(self.size)]
            silent = [rank for rank in range(1, self.size) if not given[rank]]
        else:
            seats = [self._seat_of(rank) for rank in range(self.size)]
            silent = [r for r, seat in enumerate(seats) if seat is None or not seat["nonce"]]
        return silent or [0]

    def _late(self, missing: list[int]) -> errors.TimeoutError:
        self._innocent = True
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
        self._tell(f"seat/{self.rank}", {"nonce": nonce, **self._me})

    def _note(self, of: str, text: str, rank: int | None = None) -> None:
        """The first word counts: later failures follow from it."""
        if not self._store.check([f"{of}/failure"]):
            self._tell(f"{of}/failure", {"rank": self.rank if rank is None else rank, "text": text})

    def _tell(self, key: str, told: Mapping[str, Any]) -> None:
        """Set the key, and have all that wait look at the seats again."""
        self._store.set(key, json.dumps(told))
        self._store.add("news", 1)

    def _read(self, key: str, types: Mapping[str, type]) -> dict[str, Any] | None:
        """None for a key that is not there, or that pycoll has not written."""
        if not self._store.check([key]):
            return None
        try:
            return json_object(read_json(bytes(self._store.get(key))), types)
        except ValueError:
            return None


def open_torch_store(
    host: str, port: int, prefix: str, rank: int, size: int, serve: bool, deadline: Deadline
) -> TorchStoreExchange:
    """Join torchrun's store; every key starts with ``prefix``.

    Raises InvalidArgumentError if torch is not importable, TransportError if the store is not
    reached.
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
