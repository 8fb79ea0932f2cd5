"""Python objects as bytes: pickle protocol 5, whose long buffers stay where they are.

An object travels as parts: a head, and its buffers. The head is bytes: a mark, the lengths of the
buffers, and the pickle. The buffers are memory of the object's own, such as that of NumPy arrays,
of ``BUFFER_BYTES_MIN`` and more; shorter ones are copied into the pickle.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from pycoll.arrays import aligned
from pycoll.errors import InvalidArgumentError, MismatchError

#: Below that a message of its own costs more than a copy.
BUFFER_BYTES_MIN = 1 << 16
_MARK = b"pycoll.1"
_REFUSED = b"pycoll.0"
#: Contiguous bytes, of the object's memory or of pycoll's.
Part = bytes | memoryview
Parts = list[Part]


def dump(value: Any, name: str = "obj", dumps: Callable[..., bytes] = pickle.dumps) -> Parts:
    """The object's parts. They keep its memory alive and are only to be read.

    InvalidArgumentError naming ``name`` where it cannot be pickled.
    """
    buffers: Parts = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < BUFFER_BYTES_MIN:
            return True
        buffers.append(raw)
        return False

    try:
        text = dumps(value, protocol=5, buffer_callback=keep)
    except Exception as error:
        raise InvalidArgumentError(
            f"{name} is a {type(value).__name__} that cannot be pickled "
            f"({type(error).__name__}: {error}): pass what pickle can carry"
        ) from error
    lengths = [memoryview(one).nbytes for one in buffers]
    head = _MARK + np.array([len(lengths), *lengths], "<u8").tobytes()
    return [head + text, *buffers]


def dump_refusal(why: str) -> bytes:
    """A head in place of an object that cannot be sent."""
    return _REFUSED + why.encode()


def lengths_of(head: memoryview, sender: int) -> list[int]:
    """Bytes of the buffers that belong to a head from rank ``sender``.

    InvalidArgumentError where that rank could not pickle its object; MismatchError for what is no
    head.
    """
    mark = bytes(head[:8])
    if mark == _REFUSED:
        text = bytes(head[8:]).decode(errors="replace")
        raise InvalidArgumentError(f"rank {sender} has refused its arguments: {text}", rank=sender)
    whole = mark == _MARK and len(head) >= 16
    count = int.from_bytes(head[8:16], "little") if whole else 1 << 64
    if count > len(head) // 8 - 2:
        raise MismatchError(
            f"rank {sender} sent {len(head)} bytes that are no object: what send, isend and "
            "sendrecv send is received by recv",
            rank=sender,
            ranks=(sender,),
        )
    lengths: list[int] = np.frombuffer(head, "<u8", count, 16).tolist()
    return lengths


def load(parts: Parts) -> Any:
    """The object, which keeps the buffers. Runs whatever code the sender has put into the pickle.

    MismatchError where the head is none.
    """
    head = memoryview(parts[0])
    return pickle.loads(head[16 + 8 * len(lengths_of(head, -1)) :], buffers=parts[1:])


def room(nbytes: int, sender: int) -> memoryview:
    """Memory for so many bytes of rank ``sender``. InvalidArgumentError where there is none."""
    try:
        return aligned(nbytes).data
    except (MemoryError, ValueError, OverflowError, OSError):
        raise InvalidArgumentError(
            f"rank {sender} sends {nbytes} bytes of an object, for which the system has no room",
            rank=sender,
        ) from None
