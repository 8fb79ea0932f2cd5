"""Values that are tables: rows by id, which the first push of an id creates.

A part of a table holds the rows of one shard. A push is ids in any order, and then a row of each;
rows of a repeated id are added in their order. A pull is ids, and its answer their rows. A pull of
a row without a push computes the row, and stores nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pycoll import _core
from pycoll.ps.messages import PART_BYTES_MAX
from pycoll.ps.values.buffer_pool import BufferPool
from pycoll.ps.values.copy_on_write import CopyOnWriteArray
from pycoll.ps.values.row_index import Ids, RowIndex, spread_ids
from pycoll.ps.values.row_terms import FRACTIONS, TableTerms, first_rows
from pycoll.ps.values.server_optimizers import Optimizer
from pycoll.types import numpy_dtype
from pycoll.untrusted import json_object, read_json

Array = npt.NDArray[Any]

#: The bytes of rows that one step of an optimizer changes, so that they stay in a core's cache.
_STEP_BYTES = 128 << 10
#: The most unused bytes of answer buffers that a part keeps for each size.
_ANSWERS_BYTES = 16 << 20
#: The members of a part's first payload.
TABLE_FACTS = {"terms": str, "rows": int, "optimizer": str}


class TableValue:
    """The rows of one part.

    ``rows``: by place. ``states``: of the optimizer, alike. ``steps``: by place how many steps a
    row took, for optimizers that ask. ``answers``: the memory of answers to pulls.
    """

    def __init__(self, terms: TableTerms, expected: int = 0) -> None:
        self.terms = terms
        self.index = RowIndex(expected)
        self.rows = CopyOnWriteArray(self._empty(max(16, expected)))
        self.optimizer: Optimizer | None = None
        self.states: list[CopyOnWriteArray] = []
        self.steps: CopyOnWriteArray | None = None
        self.answers = BufferPool(_ANSWERS_BYTES)

    def _empty(self, count: int) -> Array:
        made: Array = np.empty((count, self.terms.dim), numpy_dtype(self.terms.dtype))
        return made

    @property
    def arrays(self) -> list[CopyOnWriteArray]:
        """The rows, the states of the optimizer, and the steps if it asks for them."""
        return [self.rows, *self.states, *([] if self.steps is None else [self.steps])]

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Step by this optimizer from now on. State of the same form is kept."""
        old, self.optimizer = self.optimizer, optimizer
        if old is not None and (old.name, old.states) == (optimizer.name, optimizer.states):
            return
        capacity = len(self.rows.array)
        self.states = [CopyOnWriteArray(self._empty(capacity)) for _ in range(optimizer.states)]
        for state in self.states:
            state.array[: self.index.count] = optimizer.fresh
        counts = CopyOnWriteArray(np.zeros(capacity, np.int64))
        self.steps = counts if optimizer.counts_steps else None

    def places(self, ids: Ids) -> npt.NDArray[np.int64]:
        """Return the places of rows, and create missing rows."""
        begin = self.index.count
        places = self.index.add(ids)
        end = self.index.count
        if end > begin:
            self._reserve(end)
            new = self.index.ids[begin:end]
            self.rows.writable()[begin:end] = first_rows(self.terms, new)
            if self.optimizer is not None:
                for state in self.states:
                    state.writable()[begin:end] = self.optimizer.fresh
            if self.steps is not None:
                self.steps.writable()[begin:end] = 0
        return places

    def _reserve(self, total: int) -> None:
        capacity = len(self.rows.array)
        if total <= capacity:
            return
        capacity = max(total, capacity * 3 // 2)
        for one in self.arrays:
            old = one.array
            grown = np.empty((capacity, *old.shape[1:]), old.dtype)
            grown[: len(old)] = old
            # Views of the old array keep it alive, and it is not written any more.
            one.array = grown

    def add(self, ids: Ids, rows: Array) -> None:
        """Add ``rows`` to the rows of these ids, in their order."""
        places = self.places(ids)
        views = _core.view(self.rows.writable()), _core.view(places), _core.view(rows)
        _core.add_rows(*views)

    def step(self, ids: Ids, gradient: Array) -> None:
        """Step the rows of these ids, which are different, by the optimizer."""
        places = self.places(ids)
        for one in self.arrays:
            one.writable()
        count = max(1, _STEP_BYTES // self.terms.row_bytes)
        for begin in range(0, len(ids), count):
            self._step(places[begin : begin + count], gradient[begin : begin + count])

    def _step(self, places: npt.NDArray[np.int64], gradient: Array) -> None:
        assert self.optimizer is not None
        places_view = _core.view(places)
        changed = [(_core.view(one.array), np.empty_like(gradient)) for one in self._stepped_arrays]
        for array, rows in changed:
            _core.take_rows(_core.view(rows), array, places_view)
        count: Any = 1
        if self.steps is not None:
            count = self.steps.array[places] + 1
            self.steps.array[places] = count
        weights, *states = (rows for _, rows in changed)
        self.optimizer.step(weights, states, gradient, count)
        for array, rows in changed:
            _core.put_rows(array, places_view, _core.view(rows))

    @property
    def _stepped_arrays(self) -> list[CopyOnWriteArray]:
        return [self.rows, *self.states]


class TableValues:
    """The arithmetic of tables; see ``shard.Arithmetic``."""

    def load(self, rule: int, payload: Any) -> TableValue:
        """Return the value of a new part. Raises ValueError for wrong terms."""
        return TableValue(TableTerms.from_text(bytes(payload)))

    def set_optimizer(self, rule: int, value: TableValue, optimizer: Optimizer) -> TableValue:
        """Return the value with this optimizer; a table of whole numbers does not change."""
        if value.terms.dtype in FRACTIONS:
            value.set_optimizer(optimizer)
        return value

    def refusal(self, rule: int, value: TableValue, payload: Any) -> str:
        """Return why the payload does not fit this part, or an empty text."""
        try:
            _split(value.terms, payload)
        except ValueError as error:
            return str(error)
        return ""

    def apply(
        self, rule: int, value: TableValue, pushes: Sequence[Any], workers: int
    ) -> TableValue:
        """Return the value after the pushes."""
        split = [_split(value.terms, one) for one in pushes]
        if value.optimizer is None:
            for ids, rows in split:
                value.add(ids, rows)
            return value
        ids, gradient = split[0]
        if len(split) > 1:
            ids = np.concatenate([one for one, _ in split])
            gradient = np.concatenate([rows for _, rows in split])
        ids, gradient = sum_rows(ids, gradient)
        value.step(ids, gradient / gradient.dtype.type(workers) if workers > 1 else gradient)
        return value

    def read(self, rule: int, value: TableValue, query: Any) -> Any:
        """Return the bytes of the rows that are query for. Raises ValueError for wrong ids."""
        if query is None or memoryview(query).nbytes % 8:
            raise ValueError("a pull of a table without ids")
        ids = np.frombuffer(query, np.int64)
        _check_ids(value.terms, ids)
        if len(ids) * value.terms.row_bytes > PART_BYTES_MAX:
            raise ValueError(f"a pull of {len(ids)} rows: expected at most {PART_BYTES_MAX} bytes")
        places = value.index.find(ids)
        found = value.answers.take(len(ids) * value.terms.row_bytes)
        rows = found.view(numpy_dtype(value.terms.dtype)).reshape(len(ids), value.terms.dim)
        _core.take_rows(_core.view(rows), _core.view(value.rows.array), _core.view(places))
        absent = places < 0
        if absent.any():
            rows[absent] = first_rows(value.terms, ids[absent])
        return found

    def nbytes(self, value: TableValue) -> int:
        """Return the bytes that the rows, and the state of their optimizer, take."""
        return value.index.count * value.terms.row_bytes * (1 + len(value.states))

    def pieces(self, value: TableValue) -> Sequence[Any]:
        """Return the payloads of a value: facts, ids, rows, and the optimizer's state."""
        count = value.index.count
        facts = {
            "terms": value.terms.to_text(),
            "rows": count,
            "optimizer": "" if value.optimizer is None else value.optimizer.to_bytes().hex(),
        }
        payloads: list[Any] = [json.dumps(facts).encode()]
        # An id never changes at its place, so these views need no protection.
        payloads += _cut(CopyOnWriteArray(value.index.ids), count)
        for one in value.arrays:
            payloads += _cut(one, count)
        return payloads

    def join(self, rule: int, pieces: Sequence[Any]) -> TableValue:
        """Return the value from the payloads that ``pieces`` made."""
        if not pieces:
            raise ValueError("a table of no piece")
        facts = json_object(read_json(bytes(pieces[0])), TABLE_FACTS)
        value = TableValue(TableTerms.from_text(facts["terms"]), facts["rows"])
        if facts["optimizer"]:
            value.set_optimizer(Optimizer.from_bytes(bytes.fromhex(facts["optimizer"])))
        count = facts["rows"]
        ids = np.empty(count, np.int64)
        left = iter(pieces[1:])
        _fill(ids, left)
        value.index.add(ids)
        for one in value.arrays:
            _fill(one.array[:count], left)
        if next(left, None) is not None:
            raise ValueError("a table of too many pieces")
        return value

    def restore(self, rule: int, value: TableValue, place: int, payload: Any) -> TableValue:
        """Return the value with rows of a saved one.

        ``place``: 0 for the optimizer; then rows, states and steps by their number from 1. Their
        payload is ids and a row of each.
        """
        if place == 0:
            return self.set_optimizer(rule, value, Optimizer.from_bytes(payload))
        arrays = value.arrays
        if place > len(arrays):
            raise ValueError(f"array {place} of a table with {len(arrays)}")
        target = arrays[place - 1]
        ids, rows = _split_rows(payload, target.array)
        _check_ids(value.terms, ids)
        places = value.places(ids)
        target.writable()[places] = rows
        return value


def sum_rows(ids: Ids, rows: Array) -> tuple[Ids, Array]:
    """Return the ids once each, in the order in which they occur first, and the sums of their rows.

    Rows of an id are added in their order, so the bits depend on the arguments alone.
    """
    spread = spread_ids(ids, 1)
    if len(spread.different) == len(ids):
        return ids, rows
    total = np.empty((len(spread.different), *rows.shape[1:]), rows.dtype)
    _core.sum_rows(_core.view(total), _core.view(spread.places), _core.view(rows))
    return spread.different, total


def _split(terms: TableTerms, payload: Any) -> tuple[Ids, Array]:
    given = 0 if payload is None else memoryview(payload).nbytes
    each = 8 + terms.row_bytes
    if given == 0 or given % each:
        raise ValueError(f"a push of {given} bytes for rows of {each} bytes with their ids")
    ids, rows = _split_ids(payload, given // each)
    _check_ids(terms, ids)
    return ids, rows.view(numpy_dtype(terms.dtype)).reshape(len(ids), terms.dim)


def _split_ids(payload: Any, count: int) -> tuple[Ids, Array]:
    data = np.frombuffer(payload, np.uint8)
    return data[: 8 * count].view(np.int64), data[8 * count :]


def _split_rows(payload: Any, like: Array) -> tuple[Ids, Array]:
    """Return ids, and rows of the shape and dtype that the rows of ``like`` have."""
    each = 8 + like[:1].nbytes
    count, rest = divmod(memoryview(payload).nbytes, each)
    if rest:
        raise ValueError(f"{rest} bytes more than rows of {each} bytes with their ids")
    ids, rows = _split_ids(payload, count)
    return ids, rows.view(like.dtype).reshape(count, *like.shape[1:])


def _check_ids(terms: TableTerms, ids: Ids) -> None:
    # As an unsigned number, a negative one is above all valid ids.
    if len(ids) and int(ids.view(np.uint64).max()) >= terms.end:
        raise ValueError(f"ids that are not all from 0 to {terms.end - 1}")


def _cut(values: CopyOnWriteArray, count: int) -> Iterator[Array]:
    """Yield views of the first elements, each of which fits a message."""
    array = values.array
    step = rows_of_piece(array[:1].nbytes)
    for begin in range(0, count, step):
        yield values.view(begin, min(begin + step, count))


def rows_of_piece(row_bytes: int) -> int:
    """Return how many rows of so many bytes a payload of ``TableValues.pieces`` holds."""
    return max(1, PART_BYTES_MAX // max(1, row_bytes))


def _fill(target: Array, pieces: Iterator[Any]) -> None:
    flat = target.reshape(-1).view(np.uint8)
    begin = 0
    while begin < flat.nbytes:
        piece = next(pieces, None)
        if piece is None:
            raise ValueError("a table of too few pieces")
        data = np.frombuffer(piece, np.uint8)
        if not 0 < data.nbytes <= flat.nbytes - begin:
            raise ValueError(f"a piece of {data.nbytes} bytes that does not fit its table")
        flat[begin : begin + data.nbytes] = data
        begin += data.nbytes
