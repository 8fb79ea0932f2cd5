"""Meeting over Ray's internal key-value store, which all processes of a Ray cluster share."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.rendezvous.torch_store import TorchStoreExchange
from pycoll.comm.communicator import Communicator

Gather = Callable[[bytes], list[bytes]]

_NAMESPACE = b"pycoll"
#: Pause after a look for keys that are not there yet; every look is a call of Ray's server.
_PAUSE_S = 0.01
#: The store's own deadline is this much earlier than that of init, since its error names ranks.
_EARLIER_S = 1.0


class RayStore:
    """What TorchStoreExchange needs of a store, over Ray's. All keys begin with ``prefix``."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._kv = importlib.import_module("ray.experimental.internal_kv")

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys exist; a missing one makes the call pause."""
        for key in keys:
            if not self._kv._internal_kv_exists(self._prefix + key, namespace=_NAMESPACE):
                time.sleep(_PAUSE_S)
                return False
        return True

    def get(self, key: str) -> bytes:
        """Return the value of a key that exists."""
        return bytes(self._kv._internal_kv_get(self._prefix + key, namespace=_NAMESPACE))

    def set(self, key: str, value: str | bytes) -> None:
        """Set the value of a key."""
        self._kv._internal_kv_put(self._prefix + key, value, overwrite=True, namespace=_NAMESPACE)

    def add(self, key: str, amount: int) -> int:
        """Return a number that differs after every call with an amount other than 0. The exchange
        only compares it, and Ray's store cannot count."""
        if amount:
            self.set(key, os.urandom(8))
        value = self._kv._internal_kv_get(self._prefix + key, namespace=_NAMESPACE)
        return int.from_bytes(value or b"", "little")

    def clear(self) -> None:
        """Delete all keys."""
        self._kv._internal_kv_del(self._prefix, del_by_prefix=True, namespace=_NAMESPACE)


def meet(
    name: str, rank: int, size: int, limit_s: float, make: Callable[[Gather], Communicator]
) -> Communicator:
    """Return ``make(all_gather)``, where the function gathers from the ranks of the world ``name``.

    The function names ranks that did not come within ``limit_s`` seconds. If ``make`` raises, the
    other ranks hear of it. Rank 0 deletes the keys of a world once all ranks have joined.
    """
    if size == 1:
        return make(lambda blob: [blob])
    store: Any = RayStore(f"{name}/")
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
