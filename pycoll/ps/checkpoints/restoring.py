"""Restoring a checkpoint: the first live worker reads it and fills the shards.

That worker places the parts of arrays anew, and sends rows to the shards of their hashes. So the
number of servers may differ from that of the checkpoint. At the end it writes a note into shard 0,
for which the others wait. After a failure the note holds the reason. If the worker dies, the next
one starts again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pycoll.errors import InvalidArgumentError
from pycoll.ps.array_memory import Terms
from pycoll.ps.checkpoints.checkpoint_files import CheckpointReader, has_checkpoint, path_of
from pycoll.ps.checkpoints.taking import NOTES
from pycoll.ps.client_machine import Request
from pycoll.ps.messages import ALL, PART_BYTES_MAX, Kind
from pycoll.ps.placement import KeyPlacement
from pycoll.ps.shard_arrays import MEAN, STATE, SUM, UPDATES, rule_of
from pycoll.ps.values.row_index import shards_of
from pycoll.ps.values.row_table import TablePlacement
from pycoll.ps.values.row_terms import TableTerms
from pycoll.ps.values.server_optimizers import Optimizer
from pycoll.ps.values.store_values import TABLE, TABLES
from pycoll.types import ITEM_BYTES, DType
from pycoll.untrusted import json_object, read_json

if TYPE_CHECKING:
    from pycoll.ps.keyed_store import Store

Array = npt.NDArray[Any]

_NOTE = (NOTES + "restored").encode()
_NOTE_FACTS = {"error": str, "found": bool, "round": int, "clocks": list, "rank": int}
_KEY_FACTS = {
    **{"name": str, "dtype": str, "shape": list, "update": str, "optimizer": str, "steps": list},
    "shown": str,
}
_TABLE_FACTS = {"name": str, "terms": str, "optimizer": str, "rows": list, "shown": str}
#: The most requests that run at once.
_REQUESTS_AT_ONCE = 64


def restore(store: Store, path: Any, missing_ok: bool, timeout: float | None) -> int | None:
    """Restore a checkpoint, and return the clock that this worker had, or None if there is none."""
    what = f"restore of {str(path)!r}"
    refused = _refusal_of(path)
    answer = store._look_up(_NOTE, what, timeout=timeout)
    if answer.kind is Kind.DONE:
        note: dict[str, Any] = {"error": "", "found": False, "round": 0, "clocks": []}
        note["rank"] = store.rank
        refusal = None
        try:
            if refused is not None:
                raise refused
            if not missing_ok or has_checkpoint(path):
                note.update(_Restoring(store, path, what, answer.round).run())
        except InvalidArgumentError as error:
            # The other workers wait for the note.
            note["error"], refusal = f"rank {store.rank}: {error}", error
        written = _NOTE + b"\0" + json.dumps(note).encode()
        store._wait([store._begin(Kind.WRITE, 0, payload=written)], what)
        if refusal is not None:
            raise refusal
    else:
        if refused is not None:
            raise refused
        note = json_object(read_json(bytes(answer.payload)), _NOTE_FACTS)
        if note["error"]:
            raise InvalidArgumentError(note["error"], rank=note["rank"])
    if not note["found"]:
        return None
    clocks = dict(zip(store.workers, note["clocks"], strict=False))
    known = clocks.get(store.rank)
    if known is None or store.consistency.name == "backup":
        # A worker with Backup goes on in the round of the others.
        return max(int(note["round"]), int(known or 0))
    return int(known)


def _refusal_of(path: Any) -> InvalidArgumentError | None:
    try:
        path_of(path)
    except InvalidArgumentError as error:
        return error
    return None


class _Restoring:
    """Fills the shards, on the first worker. Raises InvalidArgumentError for a wrong checkpoint."""

    def __init__(self, store: Store, path: Any, what: str, epoch: int) -> None:
        self._store = store
        self._epoch = epoch
        self._what = what
        self._reader = CheckpointReader(path)
        self._facts = self._reader.facts
        self._shards = range(store._shards)
        self._running: list[Request] = []

    def run(self) -> dict[str, Any]:
        """Fill the shards, and return the members of the note."""
        facts = self._facts
        # Check the whole manifest before the store changes.
        try:
            keys = [self._key_of(one) for one in facts["keys"]]
            tables = [self._table_of(one) for one in facts["tables"]]
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, InvalidArgumentError):
                raise
            raise self._reader.invalid(f"its manifest makes no sense: {error}") from None
        workers = self._store.workers
        clocks = dict(zip(workers, facts["clocks"], strict=False))
        clock_by_worker = {
            str(one): facts["round"] if clocks.get(one) is None else clocks[one] for one in workers
        }
        self._to_all(
            {"clocks": clock_by_worker, "version": facts["round"], "optimizer": facts["optimizer"]},
        )
        for placement, one in keys:
            self._load_key(placement, one)
        for table, one in tables:
            self._load_table(table, one)
        self._wait_for_requests(0)
        for placement, one in keys:
            self._write(one["name"], placement.to_text())
        for table, one in tables:
            self._write(TABLES + one["name"], table.to_text())
        self._wait_for_requests(0)
        return {"found": True, "round": facts["round"], "clocks": facts["clocks"]}

    def _key_of(self, given: Any) -> tuple[KeyPlacement, dict[str, Any]]:
        one = json_object(given, _KEY_FACTS)
        terms = Terms(int(DType[one["dtype"].upper()]), tuple(map(int, one["shape"])))
        placement = self._store._place(terms, one["update"], self._epoch)
        if UPDATES[one["update"]] in (SUM, MEAN) and not self._store.consistency.folds:
            raise self._reader.invalid(
                f'key {one["name"]!r} has update {one["update"]!r}, which needs "bsp" or Backup: '
                f"this store is {self._store.consistency}"
            )
        if len(one["steps"]) != len(placement.shards):
            raise ValueError(f"{len(one['steps'])} steps for {len(placement.shards)} parts")
        return placement, one

    def _table_of(self, given: Any) -> tuple[TablePlacement, dict[str, Any]]:
        one = json_object(given, _TABLE_FACTS)
        terms = TableTerms.from_text(one["terms"])
        return TablePlacement(self._store._placer.number(self._epoch), terms), one

    # Requests

    def _begin(self, kind: Kind, shard: int, **fields: Any) -> None:
        self._running.append(self._store._begin(kind, shard, **fields))
        if len(self._running) > _REQUESTS_AT_ONCE:
            self._wait_for_requests(_REQUESTS_AT_ONCE // 2)

    def _wait_for_requests(self, left: int) -> None:
        """Wait until at most so many requests run."""
        count = len(self._running) - left
        self._store._wait(self._running[:count], self._what)
        del self._running[:count]

    def _to_all(self, facts: dict[str, Any]) -> None:
        payload = json.dumps(facts).encode()
        for shard in self._shards:
            self._begin(Kind.RESTORE, shard, flags=ALL, payload=payload)

    def _write(self, name: str, text: str) -> None:
        self._begin(Kind.WRITE, 0, payload=name.encode() + b"\0" + text.encode())

    # Values

    def _load_key(self, placement: KeyPlacement, one: dict[str, Any]) -> None:
        name, dtype = one["name"], placement.terms.dtype
        size, item = placement.ranges[-1][1], ITEM_BYTES[dtype]
        values = self._reader.array(f"values/{name}", size)
        form = bytes.fromhex(one["optimizer"])
        optimizer = Optimizer.from_bytes(form) if form else None
        wide = 8 if dtype == DType.FLOAT64 else 4
        states = [
            self._reader.array(f"state{number}/{name}", size // item * wide)
            for number in range(optimizer.states if optimizer is not None else 0)
        ]
        rule = rule_of(placement.update, dtype)
        self._running += self._store._begin_names(placement.number, name.encode(), placement.shards)
        for part, (begin, end) in enumerate(placement.ranges):
            to: dict[str, Any] = {"key": placement.number, "part": part}
            shard = placement.shards[part]
            self._begin(Kind.LOAD, shard, rule=rule, payload=values[begin:end], **to)
            if optimizer is None:
                continue
            kept = STATE.pack(one["steps"][part]) + form
            self._begin(Kind.RESTORE, shard, round=1, payload=kept, **to)
            span = slice(begin // item * wide, end // item * wide)
            for number, state in enumerate(states):
                self._begin(Kind.RESTORE, shard, round=2 + number, payload=state[span], **to)

    def _load_table(self, placement: TablePlacement, one: dict[str, Any]) -> None:
        terms, name = placement.terms, one["name"]
        shown = (TABLES + name).encode()
        self._running += self._store._begin_names(placement.number, shown, self._shards)
        form = bytes.fromhex(one["optimizer"])
        words = ["rows"]
        if form:
            optimizer = Optimizer.from_bytes(form)
            words += [f"row_state{number}" for number in range(optimizer.states)]
            words += ["row_steps"] if optimizer.counts_steps else []
        for shard in self._shards:
            to: dict[str, Any] = {"key": placement.number, "part": shard}
            text = terms.to_text().encode()
            self._begin(Kind.LOAD, shard, rule=TABLE | terms.dtype << 8, payload=text, **to)
            if form:
                self._begin(Kind.RESTORE, shard, round=0, payload=form, **to)
        for chunk, count in enumerate(one["rows"]):
            ids = self._reader.array(f"row_ids/{name}/{chunk}", 8 * count).view(np.int64)
            order = np.lexsort((ids, shards_of(ids, len(self._shards))))
            for number, word in enumerate(words, 1):
                each = 8 if word == "row_steps" else terms.row_bytes
                data = self._reader.array(f"{word}/{name}/{chunk}", each * count)
                rows = data.reshape(count, each)
                for shard, payload in _messages(ids, rows, order, len(self._shards)):
                    to = {"key": placement.number, "part": shard, "round": number}
                    self._begin(Kind.RESTORE, shard, payload=payload, **to)


def _messages(
    ids: npt.NDArray[np.int64], rows: Array, order: Array, shards: int
) -> Iterator[tuple[int, Array]]:
    """Yield payloads of rows, as (shard, payload). ``order``: by shard, and then by id."""
    each = 8 + rows.shape[1]
    step = PART_BYTES_MAX // each
    bounds = np.searchsorted(shards_of(ids, shards)[order], np.arange(shards + 1))
    for shard in range(shards):
        last = int(bounds[shard + 1])
        for begin in range(int(bounds[shard]), last, step):
            chosen = order[begin : min(begin + step, last)]
            payload = np.empty(len(chosen) * each, np.uint8)
            payload[: 8 * len(chosen)].view(np.int64)[:] = ids[chosen]
            payload[8 * len(chosen) :].reshape(len(chosen), -1)[:] = rows[chosen]
            yield shard, payload
