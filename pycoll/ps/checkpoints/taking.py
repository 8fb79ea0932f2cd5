"""Taking a checkpoint: a consistent cut through all shards, whose values one worker writes.

Each worker sends a CUT to all shards. A shard holds back the updates behind a worker's CUT until
the CUTs of all workers have come, and then keeps its values. So the checkpoint has all updates that
workers began before their cuts, and no others. The writer is the first live worker when the last
CUT arrives at shard 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pycoll.errors import InvalidArgumentError, PycollError
from pycoll.ps.checkpoints.checkpoint_files import (
    CheckpointWriter,
    abandon_on_error,
    as_file_type,
    path_of,
)
from pycoll.ps.messages import TEXT_BYTES_MAX, Kind, Message
from pycoll.ps.placement import KeyPlacement
from pycoll.ps.shard_arrays import STATE
from pycoll.ps.snapshot import FACTS, META, PART_FACTS
from pycoll.ps.values.row_table import TablePlacement
from pycoll.ps.values.server_optimizers import Optimizer
from pycoll.ps.values.store_values import TABLES
from pycoll.ps.values.table_values import TABLE_FACTS, rows_of_piece
from pycoll.types import ITEM_BYTES, DType, numpy_dtype
from pycoll.untrusted import json_object, read_json

if TYPE_CHECKING:
    from pycoll.ps.keyed_store import Store

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

#: The most pieces that the writer fetches at once.
_PIECES_AT_ONCE = 32
#: The bytes of an array of rows in a file, which bounds the memory of the writer.
_ROWS_BYTES = 64 << 20
#: The prefix of texts that name no value.
NOTES = "\x02"


def take(store: Store, path: Any, cut: int) -> None:
    """Take part in the checkpoint with this number; one worker also writes it."""
    what = f"checkpoint in {str(path)!r}"
    writer: CheckpointWriter | None = None
    refusal = None
    try:
        path_of(path)
        if store._is_first():
            writer = CheckpointWriter(path)
    except InvalidArgumentError as error:
        # The CUT carries the refusal to the other workers, which wait for it.
        refusal = error
    shards = range(store._shards)
    payload = None if refusal is None else f"rank {store.rank}: {refusal}".encode()
    cuts = [Message(Kind.CUT, shard, round=cut, payload=payload) for shard in shards]
    requests = store._links.begin_all(cuts)
    if refusal is not None:
        raise refusal
    try:
        store._wait(requests, what)
    except PycollError as error:
        if type(error) is not PycollError:
            raise
        # A worker refused its argument, or a round is open.
        raise InvalidArgumentError(str(error)) from None
    for request in requests:
        # With Backup, late workers may have ended rounds before their CUTs.
        store._note_clock(request)
    answer = requests[0].answer
    assert answer is not None
    if answer.key != store.rank:
        return
    try:
        if writer is None:
            # The first worker has left since this one looked it up.
            writer = CheckpointWriter(path)
        with abandon_on_error(writer):
            _write(writer, [KeptShard(store, shard, cut, what) for shard in shards], store)
    finally:
        releases = [Message(Kind.RELEASE, shard) for shard in shards]
        store._links.begin_all(releases)


class KeptShard:
    """A shard at a cut, whose pieces the servers keep. ``facts``: the members of its text.

    ``parts``: by key and part the facts, and the number of the first piece. Raises PycollError if
    the server has released the cut, and the errors of reads.
    """

    def __init__(self, store: Store, shard: int, cut: int, what: str) -> None:
        self._store = store
        self._shard = shard
        self._cut = cut
        self._what = what
        text, count = b"", 0
        while len(text) == count * TEXT_BYTES_MAX:
            answer = self._fetch([count])[0]
            if answer.flags != META:
                break
            text += bytes(answer.payload)
            count += 1
        self.facts = json_object(read_json(text), FACTS)
        self.parts: dict[tuple[int, int], tuple[dict[str, Any], int]] = {}
        for one in self.facts["parts"]:
            part_facts = json_object(one, PART_FACTS)
            self.parts[part_facts["key"], part_facts["part"]] = part_facts, count
            count += part_facts["values"]

    def _fetch(self, numbers: Sequence[int]) -> list[Message]:
        store = self._store
        requests = [
            store._begin(Kind.FETCH, self._shard, key=one, round=self._cut) for one in numbers
        ]
        store._wait(requests, self._what)
        return [one.answer for one in requests if one.answer is not None]

    def pieces(self, numbers: Sequence[int]) -> list[Bytes]:
        """Return the pieces of these numbers."""
        found: list[Bytes] = []
        for begin in range(0, len(numbers), _PIECES_AT_ONCE):
            answers = self._fetch(numbers[begin : begin + _PIECES_AT_ONCE])
            found += [
                np.frombuffer(b"" if one.payload is None else one.payload, np.uint8)
                for one in answers
            ]
        return found

    def part(self, key: int, part: int) -> list[Bytes]:
        """Return all pieces of a part of an array."""
        part_facts, first = self.parts[key, part]
        return self.pieces(range(first, first + part_facts["values"]))


class _KeptRows:
    """An array of a table's part, by row. ``first``: the number of its first piece."""

    def __init__(self, kept: KeptShard, first: int, rows: int, like: Array) -> None:
        self._kept = kept
        self._first = first
        self._like = like
        self._step = rows_of_piece(like.nbytes)
        #: The number of the piece after the array.
        self.end = first + -(-rows // self._step)

    def rows(self, begin: int, end: int) -> Array:
        """Return rows of the array."""
        first, last = begin // self._step, (end - 1) // self._step
        pieces = self._kept.pieces(range(self._first + first, self._first + last + 1))
        whole = np.concatenate(pieces).view(self._like.dtype).reshape(-1, *self._like.shape[1:])
        skipped = first * self._step
        made: Array = whole[begin - skipped : end - skipped]
        return made


def _write(writer: CheckpointWriter, shards: Sequence[KeptShard], store: Store) -> None:
    keys, tables = [], []
    for name, text in sorted(shards[0].facts["texts"].items()):
        if name.startswith(TABLES):
            placement = TablePlacement.from_text(text)
            tables.append(_write_table(writer, shards, name.removeprefix(TABLES), placement))
        elif not name.startswith(NOTES):
            keys.append(_write_key(writer, shards, name, KeyPlacement.from_text(text, len(shards))))
    facts = [one.facts for one in shards]
    # Workers may have joined since this one opened the store.
    workers = sorted({int(rank) for one in facts for rank in one["clocks"]})
    gone = {rank for rank in workers if not all(rank in one["live"] for one in facts)}
    clocks = [
        None if rank in gone else min(one["clocks"][str(rank)] for one in facts) for rank in workers
    ]
    writer.finish(
        {
            "consistency": str(store.consistency),
            "round": min(one["version"] for one in facts),
            # By the workers' places in the order of their ranks; null for one that was gone.
            "clocks": clocks,
            "optimizer": _same_optimizer([one["optimizer"] for one in facts], "all keys"),
            "keys": keys,
            "tables": tables,
        }
    )


def _same_optimizer(forms: Sequence[str], whose: str) -> str:
    if len(set(forms)) > 1:
        raise PycollError(
            f"parts of {whose} have different optimizers: two workers called set_optimizer() at "
            "once; call it on one worker, and then checkpoint()",
            operation="ps",
        )
    return forms[0]


def _write_key(
    writer: CheckpointWriter, shards: Sequence[KeptShard], name: str, placement: KeyPlacement
) -> dict[str, Any]:
    """Write a key's elements and the states of its optimizer; return its entry of the manifest."""
    terms = placement.terms
    item = ITEM_BYTES[terms.dtype]
    size = placement.ranges[-1][1]
    values = np.empty(size, np.uint8)
    wide = np.dtype(np.float64 if terms.dtype == DType.FLOAT64 else np.float32)
    states: list[Array] = []
    forms: list[str] = []
    steps: list[int] = []
    for part, (begin, end) in enumerate(placement.ranges):
        pieces = shards[placement.shards[part]].part(placement.number, part)
        values[begin:end] = pieces[0]
        kept = bytes(pieces[1]) if len(pieces) > 1 else STATE.pack(0)
        forms.append(kept[STATE.size :].hex())
        steps += STATE.unpack(kept[: STATE.size])
        _same_optimizer(forms, repr(name))
        if not states:
            states = [np.empty(size // item, wide) for _ in pieces[2:]]
        span = slice(begin // item, end // item)
        for state, piece in zip(states, pieces[2:], strict=True):
            state[span] = piece.view(wide)
    writer.add(f"values/{name}", as_file_type(values, terms.dtype, terms.shape))
    for number, state in enumerate(states):
        writer.add(f"state{number}/{name}", state.reshape(terms.shape))
    return {
        "name": name,
        "dtype": DType(terms.dtype).word,
        "shape": terms.shape,
        "update": placement.update,
        "optimizer": forms[0],
        "steps": steps,
        "shown": _optimizer_text(forms[0]),
    }


def _write_table(
    writer: CheckpointWriter, shards: Sequence[KeptShard], name: str, placement: TablePlacement
) -> dict[str, Any]:
    """Write a table's ids and rows, in pieces; return its entry of the manifest."""
    chunks: list[int] = []
    forms = []
    row = np.empty((1, placement.terms.dim), numpy_dtype(placement.terms.dtype))
    for shard, kept in enumerate(shards):
        _, first = kept.parts[placement.number, shard]
        part_facts = json_object(read_json(bytes(kept.pieces([first])[0])), TABLE_FACTS)
        forms.append(part_facts["optimizer"])
        form = _same_optimizer(forms, f"table {name!r}")
        optimizer = Optimizer.from_bytes(bytes.fromhex(form)) if form else None
        number = np.empty(1, np.int64)
        likes = {"row_ids": number, "rows": row}
        if optimizer is not None:
            likes.update((f"row_state{one}", row) for one in range(optimizer.states))
            if optimizer.counts_steps:
                likes["row_steps"] = number
        arrays, at = {}, first + 1
        for word, like in likes.items():
            arrays[word] = _KeptRows(kept, at, part_facts["rows"], like)
            at = arrays[word].end
        step = max(1, _ROWS_BYTES // sum(one.nbytes for one in likes.values()))
        for begin in range(0, part_facts["rows"], step):
            end = min(begin + step, part_facts["rows"])
            for word, found in arrays.items():
                writer.add(f"{word}/{name}/{len(chunks)}", found.rows(begin, end))
            chunks.append(end - begin)
    return {
        "name": name,
        "terms": placement.terms.to_text(),
        "optimizer": forms[0],
        "rows": chunks,
        "shown": _optimizer_text(forms[0]),
    }


def _optimizer_text(form: str) -> str:
    return str(Optimizer.from_bytes(bytes.fromhex(form))) if form else ""
