"""One blob for all ranks over PMI-1, the protocol that process managers offer to their ranks.

Hydra (MPICH, Intel MPI), ``srun --mpi=pmi2`` and Flux give each rank a connected socket, whose
number is in ``PMI_FD``. A rank sends one line and reads one line in answer (Flux RFC 13). Values
that all ranks ``put`` before a barrier can be read by all ranks after it. The process manager
starts the ranks and holds these sockets, so it keeps other processes out of the exchange.

An MPI in the same process uses the same socket, before or after this module. These rules keep both
sides intact:

* every request has got its whole answer before ``blob_of_first`` returns, and no byte behind the
  answer is read;
* the flags of the descriptor, which MPI shares, stay as they are;
* ``init`` is sent only if no MPI has begun in the process: Slurm ends a job at the second ``init``
  of a rank. So under ``srun --mpi=pmi2`` an MPI must begin before the first exchange, or use PMIx;
* ``finalize`` is sent when the process ends, and only if no MPI has begun in it: Hydra closes the
  socket after ``finalize``, so a later MPI_Init or MPI_Finalize would fail;
* a socket with an unanswered request is not used again.
"""

from __future__ import annotations

import atexit
import base64
import binascii
import contextlib
import os
import select
import stat
from collections.abc import Mapping

from pycoll import errors
from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.discovery.loaded_mpi import mpi_has_begun

#: Bytes of the longest line that is read.
LINE_MAX = 1 << 16
#: Bytes of the largest blob of one rank in one round.
BLOB_MAX = 1 << 20
#: Values shorter than this could not hold a useful piece of a blob.
_VALUE_MIN = 64
#: Seconds for ``finalize`` when the process ends.
_FINALIZE_S = 1.0

_ADVICE = (
    "or give the ranks PYCOLL_ADDRESS and PYCOLL_SECRET, which do without the launcher's exchange"
)


class PmiClient:
    """This process's side of PMI-1. All exchanges of a process use the same object, one at a time.

    ``failure`` says why the socket can no longer be used; "" while it can.
    """

    def __init__(self, number: int, deadline: Deadline) -> None:
        self._name = f"PMI_FD={number}"
        self.failure = ""
        self.pid = os.getpid()
        #: Exchanges that were opened; all ranks count alike, so it makes keys unique.
        self.exchanges = 0
        # MPI_Finalize closes the number in PMI_FD, after which it may name another file.
        self._fd = self._duplicate(number)
        if not mpi_has_begun():
            self._request("init pmi_version=1 pmi_subversion=1", "response_to_init", deadline)
        maxes = self._request("get_maxes", "maxes", deadline)
        self.key_max = self._number(maxes, "keylen_max")
        self.value_max = min(self._number(maxes, "vallen_max"), LINE_MAX // 2)
        if self.key_max < _VALUE_MIN or self.value_max < _VALUE_MIN:
            raise self._fail(f"offers keys of {self.key_max} and values of {self.value_max} bytes")
        self._space = self._request("get_my_kvsname", "my_kvsname", deadline).get("kvsname", "")
        if not self._space:
            raise self._fail("answers get_my_kvsname without a name")

    def _duplicate(self, number: int) -> int:
        try:
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                return os.dup(number)
        except OSError:
            pass
        raise errors.TransportError(
            f"{self._name} is no open socket: a program between the launcher and Python closed "
            f"it. Let the launcher start Python itself, {_ADVICE}",
            operation="init",
        )

    def put(self, key: str, value: str, deadline: Deadline) -> None:
        """Store a value, which the other ranks can read after the next barrier."""
        self._request(f"put kvsname={self._space} key={key} value={value}", "put_result", deadline)

    def get(self, key: str, deadline: Deadline) -> str:
        """Return a value that a rank put before the last barrier."""
        request = f"get kvsname={self._space} key={key}"
        return self._request(request, "get_result", deadline).get("value", "")

    def barrier(self, deadline: Deadline) -> None:
        """Wait for all ranks."""
        self._request("barrier_in", "barrier_out", deadline)

    def finalize(self) -> None:
        """Tell the process manager that this process will not use PMI again, unless an MPI in the
        process does so itself. Errors are left to the process manager."""
        if self.pid != os.getpid() or self.failure or mpi_has_begun():
            return
        with contextlib.suppress(errors.PycollError):
            self._request("finalize", "finalize_ack", Deadline(_FINALIZE_S))

    def _request(self, request: str, answer: str, deadline: Deadline) -> dict[str, str]:
        """Send a command and return the words of its answer."""
        if self.failure:
            raise errors.TransportError(self.failure, operation="init")
        command = request.partition(" ")[0]
        # A request that does not reach its end leaves the socket unusable, whatever ends it.
        self.failure = f"{self._name}: an earlier {command} got no answer; {_ADVICE}"
        try:
            self._write(f"cmd={request}\n".encode())
            line = self._read_line(command, deadline)
        except errors.PycollError:
            raise  # its TimeoutError is an OSError too
        except OSError as error:
            raise self._fail(f"{command} failed: {error.strerror}") from None
        words = _words(line)
        if words.get("cmd") != answer:
            raise self._fail(f"answers {command} with {line[:80]!r} instead of cmd={answer}")
        self.failure = ""
        if words.get("rc", "0") != "0":
            told = words.get("msg", f"rc={words['rc']}")[:200]
            raise errors.TransportError(
                f"{self._name}: the launcher refuses {request[:120]!r}: {told}. All ranks must "
                "call init() at the same point of the program and equally often",
                operation="init",
            )
        return words

    def _write(self, data: bytes) -> None:
        # Only one request is ever under way, so the socket's buffer has space for a line.
        while data:
            data = data[os.write(self._fd, data) :]

    def _read_line(self, command: str, deadline: Deadline) -> str:
        line = b""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        while not line.endswith(b"\n"):
            if not poll.poll(1000 * deadline.remaining()):
                raise self._late(command, deadline)
            piece = os.read(self._fd, LINE_MAX)
            line += piece
            if not piece:
                raise self._fail(f"the launcher closed it before it answered {command}")
            if b"\n" in line[:-1] or len(line) > LINE_MAX:
                raise self._fail(f"answers {command} with more than one line: {line[:80]!r}")
        return line.decode("ascii", "replace").rstrip("\n")

    def _late(self, command: str, deadline: Deadline) -> errors.PycollError:
        waited = f"init waited {deadline.seconds:.3g} s"
        if command != "barrier_in":
            return errors.TimeoutError(
                f"{waited} for the launcher's answer to {command} at {self._name}",
                operation="init",
            )
        self.failure = (
            f"{self._name} still has a barrier under way, of an attempt to join that timed out: "
            f"start the job again, {_ADVICE}"
        )
        return errors.TimeoutError(
            f"{waited} in the launcher's barrier: not all ranks called pycoll.init() (PMI does "
            "not tell which)",
            operation="init",
        )

    def _fail(self, text: str) -> errors.TransportError:
        self.failure = f"{self._name}: {text}"
        return errors.TransportError(
            f"{self.failure}. Expected a launcher that speaks PMI-1; {_ADVICE}", operation="init"
        )

    def _number(self, words: Mapping[str, str], name: str) -> int:
        text = words.get(name, "")
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            raise self._fail(f"{name}={text[:40]!r} is no number")
        return int(text)


def _words(line: str) -> dict[str, str]:
    pairs = (word.partition("=") for word in line.split(" "))
    return {name: value for name, _, value in pairs}


class _Process:
    """The client of this process, kept for its next exchange."""

    client: PmiClient | None = None


def _client(number: int, deadline: Deadline) -> PmiClient:
    client = _Process.client
    if client is not None and client.pid != os.getpid():
        raise errors.InvalidArgumentError(
            f"init() runs in a fork of the rank that owns PMI_FD={number}: give the world of forks "
            "rank=, size=, address= and secret=",
            operation="init",
        )
    if client is None:
        client = _Process.client = PmiClient(number, deadline)
        atexit.register(client.finalize)
    return client


class PmiExchange:
    """Rank 0's blob for all ranks over the PMI-1 socket of this process."""

    def __init__(self, rank: int, size: int, number: int, deadline: Deadline) -> None:
        self.rank = rank
        self.size = size
        self._deadline = deadline
        self._client = _client(number, deadline)
        self._client.exchanges += 1
        self._prefix = f"pycoll-{self._client.exchanges}"

    def blob_of_first(self, blob: bytes) -> bytes:
        """Return rank 0's blob. PMI waits for all ranks, and cannot tell which one is missing."""
        if self.rank == 0:
            for number, value in enumerate(encode(blob, self._client.value_max)):
                self._client.put(self._key(number), value, self._deadline)
        self._client.barrier(self._deadline)
        return blob if self.rank == 0 else self._fetch()

    def close(self) -> None:
        """Do nothing: the socket belongs to the process."""

    def abandon(self) -> None:
        """Do nothing: the other ranks fail at their deadline."""

    def _key(self, number: int) -> str:
        return f"{self._prefix}-{number}"

    def _fetch(self) -> bytes:
        first = self._client.get(self._key(0), self._deadline)
        count, _, text = first.partition(".")
        try:
            rest = range(1, _checked_count(count, self._client.value_max))
            pieces = [self._client.get(self._key(n), self._deadline) for n in rest]
            return decode("".join([text, *pieces]))
        except ValueError as error:
            raise errors.TransportError(
                f"rank 0 sent unreadable data over PMI: {error}; install the same pycoll "
                "everywhere",
                rank=0,
                ranks=[0],
                operation="init",
            ) from None


def encode(blob: bytes, value_max: int) -> list[str]:
    """Return the values that carry a blob, each shorter than ``value_max``. They hold letters,
    digits, "-" and "_"; the first one begins with the number of values and a dot."""
    if len(blob) > BLOB_MAX:
        raise errors.InvalidArgumentError(
            f"rank 0 publishes {len(blob)} bytes: expected at most {BLOB_MAX}",
            operation="init",
        )
    text = base64.urlsafe_b64encode(blob).rstrip(b"=").decode()
    length = _piece_length(value_max)
    pieces = [text[start : start + length] for start in range(0, len(text), length)] or [""]
    return [f"{len(pieces)}.{pieces[0]}", *pieces[1:]]


def decode(text: str) -> bytes:
    """Return the blob of a joined text. Raises ValueError unless ``encode`` made it."""
    try:
        blob = base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise ValueError(f"{text[:40]!r} is not in base64") from None
    if len(blob) > BLOB_MAX:
        raise ValueError(f"{len(blob)} bytes are more than {BLOB_MAX}")
    return blob


def _piece_length(value_max: int) -> int:
    return value_max - len(f"{BLOB_MAX}.") - 1


def _checked_count(text: str, value_max: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ValueError(f"{text[:40]!r} is no number of pieces")
    most = 1 + 4 * BLOB_MAX // 3 // _piece_length(value_max)
    if not 1 <= int(text) <= most:
        raise ValueError(f"{text} pieces, expected 1 to {most}")
    return int(text)
