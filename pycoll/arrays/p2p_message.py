"""A send or a receive between two ranks: its memory, its peer and its tag."""

from __future__ import annotations

from typing import Any, NamedTuple

from pycoll import _core
from pycoll.arrays.device_view import Where


class P2PMessage(NamedTuple):
    """A send or a recv. ``view`` is its memory; the caller gets ``result``."""

    sends: bool
    peer: int
    tag: int
    view: _core.BufferView
    where: Where
    result: Any

    @property
    def text(self) -> str:
        """The message as a text for errors."""
        return f"{'send' if self.sends else 'recv'} with tag {self.tag}"
