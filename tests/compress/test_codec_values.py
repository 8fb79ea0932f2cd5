"""Codecs as values: bad arguments, encode and decode against definitions, what is exact."""

from __future__ import annotations

import dataclasses
import doctest
import math
import pickle
from typing import Any

import codec_oracle as oracle
import numpy as np
import pytest

import pycoll.compress
from pycoll import InvalidArgumentError
from pycoll.compress import (
    BF16,
    FP8,
    Block,
    Custom,
    Feedback,
    PowerSGD,
    RandomK,
    Sign,
    Threshold,
    TopK,
)
from pycoll.compress.low_rank import orthonormal, product
from pycoll.compress.sparse import draws_from

Array = Any
DENSE = {
    "bf16": (BF16(), oracle.BF16, 256, None),
    "fp8": (FP8(64), oracle.FP8, 64, None),
    "int8": (Block("int8", 64), oracle.INT8, 64, None),
    "int4": (Block("int4", 32), oracle.INT4, 32, None),
    "chance": (Block("int8", 32, "stochastic", 7), oracle.INT8, 32, 7),
    "sign": (Sign(32), oracle.SIGN, 32, None),
}
HALVES = Custom(
    lambda x: x.astype(np.float16), lambda b, n: np.frombuffer(b, np.float16), name="halves"
)
EVERY: list[Any] = [
    *(one for one, *_ in DENSE.values()),
    *(TopK(0.1), Threshold(0.5), RandomK(0.1, 3), PowerSGD(2), HALVES),
]


def sample(count: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def through(codec: Any, x: Array) -> Array:
    return codec.decode(codec.encode(x), x.size)


def bits(x: Array) -> bytes:
    return np.asarray(x, np.float32).tobytes()


@pytest.mark.parametrize("name", DENSE)
def test_dense_codecs_have_the_bits_of_the_kernels_definition(name: str) -> None:
    codec, kind, block, seed = DENSE[name]
    for count in (0, 1, block - 1, block, 3 * block + 5):
        x = sample(count)
        told, sent, _ = oracle.encode(kind, x, block, seed)
        assert codec.encode(x).tobytes() == told
        assert bits(codec.decode(told, count)) == bits(sent)
        assert codec.encoded_bytes(count) == len(told)


@pytest.mark.parametrize("codec", EVERY, ids=repr)
def test_codecs_are_values_and_zeros_stay_zeros(codec: Any) -> None:
    assert hash(codec) == hash(dataclasses.replace(codec))
    assert codec == dataclasses.replace(codec)
    if codec is not HALVES:
        assert pickle.loads(pickle.dumps(codec)) == codec
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(codec, dataclasses.fields(codec)[0].name if dataclasses.fields(codec) else "x", 1)
    for count in (0, 1, 33):
        assert bits(through(codec, np.zeros(count, np.float32))) == bytes(4 * count)
    assert through(codec, sample(7).astype(np.float16)).dtype == np.float32
    for other in (np.zeros(3, np.int32), np.zeros(3, np.complex64), np.zeros(3, bool)):
        with pytest.raises(InvalidArgumentError, match=f"x has dtype {other.dtype}, but codes"):
            codec.encode(other)
    with pytest.raises(InvalidArgumentError, match=r"pass x\.astype\(numpy\.float32\)"):
        codec.encode(np.zeros(3))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Block("int2"), "codes is 'int2': expected 'int8' or 'int4'"),
        (lambda: Block("int8", 48), "block is 48: expected a power of two from 32 to 4096"),
        (lambda: Block("int8", 8192), "block is 8192: expected a power of two from 32 to 4096"),
        (lambda: FP8(16), "block is 16: expected a power of two from 32 to 4096"),
        (lambda: Sign(64.0), "block is 64.0: expected a whole number of at least 1"),
        (lambda: Block(rounding="up"), "rounding is 'up': expected 'nearest' or 'stochastic'"),
        (lambda: Block(seed=-1), "seed is -1: expected a whole number of at least 0"),
        (lambda: RandomK(0.1, 2**64), f"seed is {2**64}: expected a whole number below"),
        (lambda: TopK(0), "density is 0: expected a number above 0 and at most 1"),
        (lambda: TopK(1.5), "density is 1.5: expected a number above 0 and at most 1"),
        (lambda: RandomK(math.nan, 0), "density is nan: expected a number above 0"),
        (lambda: Threshold(-1), "value is -1: expected a finite number of at least 0"),
        (lambda: Threshold(math.inf), "value is inf: expected a finite number of at least 0"),
        (lambda: PowerSGD(0), "rank is 0: expected a whole number of at least 1"),
        (lambda: PowerSGD(True), "rank is True: expected a whole number"),
        (lambda: Custom(None, bytes), "encoder is None: expected a function"),
        (lambda: Custom(bytes, bytes, name=3), "name is 3: expected a text"),
        (lambda: Feedback(momentum=1), "momentum is 1: expected a number from 0 to below 1"),
        (lambda: Feedback(masking=1), "masking is 1: expected a bool"),
        (lambda: Feedback(warmup=-1), "warmup is -1: expected a whole number of at least 0"),
    ],
)
def test_bad_arguments_are_named(make: Any, text: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        make()
    assert str(caught.value).startswith(text)


def test_top_k_is_exact_whatever_the_length() -> None:
    random = np.random.default_rng(1)
    for count in (1, 10, 40_000, 200_000):
        for number in (0, 1, 2):
            x = sample(count, number)
            if number == 1:
                x = np.round(x * 2)  # many equal magnitudes
            if number == 2:
                x[random.integers(0, count, 5)] = [np.nan, np.inf, -np.inf, np.nan, 0]
            for density in (1e-4, 0.01, 0.3, 1.0):
                wanted = min(count, math.ceil(density * count))
                size = np.where(np.isnan(x), np.inf, np.abs(x))
                order = np.lexsort((np.arange(count), ~np.isnan(x), -size))[:wanted]
                found = TopK(density).chosen(x)
                assert found.tolist() == np.sort(order).tolist(), (count, number, density)
    wide = np.float64([1, 1e300, np.inf, np.nan, -np.finfo(np.float64).max])
    assert TopK(0.4).chosen(wide).tolist() == [2, 3]
    assert TopK(0.6).chosen(wide).tolist() == [2, 3, 4]


def test_random_k_draws_one_place_of_each_part() -> None:
    x = np.zeros(1000, np.float32)
    first = RandomK(0.1, 5).chosen(x)
    assert first.tolist() == RandomK(0.1, 5).chosen(x + 1).tolist()
    assert (first // 10).tolist() == list(range(100))
    other_step, other_seed = RandomK(0.1, 5).chosen(x, 1), RandomK(0.1, 6).chosen(x)
    assert first.tolist() != other_step.tolist() and first.tolist() != other_seed.tolist()
    assert RandomK(1.0, 2).chosen(x).tolist() == list(range(1000))
    assert RandomK(0.3, 2).chosen(x[:0]).size == 0
    counts = np.zeros(37)
    for step in range(2000):
        counts[RandomK(0.2, 1).chosen(counts, step)] += 1
    assert abs(counts / 2000 - 8 / 37).max() < 0.06
    # The published numbers of splitmix64 for the seed 1234567.
    assert draws_from(1234567, 2).tolist() == [6457827717110365317, 3203168211198807973]


def test_threshold_sends_nan_and_the_bound_itself() -> None:
    x = np.float32([0.5, -0.5, 0.49, np.nan, -np.inf, 0])
    assert Threshold(0.5).chosen(x).tolist() == [0, 1, 3, 4]
    assert bits(through(Threshold(0), x)) == bits(x)
    assert bits(through(TopK(1.0), x)) == bits(x)


def test_sparse_codes_that_encode_never_makes_are_refused() -> None:
    codec = TopK(0.5)
    codes = codec.encode(sample(10))
    for bad, text in (
        (codes[:-1], "have 39 bytes for 10 values"),
        (codec.encode(sample(30)), "places that do not ascend from 0 to 9"),
        (np.concatenate([codes[4:8], codes[:4], codes[8:]]), "places that do not ascend"),
        (np.concatenate([codes[:4], codes[:4], codes[8:]]), "places that do not ascend"),
    ):
        with pytest.raises(InvalidArgumentError, match=text):
            codec.decode(bad, 10)
    for dense in (Block(), BF16(), Sign()):
        with pytest.raises(InvalidArgumentError, match="have 7 bytes for 10 values: expected"):
            dense.decode(bytes(7), 10)
    with pytest.raises(InvalidArgumentError, match="have 13 bytes for 10 values"):
        PowerSGD(1).decode(bytes(13), 10)
    with pytest.raises(InvalidArgumentError, match="expected those of encode"):
        PowerSGD(1).decode(PowerSGD(1).encode(np.ones((8, 8), np.float32)), 65)


def test_power_sgd_repeats_what_has_its_rank() -> None:
    random = np.random.default_rng(1)
    low = random.standard_normal((40, 3)) @ random.standard_normal((3, 20))
    low = low.astype(np.float32)
    found = through(PowerSGD(3), low).reshape(low.shape)
    assert np.abs(found - low).max() < 1e-5 * np.abs(low).max()
    # A Q of more columns than the matrix has rank gives columns of zeros, not of noise.
    found = through(PowerSGD(5), low).reshape(low.shape)
    assert np.abs(found - low).max() < 1e-5 * np.abs(low).max()
    full = random.standard_normal((12, 8)).astype(np.float32)
    p = orthonormal(full @ PowerSGD(8).first_q(8))
    assert np.abs(p.T @ p - np.eye(8)).max() < 1e-6
    assert np.abs(product(p, full.T @ p) - full).max() < 1e-6 * np.abs(full).max() * 8
    assert not orthonormal(np.zeros((3, 2), np.float32)).any()
    whole = sample(50)
    assert bits(through(PowerSGD(1), whole)) == bits(whole), "vectors are sent whole"
    matrix = np.ones((20, 20), np.float32)
    matrix[3, 4] = np.nan
    assert np.isnan(through(PowerSGD(1), matrix)).any()


def test_functions_of_a_program_are_checked() -> None:
    x = sample(5)
    assert bits(through(HALVES, x)) == bits(x.astype(np.float16))
    assert repr(HALVES) == "Custom('halves')"
    with pytest.raises(InvalidArgumentError, match=r"encoder of .* returned a list: expected b"):
        Custom(lambda x: [1], HALVES.decoder).encode(x)
    with pytest.raises(InvalidArgumentError, match=r"decoder of .* returned 2 values: expected 5"):
        Custom(HALVES.encoder, lambda b, n: np.zeros(2)).decode(b"", 5)


def test_codes_of_a_value_that_is_not_finite_tell_of_it() -> None:
    for bad in (np.nan, np.inf, -np.inf):
        x = sample(100)
        x[40] = bad
        for codec in (Block("int8", 32), Block("int4", 32), FP8(32), Sign(32)):
            found = through(codec, x)
            assert (
                np.isnan(found[32:64]).all() and np.isfinite(np.delete(found, np.s_[32:64])).all()
            )
        for codec in (BF16(), TopK(0.01), Threshold(50.0)):
            assert np.array_equal(through(codec, x)[40:41], x[40:41], equal_nan=True)


@pytest.mark.parametrize("name", [n for n in pycoll.compress.__all__ if n != "Feedback"])
def test_the_examples_of_docstrings(name: str) -> None:
    thing = getattr(pycoll.compress, name)
    scope = {"pycoll": pycoll, "np": np}
    for example in doctest.DocTestParser().get_examples(thing.__doc__):
        if example.want:
            assert repr(eval(example.source, scope)) == example.want.rstrip("\n")
        else:
            exec(example.source, scope)
