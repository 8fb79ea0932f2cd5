"""Values that are tables: rows by id, made when they are first pushed.

A part of a table holds the rows of one shard. A push is the ids, in rising order without repeats,
and then a row of each. A pull asks with such ids, and is answered with the rows. A pull of a row
that nobody has pushed computes it, and stores nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pycoll.ps.messages import PART_BYTES_MAX
from pycoll.ps.values.row_index import HotIds, Ids, RowIndex
from pycoll.ps.values.row_terms import FRACTIONS, TableTerms, first_rows
from pycoll.ps.values.server_optimizers import Optimizer
from pycoll.ps.values.shown_array import ShownArray
from pycoll.types import numpy_dtype
from pycoll.untrusted import json_object, read_json

Array = npt.NDArray[Any]

#: So few ids that repeat still are summed one by one.
_FEW = 16
#: The members of a part's first payload.
TABLE_FACTS = {"terms": str, "rows": int, "optimizer": str}


class TableValue:
    """The rows of one part.

    ``rows``: by place. ``states``: of the optimizer, alike. ``steps``: by place how many steps a
    row took, for optimizers that ask. ``hot``: ids that were pulled and pushed most; no part of the
    replicated state.
    """

    def __init__(self, terms: TableTerms, expected: int = 0) -> None:
        self.terms = terms
        self.index = RowIndex(expected)
        self.rows = ShownArray(self._empty(max(16, expected)))
        self.optimizer: Optimizer | None = None
        self.states: list[ShownArray] = []
        self.steps: ShownArray | None = None
        self.hot = HotIds()

    def _empty(self, count: int) -> Array:
        made: Array = np.empty((count, self.terms.dim), numpy_dtype(self.terms.dtype))
        return made

    @property
    def arrays(self) -> list[ShownArray]:
        """The rows, the states of the optimizer, and the steps if it asks for them."""
        return [self.rows, *self.states, *([] if self.steps is None else [self.steps])]

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Step by this optimizer from now on. The state stays where it has the same form."""
        old, self.optimizer = self.optimizer, optimizer
        if old is not None and (old.name, old.states) == (optimizer.name, optimizer.states):
            return
        capacity = len(self.rows.array)
        self.states = [ShownArray(self._empty(capacity)) for _ in range(optimizer.states)]
        for state in self.states:
            state.array[: self.index.count] = optimizer.fresh
        counts = ShownArray(np.zeros(capacity, np.int64))
        self.steps = counts if optimizer.counts_steps else None

    def places(self, ids: Ids) -> npt.NDArray[np.int64]:
        """Return the places of rows, and make those that there are not."""
        places = self.index.find(ids)
        absent = places < 0
        if absent.any():
            new = ids[absent]
            begin = self.index.count
            places[absent] = self.index.add(new)
            self._reserve(self.index.count)
            self.rows.writable()[begin : self.index.count] = first_rows(self.terms, new)
            if self.optimizer is not None:
                for state in self.states:
                    state.writable()[begin : self.index.count] = self.optimizer.fresh
            if self.steps is not None:
                self.steps.writable()[begin : self.index.count] = 0
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
            # Views of the old array keep it, and nobody writes to it any more.
            one.array = grown

    def step(self, ids: Ids, gradient: Array) -> None:
        """Let the optimizer change these rows, which are different."""
        assert self.optimizer is not None
        places = self.places(ids)
        rows = self.rows.array[places]
        states = [one.array[places] for one in self.states]
        count: Any = 1
        if self.steps is not None:
            count = self.steps.writable()[places] + 1
            self.steps.array[places] = count
        self.optimizer.step(rows, states, gradient, count)
        self.rows.writable()[places] = rows
        for one, new in zip(self.states, states, strict=True):
            one.writable()[places] = new


class TableValues:
    """The arithmetic of tables; see ``shard.Arithmetic``."""

    def load(self, rule: int, payload: Any) -> TableValue:
        """Return the value of a new part. Raises ValueError for wrong terms."""
        return TableValue(TableTerms.from_text(bytes(payload)))

    def set_optimizer(self, rule: int, value: TableValue, optimizer: Optimizer) -> TableValue:
        """Return the value that steps by this optimizer; one of whole numbers stays as it is."""
        if value.terms.dtype in FRACTIONS:
            value.set_optimizer(optimizer)
        return value

    def refusal(self, rule: int, value: TableValue, payload: Any) -> str:
        """Return why the payload is no push of this part, or an empty text."""
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
        for ids, _ in split:
            value.hot.note(ids)
        if value.optimizer is None:
            for ids, rows in split:
                places = value.places(ids)
                value.rows.writable()[places] += rows
            return value
        ids, gradient = split[0]
        if len(split) > 1:
            together = np.concatenate([one for one, _ in split])
            ids, gradient = sum_rows(together, np.concatenate([rows for _, rows in split]))
        value.step(ids, gradient / gradient.dtype.type(workers) if workers > 1 else gradient)
        return value

    def read(self, rule: int, value: TableValue, asked: Any) -> Array:
        """Return the bytes of the rows that are asked for. Raises ValueError for wrong ids."""
        if asked is None or memoryview(asked).nbytes % 8:
            raise ValueError("a pull of a table without ids")
        ids = np.frombuffer(asked, np.int64)
        _check_ids(value.terms, ids)
        if len(ids) * value.terms.row_bytes > PART_BYTES_MAX:
            raise ValueError(f"a pull of {len(ids)} rows: expected at most {PART_BYTES_MAX} bytes")
        value.hot.note(ids)
        places = value.index.find(ids)
        found: Array = value.rows.array[places]
        absent = places < 0
        if absent.any():
            found[absent] = first_rows(value.terms, ids[absent])
        return found.reshape(-1).view(np.uint8)

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
        # Ids never change at their place, so they need no protection.
        payloads += _cut(ShownArray(value.index.ids), count)
        for one in value.arrays:
            payloads += _cut(one, count)
        return payloads

    def join(self, rule: int, pieces: Sequence[Any]) -> TableValue:
        """Return the value of which ``pieces`` made these payloads."""
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
        """Return the value with rows of an earlier one.

        ``place``: 0 for the form of its optimizer; then rows, states and steps by their number from
        1, as ids in rising order and a row of each.
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
    """Return the ids in rising order, once each, and of each the sum of its rows.

    Rows of an id are added in their order, so the bits depend on the arguments alone.
    """
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


def _split(terms: TableTerms, payload: Any) -> tuple[Ids, Array]:
    given = 0 if payload is None else memoryview(payload).nbytes
    each = 8 + terms.row_bytes
    if given == 0 or given % each:
        raise ValueError(f"a push of {given} bytes for rows of {each} bytes with their ids")
    ids, rows = _parted(payload, given // each)
    _check_ids(terms, ids)
    return ids, rows.view(numpy_dtype(terms.dtype)).reshape(len(ids), terms.dim)


def _parted(payload: Any, count: int) -> tuple[Ids, Array]:
    data = np.frombuffer(payload, np.uint8)
    return data[: 8 * count].view(np.int64), data[8 * count :]


def _split_rows(payload: Any, like: Array) -> tuple[Ids, Array]:
    """Return ids, and rows of the shape and dtype that the rows of ``like`` have."""
    each = 8 + like[:1].nbytes
    count, rest = divmod(memoryview(payload).nbytes, each)
    if rest:
        raise ValueError(f"{rest} bytes more than rows of {each} bytes with their ids")
    ids, rows = _parted(payload, count)
    return ids, rows.view(like.dtype).reshape(count, *like.shape[1:])


def _check_ids(terms: TableTerms, ids: Ids) -> None:
    if len(ids) and (ids[0] < 0 or ids[-1] >= terms.end or not np.all(ids[1:] > ids[:-1])):
        raise ValueError(f"ids that are not rising from 0 to {terms.end - 1}")


def _cut(shown: ShownArray, count: int) -> Iterator[Array]:
    """Yield the first elements in pieces that fit messages."""
    array = shown.array
    step = rows_of_piece(array[:1].nbytes)
    for begin in range(0, count, step):
        yield shown.view(begin, min(begin + step, count))


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
