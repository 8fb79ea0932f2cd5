"""Broken, spliced and replayed handshakes by the thousand; and a canary that must be caught."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from pycoll.bootstrap.handshake import (
    ANSWER_BYTES,
    VERDICT_BYTES,
    Claim,
    Gate,
    HandshakeError,
    Purpose,
    Verdict,
    Visitor,
    scope_of,
)

KEY = bytes(range(32))
ROUNDS = 1500


def transcript(prng: random.Random, key: bytes = KEY) -> tuple[Gate, Visitor, bytes, bytes]:
    """One honest handshake: gate, visitor, answer, verdict."""
    purpose = prng.choice(list(Purpose))
    scope = scope_of("job", f"world/{prng.randrange(3)}")
    claim = Claim(purpose, prng.randrange(100), prng.randrange(-1, 100), prng.randrange(4))
    gate, visitor = Gate(key, scope, purpose), Visitor(key, scope, claim)
    answer = visitor.answer(gate.challenge())
    return gate, visitor, answer, gate.verdict(answer, Verdict.ADMITTED)


def mutate(prng: random.Random, data: bytes, other: bytes) -> bytes:
    """Something else of the same length, made of ``data`` and of a message of another handshake."""
    out = bytearray(data)
    kind = prng.randrange(5)
    at, end = sorted(prng.sample(range(len(out) + 1), 2))
    if kind == 0:
        out[prng.randrange(len(out))] ^= 1 << prng.randrange(8)
    elif kind == 1:
        out[at:end] = prng.randbytes(end - at)
    elif kind == 2:
        out[at:end] = other[at:end]
    elif kind == 3:
        out[at:end] = bytes(end - at)
    else:
        out = bytearray(other)
    return bytes(out)


def attack_gate(prng: random.Random, make: Callable[[], Gate] | None = None) -> int:
    """How many forged answers are let in."""
    admitted = 0
    for _ in range(ROUNDS):
        gate, _, answer, _ = transcript(prng)
        if make is not None:
            gate = make()
        _, _, other, _ = transcript(prng, prng.choice([KEY, bytes(32)]))
        forged = mutate(prng, answer, other)
        assert len(forged) == ANSWER_BYTES
        admitted += forged != answer and gate.check(forged)[0] is not None
    return admitted


@pytest.mark.parametrize("seed", range(4))
def test_no_forged_answer_is_admitted(seed: int) -> None:
    print("seed", seed)
    assert attack_gate(random.Random(seed)) == 0


@pytest.mark.parametrize("seed", range(4))
def test_no_forged_verdict_is_believed(seed: int) -> None:
    print("seed", seed)
    prng = random.Random(seed)
    for _ in range(ROUNDS):
        _, visitor, _, verdict = transcript(prng)
        _, _, _, other = transcript(prng, prng.choice([KEY, bytes(32)]))
        forged = mutate(prng, verdict, other)
        assert len(forged) == VERDICT_BYTES
        # Bytes 12 to 15 mean nothing.
        if forged[:12] + forged[16:] == verdict[:12] + verdict[16:]:
            continue
        with pytest.raises(HandshakeError):
            visitor.conclude(forged)


class Careless(Gate):
    """Lets in one in sixteen that fail."""

    def check(self, answer: bytes) -> tuple[Claim | None, Verdict]:
        claim, verdict = super().check(answer)
        if claim is None and answer[-1] % 16 == 0:
            return Claim(Purpose.TCP, 0, 0), Verdict.ADMITTED
        return claim, verdict


def test_the_attack_catches_a_careless_gate() -> None:
    def make() -> Gate:
        return Careless(KEY, scope_of("job", "world/0"), Purpose.TCP)

    assert attack_gate(random.Random(0), make) > 0


def test_golden_bytes() -> None:
    scope = scope_of("job", "world")
    gate = Gate(KEY, scope, Purpose.TCP, nonce=b"n" * 32)
    challenge = gate.challenge()
    assert challenge == b"PYCOLLHS\x01\0\x03\0\0\0\0\0" + b"n" * 32
    body = (
        b"PYCOLLHS\x01\0\x03\0"
        + (2).to_bytes(4, "little")
        + (1).to_bytes(4, "little")
        + (5).to_bytes(4, "little")
        + b"c" * 32
        + bytes.fromhex("16a042591c6e3b852d5feb7b80a808e58b01ceb2bc4c652d5ddefe0b3e5968f1")
    )
    answer = body + bytes.fromhex(
        "5e09e9a2acbb28be53b8a6a6042d74ea4c4ff0f6d75072bf99cfbefa58a5d058"
    )
    assert gate.check(answer) == (Claim(Purpose.TCP, 2, 1, 5), Verdict.ADMITTED)
    verdict = gate.verdict(answer, Verdict.ADMITTED)
    assert verdict == b"PYCOLLHS\x01\0\0\0\0\0\0\0" + bytes.fromhex(
        "13302f586d7f8887c33b67d943261bb3fe782c860b62e14b4d6b48534853cbd4"
    )
    refusal = gate.verdict(answer, Verdict.BAD_PROOF)
    assert refusal == b"PYCOLLHS\x01\0\x01\0\0\0\0\0" + bytes(32)
