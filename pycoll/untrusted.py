"""Readers for input that another process wrote: files of a bounded size, and typed JSON.

Each fault of such input raises ValueError with a text that describes it, so a caller has one
exception to translate. A refusal by the system stays an OSError.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from typing import Any

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFDIR: "a directory",
    stat.S_IFSOCK: "a socket",
}
#: A whole number in JSON beyond this is refused; it would not fit a native integer.
_WHOLE_MAX = 2**63 - 1
_SHOWN = 80


def read_file(path: str | os.PathLike[str], bytes_max: int) -> bytes:
    """Return the content of a regular file of at most ``bytes_max`` bytes.

    The call never waits for a writer: it refuses FIFOs, devices and directories unread. Raises
    ValueError for those and for longer files, and OSError where the system refuses.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        kind = stat.S_IFMT(os.fstat(fd).st_mode)
        if kind != stat.S_IFREG:
            raise ValueError(f"it is {_KINDS.get(kind, 'something else')}, and no regular file")
        data = bytearray()
        while len(data) <= bytes_max:
            # The size from fstat is no bound: the file may grow, or lie in /proc.
            piece = os.read(fd, min(1 << 20, bytes_max + 1 - len(data)))
            if not piece:
                return bytes(data)
            data += piece
    finally:
        os.close(fd)
    raise ValueError(f"it has more than {bytes_max} bytes")


def read_json(data: bytes | bytearray | str) -> Any:
    """Return the value of a JSON text. Raise ValueError for other bytes."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("its JSON is nested too deep") from None


def json_object(value: Any, types: Mapping[str, type]) -> dict[str, Any]:
    """Return ``value`` if it is a JSON object with exactly these members, each of its type.

    ``int`` takes whole numbers of 64 bits, ``float`` any finite number, and neither takes a bool.
    Raise ValueError otherwise.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{shown(value)} is no JSON object")
    if value.keys() != types.keys():
        raise ValueError(f"{shown(list(value))} are its members: expected {', '.join(types)}")
    for name, kind in types.items():
        if not _fits(value[name], kind):
            raise ValueError(f"{name} is {shown(value[name])}: expected {kind.__name__}")
    return value


def _fits(value: Any, kind: type) -> bool:
    if isinstance(value, bool):
        return kind is bool
    if kind is int:
        return isinstance(value, int) and abs(value) <= _WHOLE_MAX
    if kind is float:
        return isinstance(value, int | float) and abs(value) <= _WHOLE_MAX
    return isinstance(value, kind)


def shown(value: Any) -> str:
    """Return a text of bounded length for any value, for use in error texts."""
    if isinstance(value, int) and abs(value) > _WHOLE_MAX:
        return "a number of more than 64 bits"
    try:
        text = repr(value)
    except (RecursionError, ValueError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
