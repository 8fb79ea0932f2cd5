"""A worker's side of tables: it checks ids, sums repeated ones, and spreads them over shards."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pycoll.errors import InvalidArgumentError
from pycoll.ps.array_memory import Terms, into, new, read_array
from pycoll.ps.messages import Kind
from pycoll.ps.values.row_index import HotIds, Ids, shards_of
from pycoll.ps.values.row_terms import TableTerms
from pycoll.ps.values.table_values import sum_rows
from pycoll.types import INTEGERS, DType, numpy_dtype
from pycoll.untrusted import json_object, read_json

if TYPE_CHECKING:
    from pycoll.ps.client_machine import Request
    from pycoll.ps.keyed_store import Store

_FACTS = {"number": int, "table": str}


class PlacedTable(NamedTuple):
    """A table's place: a part in each shard. ``number``: of the key."""

    number: int
    terms: TableTerms

    def to_text(self) -> str:
        """Return the form that ``from_text`` reads."""
        return json.dumps({"number": self.number, "table": self.terms.to_text()})

    @classmethod
    def from_text(cls, text: str | bytes) -> PlacedTable:
        """Read a place. Raises ValueError for any other text."""
        facts = json_object(read_json(text), _FACTS)
        return cls(facts["number"], TableTerms.from_text(facts["table"]))


class Table:
    """Rows by id that servers hold; ``Store.table`` makes it. Threads: any.

    ``name``; ``terms``: its rows, dim, init and seed.
    """

    def __init__(self, store: Store, name: str, placed: PlacedTable, shards: int) -> None:
        self.name = name
        self.terms = placed.terms
        self.number = placed.number
        self._store = store
        self._shards = shards
        self._hot = HotIds()

    def __repr__(self) -> str:
        return f"<pycoll.ps.Table {self.name!r}: {self.terms}>"

    def pull(self, ids: Any, *, out: Any = None, priority: int = 0, async_op: bool = False) -> Any:
        """Return the rows of ids, as the consistency allows them to be seen.

        ``ids``: whole numbers from 0 to below ``rows``, of one axis; they may repeat. ``out``: an
        array of shape (len(ids), dim) in C order that receives the rows. ``priority`` and
        ``async_op``: as in ``Store.pull``.

        Returns ``out``, or a new array of the kind of ``ids``. A row that nobody has pushed has the
        elements that ``init`` and ``seed`` give to its id.

        Raises InvalidArgumentError for wrong ids, before anything is sent; the errors of
        ``Store.pull``.

        Cost: each different id travels once, 8 bytes up and a row down.

        >>> table = store.table("t", dim=2)
        >>> table.pull([5, 7, 5])
        array([[0., 0.],
               [0., 0.],
               [0., 0.]], dtype=float32)
        """
        framework, like, wanted = self._read_ids(ids)
        self._hot.note(wanted)
        shape = Terms(self.terms.dtype, (len(wanted), self.terms.dim))
        target = new(framework, like, shape) if out is None else into(out, shape)
        unique, inverse = np.unique(wanted, return_inverse=True)
        order, ranges = self._spread(unique)
        sent = unique[order]
        rows = np.empty((len(unique), self.terms.dim), numpy_dtype(self.terms.dtype))
        data = rows.reshape(-1).view(np.uint8)
        each = self.terms.row_bytes
        requests = [
            self._store._begin(
                Kind.PULL,
                shard,
                priority,
                key=self.number,
                part=shard,
                payload=sent[begin:end],
                target=data[begin * each : end * each],
            )
            for shard, begin, end in ranges
        ]

        def finish() -> Any:
            back = np.empty(len(order), np.int64)
            back[order] = np.arange(len(order))
            filled = target.memory.view(rows.dtype).reshape(shape.shape)
            np.take(rows, back[inverse], axis=0, out=filled)
            return target.finish()

        return self._store._go(requests, f"pull of table {self.name!r}", finish, async_op)

    def push(self, ids: Any, grads: Any, *, priority: int = 0, async_op: bool = False) -> Any:
        """Send a row for each id, by which the servers change the rows of the table.

        ``ids``: as in pull; rows of an id that repeats are summed in their order before they are
        sent. ``grads``: an array of shape (len(ids), dim) with the table's dtype. ``priority`` and
        ``async_op``: as in ``Store.push``; both arrays may be changed at once.

        Returns None, once the servers have the rows. They add them, or step by the optimizer of
        ``Store.set_optimizer``.

        Raises InvalidArgumentError for wrong ids or grads, before anything is sent; the errors of
        ``Store.push``.

        Cost: each different id travels once, with 8 bytes and a row.

        >>> table = store.table("u", dim=2)
        >>> table.push([5, 5], np.ones((2, 2), np.float32))
        """
        _, _, wanted = self._read_ids(ids)
        _, terms, data = read_array(grads, "grads")
        expected = Terms(self.terms.dtype, (len(wanted), self.terms.dim))
        if terms != expected:
            raise InvalidArgumentError(
                f"grads has dtype {DType(terms.dtype).word} and shape {terms.shape}: expected "
                f"{DType(expected.dtype).word} and {expected.shape} for {len(wanted)} ids"
            )
        rows = data.view(numpy_dtype(terms.dtype)).reshape(terms.shape)
        self._hot.note(wanted)
        rising = np.argsort(wanted)
        unique = wanted[rising]
        if np.any(unique[1:] == unique[:-1]):
            unique, rows = sum_rows(wanted, rows)
            rising = np.arange(len(unique))
        order, ranges = self._spread(unique)
        sent, source = unique[order], rising[order]
        requests = []
        for shard, begin, end in ranges:
            count = end - begin
            payload = np.empty(count * (8 + self.terms.row_bytes), np.uint8)
            payload[: 8 * count].view(np.int64)[:] = sent[begin:end]
            target = payload[8 * count :].view(rows.dtype).reshape(count, self.terms.dim)
            np.take(rows, source[begin:end], axis=0, out=target)
            requests.append(self._push(shard, payload, priority))
        return self._store._go(requests, f"push of table {self.name!r}", _none, async_op)

    def _push(self, shard: int, payload: Any, priority: int) -> Request:
        store = self._store
        then: Callable[[Request], None] = store._note_dropped
        return store._begin(
            Kind.PUSH,
            shard,
            priority,
            key=self.number,
            part=shard,
            round=store._clock,
            payload=payload,
            then=then,
        )

    def hot(self, count: int = 10) -> list[tuple[int, int]]:
        """Return the ids that this worker used most, as (id, at least how often).

        ``count``: how many ids. Raises nothing.

        Cost: none on the network; a sort of at most 66,000 numbers.

        >>> table = store.table("h", dim=2)
        >>> rows = table.pull([3, 3, 4])
        >>> table.hot(1)
        [(3, 2)]
        """
        return self._hot.top(count)

    def _read_ids(self, ids: Any) -> tuple[Any, Any, Ids]:
        like = (
            np.array(ids, np.int64 if len(ids) == 0 else None)
            if isinstance(ids, list | tuple)
            else ids
        )
        framework, terms, data = read_array(like, "ids")
        if len(terms.shape) != 1 or terms.dtype not in INTEGERS:
            raise InvalidArgumentError(
                f"ids has dtype {DType(terms.dtype).word} and shape {terms.shape}: expected whole "
                "numbers of one axis"
            )
        given = data.view(numpy_dtype(terms.dtype))
        wrong = (given < 0) | (given >= self.terms.end)
        if wrong.any():
            place = int(np.argmax(wrong))
            raise InvalidArgumentError(
                f"ids[{place}] is {given[place]}: expected 0 to {self.terms.end - 1}"
            )
        return framework, like, given.astype(np.int64)

    def _spread(self, ids: Ids) -> tuple[npt.NDArray[np.int64], list[tuple[int, int, int]]]:
        """Return an order of rising ids by shard, and ranges of it as (shard, begin, end)."""
        shards = shards_of(ids, self._shards)
        order = np.argsort(shards, kind="stable")
        bounds = np.searchsorted(shards[order], np.arange(self._shards + 1))
        step = self.terms.rows_of_message
        ranges = [
            (shard, begin, min(begin + step, int(bounds[shard + 1])))
            for shard in range(self._shards)
            for begin in range(int(bounds[shard]), int(bounds[shard + 1]), step)
        ]
        return order, ranges


def _none() -> None:
    return None
