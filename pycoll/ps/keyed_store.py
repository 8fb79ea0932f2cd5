"""The store of a worker: keyed arrays on servers, with init, push, pull, push_pull and clock."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pycoll.arrays.host_arrays import Framework
from pycoll.errors import (
    ClosedError,
    InvalidArgumentError,
    MismatchError,
    PycollError,
    TimeoutError,
)
from pycoll.ps.array_memory import Bytes, Target, Terms, new_target, read_array, target_in
from pycoll.ps.client_machine import Request, check_priority
from pycoll.ps.consistency import Consistency
from pycoll.ps.membership.newcomers import agreed_start
from pycoll.ps.messages import ALL, CREATES, ENDS_ROUND, NAMES, NO_WAIT, PULLS, Kind, Message
from pycoll.ps.placement import KeyPlacement, PartPlacer
from pycoll.ps.reports.request_errors import request_error, timeout_error
from pycoll.ps.reports.store_figures import store_text
from pycoll.ps.shard_arrays import MEAN, SUM, rule_of, takes_optimizer
from pycoll.ps.values.buffer_pool import BufferPool
from pycoll.ps.values.row_cache import check_cache
from pycoll.ps.values.row_table import Table, TablePlacement
from pycoll.ps.values.row_terms import FRACTIONS, TABLE_TYPES, check_table_terms
from pycoll.ps.values.server_optimizers import Optimizer
from pycoll.ps.values.store_values import TABLE, TABLES
from pycoll.ps.views import View, is_done, refusal_to_add, refusal_to_drain
from pycoll.ps.worker_links import WorkerLinks
from pycoll.types import DType, check_timeout

#: The longest name of a key, in bytes of UTF-8.
KEY_BYTES_MAX = 1024
#: A name in shard 0 that no store writes. Its look-up tells the first worker that it is the first.
_PROBE_NAME = b"\x02first"
#: The most unused bytes of row buffers that the store keeps for each size.
_ROWS_BYTES = 64 << 20
#: Seconds between two reads of the view while a server is drained or added. After so many reads the
#: worker repeats its request, since the view manager may be gone.
_VIEW_POLL_S, _POLLS_PER_RETRY = 0.01, 20


class _Key:
    """A key that this worker knows. ``rounds``: by part the rounds that ``push_pull`` has ended."""

    def __init__(self, name: str, placement: KeyPlacement, framework: Framework, like: Any) -> None:
        self.name = name
        self.placement = placement
        self.ranges = placement.ranges
        self.framework = framework
        self.like = like
        self.rounds = [0] * len(placement.shards)


class StoreWork:
    """A running request of a store; like ``pycoll.Work``.

    Errors: ``wait`` raises those of the request. Cost: none.

    >>> store.init("u", np.zeros(2))
    >>> store.push_pull("u", np.ones(2), async_op=True).wait()
    array([1., 1.])
    """

    def __init__(
        self, store: Store, requests: Sequence[Request], what: str, finish: Callable[[], Any]
    ) -> None:
        self._store = store
        self._requests = requests
        self._what = what
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None

    def done(self) -> bool:
        """Return whether the request has ended, with a result or an error."""
        return all(request.ended for request in self._requests)

    def wait(self, timeout: float | None = None) -> Any:
        """Wait and return the result. ``timeout``: seconds; None for the store's ``timeout_s``.

        Raises the errors of the request; TimeoutError that names the slowest worker.
        """
        self._store._wait(self._requests, self._what, timeout)
        if self._finish is not None:
            self._result, self._finish = self._finish(), None
        return self._result


class Store:
    """Keyed arrays that servers hold; ``pycoll.ps.connect`` makes it. Threads: any.

    ``consistency``: the consistency of the store. ``timeout_s``: the longest wait of a call, in
    seconds. ``rank``: this worker, a rank of the communicator on which the store was opened.

    Errors: ClosedError after ``close``, and those of each method. Cost: connections to all servers.

    >>> store.init("v", np.zeros(2))
    """

    def __init__(
        self,
        links: WorkerLinks,
        ranks: tuple[int, tuple[int, ...]],
        consistency: Consistency,
        timeout_s: float,
    ) -> None:
        self.rank, self.workers = ranks
        self.consistency = consistency
        self.timeout_s = timeout_s
        self._links = links
        self._closed = False
        self._keys: dict[str, _Key] = {}
        self._tables: dict[str, Table] = {}
        self._clock = 0
        self._shards = len(links.machine.view.chains)
        self._placer = PartPlacer(self._shards)
        #: The buffers of rows that are being sent or received, for all tables.
        self._buffers = BufferPool(_ROWS_BYTES)
        #: The number of the newest checkpoint in which this worker took part.
        self._cuts = 0
        #: The path of the restored checkpoint for error texts; empty if there is none.
        self._restored_from = ""
        self._new_keys = False
        #: Whether this worker has joined the store while it ran.
        self._is_new = False
        #: The pushes of this worker that came too late for their round.
        self.dropped = 0

    def __repr__(self) -> str:
        return f"<pycoll.ps.Store: worker {self.rank}, {len(self._keys)} keys, {self.consistency}>"

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def _join(self) -> None:
        """On a newcomer: make all shards count this worker from one common round on.

        Raises InvalidArgumentError where they refuse it, and the errors of ``init``.
        """
        requests = [self._begin(Kind.JOIN, shard) for shard in range(self._shards)]
        try:
            self._wait(requests, f"joining the store as worker {self.rank}")
        except PycollError as error:
            if type(error) is not PycollError:
                raise
            raise InvalidArgumentError(str(error), operation="ps") from None
        answers = [one.answer for one in requests if one.answer is not None]
        self._clock, self._cuts, messages = agreed_start(answers)
        self._is_new = True
        self._links.begin_all(messages)

    # Keys

    def init(self, key: str, x: Any, update: str = "add") -> None:
        """Make a key, with the values of the first worker that takes part.

        ``key``: a name of at most 1024 bytes. ``x``: an array in host memory, of any framework; all
        workers pass the same dtype and shape. ``update``: how pushes change the value. "add" adds
        them to it; "sum" and "mean" replace it by the sum or the mean of the pushes of a round, and
        need "bsp" or ``Backup``. All workers call this method. A second identical call changes
        nothing.

        Raises InvalidArgumentError for wrong arguments and for a known key with other terms;
        MismatchError that names this worker where the first one has passed others; TimeoutError
        where that one has not called ``init``; PeerLostError where servers are gone. If the first
        worker dies before its call has ended, the next one takes its place.

        Cost: the first worker sends its values, and a short message to each shard that holds parts;
        the others send one short message.

        >>> store.init("w", np.zeros(4))
        >>> store.pull("w")
        array([0., 0., 0., 0.])
        """
        self._init(key, x, update, _none)

    def _init(self, key: str, x: Any, update: str, before_publish: Callable[[], None]) -> None:
        """Make a key. Its maker calls ``before_publish`` before others see the key."""
        self._check_open()
        name = _check_name(key)
        framework, terms, data = read_array(x)
        rule = rule_of(update, terms.dtype)
        if rule & 0xFF in (SUM, MEAN) and not self.consistency.folds:
            raise InvalidArgumentError(
                f'update is {update!r}, which replaces the value once a round: expected "add" with '
                f"consistency {self.consistency}"
            )
        known = self._keys.get(key)
        if known is not None:
            self._compare(known.placement, terms, update, key)
            return
        restored = self._placement_text(name, f"key {key!r}")
        if restored:
            placement = KeyPlacement.from_text(restored, self._shards)
            self._compare(placement, terms, update, key)
            self._placer.note(placement)
        else:
            what = f"init of {key!r}"
            answer = self._look_up(name, what)
            if answer.kind is Kind.DONE:
                placement = self._place(terms, update, answer.round)
                self._load(placement, data, rule, key)
                self._wait(self._begin_names(placement.number, name, placement.shards), what)
                before_publish()
                written = name + b"\0" + placement.to_text().encode()
                self._wait([self._begin(Kind.WRITE, 0, payload=written)], what)
            else:
                placement = KeyPlacement.from_text(bytes(answer.payload), self._shards)
                self._compare(placement, terms, update, key, is_by_first=True)
                self._placer.note(placement)
        # An empty array of the type of x tells the type of results; it keeps no memory of x.
        like = framework.finish(x, framework.empty(x, (0,), terms.dtype))
        self._keys[key] = _Key(key, placement, framework, like)

    def _place(self, terms: Terms, update: str, epoch: int) -> KeyPlacement:
        heads = [chain[0] if chain else -1 for chain in self._links.machine.view.chains]
        return self._placer.place(terms, update, epoch, heads)

    def table(
        self,
        name: str,
        *,
        rows: int | None = None,
        dim: int,
        dtype: str = "float32",
        init: str = "zeros",
        seed: int = 0,
        cache_rows: int | str = 0,
    ) -> Table:
        """Return a table of rows, each of ``dim`` elements; the first call on all workers makes it.

        ``rows``: how many, with ids from 0; None for any ids below 2**62. Servers keep the rows
        that were pushed. ``dtype``: "float32", "float64", "int32" or "int64". ``init``: the
        elements of a row before any push: "zeros", "normal:DEVIATION" or "uniform:BOUND" (from
        -BOUND to BOUND). They depend on ``seed`` and the id alone. ``cache_rows``: which rows this
        worker keeps; pulls take them without a message. "hot" keeps the rows that it mostly pulls
        again while a kept row is still valid, up to 64 MiB and 262,144 rows. A number keeps at most
        so many rows, those that it uses most. 0 keeps none. Workers may pass different values.

        A kept row is valid in at most 16 pulls, and as long as the consistency allows. With "bsp"
        and Backup that is one round; with SSP(s), until its version is s clocks old; with "asp",
        until this worker's next ``clock``. Pulls see this worker's own pushes, as without kept
        rows. Rows that an optimizer steps are pulled again after a push.

        Returns a ``Table``. Rows are spread over the servers by a hash of their ids.

        Raises InvalidArgumentError for wrong arguments and for a known table with other terms;
        MismatchError where the first worker has passed others; the errors of ``init``.

        Cost: a short message to each server; no row is sent.

        >>> table = store.table("emb", dim=4, init="normal:0.01")
        >>> table.pull([7]).shape
        (1, 4)
        """
        self._check_open()
        text = TABLES.encode() + _check_name(name)
        word = {one.word: one for one in TABLE_TYPES}.get(dtype)
        if word is None:
            words = ", ".join(repr(one.word) for one in TABLE_TYPES)
            raise InvalidArgumentError(f"dtype is {dtype!r}: expected one of {words}")
        terms = check_table_terms(word, rows, dim, init, seed)
        check_cache(cache_rows)
        known = self._tables.get(name)
        what = f"table {name!r}"
        is_by_first = False
        if known is not None:
            placement = TablePlacement(known.number, known.terms)
        elif restored := self._placement_text(text, what):
            placement = TablePlacement.from_text(restored)
        elif (answer := self._look_up(text, what)).kind is Kind.DONE:
            placement = TablePlacement(self._placer.number(answer.round), terms)
            form = terms.to_text().encode()
            rule = TABLE | word << 8
            facts: dict[str, Any] = {"key": placement.number, "rule": rule, "payload": form}
            shards = range(self._shards)
            loads = [self._begin(Kind.LOAD, one, part=one, **facts) for one in shards]
            self._wait([*loads, *self._begin_names(placement.number, text, shards)], what)
            written = text + b"\0" + placement.to_text().encode()
            self._wait([self._begin(Kind.WRITE, 0, payload=written)], what)
        else:
            placement = TablePlacement.from_text(bytes(answer.payload))
            is_by_first = True
        if placement.terms != terms:
            differ = f"{what} with {terms}: the store has {placement.terms}"
            raise self._other_terms(differ, is_by_first)
        made = self._tables.setdefault(name, Table(self, name, placement, cache_rows))
        if made.cache_rows != cache_rows:
            raise InvalidArgumentError(
                f"cache_rows is {cache_rows!r} for {what}, which was made here with "
                f"{made.cache_rows!r}: pass the value of the first call"
            )
        return made

    def set_optimizer(self, optimizer: Optimizer, key: str | None = None) -> None:
        """Let the servers step by an optimizer, where pushes were added: a push is a gradient.

        ``optimizer``: ``SGD``, ``Adagrad`` or ``Adam`` of pycoll.ps. ``key``: a key or a table;
        None for all of them, and for those that follow. It steps keys with update "add" and
        fractions as elements, and rows of tables that are pushed. With "bsp" and Backup one step is
        made a round, by the mean of the workers' gradients; with "asp" and SSP one for each push.
        One worker may call this method, or all. The same optimizer with other numbers keeps its
        state.

        Raises InvalidArgumentError for anything else, and for a key that it cannot step; the
        errors of ``push``.

        Cost: a short message to each server.

        >>> store.init("weights", np.ones(2))
        >>> store.set_optimizer(pycoll.ps.SGD(lr=0.5), "weights")
        >>> store.push_pull("weights", np.ones(2))
        array([0.5, 0.5])
        """
        self._check_open()
        if not isinstance(optimizer, Optimizer):
            raise InvalidArgumentError(
                f"optimizer is {optimizer!r}: expected pycoll.ps.SGD, Adagrad or Adam"
            )
        facts: dict[str, Any] = {"flags": ALL}
        if key is not None:
            table = self._tables.get(key)
            found = None if table is not None else self._find_key(key).placement
            number = table.number if table is not None else found.number if found else 0
            facts = {"key": number}
            can = (
                table.terms.dtype in FRACTIONS
                if table is not None
                else found is not None and takes_optimizer(rule_of(found.update, found.terms.dtype))
            )
            if not can:
                raise InvalidArgumentError(
                    f"key is {key!r}, which no optimizer steps: expected update 'add' and float16, "
                    "bfloat16, float32 or float64; for tables float32 or float64"
                )
        form = optimizer.to_bytes()
        for name, one in self._tables.items():
            if one.cache is not None and key in (None, name) and one.terms.dtype in FRACTIONS:
                one.cache.step()
        requests = [
            self._begin(Kind.OPTIMIZE, shard, payload=form, **facts)
            for shard in range(self._shards)
        ]
        self._wait(requests, "set_optimizer")

    def _look_up(
        self, name: bytes, what: str, flags: int = 0, timeout: float | None = None
    ) -> Message:
        """Look up a name in shard 0, and return the answer.

        The answer is the name's TEXT, as soon as the first worker has written it. On the first
        worker it is a DONE: this worker has to write the text.
        """
        lookup = self._begin(Kind.LOOKUP, 0, payload=name, flags=CREATES | flags)
        self._wait([lookup], f"{what}, which the first worker begins,", timeout)
        assert lookup.answer is not None
        return lookup.answer

    def _is_first(self) -> bool:
        """Return whether this worker is the first one that takes part."""
        return (
            self._look_up(_PROBE_NAME, "a question for the first worker", NO_WAIT).kind is Kind.DONE
        )

    def _placement_text(self, name: bytes, what: str) -> bytes:
        """Return the text of a name's placement in a restored store, or an empty text."""
        if not self._restored_from:
            return b""
        lookup = self._begin(Kind.LOOKUP, 0, payload=name, flags=NO_WAIT)
        self._wait([lookup], what)
        assert lookup.answer is not None
        payload = lookup.answer.payload
        text = b"" if payload is None else bytes(payload)
        if not text and not self._new_keys:
            raise InvalidArgumentError(
                f"{what} is not in the checkpoint {self._restored_from}: pass new_keys=True to "
                "restore() to make it anew"
            )
        return text

    def _load(self, placement: KeyPlacement, data: Bytes, rule: int, key: str) -> None:
        requests = [
            self._begin(
                Kind.LOAD,
                placement.shards[part],
                key=placement.number,
                part=part,
                rule=rule,
                payload=data[begin:end],
            )
            for part, (begin, end) in enumerate(placement.ranges)
        ]
        self._wait(requests, f"init of {key!r}")

    def _begin_names(self, number: int, name: bytes, shards: Iterable[int]) -> list[Request]:
        """Begin to send the name of a key to its shards, which use it in figures."""
        return [
            self._begin(Kind.WRITE, shard, key=number, flags=NAMES, payload=name)
            for shard in sorted(set(shards))
        ]

    def _compare(
        self,
        placement: KeyPlacement,
        terms: Terms,
        update: str,
        key: str,
        is_by_first: bool = False,
    ) -> None:
        """Raise an error unless the caller's terms are those of the key.

        ``is_by_first``: whether the first worker made the key, rather than this one or a restore.
        """
        if (placement.terms, placement.update) != (terms, update):
            raise self._other_terms(
                f"init of {key!r} with {_terms_text(terms, update)}: the store has "
                f"{_terms_text(placement.terms, placement.update)}",
                is_by_first,
            )

    def _other_terms(self, text: str, is_by_first: bool) -> PycollError:
        if not is_by_first:
            return InvalidArgumentError(text)
        return MismatchError(
            f"rank {self.rank}: {text}, as the first worker passed", rank=self.rank, operation="ps"
        )

    # Values

    def push(self, key: str, x: Any, *, priority: int = 0, async_op: bool = False) -> Any:
        """Send values, by which the servers change the key's value as ``init`` said.

        ``x``: an array with the dtype and shape of the key. ``priority``: a whole number; requests
        with a higher one are sent earlier, as long as the order within a key and around a clock is
        kept. It orders those that wait because 16 pushes of their shard are on their way.
        ``async_op``: return a work at once; x must stay unchanged until its ``wait()``
        returns.

        Returns None, once the servers have the values: with "asp" and SSP they are applied, with
        "bsp" and Backup when the round ends. After Backup has ended the round of a push, it has no
        effect, and ``dropped`` counts it. With ``BSP(elastic=True)`` a push has no effect if its
        worker leaves or dies before the round ends; ``stats()`` counts it as dropped.

        Raises InvalidArgumentError for an unknown key and for another dtype or shape; PeerLostError
        that names a server, its keys and the tables; TimeoutError.

        Cost: one message for each 4 MiB, and its acknowledgement.

        >>> store.init("g", np.zeros(2))
        >>> store.push("g", np.ones(2))
        """
        requests = self._begin_push(self._find_key(key), x, priority, 0)
        return self._complete(requests, f"push of {key!r}", _none, async_op)

    def pull(self, key: str, *, out: Any = None, priority: int = 0, async_op: bool = False) -> Any:
        """Return the value of a key, as the consistency allows it to be seen.

        ``out``: an array with the dtype and shape of the key, in C order, that receives the value.
        ``priority`` and ``async_op``: as in push; ``out`` must not be used until the end of a work.

        Returns ``out``, or a new array of the kind that this worker passed to ``init``. A pull sees
        every push of this worker that was begun earlier (with "bsp" and Backup, of earlier rounds).

        Raises the errors of push; TimeoutError that names the slowest worker and its clock, where
        the consistency makes this one wait for it; PeerLostError with "bsp" where that worker died.

        Cost: one short message for each 4 MiB, and its answer.

        >>> store.init("p", np.arange(3.0))
        >>> store.pull("p")
        array([0., 1., 2.])
        """
        found = self._find_key(key)
        check_priority(priority)
        target = self._target(found, out)
        requests = self._begin_pull(found, target.memory, priority)
        return self._complete(requests, f"pull of {key!r}", target.finish, async_op)

    def push_pull(
        self, key: str, x: Any, *, out: Any = None, priority: int = 0, async_op: bool = False
    ) -> Any:
        """Push, and return the value with the push.

        The arguments and errors are those of push and pull; ``out`` may be x. With "bsp" and Backup
        all workers make this call. It ends this worker's round of the key, and returns the value
        after that round. For a key with ``update="mean"`` that is the mean of all pushes. With
        "bsp" it has the bits of ``all_reduce("avg", deterministic=True)``. With "asp" and SSP the
        value holds at least this worker's pushes.

        Cost: one message for each 4 MiB, and its answer.

        >>> store.init("m", np.zeros(2))
        >>> store.push_pull("m", np.ones(2))
        array([1., 1.])
        """
        found = self._find_key(key)
        target = self._target(found, out)
        # Only a store that folds has rounds that a push can end.
        flags = PULLS | ENDS_ROUND if self.consistency.folds else PULLS
        requests = self._begin_push(found, x, priority, flags, target.memory)
        return self._complete(requests, f"push_pull of {key!r}", target.finish, async_op)

    def clock(self, *, async_op: bool = False) -> Any:
        """End this worker's round for all keys.

        Returns None when this worker may begin the next round: with "bsp" when all have ended this
        one, with SSP(s) when the slowest is at most s rounds behind, with "asp" at once.

        Raises TimeoutError that names the slowest worker and its clock; PeerLostError, with "bsp"
        also where a worker died.

        Cost: a short message to each server, and the wait for slower workers.

        >>> store.clock()
        """
        self._check_open()
        # push_pull may have put keys ahead. The new clock is above all of them.
        alone = (round_number for key in self._keys.values() for round_number in key.rounds)
        self._clock = max(self._clock, *alone, 0) + 1
        requests = [
            self._begin(Kind.CLOCK, shard, round=self._clock, on_end=self._note_clock)
            for shard in range(self._shards)
        ]
        return self._complete(requests, "clock", _none, async_op)

    def _note_clock(self, request: Request) -> None:
        if request.answer is not None and self.consistency.name == "backup":
            self._clock = max(self._clock, request.answer.round)

    def _begin_push(
        self, key: _Key, x: Any, priority: int, flags: int, memory: Bytes | None = None
    ) -> list[Request]:
        """Begin the pushes of x. With the flag PULLS, ``memory`` receives the answered values."""
        check_priority(priority)
        _, terms, data = read_array(x)
        placement = key.placement
        if terms != placement.terms:
            raise InvalidArgumentError(
                f"x has {_terms_text(terms)}, but {key.name!r} has {_terms_text(placement.terms)}"
            )
        note = self._note_push if memory is None else self._note_push_pull
        requests = []
        for part, (begin, end) in enumerate(key.ranges):
            round_number = max(self._clock, key.rounds[part])
            request = self._begin(
                Kind.PUSH,
                placement.shards[part],
                priority,
                key=placement.number,
                part=part,
                round=round_number,
                flags=flags,
                payload=data[begin:end],
                target=None if memory is None else memory[begin:end],
                on_end=functools.partial(note, key, part),
            )
            if flags & ENDS_ROUND:
                key.rounds[part] = round_number + 1
            requests.append(request)
        return requests

    def _note_push(self, key: _Key, part: int, request: Request) -> None:
        if request.dropped:
            self.dropped += 1
            self._note_version(key, part, request)

    def _note_push_pull(self, key: _Key, part: int, request: Request) -> None:
        self.dropped += request.dropped
        self._note_version(key, part, request)

    def _note_dropped(self, request: Request) -> None:
        self.dropped += request.dropped

    def _note_version(self, key: _Key, part: int, request: Request) -> None:
        """With Backup: take the round of the other workers as this worker's round."""
        if request.answer is not None and self.consistency.name == "backup":
            key.rounds[part] = max(key.rounds[part], request.answer.round)

    def _begin_pull(self, key: _Key, memory: Bytes, priority: int) -> list[Request]:
        return [
            self._begin(
                Kind.PULL,
                key.placement.shards[part],
                priority,
                key=key.placement.number,
                part=part,
                target=memory[begin:end],
                on_end=functools.partial(self._note_version, key, part),
            )
            for part, (begin, end) in enumerate(key.ranges)
        ]

    def _target(self, key: _Key, out: Any) -> Target:
        if out is not None:
            return target_in(out, key.placement.terms)
        return new_target(key.framework, key.like, key.placement.terms)

    # Checkpoints

    def checkpoint(self, path: Any) -> None:
        """Write all keys and tables, with the states of their optimizers, to a directory.

        All workers call this method, after the same number of calls of ``clock``. The checkpoint
        holds all pushes that each worker began before its call, and none that it began later. With
        "bsp" and Backup, no round may be open: ``clock`` or ``push_pull`` was the last call. With
        Backup, a late worker ends its rounds while others wait here, even as the only worker.
        Afterwards all workers go on in the same round.

        ``path``: a directory on the host of the first worker that takes part, which makes it; it
        belongs to this store alone. A later checkpoint takes the place of an earlier one, which
        stays whole until then, also if a process is killed. Files: ``manifest.json``, and
        safetensors files with a key's elements as "values/KEY", states of its optimizer as
        "state0/KEY", and rows of a table as "row_ids/TABLE/0" and "rows/TABLE/0".

        Returns None: on the first worker when the checkpoint is on the disk; on the others when
        their later pushes cannot enter it. Meanwhile they may go on.

        Raises InvalidArgumentError on all workers for a path that cannot be written and for an open
        round, and where safetensors is not installed; TimeoutError that names a worker that has not
        called it; PeerLostError; PycollError where the disk is full. An earlier checkpoint stays
        whole.

        Cost: all values travel to the first worker once. The servers keep them meanwhile, so a
        value that is pushed takes its memory twice.

        >>> store.checkpoint("checkpoint")
        """
        from pycoll.ps.checkpoints.taking import take

        self._check_open()
        self._cuts += 1
        take(self, path, self._cuts)

    def restore(
        self,
        path: Any,
        *,
        missing_ok: bool = False,
        new_keys: bool = False,
        timeout: float | None = None,
    ) -> int | None:
        """Fill the store with a checkpoint, bit for bit, on any number of servers.

        All workers call this method, before any ``init`` and ``table``; these calls then compare
        their terms with the checkpoint, and load no values. Optimizers step on where they were. A
        call of ``set_optimizer`` for all keys would take the place of those of single keys.

        ``path``: the directory, on the host of the first worker that takes part. ``missing_ok``: a
        directory without a checkpoint leaves the store empty. ``new_keys``: ``init`` and ``table``
        may make what the checkpoint does not hold. ``timeout``: the longest time that the other
        workers wait for the first one, in seconds; None for ``timeout_s``.

        Returns the number of rounds that this worker had ended by ``clock`` when it called
        ``checkpoint``, and goes on from there; for a worker that was gone or is new, and with
        Backup, the number of rounds that the store had ended. None if there is no checkpoint.

        Raises InvalidArgumentError, on all workers, for a directory without a whole checkpoint, for
        one that is damaged or of another version, and for keys that need another consistency; the
        errors of ``init``. After a failure the store can only be closed.

        Cost: the first worker reads all files twice, and sends all values once.

        >>> store.restore("checkpoint", missing_ok=True) or 0  # the first run begins with round 0
        0
        """
        from pycoll.ps.checkpoints.restoring import restore

        self._check_open()
        if self._keys or self._tables or self._restored_from or self._is_new:
            raise InvalidArgumentError(
                "restore() was called on a store with values, or by a worker that joined it: call "
                "it once, ahead of init() and table()"
            )
        seconds = None if timeout is None else check_timeout(timeout, "timeout")
        clock = restore(self, path, missing_ok, seconds)
        if clock is not None:
            self._restored_from, self._new_keys, self._clock = repr(str(path)), new_keys, clock
        return clock

    # Figures

    def stats(self) -> dict[str, Any]:
        """Return the counters of the servers and of this worker.

        Returns a dict. "consistency", "clock", "dropped" and "view" (its number) are those of this
        worker. "servers" has the transport to each server, "keys" the shards of each key, "tables"
        the rows that this worker used most. "caches" has counts of each table with ``cache_rows``:
        kept rows and their bytes; "hits" and "misses", the pulled rows that kept rows answered or
        not. With "hot" also "fetched", the rows of answers that could be kept, and "repeated",
        those of them that an earlier answer could have served. "shards" has for each shard its
        chain, bytes, clocks, version, workers that are gone, and counts of pushes, dropped pushes,
        repeated pushes, pulls and rounds. Its "busy" lists the parts with the most uses, by name.
        Its "waiting" counts waiting requests by the clocks that each lacks before it is answered;
        requests under "0" wait for something else.

        Raises PeerLostError and TimeoutError. Cost: a short message to each shard.

        >>> store.stats()["consistency"]
        'bsp'
        """
        self._check_open()
        requests = [self._begin(Kind.STATS, shard) for shard in range(self._shards)]
        self._wait(requests, "stats")
        shards = [
            json.loads(bytes(one.answer.payload)) for one in requests if one.answer is not None
        ]
        view = self._links.machine.view
        return {
            "consistency": str(self.consistency),
            "clock": self._clock,
            "dropped": self.dropped,
            "view": view.number,
            "servers": self._links.transports,
            "keys": {key: list(one.placement.shards) for key, one in self._keys.items()},
            "tables": {name: one.hot() for name, one in self._tables.items()},
            "caches": {name: one.cache.counts() for name, one in self._tables.items() if one.cache},
            "shards": shards,
        }

    def explain(self) -> str:
        """Return a text about the store: figures of ``stats``, and the most used keys and rows.

        Raises the errors of ``stats``, and costs as much.

        >>> print(store.explain().splitlines()[0])
        store: bsp, 1 worker, 1 shard
        """
        return store_text(self.stats(), len(self.workers))

    def ticket(self) -> str:
        """Return a text by which new processes join this store while it runs, as often as wanted.

        A new server calls ``pycoll.ps.serve(ticket=...)``, or runs ``python -m pycoll.ps`` with
        ``PYCOLL_TICKET`` set. A new worker, or one that comes back, calls
        ``pycoll.ps.connect(ticket=...)``. Any worker may call this method. The ticket is valid
        while the server that gave it runs. It is secret: pass it by the environment, a pipe or a
        private file, never on a command line.

        Raises PycollError where the server has no address or free port; TimeoutError;
        PeerLostError.

        Cost: a short message. The server listens from then on until the store ends.

        >>> ticket = store.ticket()
        """
        self._check_open()
        request = self._begin(Kind.TICKET, 0)
        self._wait([request], "ticket")
        assert request.answer is not None
        return self._links.ticket(bytes(request.answer.payload))

    def drain(self, server: int) -> None:
        """Move all shards of a server to the others, so that its process may be ended.

        ``server``: the rank of a server. Any worker may call this method. Pushes and pulls go on
        meanwhile; the server keeps its connections until the workers leave.

        Raises InvalidArgumentError for another rank, and for the last server; TimeoutError where
        the shards have not been moved within ``timeout_s``; PeerLostError.

        Cost: the server's shards travel once.

        >>> store.drain(2)  # with other servers than rank 2
        """
        text = refusal_to_drain(self._newest_view(), server)
        self._ask_manager(
            Kind.DRAIN, server, text, "it still holds shards, which no other server took"
        )

    def add(self, server: int) -> None:
        """Let a drained server hold shards again.

        ``server``: the rank of a server that was drained and still runs. Any worker may call this
        method. The server gets shards that too few servers hold, and shards of servers that hold at
        least two more than it; the others serve meanwhile.

        Raises InvalidArgumentError for another server; TimeoutError where the servers have not
        decided within ``timeout_s``; PeerLostError. Cost: the shards that it is given travel once,
        after this call.

        >>> store.add(2)  # after drain(2)
        """
        text = refusal_to_add(self._newest_view(), server)
        self._ask_manager(Kind.ADD, server, text, "the servers have not decided about it")

    def _newest_view(self) -> View:
        """Return the newest view, which comes with the answers of servers."""
        self.stats()
        return self._links.machine.view

    def _ask_manager(self, kind: Kind, server: int, refusal: str, why: str) -> None:
        """Request a change of the view manager, and wait until a view contains it."""
        if refusal:
            raise InvalidArgumentError(refusal)
        deadline = time.monotonic() + self.timeout_s
        polls = 0
        while not is_done(kind, server, self._newest_view()):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{kind.name.lower()} of server rank {server} waited {self.timeout_s:g} s: "
                    f"{why}",
                    rank=server,
                    ranks=(server,),
                    operation="ps",
                )
            if polls % _POLLS_PER_RETRY == 0:
                self._links.ask_manager(kind, server)
            polls += 1
            time.sleep(_VIEW_POLL_S)

    def close(self) -> None:
        """Leave the store; its servers end when all workers have left. A second call does nothing.

        >>> store.close()
        """
        if not self._closed:
            self._closed = True
            self._links.close()

    # Requests

    def _begin(
        self,
        kind: Kind,
        shard: int,
        priority: int = 0,
        *,
        target: Bytes | None = None,
        on_end: Callable[[Request], None] | None = None,
        **fields: Any,
    ) -> Request:
        return self._links.begin(Message(kind, shard, **fields), priority, target, on_end)

    def _complete(
        self, requests: Sequence[Request], what: str, finish: Callable[[], Any], async_op: bool
    ) -> Any:
        work = StoreWork(self, requests, what, finish)
        if async_op:
            self._links.receive_in_threads()
            return work
        return work.wait()

    def _wait(self, requests: Sequence[Request], what: str, timeout: float | None = None) -> None:
        seconds = self.timeout_s if timeout is None else check_timeout(timeout, "timeout")
        if not self._links.wait(requests, time.monotonic() + seconds):
            raise self._timeout_error(requests, what, seconds)
        for request in requests:
            if request.failure:
                raise self._request_error(request, what)

    def _timeout_error(
        self, requests: Sequence[Request], what: str, seconds: float
    ) -> TimeoutError:
        return timeout_error(requests, f"{what} waited {seconds:g} s", self._links.machine.view)

    def _request_error(self, request: Request, what: str) -> PycollError:
        shard = request.message.shard
        keys = [key for key, one in self._keys.items() if shard in one.placement.shards]
        return request_error(request, what, self.consistency, keys, list(self._tables))

    def _find_key(self, key: str) -> _Key:
        self._check_open()
        found = self._keys.get(key) if isinstance(key, str) else None
        if found is None:
            known = ", ".join(map(repr, list(self._keys)[:8])) or "none"
            raise InvalidArgumentError(
                f"key {key!r} is not known here: call init first; known keys: {known}"
            )
        return found

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the store is closed")


def _check_name(key: Any) -> bytes:
    name = key.encode() if isinstance(key, str) else b""
    if not 0 < len(name) <= KEY_BYTES_MAX or b"\0" in name:
        raise InvalidArgumentError(
            f"key is {key!r}: expected a text of 1 to {KEY_BYTES_MAX} bytes without NUL"
        )
    return name


def _terms_text(terms: Terms, update: str = "") -> str:
    text = f"dtype {DType(terms.dtype).word} and shape {terms.shape}"
    return f"{text}, update {update!r}" if update else text


def _none() -> None:
    return None
