"""The stores that fill the slots of shared memory: an agreed value of the tuning.

Ordinary stores fill a slot, or streaming stores that bypass the caches, or a string instruction.
Some processors take lines over for a string instruction without reading them. Ordinary stores are
faster where cache lines move quickly between cores. ``pycoll tune`` stores the value in
its file. Where there is no file, rank 0 measures it when it joins (`pycoll.comm.start_tuning`), and
sends it to all ranks. Communicators keep it until they are closed.
"""

from __future__ import annotations

import functools
import json
from typing import Any

ORDINARY, STREAMING, STRING = KINDS = ("ordinary", "streaming", "string")
#: The string instruction is chosen unless other stores take less than this share of its time: where
#: a hypervisor moves cores, ordinary and streaming stores change their order, and it stays close to
#: the best.
GAIN = 0.8
#: The value without a measurement: its worst case is better than that of ordinary stores.
DEFAULT = STREAMING


def parse_kind(value: Any) -> str | None:
    """Return the kind in a tuning file, None if it was not measured. Raises ValueError."""
    if value is not None and value not in KINDS:
        raise ValueError(f"slot_stores is {value!r}: expected one of {', '.join(KINDS)}")
    return None if value is None else str(value)


# Every communicator of a world asks with the same text.
@functools.lru_cache(maxsize=8)
def slot_stores_of(text: str) -> str:
    """Return the value in a text of ``Tuning.to_text``. Ranks read it before they read the rest.

    A text that cannot be read has the default; ``from_text`` raises when it reads the costs.
    """
    try:
        return parse_kind(json.loads(text).get("slot_stores")) or DEFAULT
    except (ValueError, AttributeError):
        return DEFAULT
