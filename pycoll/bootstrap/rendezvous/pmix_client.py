"""The program that speaks PMIx for a rank. ``pmix.py`` starts it as a process of its own.

It imports nothing of pycoll. It reads frames from its standard input and writes frames to its
standard output: 4 bytes of length, least significant first, and that many bytes. Each frame that
it writes begins with "+" or, if the text of an error follows, with "-". First it writes the rank
and the number of ranks. Then it answers a frame, a blob, with the blob of rank 0. At the end of its
input it leaves PMIx and ends.

Rank 0 publishes its blob and the others look it up. There is no fence, in which all ranks wait: a
server of PMIx 5 takes a client that disconnects off every fence under way. Servers that look up
nothing, such as Slurm's, are asked for the value that rank 0 has put. That question comes second,
since Open MPI's server looks every two seconds whether rank 0 has put the value by now.

The structures are those of PMIx 4, 5 and 6 (``pmix_common.h``), where they are alike.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from typing import BinaryIO

VERSIONS = (4, 5, 6)
_LIBRARY = "libpmix.so.2"

_UINT32, _BYTE_OBJECT = 14, 27
_GLOBAL = 3
_WILDCARD = 0xFFFFFFFE
_NOT_FOUND, _TIMEOUT = -46, -24
_PR_SET_PDEATHSIG = 1
#: Seconds between two questions for a value that is not there yet, and seconds after which it is
#: not looked up any more: rank 0's server may publish nothing.
_PAUSE_S, _LOOK_UP_S = 0.01, 5.0
_KEY_BYTES = 512


class Proc(ctypes.Structure):
    """pmix_proc_t."""

    _fields_ = (("nspace", ctypes.c_char * 256), ("rank", ctypes.c_uint32))


class ByteObject(ctypes.Structure):
    """pmix_byte_object_t."""

    _fields_ = (("bytes", ctypes.c_void_p), ("size", ctypes.c_size_t))


class Data(ctypes.Union):
    """The union in pmix_value_t. Its largest member is pmix_envar_t, of 24 bytes."""

    _fields_ = (
        ("flag", ctypes.c_bool),
        ("uint32", ctypes.c_uint32),
        ("bo", ByteObject),
        ("largest", ctypes.c_void_p * 3),
    )


class Value(ctypes.Structure):
    """pmix_value_t."""

    _fields_ = (("type", ctypes.c_uint16), ("data", Data))


class Info(ctypes.Structure):
    """pmix_info_t."""

    _fields_ = (("key", ctypes.c_char * _KEY_BYTES), ("flags", ctypes.c_uint32), ("value", Value))


class Published(ctypes.Structure):
    """pmix_pdata_t."""

    _fields_ = (("proc", Proc), ("key", ctypes.c_char * _KEY_BYTES), ("value", Value))


class ClientError(Exception):
    """Its text goes to the rank."""


class Client:
    """A connection to the PMIx server of this host."""

    def __init__(self, library: ctypes.CDLL, key: str) -> None:
        self._library = library
        self._key = key
        self._me = Proc()
        self._call("PMIx_Init", ctypes.byref(self._me), None, ctypes.c_size_t(0))
        size = self._look(_WILDCARD, "pmix.job.size")
        if size is None or size.type != _UINT32:
            raise ClientError("the server does not tell the number of ranks")
        self.size = int(size.data.uint32)
        self.rank = int(self._me.rank)

    def blob_of_first(self, blob: bytes) -> bytes:
        """Return rank 0's blob. Waits for it without a limit; the rank ends this process."""
        if self.rank == 0:
            self._publish(blob)
            return blob
        value = self._look_up() or self._look(0, self._key)
        while value is None:
            time.sleep(_PAUSE_S)
            value = self._look(0, self._key)
        if value.type != _BYTE_OBJECT:
            raise ClientError(f"rank 0's {self._key} has the type {value.type} instead of bytes")
        return ctypes.string_at(value.data.bo.bytes, value.data.bo.size)

    def _publish(self, blob: bytes) -> None:
        held = ctypes.create_string_buffer(blob, len(blob))
        value = Value(_BYTE_OBJECT)
        value.data.bo = ByteObject(ctypes.addressof(held), len(blob))
        key = self._key.encode()
        self._call("PMIx_Put", ctypes.c_uint8(_GLOBAL), key, ctypes.byref(value))
        self._call("PMIx_Commit")
        # A server that publishes nothing returns an error; it has the value by the calls above.
        info = Info(self._published_key, 0, value)
        self._library.PMIx_Publish(ctypes.byref(info), ctypes.c_size_t(1))

    @property
    def _published_key(self) -> bytes:
        """The key among those of all jobs of this user."""
        return bytes(self._me.nspace) + b"." + self._key.encode()

    def _look_up(self) -> Value | None:
        """Return what rank 0 has published; None where the server can publish nothing."""
        asked, value = Published(key=self._published_key), None
        none = ctypes.c_size_t(0)
        until = time.monotonic() + _LOOK_UP_S
        while time.monotonic() < until:
            one = ctypes.c_size_t(1)
            status = self._library.PMIx_Lookup(ctypes.byref(asked), one, None, none)
            if status == 0:
                value = Value(asked.value.type, asked.value.data)
            if status != _NOT_FOUND:
                break
            time.sleep(_PAUSE_S)
        return value

    def finalize(self) -> None:
        """Leave PMIx. A launcher treats a process that ends without it as failed."""
        self._call("PMIx_Finalize", None, ctypes.c_size_t(0))

    def _look(self, rank: int, key: str) -> Value | None:
        """Return a value; None if the rank has published others, and not this one."""
        # The few values of a job stay allocated until this process ends.
        found = ctypes.POINTER(Value)()
        proc = Proc(self._me.nspace, rank)
        none = ctypes.c_size_t(0)
        status = self._library.PMIx_Get(
            ctypes.byref(proc), key.encode(), None, none, ctypes.byref(found)
        )
        if status in (_NOT_FOUND, _TIMEOUT):
            return None
        self._check("PMIx_Get", status)
        return found.contents

    def _call(self, name: str, *arguments: object) -> None:
        self._check(name, getattr(self._library, name)(*arguments))

    def _check(self, name: str, status: int) -> None:
        if status != 0:
            self._library.PMIx_Error_string.restype = ctypes.c_char_p
            text = self._library.PMIx_Error_string(status) or b""
            raise ClientError(f"{name} failed: {text.decode(errors='replace')} ({status})")


def load() -> ctypes.CDLL:
    """Load the PMIx library, and check its version before anything else is called."""
    refused = []
    for path in candidates():
        try:
            library = ctypes.CDLL(path)
        except OSError as error:
            refused.append(str(error))
            continue
        library.PMIx_Get_version.restype = ctypes.c_char_p
        version = (library.PMIx_Get_version() or b"").decode(errors="replace")
        found = re.search(r"PMIx (\d+)\.", version)
        if found is None or int(found[1]) not in VERSIONS:
            raise ClientError(
                f"{path} says it is {version[:80]!r}: expected PMIx {', '.join(map(str, VERSIONS))}"
            )
        return library
    raise ClientError(
        f"{_LIBRARY} cannot be loaded ({'; '.join(refused)[:300]}): set LD_LIBRARY_PATH to its "
        "folder"
    )


def candidates() -> Iterator[str]:
    """Return paths to try: that of the launcher's own library first, since it fits the server.

    The launcher is an ancestor of this process that has the library mapped.
    """
    pid = os.getppid()
    while pid > 1:
        try:
            with open(f"/proc/{pid}/maps") as file:
                paths = [line.rstrip("\n").partition("/")[2] for line in file]
        except OSError:
            paths = []
        yield from {f"/{path}" for path in paths if f"/{path}".find(f"/{_LIBRARY}") >= 0}
        try:
            with open(f"/proc/{pid}/stat") as file:
                pid = int(file.read().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            break
    prefix = os.environ.get("PMIX_PREFIX")
    if prefix:
        yield f"{prefix}/lib/{_LIBRARY}"
    yield _LIBRARY


def read_frame(stream: BinaryIO) -> bytes | None:
    """Return the next frame, or None at the end."""
    head = stream.read(4)
    length = int.from_bytes(head, "little")
    data = stream.read(length) if len(head) == 4 else b""
    return data if len(head) == 4 and len(data) == length else None


def main(key: str) -> None:
    """Serve the rank that started this process until it closes the input."""
    # The rank decides when this process ends: by the end of its input, or with itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    output = sys.stdout.buffer

    def tell(data: bytes) -> None:
        output.write(len(data).to_bytes(4, "little") + data)
        output.flush()

    try:
        client = Client(load(), key)
        tell(f"+{client.rank} {client.size}".encode())
        while (blob := read_frame(sys.stdin.buffer)) is not None:
            tell(b"+" + client.blob_of_first(blob))
        client.finalize()
    except ClientError as error:
        tell(f"-{error}".encode())


if __name__ == "__main__":
    main(sys.argv[1])
