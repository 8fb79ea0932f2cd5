"""Mutual proof of a shared key on a fresh connection: three fixed-size messages.

    server -> client   challenge   protocol, purpose, server's nonce
    client -> server   answer      purpose, rank, peer, number, client's nonce, scope, proof
    server -> client   verdict     admitted or the reason of a refusal, proof

Both proofs are HMAC-SHA256 over both nonces and the whole claim, under different labels. A recorded
answer fails against a fresh nonce, and a reflected one fails against its label. WIRE.md has the
layout byte by byte. Only ``receive_exactly`` and ``ask`` use a socket.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
from enum import IntEnum
from typing import NamedTuple

from pycoll.bootstrap.deadline import Deadline

MAGIC = b"PYCOLLHS"
VERSION = 1
NONCE_BYTES = 32
MAC_BYTES = 32
#: Seconds that a stranger may take from connecting to its proof.
STRANGER_S = 5.0

_CHALLENGE = struct.Struct("<8sHH4x32s")
_CLAIM = struct.Struct("<8sHHiiI32s32s")
_VERDICT = struct.Struct("<8sHH4x32s")
CHALLENGE_BYTES = _CHALLENGE.size
ANSWER_BYTES = _CLAIM.size + MAC_BYTES
VERDICT_BYTES = _VERDICT.size

_CLIENT = b"pycoll handshake client\0"
_SERVER = b"pycoll handshake server\0"


class Purpose(IntEnum):
    """The purpose of a connection. A proof for one purpose is invalid for another."""

    STORE = 1
    SHM = 2
    TCP = 3


class Verdict(IntEnum):
    """The server's decision. Only ADMITTED, DUPLICATE and UNWANTED carry a proof."""

    ADMITTED = 0
    BAD_PROOF = 1
    OTHER_JOB = 2
    DUPLICATE = 3
    UNWANTED = 4


_REASONS = {
    Verdict.BAD_PROOF: "the secrets differ (PYCOLL_SECRET or secret= must be equal on all ranks)",
    Verdict.OTHER_JOB: "it belongs to another job (PYCOLL_JOB_ID must be equal on all ranks)",
    Verdict.DUPLICATE: "a process with this rank is connected already: two claim one number",
    Verdict.UNWANTED: "it does not expect this rank",
}


class HandshakeError(Exception):
    """The handshake failed. ``verdict`` is the server's decision if it sent one."""

    def __init__(self, text: str, verdict: Verdict | None = None) -> None:
        super().__init__(text)
        self.verdict = verdict


def scope_of(job_id: str, communicator_id: str) -> bytes:
    """Return 32 bytes that identify one communicator of one job."""
    digest = hashlib.sha256(b"pycoll scope\0")
    for text in (job_id, communicator_id):
        data = text.encode()
        digest.update(struct.pack("<I", len(data)) + data)
    return digest.digest()


class Claim(NamedTuple):
    """A client's request: ``rank`` asks for connection ``number`` to ``peer`` (-1: the store)."""

    purpose: Purpose
    rank: int
    peer: int
    number: int = 0


def _proof(key: bytes, label: bytes, parts: tuple[bytes, ...]) -> bytes:
    return hmac.digest(key, label + b"".join(parts), "sha256")


class Gate:
    """The server's side of the handshake for one connection, without I/O."""

    def __init__(self, key: bytes, scope: bytes, purpose: Purpose, nonce: bytes = b"") -> None:
        self._key = key
        self._scope = scope
        self._purpose = purpose
        self._nonce = nonce or os.urandom(NONCE_BYTES)

    def challenge(self) -> bytes:
        """Return the first message."""
        return _CHALLENGE.pack(MAGIC, VERSION, self._purpose, self._nonce)

    def check(self, answer: bytes) -> tuple[Claim | None, Verdict]:
        """Return the proven claim and ADMITTED, or None and the reason.

        Requires: len(answer) == ANSWER_BYTES.
        """
        body, proof = answer[: _CLAIM.size], answer[_CLAIM.size :]
        magic, version, purpose, rank, peer, index, _, scope = _CLAIM.unpack(body)
        if magic != MAGIC or version != VERSION or purpose != self._purpose:
            return None, Verdict.BAD_PROOF
        if not hmac.compare_digest(proof, _proof(self._key, _CLIENT, (self._nonce, body))):
            other = not hmac.compare_digest(scope, self._scope)
            return None, Verdict.OTHER_JOB if other else Verdict.BAD_PROOF
        if not hmac.compare_digest(scope, self._scope):
            return None, Verdict.OTHER_JOB
        return Claim(self._purpose, rank, peer, index), Verdict.ADMITTED

    def verdict(self, answer: bytes, verdict: Verdict) -> bytes:
        """Return the last message; it holds no proof for a client that gave none."""
        proof = bytes(MAC_BYTES)
        if verdict not in (Verdict.BAD_PROOF, Verdict.OTHER_JOB):
            code = struct.pack("<H", verdict)
            proof = _proof(self._key, _SERVER, (self._nonce, answer, code))
        return _VERDICT.pack(MAGIC, VERSION, verdict, proof)


class Visitor:
    """The client's side of the handshake for one connection, without I/O."""

    def __init__(self, key: bytes, scope: bytes, claim: Claim) -> None:
        self._key = key
        self._scope = scope
        self._claim = claim
        self._server_nonce = b""
        self._answer = b""

    def answer(self, challenge: bytes) -> bytes:
        """Return the answer. Raises HandshakeError if ``challenge`` is no challenge of pycoll's
        for this purpose."""
        magic, version, purpose, nonce = _CHALLENGE.unpack(challenge)
        if magic != MAGIC:
            raise HandshakeError("the server at this address is not pycoll")
        if version != VERSION:
            raise HandshakeError(
                f"it speaks version {version} of the handshake, this process {VERSION}: "
                "install the same pycoll everywhere"
            )
        if purpose != self._claim.purpose:
            raise HandshakeError("it listens for another purpose")
        claim = self._claim
        body = _CLAIM.pack(
            MAGIC,
            VERSION,
            claim.purpose,
            claim.rank,
            claim.peer,
            claim.number,
            os.urandom(NONCE_BYTES),
            self._scope,
        )
        self._server_nonce = nonce
        self._answer = body + _proof(self._key, _CLIENT, (nonce, body))
        return self._answer

    def conclude(self, message: bytes) -> None:
        """Raise HandshakeError unless the server admits this client and proves the key itself."""
        magic, version, code, proof = _VERDICT.unpack(message)
        if magic != MAGIC or version != VERSION:
            raise HandshakeError("its verdict is malformed")
        if code in (Verdict.BAD_PROOF, Verdict.OTHER_JOB):
            raise HandshakeError(_REASONS[Verdict(code)], Verdict(code))
        expected = _proof(
            self._key, _SERVER, (self._server_nonce, self._answer, struct.pack("<H", code))
        )
        if not hmac.compare_digest(proof, expected):
            raise HandshakeError("it could not prove that it knows the secret")
        if code not in (Verdict.ADMITTED, *_REASONS):
            raise HandshakeError(f"its verdict {code} is unknown to this version of pycoll")
        verdict = Verdict(code)
        if verdict is not Verdict.ADMITTED:
            raise HandshakeError(_REASONS[verdict], verdict)


def receive_exactly(sock: socket.socket, count: int, deadline: Deadline) -> bytes:
    """Read ``count`` bytes. Raises EOFError, or the builtin TimeoutError at the deadline."""
    data = bytearray(count)
    view = memoryview(data)
    while view:
        left = deadline.remaining()
        if left <= 0:
            raise TimeoutError("timed out")
        sock.settimeout(left)
        got = sock.recv_into(view)
        if not got:
            raise EOFError("the connection was closed")
        view = view[got:]
    return bytes(data)


def ask(sock: socket.socket, key: bytes, scope: bytes, claim: Claim, deadline: Deadline) -> None:
    """Run the client's side on a connected socket; returns when the server has admitted it.

    Raises HandshakeError for a refusal, EOFError if the server closes the connection without a
    verdict (it had too many strangers: try again), OSError for a broken connection, and
    TimeoutError at the deadline.
    """
    visitor = Visitor(key, scope, claim)
    answer = visitor.answer(receive_exactly(sock, CHALLENGE_BYTES, deadline))
    sock.settimeout(max(deadline.remaining(), 0.001))
    sock.sendall(answer)
    visitor.conclude(receive_exactly(sock, VERDICT_BYTES, deadline))
