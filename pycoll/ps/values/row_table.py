"""A worker's side of tables: it checks ids, sums repeated ones, and spreads them over shards.

A message holds rows of one shard. Messages of all shards take turns, so all servers begin at once,
and rows of a message are copied while earlier ones travel.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pycoll import _core
from pycoll.errors import InvalidArgumentError
from pycoll.ps.array_memory import Bytes, Terms, new_target, read_array, target_in
from pycoll.ps.client_machine import check_priority
from pycoll.ps.messages import Kind
from pycoll.ps.values.row_cache import RowCache
from pycoll.ps.values.row_index import HotIds, Ids, spread_ids
from pycoll.ps.values.row_terms import TableTerms
from pycoll.types import INTEGERS, DType, numpy_dtype
from pycoll.untrusted import json_object, read_json

if TYPE_CHECKING:
    from pycoll.ps.array_memory import Target
    from pycoll.ps.client_machine import Request
    from pycoll.ps.keyed_store import Store
    from pycoll.ps.values.row_index import SpreadIds

_FACTS = {"number": int, "table": str}


class TablePlacement(NamedTuple):
    """The placement of a table: a part in each shard. ``number``: the key's."""

    number: int
    terms: TableTerms

    def to_text(self) -> str:
        """Return the form that ``from_text`` reads."""
        return json.dumps({"number": self.number, "table": self.terms.to_text()})

    @classmethod
    def from_text(cls, text: str | bytes) -> TablePlacement:
        """Read a placement. Raises ValueError for any other text."""
        facts = json_object(read_json(text), _FACTS)
        return cls(facts["number"], TableTerms.from_text(facts["table"]))


class Table:
    """Rows by id that servers hold; ``Store.table`` makes it. Threads: any.

    ``name`` is its name, and ``terms`` its rows, dim, init and seed. ``cache_rows`` is how many
    rows this worker keeps at most, or "hot", in ``cache``, which is None for 0.

    Errors: those of ``Store``. Cost: a message to each server that holds one of the rows, and one
    back.

    >>> table = store.table("rows of Table", dim=2)
    >>> table.pull([3, 5])
    array([[0., 0.],
           [0., 0.]], dtype=float32)
    """

    def __init__(
        self, store: Store, name: str, placement: TablePlacement, cache_rows: int | str
    ) -> None:
        self.name = name
        self.terms = placement.terms
        self.number = placement.number
        self._store = store
        self._shards = store._shards
        self._hot = HotIds()
        self.cache_rows = cache_rows
        self.cache: RowCache | None = None
        if cache_rows:
            self.cache = RowCache(placement.terms, cache_rows, store.consistency)

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

        Cost: each different id travels once, 8 bytes up and a row down. Rows that ``cache_rows`` of
        ``Store.table`` keeps here do not travel.

        >>> table = store.table("t", dim=2)
        >>> table.pull([5, 7, 5])
        array([[0., 0.],
               [0., 0.],
               [0., 0.]], dtype=float32)
        """
        check_priority(priority)
        framework, like, wanted = self._read_ids(ids)
        shape = Terms(self.terms.dtype, (len(wanted), self.terms.dim))
        target = new_target(framework, like, shape) if out is None else target_in(out, shape)
        spread = spread_ids(wanted, self._shards)
        count = len(spread.different)
        if self.cache is not None:
            return self._pull_some(wanted, spread, target, priority, async_op)
        if count == len(wanted) and self._shards == 1:
            # Answers have the caller's order, so they are received in its array.
            requests = self._begin_pulls(spread.different, spread.bounds, target.memory, priority)
            return self._complete(wanted, requests, target.finish, async_op)
        data = self._store._buffers.take(count * self.terms.row_bytes)
        requests = self._begin_pulls(spread.different, spread.bounds, data, priority)

        def finish() -> Any:
            self._place(data, spread.places, target.memory)
            return target.finish()

        return self._complete(wanted, requests, finish, async_op)

    def _pull_some(
        self, wanted: Ids, spread: SpreadIds, target: Target, priority: int, async_op: bool
    ) -> Any:
        """Pull the rows that the cache does not hold, and keep them there."""
        cache, store, ids = self.cache, self._store, spread.different
        assert cache is not None
        data = store._buffers.take(len(ids) * self.terms.row_bytes)
        rows = self._rows_in(data)
        lookup = cache.lookup(ids, store._clock, rows)
        left = np.flatnonzero(~lookup.hits)
        bounds = np.searchsorted(left, spread.bounds).tolist()
        missing = ids[left]
        fetched = store._buffers.take(len(left) * self.terms.row_bytes)
        requests = self._begin_pulls(missing, bounds, fetched, priority)
        ranges = self._ranges(bounds)

        def finish() -> Any:
            some = self._rows_in(fetched)
            for request, (_, begin, end) in zip(requests, ranges, strict=True):
                assert request.answer is not None
                version = request.answer.round
                cache.insert(missing[begin:end], some[begin:end], version, store._clock, lookup)
            _core.put_rows(_core.view(rows), _core.view(left), _core.view(some))
            self._place(data, spread.places, target.memory)
            return target.finish()

        return self._complete(wanted, requests, finish, async_op)

    def _begin_pulls(
        self, ids: Ids, bounds: list[int], memory: Bytes, priority: int
    ) -> list[Request]:
        """Begin to pull ids by shard; ``memory`` receives their rows."""
        each = self.terms.row_bytes
        return [
            self._store._begin(
                Kind.PULL,
                shard,
                priority,
                key=self.number,
                part=shard,
                payload=ids[begin:end],
                target=memory[begin * each : end * each],
            )
            for shard, begin, end in self._ranges(bounds)
        ]

    def _complete(
        self, wanted: Ids, requests: list[Request], finish: Callable[[], Any], async_op: bool
    ) -> Any:
        # Counting runs here since the servers work on the requests meanwhile.
        self._hot.note(wanted)
        return self._store._complete(requests, f"pull of table {self.name!r}", finish, async_op)

    def _rows_in(self, memory: Bytes) -> Any:
        return memory.view(numpy_dtype(self.terms.dtype)).reshape(-1, self.terms.dim)

    def _place(self, data: Bytes, places: Any, memory: Bytes) -> None:
        """Copy the row at each place to ``memory``, in the order of ``places``."""
        views = _core.view(self._rows_in(memory)), _core.view(self._rows_in(data))
        _core.take_rows(*views, _core.view(places))

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
        check_priority(priority)
        _, _, wanted = self._read_ids(ids)
        _, terms, data = read_array(grads, "grads")
        expected = Terms(self.terms.dtype, (len(wanted), self.terms.dim))
        if terms != expected:
            raise InvalidArgumentError(
                f"grads has dtype {DType(terms.dtype).word} and shape {terms.shape}: expected "
                f"{DType(expected.dtype).word} and {expected.shape} for {len(wanted)} ids"
            )
        rows = data.view(numpy_dtype(terms.dtype)).reshape(terms.shape)
        spread = spread_ids(wanted, self._shards)
        ids, source = spread.different, spread.firsts
        if len(ids) < len(wanted):
            total = self._rows_in(self._store._buffers.take(len(ids) * self.terms.row_bytes))
            _core.sum_rows(_core.view(total), _core.view(spread.places), _core.view(rows))
            rows, source = total, np.arange(len(ids))
        with contextlib.nullcontext() if self.cache is None else self.cache.hold_answers():
            if self.cache is not None:
                self.cache.note_push(ids, rows, source)
            requests = self._send(spread.bounds, ids, rows, source, priority)
        # Counting runs here since the servers work on the requests meanwhile.
        self._hot.note(wanted)
        return self._store._complete(requests, f"push of table {self.name!r}", _none, async_op)

    def _send(
        self, bounds: list[int], ids: Ids, rows: Any, source: Any, priority: int
    ) -> list[Request]:
        """Begin the pushes of ``rows[source]`` for these ids, by shard."""
        given = _core.view(rows)
        requests = []
        for shard, begin, end in self._ranges(bounds):
            count = end - begin
            payload = self._store._buffers.take(count * (8 + self.terms.row_bytes))
            payload[: 8 * count].view(np.int64)[:] = ids[begin:end]
            target = _core.view(self._rows_in(payload[8 * count :]))
            _core.take_rows(target, given, _core.view(source[begin:end]))
            requests.append(self._push(shard, payload, priority, ids[begin:end]))
        return requests

    def _push(self, shard: int, payload: Any, priority: int, ids: Ids) -> Request:
        store = self._store
        on_end: Callable[[Request], None] = store._note_dropped
        if self.cache is not None:
            on_end = functools.partial(self._note_push, self.cache, ids)
        return store._begin(
            Kind.PUSH,
            shard,
            priority,
            key=self.number,
            part=shard,
            round=store._clock,
            payload=payload,
            on_end=on_end,
        )

    def _note_push(self, cache: RowCache, ids: Ids, request: Request) -> None:
        self._store._note_dropped(request)
        if request.answer is not None:
            cache.note_answer(ids, request.answer.flags)
        else:
            cache.note_failure(ids)

    def hot(self, count: int = 10) -> list[tuple[int, int]]:
        """Return the ids that this worker used most, as (id, at least how often).

        ``count``: how many ids. Raises nothing.

        Cost: none on the network; a sort of at most 2,048 numbers.

        >>> table = store.table("h", dim=2)
        >>> rows = table.pull([3, 3, 4])
        >>> table.hot(1)
        [(3, 2)]
        """
        return self._hot.top(count)

    def _read_ids(self, ids: Any) -> tuple[Any, Any, Ids]:
        like = _array_of(ids) if isinstance(ids, list | tuple) else ids
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

    def _ranges(self, bounds: list[int]) -> list[tuple[int, int, int]]:
        """Return the ranges of messages as (shard, begin, end), in the order of sending."""
        step = self.terms.rows_of_message
        found = [
            (begin - bounds[shard], shard, begin, min(begin + step, bounds[shard + 1]))
            for shard in range(self._shards)
            for begin in range(bounds[shard], bounds[shard + 1], step)
        ]
        return [one[1:] for one in sorted(found)]


def _array_of(ids: list[Any] | tuple[Any, ...]) -> Any:
    try:
        return np.array(ids, np.int64 if len(ids) == 0 else None)
    except ValueError:
        kind = type(ids).__name__
        raise InvalidArgumentError(
            f"ids is a {kind} whose members are of different lengths: expected whole numbers of "
            "one axis; pull or push each member by itself, or join them"
        ) from None


def _none() -> None:
    return None
