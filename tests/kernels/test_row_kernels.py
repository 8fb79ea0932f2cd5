"""The kernels of tables of rows against NumPy, bit for bit."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from instruction_sets import every_isa

from pycoll import _core
from pycoll.arrays.hashes import hashes
from pycoll.errors import InvalidArgumentError
from pycoll.ps.values.buffer_pool import BufferPool
from pycoll.ps.values.row_index import RowIndex, shards_of, spread_ids
from pycoll.ps.values.table_values import sum_rows

Array = Any
SEED = int(os.environ.get("TEST_SEED", "20261127"))
#: Lengths about the searches that are under way at once.
LENGTHS = [*range(4), 63, 64, 65, 5000]


# The kernels in NumPy, the oracle

#: So few ids that repeat still are summed one by one.
_FEW = 16


def first_slots(ids: Array, slots: int) -> Array:
    return (hashes(ids) & np.uint64(slots - 1)).astype(np.int64)


def plain_find_rows(slots: Array, known: Array, wanted: Array) -> Array:
    """The place of each id, and -1 for unknown ones."""
    places = np.full(len(wanted), -1, np.int64)
    left = np.arange(len(wanted))
    mask = len(slots) - 1
    turns = first_slots(wanted, len(slots))
    while left.size:
        found = slots[turns]
        taken = found >= 0
        left, turns, found = left[taken], turns[taken], found[taken]
        same = known[found] == wanted[left]
        places[left[same]] = found[same]
        other = ~same
        left, turns = left[other], (turns[other] + 1) & mask
    return places


def plain_fill_slots(slots: Array, known: Array) -> None:
    """Enter different ids into free slots, each in a place of its own."""
    mask = len(slots) - 1
    places = np.arange(len(known))
    turns = first_slots(known, len(slots))
    while places.size:
        free = slots[turns] < 0
        slots[turns[free]] = places[free]
        # Of several ids at one slot the last has it now; the others go on to the next slot.
        open_ones = slots[turns] != places
        places, turns = places[open_ones], (turns[open_ones] + 1) & mask


def plain_sum_rows(ids: Array, rows: Array) -> tuple[Array, Array]:
    """The ids in rising order, once each, and of each the sum of its rows, in their order."""
    order = np.argsort(ids, kind="stable")
    ids = ids[order]
    is_first = np.empty(len(ids), bool)
    is_first[:1] = True
    np.not_equal(ids[1:], ids[:-1], out=is_first[1:])
    begins = np.flatnonzero(is_first)
    ends = np.append(begins[1:], len(ids))
    total: Array = rows[order[begins]]
    # The second rows of all ids are added at once, then the third ones, and so on.
    left, turn = np.flatnonzero(ends - begins > 1), 1
    while left.size > _FEW:
        total[left] += rows[order[begins[left] + turn]]
        turn += 1
        left = left[(ends - begins)[left] > turn]
    for one in left:
        rest = rows[order[begins[one] + turn : ends[one]]]
        # Unlike a reduction, an accumulation has one order in NumPy.
        total[one] = np.add.accumulate([total[one], *rest], axis=0, dtype=rows.dtype)[-1]
    return ids[begins], total


def plain_spread_ids(ids: Array, shards: int) -> tuple[Array, Array, Array, list[int]]:
    """The different ids by shard in the order in which they occur first, and where they came."""
    rising, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    order = np.lexsort((first, shards_of(rising, shards)))
    turn = np.empty(len(order), np.int64)
    turn[order] = np.arange(len(order))
    bounds = np.searchsorted(shards_of(rising[order], shards), np.arange(shards + 1))
    return rising[order], turn[inverse], first[order], bounds.tolist()


# Comparisons


def odd(x: Array) -> Array:
    """A copy at an address that no vector is aligned to."""
    held = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype)
    held[:] = x.reshape(-1)
    return held.reshape(x.shape)


def drawn(draw: Any, shape: Any, dtype: Any) -> Array:
    if np.dtype(dtype).kind == "i":
        info = np.iinfo(dtype)
        return draw.integers(info.min, info.max, shape, dtype)
    return draw.standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("count", LENGTHS)
def test_places_are_those_of_numpy(count: int) -> None:
    draw = np.random.default_rng(SEED + count)
    ids = draw.permutation(3 * count)[:count] - count
    index = RowIndex()
    assert (index.add(ids) == np.arange(count)).all() and index.count == count
    wanted = odd(draw.integers(-count, 2 * count + 1, 2 * count))
    slots = np.full(4096 if count < 1000 else 1 << 14, -1, np.int32)
    plain_fill_slots(slots, ids)
    assert (index.find(wanted) == plain_find_rows(slots, ids, wanted)).all()


def test_ids_that_repeat_get_one_place() -> None:
    index = RowIndex()
    assert index.add(np.array([7, 9, 7, 5])).tolist() == [0, 1, 0, 2]
    assert index.add(np.array([9, 4, 4, 7])).tolist() == [1, 3, 3, 0]
    assert index.ids.tolist() == [7, 9, 5, 4]


@every_isa
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float32, np.float64])
@pytest.mark.parametrize("dim", [1, 3, 64])
def test_rows_are_copied_and_added_as_by_numpy(dtype: Any, dim: int, isa: str) -> None:
    draw = np.random.default_rng(SEED + dim)
    rows = drawn(draw, (50, dim), dtype)
    for count in (0, 1, 7, 40):
        places = odd(draw.permutation(50)[:count])
        some = odd(drawn(draw, (count, dim), dtype))
        target = np.empty_like(some)
        _core.take_rows(_core.view(target), _core.view(rows), _core.view(places))
        assert target.tobytes() == rows[places].tobytes()
        found, expected = rows.copy(), rows.copy()
        _core.put_rows(_core.view(found), _core.view(places), _core.view(some))
        expected[places] = some
        assert found.tobytes() == expected.tobytes()
        _core.add_rows(_core.view(found), _core.view(places), _core.view(some), isa)
        expected[places] += some
        assert found.tobytes() == expected.tobytes()
        # A row may come several times: each is added in its turn.
        twice = np.concatenate([places, places[::-1]])
        more = drawn(draw, (len(twice), dim), dtype)
        _core.add_rows(_core.view(found), _core.view(twice), _core.view(more), isa)
        np.add.at(expected, twice, more)
        assert found.tobytes() == expected.tobytes()


def test_place_minus_one_names_no_row() -> None:
    rows, target = np.arange(6.0).reshape(3, 2), np.full((3, 2), 9.0)
    places = np.array([2, -1, 0])
    _core.take_rows(_core.view(target), _core.view(rows), _core.view(places))
    assert target.tolist() == [[4, 5], [9, 9], [0, 1]]
    _core.add_rows(_core.view(rows), _core.view(places), _core.view(target))
    assert rows.tolist() == [[0, 2], [2, 3], [8, 10]]


@pytest.mark.parametrize("shards", [1, 2, 7])
@pytest.mark.parametrize("end", [1, 60, 1 << 62])
def test_ids_are_spread_and_sums_have_the_bits_of_numpy(end: int, shards: int) -> None:
    draw = np.random.default_rng(SEED + shards)
    for count in LENGTHS:
        ids = draw.integers(0, end, count)
        found = spread_ids(odd(ids), shards)
        different, places, firsts, bounds = plain_spread_ids(ids, shards)
        assert found.different.tolist() == different.tolist() and found.bounds == bounds
        assert (found.places == places).all() and (found.firsts == firsts).all()
        rows = drawn(draw, (count, 3), np.float32)
        names, total = sum_rows(ids, rows)
        order = np.argsort(names)
        expected = plain_sum_rows(ids, rows)
        assert names[order].tolist() == expected[0].tolist()
        assert total[order].tobytes() == expected[1].tobytes()


def test_wrong_arrays_are_refused() -> None:
    rows, ids = np.zeros((3, 2), np.float32), np.arange(2)
    view = _core.view
    slots, places = np.full(16, -1), np.full(2, -1)
    still = np.arange(2)
    still.flags.writeable = False
    wrong: list[tuple[str, Any]] = [
        ("places must be from -1 to 2", lambda: _core.put_rows(view(rows), view(ids + 2), rows2)),
        ("places must be from -1 to 2", lambda: _core.put_rows(view(rows), view(ids - 2), rows2)),
        ("as many rows as places", lambda: _core.put_rows(view(rows), view(ids), view(rows))),
        (
            "rows and source must have one dtype",
            lambda: _core.add_rows(view(rows), view(ids), view(rows[:2].view(np.int32))),
        ),
        (
            "slots are 12: expected a power of 2",
            lambda: _core.find_rows(view(slots[:12]), view(ids), 2, view(ids), view(places)),
        ),
        (
            "count is 3: expected at most 2",
            lambda: _core.find_rows(view(slots), view(ids), 3, view(ids), view(places)),
        ),
        (
            "no space for 2 more",
            lambda: _core.add_ids(view(slots), view(ids), 1, view(ids), view(places)),
        ),
        (
            "places must be int64.*writable",
            lambda: _core.find_rows(view(slots), view(ids), 2, view(ids), view(still)),
        ),
        (
            "at least 4 times kept",
            lambda: _core.count_ids(view(np.zeros(16, int)), view(np.zeros(16, int)), 5, view(ids)),
        ),
    ]
    rows2 = view(rows[:2])
    for text, call in wrong:
        with pytest.raises(InvalidArgumentError, match=text):
            call()
    assert not rows.any() and (slots == -1).all()


def test_memory_is_used_again_when_no_view_is_left() -> None:
    memory = BufferPool(1 << 20)
    first = memory.take(200_000)
    first[:] = 1
    address = first.ctypes.data
    # A view of a view keeps the memory, also when the array that was given out is gone.
    rows = first[8:].view(np.int64)
    del first
    assert memory.take(200_000).ctypes.data != address and rows[0] == 0x0101010101010101
    held = memoryview(rows[1:])
    del rows
    assert memory.take(200_000).ctypes.data != address
    del held
    again = [memory.take(250_000), memory.take(262_144)]
    assert address in {one.ctypes.data for one in again}
    assert memory.take(100).nbytes == 100
    several = [memory.take(1 << 19) for _ in range(5)]
    del several
    assert sum(len(one) * size for size, one in memory._free.items()) <= 3 << 20
