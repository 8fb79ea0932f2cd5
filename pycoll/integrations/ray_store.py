"""Ray's internal key-value store, over which ranks meet."""

from __future__ import annotations

import importlib

from pycoll.integrations.store_meeting import EngineStore

_NAMESPACE = b"pycoll"


class RayStore(EngineStore):
    """The keys of the world ``name``."""

    def __init__(self, name: str) -> None:
        self._prefix = f"{name}/"
        self._kv = importlib.import_module("ray.experimental.internal_kv")

    def find(self, key: str) -> bytes | None:
        """See EngineStore."""
        value = self._kv._internal_kv_get(self._prefix + key, namespace=_NAMESPACE)
        return None if value is None else bytes(value)

    def set(self, key: str, value: str | bytes) -> None:
        """See EngineStore."""
        self._kv._internal_kv_put(self._prefix + key, value, overwrite=True, namespace=_NAMESPACE)

    def clear(self) -> None:
        """See EngineStore."""
        self._kv._internal_kv_del(self._prefix, del_by_prefix=True, namespace=_NAMESPACE)
