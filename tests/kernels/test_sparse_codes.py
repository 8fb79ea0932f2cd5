"""The kernels of sparse codes and of thin products against NumPy, for every instruction set."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from instruction_sets import every_isa

from pycoll import _core
from pycoll.errors import InvalidArgumentError

Array = Any
SEED = int(os.environ.get("TEST_SEED", "20261127"))
#: Lengths about those of vectors, of marks, of a kernel's piece and of arrays with a sample.
LENGTHS = [*range(70), 4095, 4096, 4133, 20_000, 70_001]


def arrays(count: int) -> list[Array]:
    """Values without and with many equal magnitudes, mostly zeros, NaN and infinities."""
    random = np.random.default_rng(SEED + count)
    plain = random.standard_normal(count).astype(np.float32)
    zeros = np.where(random.random(count) < 0.99, np.copysign(np.float32(0), plain), plain)
    wild = plain.copy()
    places = random.integers(0, max(count, 1), min(count, 5))
    wild[places] = np.float32([np.nan, np.inf, -np.inf, -np.nan, 0])[: len(places)]
    payload = plain.view(np.uint32) | np.uint32(0x7F800000)
    return [plain, np.round(plain * 2), zeros, wild, payload.view(np.float32)]


def odd(x: Array, address: int = 1) -> Array:
    """A copy whose address is ``address`` modulo 64; no vector is aligned to the usual one."""
    held = np.zeros(x.nbytes + 64, np.uint8)
    held = held[(address - held.ctypes.data) % 64 :][: x.nbytes].view(x.dtype)
    held[:] = x
    return held


def largest(x: Array, number: int) -> Array:
    """The oracle: places of the largest magnitudes, of equal ones the first; NaN is the largest."""
    size = np.where(np.isnan(x), np.inf, np.abs(x))
    order = np.lexsort((np.arange(len(x)), ~np.isnan(x), -size))
    return np.sort(order[:number])


def check(found: tuple[bytes, bytes], places: Array, x: Array, why: object) -> None:
    assert found[0] == places.astype(np.uint32).tobytes(), (why, SEED)
    assert found[1] == x[places].tobytes(), (why, SEED)


@every_isa
def test_the_largest_magnitudes_are_those_of_a_sort(isa: str) -> None:
    for count in LENGTHS:
        for kind, x in enumerate(arrays(count)):
            for number in {0, min(1, count), count // 100, count // 3, count}:
                found = _core.largest_values(_core.view(odd(x)), number, isa=isa)
                check(found, largest(x, number), x, (count, kind, number))


@every_isa
def test_a_bound_takes_nan_and_the_bound_itself(isa: str) -> None:
    for count in LENGTHS:
        for kind, x in enumerate(arrays(count)):
            for bound in (0.0, 0.5, 2.0, np.inf):
                found = _core.values_from(_core.view(odd(x)), bound, isa=isa)
                check(found, np.flatnonzero(~(np.abs(x) < bound)), x, (count, kind, bound))


@every_isa
def test_residuals_are_added_in_the_same_pass(isa: str) -> None:
    with np.errstate(invalid="ignore"):
        for count in (0, 1, 31, 32, 33, 5000, 40_000):
            x, rests, *_ = arrays(count)
            wanted, number = x + rests, count // 7
            for place in ("apart", "rests", "values", "none"):
                given, left = odd(x), odd(rests)
                sums = {"apart": odd(x) * 0, "rests": left, "values": given, "none": None}[place]
                view = None if sums is None else _core.view(sums)
                found = _core.largest_values(_core.view(given), number, _core.view(left), view, isa)
                check(found, largest(wanted, number), wanted, (count, place))
                assert sums is None or sums.tobytes() == wanted.tobytes()


#: Addresses modulo 64 of values, residuals and sums, in turns.
ADDRESSES = [(first, (first * 7 + 3) % 64, (first * 11 + 6) % 64) for first in range(64)]


@every_isa
def test_every_address_of_values_residuals_and_sums(isa: str) -> None:
    for count in (1, 31, 173, 4133):
        x, rests, *_ = arrays(count)
        wanted, number = x + rests, -(-count // 7)
        for one, two, three in ADDRESSES:
            given, left = odd(x, one), odd(rests, two)
            for bound in (None, 0.5):
                sums, why = odd(x * 0, three), (count, one, two, three, bound)
                views = [_core.view(each) for each in (given, left, sums)]
                if bound is None:
                    found = _core.largest_values(views[0], number, views[1], views[2], isa)
                    check(found, largest(wanted, number), wanted, why)
                else:
                    found = _core.values_from(views[0], bound, views[1], views[2], isa)
                    check(found, np.flatnonzero(np.abs(wanted) >= bound), wanted, why)
                assert sums.tobytes() == wanted.tobytes(), why
                assert given.tobytes() == x.tobytes() and left.tobytes() == rests.tobytes(), why


def test_every_address_of_places_and_values() -> None:
    """Of codes that are folded and spread, of targets, and of gaps."""
    random, count = np.random.default_rng(SEED), 700
    codes = []
    for _ in range(2):
        places = np.flatnonzero(random.random(count) < 0.2).astype(np.uint32)
        codes.append((places, random.standard_normal(len(places)).astype(np.float32)))
    places, values = folded(codes, count, 3)
    wanted = np.zeros(count, np.float32)
    wanted[codes[0][0]] = codes[0][1]
    gaps = np.frombuffer(_core.pack_places(_core.view(codes[0][0])), np.uint8)
    for one, two, three in ADDRESSES:
        moved = [(odd(named, one), odd(sent, two)) for named, sent in codes]
        views = [(_core.view(named), _core.view(sent)) for named, sent in moved]
        found = _core.fold_codes(views, count, 3)
        assert found == (places.astype(np.uint32).tobytes(), values.tobytes()), (one, two)
        target = odd(np.ones(count, np.float32), three)
        _core.spread_codes(_core.view(target), 0, count, *views[0])
        assert target.tobytes() == wanted.tobytes(), (one, two, three)
        assert _core.pack_places(views[0][0]) == gaps.tobytes(), one
        told = _core.unpack_places(_core.view(odd(gaps, one)), len(codes[0][0]), count)
        assert told == codes[0][0].tobytes(), one


def test_an_unrepresentative_sample_changes_nothing() -> None:
    """Bounds from a sample are too high or too low where the large values are unlike the others."""
    x = np.zeros(1 << 17, np.float32)
    x[: 1 << 12] = 5
    assert largest(x, 9000)[-1] == 8999
    for number in (1, 4000, 5000, 9000):
        check(_core.largest_values(_core.view(x), number), largest(x, number), x, number)
        left, sums = np.ones_like(x), np.empty_like(x)
        found = _core.largest_values(_core.view(x), number, _core.view(left), _core.view(sums))
        check(found, largest(x + 1, number), x + 1, number)


def folded(codes: list[tuple[Array, Array]], count: int, divisor: int) -> tuple[Array, Array]:
    values, named = np.zeros(count, np.float32), np.zeros(count, bool)
    for rank, (places, sent) in enumerate(codes):
        values[places] = sent if rank == 0 else values[places] + sent
        named[places] = True
    places = np.flatnonzero(named)
    return places, values[places] / np.float32(divisor or 1)


def test_codes_are_folded_in_their_order_and_spread() -> None:
    random = np.random.default_rng(SEED)
    for count in (0, 1, 64, 4096, 4097, 100_000):
        for ranks in (1, 2, 5):
            codes = []
            for _ in range(ranks):
                places = np.flatnonzero(random.random(count) < 0.05).astype(np.uint32)
                sent = random.standard_normal(len(places)).astype(np.float32)
                sent[: len(sent) // 2] *= 0  # zeros of both signs
                codes.append((odd(places), odd(sent)))
            views = [(_core.view(places), _core.view(sent)) for places, sent in codes]
            for divisor in (0, 3):
                places, values = folded(codes, count, divisor)
                found = _core.fold_codes(views, count, divisor)
                assert found == (places.astype(np.uint32).tobytes(), values.tobytes())
            target = np.full(count + 7, 9, np.float32)
            wanted = target.copy()
            wanted[5 : 5 + count] = 0
            wanted[5 : 5 + count][codes[0][0]] = codes[0][1]
            _core.spread_codes(_core.view(target), 5, count, *views[0])
            assert target.tobytes() == wanted.tobytes()
    few = _core.view(np.uint32([1, 3])), _core.view(np.float32([7, 8]))
    kept = np.float32([1, 2, 3, 4, 5])
    _core.spread_codes(_core.view(kept), 1, 4, *few, zeros=False)
    assert kept.tolist() == [1, 2, 7, 4, 8], "the others stay"
    whole = np.float32([1, 2])
    _core.spread_codes(_core.view(target), 0, 2, None, _core.view(whole))
    assert target[:2].tolist() == [1, 2]


def test_a_long_array_bypasses_the_caches_with_the_same_values() -> None:
    count = 6 << 20
    places = np.arange(3, count, 5000, dtype=np.uint32)
    sent = np.arange(len(places), dtype=np.float32)
    target, wanted = np.ones(count + 1, np.float32), np.zeros(count, np.float32)
    wanted[places] = sent
    _core.spread_codes(_core.view(target), 1, count, _core.view(places), _core.view(sent))
    assert target[0] == 1 and target[1:].tobytes() == wanted.tobytes()
    sums = np.empty(count, np.float32)
    views = [_core.view(one) for one in (wanted, target[1:], sums)]
    found = _core.values_from(views[0], 1.0, views[1], views[2])
    check(found, places[1:], wanted * 2, "long")
    assert sums.tobytes() == (wanted * 2).tobytes()


def unpacked(told: bytes, number: int, count: int) -> Any:
    found = _core.unpack_places(_core.view(np.frombuffer(told, np.uint8)), number, count)
    return None if found is None else np.frombuffer(found, np.uint32).tolist()


def test_gaps_of_places_take_few_bytes_and_come_back() -> None:
    random = np.random.default_rng(SEED)
    edges = [0, 1, 128, 129, 257, 2**14, 2**15 + 1, 2**31, 2**32 - 1]
    cases = [[], [0], [2**32 - 1], edges]
    cases += [np.flatnonzero(random.random(30_000) < p).tolist() for p in (0.01, 0.3, 1)]
    for places in cases:
        told = _core.pack_places(_core.view(odd(np.uint32(places))))
        count = max(places, default=0) + 1
        assert unpacked(told, len(places), count) == places
        assert len(told) < 2 * len(places) + 5 * len(edges)
        assert unpacked(told + b"\0", len(places), 2**32) is None
        assert unpacked(told, len(places) + 1, 2**32) is None
        if places:
            assert unpacked(told, len(places), count - 1) is None, "a place behind the end"
            assert unpacked(told[:-1], len(places), count) is None
    assert _core.pack_places(_core.view(np.uint32([0, 1, 129, 258]))) == bytes([0, 0, 127, 128, 1])
    assert unpacked(b"\xff" * 9 + b"\0", 1, 2**32) is None, "a gap of more than 32 bits"


def test_bytes_that_are_no_gaps_are_refused_or_read() -> None:
    random = np.random.default_rng(SEED)
    for _ in range(500):
        told = random.integers(0, 256, random.integers(0, 12), dtype=np.uint8).tobytes()
        places = unpacked(told, int(random.integers(0, 8)), 5000)
        if places is None:
            continue
        assert sorted(set(places)) == places and max(places, default=0) < 5000
        assert len(_core.pack_places(_core.view(np.uint32(places)))) <= len(told)


@pytest.mark.parametrize(
    ("places", "text"),
    [([0, 0], "must ascend, below 9"), ([3, 2], "must ascend"), ([1, 9], "must ascend, below 9")],
)
def test_places_that_do_not_ascend_are_refused(places: list[int], text: str) -> None:
    views = _core.view(np.uint32(places)), _core.view(np.float32([1, 2]))
    target = _core.view(np.zeros(9, np.float32))
    for zeros in (True, False):
        with pytest.raises(InvalidArgumentError, match=text):
            _core.spread_codes(target, 0, 9, *views, zeros=zeros)
    with pytest.raises(InvalidArgumentError, match=text):
        _core.fold_codes([views, views], 9, 0)


def test_arrays_that_do_not_fit_are_refused() -> None:
    x, short = np.zeros(8, np.float32), np.zeros(7, np.float32)
    wide, places = np.zeros(8), np.zeros(8, np.uint32)
    matrix = np.zeros((2, 4), np.float32)
    view = _core.view
    for call, text in (
        (lambda: _core.largest_values(view(wide), 1), "values must be float32"),
        (lambda: _core.largest_values(view(x), 1, view(short)), "as long as values"),
        (lambda: _core.largest_values(view(x[1:]), 1, None, view(x[:-1])), "must lie apart"),
        (lambda: _core.values_from(view(x), -1.0), "bound must be at least 0"),
        (lambda: _core.values_from(view(x), np.nan), "bound must be at least 0"),
        (lambda: _core.spread_codes(view(x), 1, 8, view(places), view(x)), "from first on"),
        (lambda: _core.spread_codes(view(x), 0, 8, view(places[1:]), view(x)), "as many as values"),
        (lambda: _core.spread_codes(view(x), 0, 8, view(x), view(x)), "places must be uint32"),
        (lambda: _core.thin_product(view(x), view(matrix), view(matrix)), "must be matrices"),
        (lambda: _core.thin_product(view(x), view(matrix.T), view(matrix)), "in one piece"),
    ):
        with pytest.raises(InvalidArgumentError, match=text):
            call()


@every_isa
def test_a_thin_product_adds_its_columns_in_order(isa: str) -> None:
    random = np.random.default_rng(SEED)
    for rows, columns, rank in ((1, 1, 1), (3, 70, 2), (17, 33, 4), (40, 19, 8), (0, 4, 1)):
        p = random.standard_normal((rows, rank)).astype(np.float32)
        q = random.standard_normal((rank, columns)).astype(np.float32)
        wanted = p[:, :1] * q[0]
        for k in range(1, rank):
            wanted = wanted + p[:, k : k + 1] * q[k]
        base = random.standard_normal((rows, columns)).astype(np.float32)
        target = np.zeros(rows * columns + 3, np.float32)
        _core.thin_product(_core.view(target), _core.view(p), _core.view(q), None, 3, isa)
        assert target[3:].tobytes() == wanted.tobytes() and not target[:3].any()
        view = _core.view(base)
        left = (base - wanted).tobytes()
        _core.thin_product(view, _core.view(p), _core.view(q), view, isa=isa)
        assert base.tobytes() == left
