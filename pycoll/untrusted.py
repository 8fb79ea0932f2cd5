"""Input that another process wrote: files of a bounded size, and JSON with its types.

Every fault of such input is a ValueError whose text says what is wrong with it, so that each
reader has one exception to translate. OSError remains what the system refuses.
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
#: Whole numbers of JSON beyond this are none of ours; they would not fit a native integer.
_WHOLE_MAX = 2**63 - 1
_SHOWN = 80


def read_file(path: str | os.PathLike[str], bytes_max: int) -> bytes:
    """The content of a regular file that holds at most ``bytes_max`` bytes.

    Never waits for a writer: FIFOs, devices and directories are refused unread. ValueError for
    those and for longer files, OSError where the system refuses.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        kind = stat.S_IFMT(os.fstat(fd).st_mode)
        if kind != stat.S_IFREG:
            raise ValueError(f"it is {_KINDS.get(kind, 'something else')}, and no regular file")
        data = bytearray()
        while len(data) <= bytes_max:
            # The size that the system tells is no bound: the file may grow, or be of /proc.
            piece = os.read(fd, min(1 << 20, bytes_max + 1 - len(data)))
            if not piece:
                return bytes(data)
            data += piece
    finally:
        os.close(fd)
    raise ValueError(f"it has more than {bytes_max} bytes")


def read_json(data: bytes | bytearray | str) -> Any:
    """What the JSON text stands for."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("its JSON is nested too deep") from None


def json_object(told: Any, types: Mapping[str, type]) -> dict[str, Any]:
    """``told`` if it is a JSON object with just these members, each of its type.

    ``int`` takes whole numbers of 64 bits, ``float`` any finite number, and neither takes a bool.
    """
    if not isinstance(told, dict):
        raise ValueError(f"{shown(told)} is no JSON object")
    if told.keys() != types.keys():
        raise ValueError(f"{shown(list(told))} are its members: expected {', '.join(types)}")
    for name, kind in types.items():
        if not _fits(told[name], kind):
            raise ValueError(f"{name} is {shown(told[name])}: expected {kind.__name__}")
    return told


def _fits(value: Any, kind: type) -> bool:
    if isinstance(value, bool):
        return kind is bool
    if kind is int:
        return isinstance(value, int) and abs(value) <= _WHOLE_MAX
    if kind is float:
        return isinstance(value, int | float) and abs(value) <= _WHOLE_MAX
    return isinstance(value, kind)


def shown(value: Any) -> str:
    """For an error text: one line of bounded length, whatever the value is."""
    if isinstance(value, int) and abs(value) > _WHOLE_MAX:
        return "a number of more than 64 bits"
    try:
        text = repr(value)
    except (RecursionError, ValueError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
