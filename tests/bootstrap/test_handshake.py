"""The handshake: only holders of the key get in, whatever else is sent to an open port."""

from __future__ import annotations

import errno
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from pycoll.bootstrap import admission as admission_module
from pycoll.bootstrap.admission import STRANGERS_MAX, Admission, Loop
from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.discovery.network import listen_tcp
from pycoll.bootstrap.handshake import (
    ANSWER_BYTES,
    CHALLENGE_BYTES,
    VERDICT_BYTES,
    Claim,
    Gate,
    HandshakeError,
    Purpose,
    Verdict,
    Visitor,
    ask,
    receive_exactly,
    scope_of,
)

KEY = b"k" * 32
SCOPE = scope_of("job", "world")
CLAIM = Claim(Purpose.TCP, 3, 1, 1)


def gate(key: bytes = KEY, scope: bytes = SCOPE, purpose: Purpose = Purpose.TCP) -> Gate:
    return Gate(key, scope, purpose)


def test_holders_of_the_key_admit_each_other() -> None:
    server, client = gate(), Visitor(KEY, SCOPE, CLAIM)
    answer = client.answer(server.challenge())
    assert server.check(answer) == (CLAIM, Verdict.ADMITTED)
    client.conclude(server.verdict(answer, Verdict.ADMITTED))


def test_the_messages_have_the_sizes_that_wire_md_gives() -> None:
    assert (CHALLENGE_BYTES, ANSWER_BYTES, VERDICT_BYTES) == (48, 120, 48)


@pytest.mark.parametrize(
    ("key", "scope", "verdict", "text"),
    [
        (b"x" * 32, SCOPE, Verdict.BAD_PROOF, "secrets differ"),
        (KEY, scope_of("other", "world"), Verdict.OTHER_JOB, "another job"),
        (KEY, scope_of("job", "world/1"), Verdict.OTHER_JOB, "another job"),
        (b"x" * 32, scope_of("other", "world"), Verdict.OTHER_JOB, "another job"),
    ],
)
def test_a_wrong_key_or_scope_is_refused(
    key: bytes, scope: bytes, verdict: Verdict, text: str
) -> None:
    server, client = gate(), Visitor(key, scope, CLAIM)
    answer = client.answer(server.challenge())
    assert server.check(answer) == (None, verdict)
    with pytest.raises(HandshakeError, match=text):
        client.conclude(server.verdict(answer, verdict))


def test_a_proof_for_one_purpose_is_worthless_for_another() -> None:
    tcp, shm = gate(), gate(purpose=Purpose.SHM)
    client = Visitor(KEY, SCOPE, CLAIM)
    assert shm.check(client.answer(tcp.challenge()))[0] is None
    with pytest.raises(HandshakeError, match="another purpose"):
        client.answer(shm.challenge())


def test_scopes_do_not_run_into_each_other() -> None:
    assert scope_of("ab", "c") != scope_of("a", "bc")


def test_a_replayed_answer_is_refused() -> None:
    first, second = gate(), gate()
    answer = Visitor(KEY, SCOPE, CLAIM).answer(first.challenge())
    assert first.check(answer)[0] == CLAIM
    assert second.check(answer) == (None, Verdict.BAD_PROOF)


def test_a_replayed_verdict_is_refused() -> None:
    server = gate()
    first = Visitor(KEY, SCOPE, CLAIM)
    answer = first.answer(server.challenge())
    recorded = server.verdict(answer, Verdict.ADMITTED)
    second = Visitor(KEY, SCOPE, CLAIM)
    second.answer(server.challenge())
    with pytest.raises(HandshakeError, match="could not prove"):
        second.conclude(recorded)


def test_the_client_s_own_proof_does_not_serve_as_the_server_s() -> None:
    client = Visitor(KEY, SCOPE, CLAIM)
    answer = client.answer(gate().challenge())
    reflected = struct.pack("<8sHH4x32s", b"PYCOLLHS", 1, 0, answer[-32:])
    with pytest.raises(HandshakeError, match="could not prove"):
        client.conclude(reflected)


@pytest.mark.parametrize("byte", range(ANSWER_BYTES))
def test_one_flipped_bit_anywhere_in_the_answer_is_refused(byte: int) -> None:
    server = gate()
    answer = bytearray(Visitor(KEY, SCOPE, CLAIM).answer(server.challenge()))
    answer[byte] ^= 1 << (byte % 8)
    assert server.check(bytes(answer))[0] is None


@pytest.mark.parametrize("byte", [b for b in range(VERDICT_BYTES) if not 12 <= b < 16])
def test_one_flipped_bit_anywhere_in_the_verdict_is_noticed(byte: int) -> None:
    server, client = gate(), Visitor(KEY, SCOPE, CLAIM)
    answer = client.answer(server.challenge())
    verdict = bytearray(server.verdict(answer, Verdict.ADMITTED))
    verdict[byte] ^= 1 << (byte % 8)
    with pytest.raises(HandshakeError):
        client.conclude(bytes(verdict))


def test_a_server_without_the_key_cannot_pretend_to_admit() -> None:
    server, client = gate(b"x" * 32), Visitor(KEY, SCOPE, CLAIM)
    answer = client.answer(server.challenge())
    with pytest.raises(HandshakeError, match="could not prove"):
        client.conclude(server.verdict(answer, Verdict.ADMITTED))


def test_other_services_and_versions_are_told_apart() -> None:
    with pytest.raises(HandshakeError, match="not pycoll"):
        Visitor(KEY, SCOPE, CLAIM).answer(b"SSH-2.0-OpenSSH_9.2".ljust(CHALLENGE_BYTES, b"\0"))
    newer = bytearray(gate().challenge())
    newer[8] = 2
    with pytest.raises(HandshakeError, match=r"version 2 .* this process 1"):
        Visitor(KEY, SCOPE, CLAIM).answer(bytes(newer))


class LocalAddress:
    """An Admission in a thread, which notes the claims that it admitted."""

    def __init__(self) -> None:
        self.admitted: list[Claim] = []
        self.sockets: list[socket.socket] = []
        self.loop = Loop("test-door")
        self.keeper = Admission(
            self.loop.selector, KEY, SCOPE, lambda claim: Verdict.ADMITTED, self.admit
        )
        listener = listen_tcp("127.0.0.1")
        self.address = listener.getsockname()
        self.keeper.listen(listener, Purpose.TCP)
        self.loop.every.append(self.keeper.expire)
        self.loop.start()

    def admit(self, claim: Claim, sock: socket.socket) -> None:
        self.admitted.append(claim)
        self.sockets.append(sock)

    def close(self) -> None:
        self.loop.end()
        self.loop.join()
        self.keeper.close()
        self.loop.close()
        for sock in self.sockets:
            sock.close()

    def entered(self, count: int) -> list[Claim]:
        """Who is in; a client knows a moment before the door does."""
        deadline = Deadline(5)
        while len(self.sockets) < count and not deadline.passed():
            time.sleep(0.005)
        return self.admitted

    def visit(self) -> socket.socket:
        return socket.create_connection(self.address, 5)

    def enter(self, claim: Claim = CLAIM) -> float:
        """Seconds until a rightful peer is in; it tries again like a real one."""
        started, deadline = time.monotonic(), Deadline(10)
        while True:
            with self.visit() as sock:
                try:
                    ask(sock, KEY, SCOPE, claim, deadline)
                except (OSError, EOFError):
                    assert not deadline.passed()
                    continue
                return time.monotonic() - started


@pytest.fixture
def local_address() -> Iterator[LocalAddress]:
    made = LocalAddress()
    yield made
    made.close()


def test_silent_strangers_do_not_hold_up_a_peer(local_address: LocalAddress) -> None:
    strangers = [local_address.visit() for _ in range(2 * STRANGERS_MAX)]
    assert local_address.enter() < 2
    assert local_address.entered(1) == [CLAIM]
    for sock in strangers:
        sock.close()


def test_more_strangers_than_places_evict_the_oldest(local_address: LocalAddress) -> None:
    oldest = local_address.visit()
    others = [local_address.visit() for _ in range(STRANGERS_MAX + 4)]
    assert receive_exactly(oldest, CHALLENGE_BYTES, Deadline(5))
    with pytest.raises((EOFError, ConnectionError)):
        receive_exactly(oldest, 1, Deadline(5))
    for sock in [oldest, *others]:
        sock.close()


def test_a_lack_of_descriptors_is_remembered_for_the_error(
    local_address: LocalAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failures = socket.socket.accept, [OSError(errno.EMFILE, "Too many open files")] * 3

    def accept(self: socket.socket) -> Any:
        if failures:
            raise failures.pop()
        return real(self)

    monkeypatch.setattr(socket.socket, "accept", accept)
    assert local_address.enter() < 5
    assert local_address.entered(1) == [CLAIM]
    assert local_address.keeper.refusals == [
        "a connection, for lack of file descriptors (ulimit -n)"
    ]


def test_a_stranger_is_dropped_when_its_time_is_over(
    local_address: LocalAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission_module, "STRANGER_S", 0.3)
    with local_address.visit() as sock:
        receive_exactly(sock, CHALLENGE_BYTES, Deadline(5))
        started = time.monotonic()
        # A byte now and then buys no time.
        while time.monotonic() - started < 3:
            try:
                sock.send(b"P")
            except OSError:
                break
            time.sleep(0.05)
        assert time.monotonic() - started < 2
    assert any("no proof in time" in text for text in local_address.keeper.refusals)
    assert local_address.admitted == []


@pytest.mark.parametrize("seed", range(8))
def test_garbage_is_refused_and_disturbs_nobody(local_address: LocalAddress, seed: int) -> None:
    print("seed", seed)
    prng = random.Random(seed)
    stop = threading.Event()

    def attack(number: int) -> None:
        own = random.Random(seed * 100 + number)
        while not stop.is_set():
            try:
                with local_address.visit() as sock:
                    sock.sendall(own.randbytes(own.choice([0, 1, 47, 119, 120, 121, 5000])))
                    if own.random() < 0.5:
                        sock.setsockopt(
                            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                        )
            except OSError:
                continue

    attackers = [threading.Thread(target=attack, args=(n,)) for n in range(3)]
    for thread in attackers:
        thread.start()
    claims = [Claim(Purpose.TCP, rank, 0, prng.randrange(4)) for rank in range(1, 6)]
    try:
        for claim in claims:
            assert local_address.enter(claim) < 5
    finally:
        stop.set()
        for thread in attackers:
            thread.join()
    assert local_address.entered(len(claims)) == claims


def test_recorded_and_truncated_handshakes_are_refused(local_address: LocalAddress) -> None:
    with local_address.visit() as sock:
        challenge = receive_exactly(sock, CHALLENGE_BYTES, Deadline(5))
        recorded = Visitor(KEY, SCOPE, CLAIM).answer(challenge)
        sock.sendall(recorded[:60])
    for answer in (recorded, recorded[:-32] + os.urandom(32)):
        with local_address.visit() as sock:
            receive_exactly(sock, CHALLENGE_BYTES, Deadline(5))
            sock.sendall(answer)
            verdict = receive_exactly(sock, VERDICT_BYTES, Deadline(5))
            assert verdict[10] == Verdict.BAD_PROOF
            assert verdict[-32:] == bytes(32)
    assert local_address.enter() < 5
    assert local_address.entered(1) == [CLAIM]


def test_bytes_behind_the_answer_are_left_for_the_next_owner(local_address: LocalAddress) -> None:
    visitor = Visitor(KEY, SCOPE, CLAIM)
    with local_address.visit() as sock:
        answer = visitor.answer(receive_exactly(sock, CHALLENGE_BYTES, Deadline(5)))
        sock.sendall(answer + b"first words")
        visitor.conclude(receive_exactly(sock, VERDICT_BYTES, Deadline(5)))
        deadline = Deadline(5)
        while not local_address.sockets and not deadline.passed():
            time.sleep(0.01)
        assert receive_exactly(local_address.sockets[0], 11, deadline) == b"first words"
