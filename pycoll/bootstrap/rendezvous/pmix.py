"""One blob for all ranks over PMIx, the protocol of Open MPI's mpirun and ``srun --mpi=pmix``.

A process of its own, ``pmix_client.py``, loads the PMIx library and speaks for this rank. So the
library never meets an MPI of the rank in one process: Open MPI 5 fails in MPI_Init if PMIx has
been initialized before, and PMIx 5.0 frees memory twice if it is initialized again after its end.
The process also bounds every wait, since calls of the library have no reliable time limit.

The launcher's server accepts only processes of this user with the namespace of this job, so it
keeps other processes out of the exchange.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from pathlib import Path

from pycoll import errors
from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.rendezvous.pmi import BLOB_MAX

#: Seconds that the client has for leaving PMIx, at most.
_LEAVE_S = 5.0
#: Bytes of the client's first frame, which may be an error.
_HELLO_MAX = 2000
_ADVICE = "give the ranks PYCOLL_ADDRESS and PYCOLL_SECRET, which do without the launcher's PMIx"


class _Process:
    """Exchanges that this process opened; all ranks count alike, so it makes keys unique."""

    exchanges = 0


class PmixExchange:
    """Rank 0's blob for all ranks over the launcher's PMIx server.

    The constructor starts the client and waits for the rank and the size that the server tells.
    """

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        _Process.exchanges += 1
        self._client = _start(f"pycoll.{_Process.exchanges}")
        try:
            rank, size = map(int, self._read("starts", _HELLO_MAX).split())
        except ValueError:
            raise self._abandon_error("tells no rank and size") from None
        self.rank, self.size = rank, size

    def blob_of_first(self, blob: bytes) -> bytes:
        """Return rank 0's blob. Rank 0 does not wait for the others."""
        if len(blob) > BLOB_MAX:
            raise errors.InvalidArgumentError(
                f"rank 0 publishes {len(blob)} bytes: expected at most {BLOB_MAX}",
                operation="init",
            )
        self._write(blob)
        return self._read("waits for rank 0 to call pycoll.init()", BLOB_MAX + 1)

    def close(self) -> None:
        """Leave PMIx."""
        for stream in (self._client.stdin, self._client.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        try:
            self._client.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            self._client.kill()
            self._client.wait()

    def abandon(self) -> None:
        """End the client, also in the middle of a call."""
        self._client.kill()
        self.close()

    def _write(self, blob: bytes) -> None:
        assert self._client.stdin is not None
        # A client that has ended may have told why: the next read finds its words, or its end.
        with contextlib.suppress(OSError):
            self._client.stdin.write(len(blob).to_bytes(4, "little") + blob)
            self._client.stdin.flush()

    def _read(self, state: str, most: int) -> bytes:
        """Return the next frame of the client, or raise the error that it tells."""
        length = int.from_bytes(self._bytes(4, state), "little")
        if not 1 <= length <= most:
            raise self._abandon_error(f"answers with {length} bytes, expected 1 to {most}")
        answer = self._bytes(length, state)
        if answer[:1] != b"+":
            raise self._abandon_error(f"reports: {answer[1:].decode(errors='replace')[:600]}")
        return answer[1:]

    def _bytes(self, count: int, state: str) -> bytes:
        assert self._client.stdout is not None
        number = self._client.stdout.fileno()
        poll = select.poll()
        poll.register(number, select.POLLIN)
        data = bytearray()
        while len(data) < count:
            if not poll.poll(1000 * self._deadline.remaining()):
                self.abandon()
                raise errors.TimeoutError(
                    f"init waited {self._deadline.seconds:.3g} s while the PMIx client {state}",
                    rank=0,
                    ranks=[0],
                    operation="init",
                )
            piece = os.read(number, count - len(data))
            if not piece:
                raise self._abandon_error("ended early")
            data += piece
        return bytes(data)

    def _abandon_error(self, why: str) -> errors.TransportError:
        self.abandon()
        return errors.TransportError(
            f"the launcher's PMIx cannot be used: the client {why}. Or {_ADVICE}",
            operation="init",
        )


def open_pmix(deadline: Deadline, rank: int | None = None, size: int | None = None) -> PmixExchange:
    """Open the exchange. Raises InvalidArgumentError unless the server agrees about a given rank
    and size."""
    exchange = PmixExchange(deadline)
    if size is not None and (exchange.rank, exchange.size) != (rank, size):
        exchange.abandon()
        raise errors.InvalidArgumentError(
            f"the launcher's variables make this process rank {rank} of {size}, and its PMIx "
            f"server makes it rank {exchange.rank} of {exchange.size}: start Python directly",
            operation="init",
        )
    return exchange


def _start(prefix: str) -> subprocess.Popen[bytes]:
    # The client imports ctypes and little else, so it does without site packages.
    command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("pmix_client.py")), prefix]
    try:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    except OSError as error:
        raise errors.TransportError(
            f"the PMIx client {command[0]!r} cannot be started ({error.strerror}): {_ADVICE}",
            operation="init",
        ) from None
