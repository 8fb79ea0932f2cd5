"""Meeting over the key-value store of an engine, which all processes of its cluster share."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.rendezvous.torch_store import TorchStoreExchange
from pycoll.comm.communicator import Communicator
from pycoll.config import Config
from pycoll.types import check_timeout

Gather = Callable[[bytes], list[bytes]]

#: Pause after a look for keys that are not there yet; every look is a call of the engine's server.
_PAUSE_S = 0.01
#: The store's own deadline is this much earlier than that of init, since its error names ranks.
_EARLIER_S = 1.0


class EngineStore(ABC):
    """What TorchStoreExchange needs of a store, over one that finds and sets values."""

    @abstractmethod
    def find(self, key: str) -> bytes | None:
        """Return the value of a key; None if there is none."""

    @abstractmethod
    def set(self, key: str, value: str | bytes) -> None:
        """Set the value of a key."""

    @abstractmethod
    def clear(self) -> None:
        """Delete all keys."""

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys exist; a missing one makes the call pause."""
        for key in keys:
            if self.find(key) is None:
                time.sleep(_PAUSE_S)
                return False
        return True

    def get(self, key: str) -> bytes:
        """Return the value of a key that exists."""
        value = self.find(key)
        if value is None:
            raise KeyError(key)
        return value

    def add(self, key: str, amount: int) -> int:
        """Return a number that differs after every call with an amount other than 0. The exchange
        only compares it, and these stores cannot count."""
        if amount:
            self.set(key, os.urandom(8))
        return int.from_bytes(self.find(key) or b"", "little")


def join_limit_s(words: dict[str, Any]) -> float:
    """Return the time limit of joining that the arguments of ``pycoll.init`` give, in seconds."""
    given = words.get("init_timeout_s")
    return check_timeout(Config.read().init_timeout_s if given is None else given, "init_timeout_s")


def meet(
    store: EngineStore,
    rank: int,
    size: int,
    limit_s: float,
    make: Callable[[Gather], Communicator],
) -> Communicator:
    """Return ``make(all_gather)``, where the function gathers from the ranks that share ``store``.

    The function names ranks that did not come within ``limit_s`` seconds. If ``make`` raises, the
    other ranks hear of it. Rank 0 deletes the keys of a world once all ranks have joined.
    """
    if size == 1:
        return make(lambda blob: [blob])
    deadline = Deadline(max(limit_s - _EARLIER_S, limit_s / 2))
    exchange = TorchStoreExchange(store, rank, size, deadline)
    try:
        made = make(exchange.all_gather)
    except BaseException:
        exchange.abandon()
        raise
    exchange.close()
    try:
        made.barrier()  # no rank reads the store any more
    except BaseException:
        made.close()
        raise
    if rank == 0:
        store.clear()
    return made
