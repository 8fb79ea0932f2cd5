"""The codecs' kernels against their oracle, bit by bit, for every instruction set here."""

from __future__ import annotations

import os
from typing import Any

import codec_oracle as oracle
import numpy as np
import pytest

from pycoll import _core
from pycoll.errors import InvalidArgumentError

Array = Any
KINDS = {"bf16": 0, "int8": 1, "int4": 2, "fp8": 3, "sign": 4}
SEED = int(os.environ.get("TEST_SEED", "20261127"))
pytestmark = pytest.mark.parametrize("isa", _core.isas())


def encoded(codec: Any, values: Array, first: int = 0, offset: int = 1) -> tuple[bytes, Array]:
    """Codes and rests, from and to buffers that no vector is aligned to."""
    held = np.zeros(4 * len(values) + offset, np.uint8)[offset:].view(np.float32)
    held[:] = values
    codes = np.zeros(codec.nbytes(len(values)) + offset, np.uint8)[offset:]
    rests = np.empty_like(held)
    codec.encode(_core.view(codes), _core.view(held), _core.view(rests), first)
    alone = np.zeros_like(codes)
    codec.encode(_core.view(alone), _core.view(held), None, first)
    assert codes.tobytes() == alone.tobytes(), "the codes do not depend on whether rests are wanted"
    codec.encode(_core.view(alone), _core.view(held), _core.view(held), first)
    assert held.tobytes() == rests.tobytes(), "rests may take the place of the values"
    return codes.tobytes(), rests


def decoded(codec: Any, codes: bytes, count: int, onto: Array | None = None) -> Array:
    values = np.full(count, 7.0, np.float32) if onto is None else onto.copy()
    codec.decode(_core.view(values), _core.view(np.frombuffer(codes, np.uint8)), onto is not None)
    return values


def same(found: Array, expected: Array) -> bool:
    """Alike in every bit, where the payload of a NaN does not count."""
    alike = found.view(np.uint32) == expected.view(np.uint32)
    return bool(np.all(alike | (np.isnan(found) & np.isnan(expected))))


def arrays(count: int) -> list[Array]:
    """Values of many magnitudes, subnormals, zeros of both signs, and halves between two codes."""
    random = np.random.default_rng(SEED + count)
    plain = random.standard_normal(count)
    wide = plain * 2.0 ** random.integers(-140, 127, count)
    near = np.concatenate([[127.0], random.integers(-254, 255, count) / 2])[:count]
    zeros = np.where(random.random(count) < 0.9, np.where(plain < 0, -0.0, 0.0), plain)
    with np.errstate(over="ignore"):
        return [a.astype(np.float32) for a in (plain, wide, near, zeros, np.zeros(count))]


@pytest.mark.parametrize("name", KINDS)
def test_every_length_gives_the_oracles_bits(name: str, isa: str) -> None:
    kind, block = KINDS[name], 64
    codec = _core.Codec(kind, block, False, 0, isa)
    for count in range(4 * block + 1):
        for values in arrays(count):
            told, sent, rests = oracle.encode(kind, values, block)
            codes, left = encoded(codec, values, offset=count % 5)
            assert codes == told, (count, SEED)
            assert same(left, rests), (count, SEED)
            assert same(decoded(codec, codes, count), sent), (count, SEED)
            with np.errstate(all="ignore"):
                added = values + sent
            assert same(decoded(codec, codes, count, values), added), (count, SEED)


@pytest.mark.parametrize("block", [32, 128, 4096])
@pytest.mark.parametrize("name", KINDS)
def test_every_size_of_block(name: str, block: int, isa: str) -> None:
    codec = _core.Codec(KINDS[name], block, False, 0, isa)
    for count in (block - 1, 2 * block + 17):
        for values in arrays(count):
            told, sent, rests = oracle.encode(KINDS[name], values, block)
            codes, left = encoded(codec, values)
            assert (codes, same(left, rests)) == (told, True), (count, SEED)
            assert same(decoded(codec, codes, count), sent), (count, SEED)


@pytest.mark.parametrize("name", ["bf16", "int8", "int4", "fp8"])
def test_sent_and_rest_add_up_to_the_value(name: str, isa: str) -> None:
    codec = _core.Codec(KINDS[name], 256, False, 0, isa)
    for drawn in arrays(5000):
        values = drawn[np.abs(drawn) < 1e38]
        codes, rests = encoded(codec, values)
        sent = decoded(codec, codes, len(values))
        assert np.all(sent.astype(np.float64) + rests == values), SEED


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_rounding_by_chance(name: str, isa: str) -> None:
    """A function of seed and index, and right on average: the oracle's bits, whose thresholds are
    all 2^16 in turn for a number that lies between two codes."""
    kind, block = KINDS[name], 64
    for seed, first in ((0, 0), (7, 64), (2**64 - 1, 2**40)):
        codec = _core.Codec(kind, block, True, seed, isa)
        for values in arrays(200):
            told, sent, rests = oracle.encode(kind, values, block, seed, first)
            codes, left = encoded(codec, values, first)
            assert codes == told, (seed, first)
            assert same(left, rests)
            assert same(decoded(codec, codes, len(values)), sent)
    largest = 127 if name == "int8" else 7
    values = np.full(1 << 16, 2.25, np.float32)
    values[::block] = largest
    codec = _core.Codec(kind, block, True, 3, isa)
    sent = decoded(codec, encoded(codec, values)[0], len(values))
    others = np.delete(sent, np.arange(0, len(sent), block))
    assert set(np.unique(others)) == {2.0, 3.0}
    assert abs(others.mean() - 2.25) < 0.01


@pytest.mark.parametrize("name", ["int8", "int4", "fp8", "sign"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_block_that_is_not_finite_decodes_to_nan(name: str, bad: float, isa: str) -> None:
    codec = _core.Codec(KINDS[name], 32, False, 0, isa)
    values = np.ones(96, np.float32)
    values[40] = bad
    codes, rests = encoded(codec, values)
    sent = decoded(codec, codes, 96)
    assert np.isnan(sent[32:64]).all() and np.isnan(rests[32:64]).all()
    assert (np.delete(sent, np.s_[32:64]) == 1).all()


def test_every_code_decodes(isa: str) -> None:
    codes = np.concatenate([[0, 0, 128, 63], np.arange(256)]).astype(np.uint8).tobytes()
    codec = _core.Codec(KINDS["int8"], 256, False, 0, isa)
    expected = np.arange(256).astype(np.int8).astype(np.float32)
    assert same(decoded(codec, codes, 256), expected)
    codec = _core.Codec(KINDS["fp8"], 256, False, 0, isa)
    assert same(decoded(codec, codes, 256), oracle.e4m3_values())


def test_bad_codecs_are_refused(isa: str) -> None:
    for kind, block, stochastic in ((5, 64, False), (-1, 64, False), (1, 48, False), (1, 16, False),
                                    (1, 8192, False), (3, 64, True), (4, 64, True)):  # fmt: skip
        with pytest.raises(InvalidArgumentError, match="not defined"):
            _core.Codec(kind, block, stochastic, 0, isa)
    codec = _core.Codec(1, 64, False, 0, isa)
    values, codes = np.zeros(64, np.float32), np.zeros(67, np.uint8)
    with pytest.raises(InvalidArgumentError, match="codes have 67 bytes, expected 68"):
        codec.encode(_core.view(codes), _core.view(values), None)
