"""Python objects as bytes: pickle protocol 5, with long buffers outside the pickle.

An object travels as parts: a head and its buffers. The head consists of a mark, the lengths of the
buffers, and the pickle. A buffer is memory that the object owns, such as that of a NumPy array, of
at least ``BUFFER_BYTES_MIN`` bytes. Shorter buffers are copied into the pickle.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from pycoll.arrays.registry import aligned_memory
from pycoll.errors import InvalidArgumentError, MismatchError

#: Bytes. For a shorter buffer a separate message costs more than a copy.
BUFFER_BYTES_MIN = 1 << 16
_MARK = b"pycoll.1"
_REFUSED = b"pycoll.0"
#: Contiguous bytes, in the object's memory or in pycoll's.
Part = bytes | memoryview
Parts = list[Part]


def dump(value: Any, name: str = "obj", dumps: Callable[..., bytes] = pickle.dumps) -> Parts:
    """Return the parts of an object. They keep its memory alive; the caller must not write to them.

    Raise InvalidArgumentError, which names ``name``, where the object cannot be pickled.
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
            f"({type(error).__name__}: {error}): pass an object that pickle can serialise"
        ) from error
    lengths = [memoryview(one).nbytes for one in buffers]
    head = _MARK + np.array([len(lengths), *lengths], "<u8").tobytes()
    return [head + text, *buffers]


def dump_refusal(why: str) -> bytes:
    """Return a head that stands for an object that cannot be sent; ``why`` is the reason."""
    return _REFUSED + why.encode()


def lengths_of(head: memoryview, sender: int) -> list[int]:
    """Return the bytes of each buffer that belongs to a head from rank ``sender``.

    Raise InvalidArgumentError where that rank could not pickle its object, and MismatchError where
    the bytes are not a head.
    """
    mark = bytes(head[:8])
    if mark == _REFUSED:
        text = bytes(head[8:]).decode(errors="replace")
        raise InvalidArgumentError(f"rank {sender} has refused its arguments: {text}", rank=sender)
    whole = mark == _MARK and len(head) >= 16
    count = int.from_bytes(head[8:16], "little") if whole else 1 << 64
    if count > len(head) // 8 - 2:
        raise MismatchError(
            f"rank {sender} sent {len(head)} bytes that are not an object: receive messages of "
            "send, isend and sendrecv with recv",
            rank=sender,
            ranks=(sender,),
        )
    lengths: list[int] = np.frombuffer(head, "<u8", count, 16).tolist()
    return lengths


def load(parts: Parts) -> Any:
    """Return the object, which keeps the buffers. Unpickling runs code that the sender chooses.

    Raise MismatchError where the first part is not a head.
    """
    head = memoryview(parts[0])
    return pickle.loads(head[16 + 8 * len(lengths_of(head, -1)) :], buffers=parts[1:])


def memory_for(nbytes: int, sender: int) -> memoryview:
    """Return memory for ``nbytes`` bytes of rank ``sender``. Raise InvalidArgumentError if the
    system has none."""
    try:
        return aligned_memory(nbytes).data
    except (MemoryError, ValueError, OverflowError, OSError):
        raise InvalidArgumentError(
            f"rank {sender} sends {nbytes} bytes of an object, but the system has no memory for "
            "them",
            rank=sender,
        ) from None
