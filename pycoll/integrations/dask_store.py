"""The metadata of Dask's scheduler, over which ranks meet."""

from __future__ import annotations

from typing import Any

from pycoll.integrations.store_meeting import EngineStore

_ROOT = "pycoll"


class DaskStore(EngineStore):
    """The keys of the world ``name``. ``client``: a ``distributed.Client``."""

    def __init__(self, client: Any, name: str) -> None:
        self._client = client
        self._name = name

    def find(self, key: str) -> bytes | None:
        """See EngineStore."""
        found = self._client.get_metadata([_ROOT, self._name, key], default=None)
        return found.encode() if isinstance(found, str) else found

    def set(self, key: str, value: str | bytes) -> None:
        """See EngineStore."""
        self._client.set_metadata([_ROOT, self._name, key], value)

    def clear(self) -> None:
        """See EngineStore."""
        # Dask deletes no names: that of the world stays, with nothing in it.
        self._client.set_metadata([_ROOT, self._name], None)
