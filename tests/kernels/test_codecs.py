"""The codecs' kernels against their oracle, bit by bit, for every instruction set here."""

from __future__ import annotations

import functools
import os
from typing import Any

import codec_oracle as oracle
import numpy as np
import pytest
from instruction_sets import every_isa

from pycoll import _core
from pycoll.errors import InvalidArgumentError

Array = Any
KINDS = {"bf16": 0, "int8": 1, "int4": 2, "fp8": 3, "sign": 4}
SEED = int(os.environ.get("TEST_SEED", "20261127"))
pytestmark = every_isa


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


#: Codecs with the seed of their rounding by chance; None rounds to nearest.
ROUNDINGS = [*((name, None) for name in KINDS), ("int8", 7), ("int4", 2**64 - 1)]


@pytest.mark.parametrize(("name", "seed"), ROUNDINGS)
def test_every_length_gives_the_oracles_bits(name: str, seed: int | None, isa: str) -> None:
    kind, block = KINDS[name], 64
    codec = _core.Codec(kind, block, seed is not None, seed or 0, isa)
    for count in range(4 * block + 1):
        first = block * (count % 3)
        for values in arrays(count):
            told, sent, rests = oracle.encode(kind, values, block, seed, first)
            codes, left = encoded(codec, values, first, offset=count % 5)
            assert codes == told, (count, SEED)
            assert same(left, rests), (count, SEED)
            assert same(decoded(codec, codes, count), sent), (count, SEED)
            with np.errstate(all="ignore"):
                added = values + sent
            assert same(decoded(codec, codes, count, values), added), (count, SEED)


@functools.cache
def prefixes(name: str, block: int, count: int) -> list[tuple[Array, list[Any]]]:
    """Values, and for each number of them up to ``count`` what the oracle makes of so many.

    Whole blocks are those of all values, and only the last block, if it is short, is encoded anew.
    """
    kind, found = KINDS[name], []
    for values in arrays(count):
        starts = range(0, count, block)
        whole = [oracle.encode(kind, values[at : at + block], block) for at in starts]
        made = []
        for length in range(count + 1):
            tail = length - length % block
            parts = whole[: length // block]
            if length % block:
                parts = [*parts, oracle.encode(kind, values[tail:length], block)]
            made.append(
                (
                    b"".join(told for told, _, _ in parts),
                    *(np.concatenate([np.zeros(0, np.float32), *(part[i] for part in parts)])
                      for i in (1, 2)),
                )
            )  # fmt: skip
        found.append((values, made))
    return found


@pytest.mark.parametrize(
    ("name", "block"), [("int8", 256), ("int4", 256), ("sign", 256), ("fp8", 128)]
)
def test_every_length_up_to_four_default_blocks(name: str, block: int, isa: str) -> None:
    codec = _core.Codec(KINDS[name], block, False, 0, isa)
    for values, made in prefixes(name, block, 4 * block):
        for count, (told, sent, rests) in enumerate(made):
            codes, left = encoded(codec, values[:count], offset=count % 5)
            assert codes == told, (count, SEED)
            assert same(left, rests), (count, SEED)
            assert same(decoded(codec, codes, count), sent), (count, SEED)


def placed(nbytes: int, address: int) -> Array:
    """Bytes whose address is ``address`` modulo 64, with 64 more behind them."""
    held = np.full(nbytes + 192, 0xA5, np.uint8)
    return held[(address - held.ctypes.data) % 64 :][: nbytes + 64]


#: Every address of a source with some of a target, and every one of a target with some of a source.
ADDRESSES = sorted(
    {(one, other) for one in range(64) for other in (0, 1, 4, 31)}
    | {(one, other) for other in range(64) for one in (0, 1, 18, 63)}
)


@pytest.mark.parametrize(("name", "seed"), ROUNDINGS)
def test_every_alignment_of_source_and_target(name: str, seed: int | None, isa: str) -> None:
    """Encode, decode, and decode-and-add; no byte behind the target changes."""
    kind, block = KINDS[name], 64
    codec = _core.Codec(kind, block, seed is not None, seed or 0, isa)
    for count in (1, 31, 2 * block + 45):
        values = arrays(count)[0]
        told, sent, rests = oracle.encode(kind, values, block, seed)
        wanted_sum = values + sent
        for source, target in ADDRESSES:
            given = placed(values.nbytes, source)
            given[: values.nbytes] = values.view(np.uint8)
            codes, left = placed(len(told), target), placed(values.nbytes, target + 8)
            mine, space = (one[: values.nbytes].view(np.float32) for one in (given, left))
            codec.encode(_core.view(codes[: len(told)]), _core.view(mine), _core.view(space))
            where = (count, source, target)
            assert codes[: len(told)].tobytes() == told and same(space, rests), where
            assert (codes[len(told) :] == 0xA5).all() and (left[values.nbytes :] == 0xA5).all()
            held = placed(len(told), source)
            held[: len(told)] = np.frombuffer(told, np.uint8)
            for adds, wanted in ((False, sent), (True, wanted_sum)):
                out = placed(values.nbytes, target)
                out[: values.nbytes] = values.view(np.uint8)
                space = out[: values.nbytes].view(np.float32)
                codec.decode(_core.view(space), _core.view(held[: len(told)]), adds)
                assert same(space, wanted), (*where, adds)
                assert (out[values.nbytes :] == 0xA5).all(), (*where, adds)


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
def test_rounding_by_chance_is_a_function_of_seed_and_index(name: str, isa: str) -> None:
    kind, block = KINDS[name], 64
    for seed, first in ((0, 0), (7, 64), (2**64 - 1, 2**40)):
        codec = _core.Codec(kind, block, True, seed, isa)
        for values in arrays(200):
            told, sent, rests = oracle.encode(kind, values, block, seed, first)
            codes, left = encoded(codec, values, first)
            assert codes == told, (seed, first)
            assert same(left, rests)
            assert same(decoded(codec, codes, len(values)), sent)


@functools.cache
def thresholds(seed: int, block: int) -> tuple[int, Array]:
    """So many blocks that all 2^16 thresholds are drawn, and for each of them an index that draws
    it. The first index of each block is left out: it holds the block's largest value."""
    found = np.full(1 << 16, -1)
    for number in range(1000):
        drawn = oracle.chances(seed, number * block, block)
        found[drawn[1:]] = np.arange(number * block + 1, (number + 1) * block)
        if (found >= 0).all():
            return number + 1, found
    raise AssertionError(f"seed {seed} does not draw all thresholds")


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_the_mean_over_all_thresholds_is_exact(name: str, isa: str) -> None:
    """For a value v, in steps of 2^-16 of a code, the codes of the 2^16 thresholds t add up to
    2^16 v exactly, and the code is that of the integer part of v + t / 2^16."""
    block, seed = 4096, 3
    largest = 127 if name == "int8" else 7
    blocks, index = thresholds(seed, block)
    codec = _core.Codec(KINDS[name], block, True, seed, isa)
    for fixed in (0, 1, -1, 2 * 65536 + 16384, -3 * 65536 - 26215, (largest - 1) * 65536 + 65535):
        values = np.full(blocks * block, fixed / 65536, np.float32)
        values[::block] = largest
        sent = decoded(codec, encoded(codec, values)[0], len(values))[index]
        assert np.array_equal(sent, (fixed + np.arange(1 << 16)) // 65536), fixed
        assert sent.sum(dtype=np.float64) == fixed


@pytest.mark.parametrize("name", ["int8", "int4", "fp8", "sign"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_block_that_is_not_finite_decodes_to_nan(name: str, bad: float, isa: str) -> None:
    codec = _core.Codec(KINDS[name], 32, False, 0, isa)
    values = np.ones(96, np.float32)
    values[40] = bad
    codes, rests = encoded(codec, values)
    sent = decoded(codec, codes, 96)
    assert np.isnan(sent[32:64]).all() and not rests[32:64].any()
    assert (np.delete(sent, np.s_[32:64]) == 1).all()


#: Scales that encode makes, and others: every bit pattern is a valid code.
SCALES = np.float32([1, 0.375, 3e-39, 3e38, -2, 0, -0.0, np.inf, np.nan])


def code_values(name: str) -> tuple[Array, int, Any]:
    """All codes of a block, its number of values, and the values of its codes for a scale."""
    each = np.arange(256, dtype=np.uint8)
    if name == "int8":
        return each, 256, lambda scale: each.view(np.int8).astype(np.float32) * scale
    if name == "fp8":
        return each, 256, lambda scale: oracle.e4m3_values() * scale
    if name == "int4":
        nibbles = np.concatenate([each & 15, each >> 4]).astype(np.float32)
        return each, 512, lambda scale: np.where(nibbles > 7, nibbles - 16, nibbles) * scale
    bits = np.unpackbits(each, bitorder="little").astype(bool)
    # A scale of -0, which encode never makes, is 0.
    return each, 2048, lambda scale: np.where(bits, -(scale + 0), scale + 0).astype(np.float32)


@pytest.mark.parametrize("name", ["int8", "int4", "fp8", "sign"])
def test_every_code_decodes(name: str, isa: str) -> None:
    each, count, meaning = code_values(name)
    codec = _core.Codec(KINDS[name], count, False, 0, isa)
    onto = np.random.default_rng(SEED).standard_normal(count).astype(np.float32)
    for scale in SCALES:
        codes = scale.tobytes() + each.tobytes()
        with np.errstate(all="ignore"):
            expected = meaning(scale)
            assert same(decoded(codec, codes, count), expected), scale
            assert same(decoded(codec, codes, count, onto), onto + expected), scale


def test_every_code_of_bf16_decodes(isa: str) -> None:
    each = np.arange(1 << 16, dtype=np.uint16)
    expected = (each.astype(np.uint32) << np.uint32(16)).view(np.float32)
    codec = _core.Codec(KINDS["bf16"], 256, False, 0, isa)
    found = decoded(codec, each.astype("<u2").tobytes(), len(each))
    assert same(found, expected)
    onto = np.random.default_rng(SEED).standard_normal(len(each)).astype(np.float32)
    with np.errstate(all="ignore"):
        added = onto + expected
    assert same(decoded(codec, each.astype("<u2").tobytes(), len(each), onto), added)
    numbers = expected[~np.isnan(expected)]
    assert encoded(codec, numbers)[0] == each[~np.isnan(expected)].astype("<u2").tobytes()


def test_bad_codecs_are_refused(isa: str) -> None:
    for kind, block, stochastic in ((5, 64, False), (-1, 64, False), (1, 48, False), (1, 16, False),
                                    (1, 8192, False), (3, 64, True), (4, 64, True)):  # fmt: skip
        with pytest.raises(InvalidArgumentError, match="not defined"):
            _core.Codec(kind, block, stochastic, 0, isa)
    codec = _core.Codec(1, 64, False, 0, isa)
    values, codes = np.zeros(64, np.float32), np.zeros(67, np.uint8)
    with pytest.raises(InvalidArgumentError, match="codes have 67 bytes, expected 68"):
        codec.encode(_core.view(codes), _core.view(values), None)
