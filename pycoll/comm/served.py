"""Collectives of a world with servers: the calls of workers, and the loop of a server.

A job of W workers and S servers has two communicators. The *world* joins the workers; programs use
it. The *base* joins all ranks, and only this module uses it. Worker 0 sends each server a short
message, the announcement, ahead of each operation on the base. The server reads from it what to
compile, and takes part in the operation without an array.

All workers use the base in the same order, so announcements have the order of the operations. The
engine compares the call of each worker with the announcement, as it compares the calls of ranks in
any collective. Worker 0 also announces the end. Without this announcement the server's wait ends
when worker 0 is gone.

A duplicate of the world has its own base, on which each server runs its loop in another thread. So
operations of the two worlds need no common order.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

import numpy as np

from pycoll.algorithms import lookup
from pycoll.arrays.device_view import DeviceView
from pycoll.arrays.registry import framework_of
from pycoll.comm.operations import PS, CallOptions, internals_of, nothing
from pycoll.errors import InvalidArgumentError, PeerLostError, PycollError, TimeoutError
from pycoll.ops import find_reduction
from pycoll.schedule.collectives import Collective
from pycoll.types import ITEM_BYTES, ReduceOp

_Result = TypeVar("_Result")

if TYPE_CHECKING:
    from pycoll.comm.communicator import Communicator
    from pycoll.comm.plans import CallPlan
    from pycoll.comm.work import Work

#: Workers may run this many operations ahead of the oldest one that a server has not ended.
AHEAD_MAX = 64
#: Seconds after which an idle server looks for operations that have failed meanwhile.
_LOOK_S = 0.25
_TAG = 0
_END = b'{"end": true}'
_DUP = b'{"dup": true}'
_STORE = b'{"store": true}'
#: Called on a server when workers open a store, with the communicator of all ranks; it returns the
#: function that serves the store. The package of stores, which is above this one, sets it.
serve_stores: list[Callable[[Communicator], Callable[[], None]]] = []


def without_servers(size: int) -> NoReturn:
    """Raise the error of a call that asks for servers in a world without any."""
    raise InvalidArgumentError(
        f"algorithm 'ps' needs servers, and no rank next to these {size} serves: start some "
        "(pycoll run --servers 2, or pycoll.ps.serve() on the last ranks), or take "
        "'servers_mixed', which puts a server next to each worker"
    )


def part_workers(base: Communicator, servers: int, name: str = "world") -> Communicator | None:
    """Make the world of the workers, with this name; returns None on a server.

    ``base``: the communicator of all ranks, of which the last ``servers`` serve. All ranks call
    this function at the same time.
    """
    workers = base.size - servers
    internals = internals_of(base)
    internals.lifecycle.number_split()
    choices = [(int(rank < workers), 0, rank) for rank in range(base.size)]
    color = 0 if base.rank < workers else None
    joined = internals.lifecycle.join_part(choices, color, name)
    compiler = internals.compiler
    compiler.follow(compiler.topology.serving(servers))
    if joined is None:
        return None
    return type(base)(joined, internals.config, name, served=Served(base, workers))


def dup_base(base: Communicator) -> Communicator:
    """Return a duplicate of the communicator of all ranks, all of which call this function.

    No operation may begin on ``base`` meanwhile.
    """
    with exchanging(base):
        return base.dup()


def exchanging(base: Communicator) -> AbstractContextManager[None]:
    """Let servers contribute like workers, for exchanges on the communicator of all ranks.

    All ranks enter the block, and no other operation may begin on ``base`` meanwhile.
    """
    compiler = internals_of(base).compiler
    return compiler.following(compiler.topology.serving(0))


def part_threads(bases: Sequence[Communicator], servers: int) -> list[Communicator]:
    """Make the world of workers that are threads of this process, and start its servers."""
    worlds: list[Communicator | Exception | None] = [None] * len(bases)

    def part(rank: int) -> None:
        try:
            worlds[rank] = part_workers(bases[rank], servers)
        except Exception as error:
            worlds[rank] = error

    threads = [threading.Thread(target=part, args=(rank,)) for rank in range(len(bases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in worlds:
        if isinstance(one, Exception):
            raise one
    for base in bases[len(bases) - servers :]:
        loop = ServerLoop(base, len(bases) - servers)
        threading.Thread(target=loop.run_until_failure, name="pycoll-server", daemon=True).start()
    return [one for one in worlds if one is not None and not isinstance(one, Exception)]


class Terms(NamedTuple):
    """The values on which all ranks agree; an announcement carries them as JSON."""

    dtype: int
    op: str
    shape: tuple[int, ...]
    algorithm: str | None
    deterministic: bool

    @property
    def elements(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def compile(self, base: Communicator) -> CallPlan:
        """Return the operation as each rank compiles it."""
        nbytes = self.elements * ITEM_BYTES[self.dtype]
        compiled = internals_of(base).compiler.compile(
            Collective.ALL_REDUCE,
            self.dtype,
            self.op,
            0,
            nbytes,
            self.algorithm,
            self.deterministic,
        )
        compiled.check_shape(self.shape)
        return compiled.of_array(self.shape)

    def algorithm_of(self, base: Communicator) -> str:
        """Return the name of the algorithm that runs."""
        nbytes = self.elements * ITEM_BYTES[self.dtype]
        reduction = find_reduction(self.op, self.dtype, "all_reduce")
        return internals_of(base).compiler.plans.algorithm_name(
            Collective.ALL_REDUCE,
            self.dtype,
            reduction,
            0,
            1 << (nbytes - 1).bit_length() if nbytes else 0,
            self.algorithm,
            self.deterministic,
        )


class ServedWork:
    """A Work of operations on the base, whose errors name servers."""

    def __init__(self, works: list[Work[Any]], served: Served, is_list: bool) -> None:
        self._works = works
        self._served = served
        self._is_list = is_list

    def done(self) -> bool:
        """Return whether all operations have ended."""
        return all(work.done() for work in self._works)

    def ended_s(self) -> float | None:
        """Return when the last operation ended, as ``Work.ended_s``; None if that is unknown."""
        ends = [work.ended_s() for work in self._works]
        known = [end for end in ends if end is not None]
        return max(known) if known and len(known) == len(ends) else None

    def wait(self, timeout: float | None = None) -> Any:
        """Wait and return the result, as ``Work.wait``."""
        try:
            results = [work.wait(timeout) for work in self._works]
        except PycollError as error:
            self._served.name(error)
            raise
        return results if self._is_list else results[0]


class Served:
    """The servers of a worker. Threads: any; operations begin one at a time."""

    def __init__(self, base: Communicator, workers: int) -> None:
        self.base = base
        self.workers = workers
        self._lock = threading.Lock()
        self._texts: dict[Terms, Any] = {}
        self._newest: Terms | None = None
        self._closed = False

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that serve, among all ranks of the job."""
        return tuple(range(self.workers, self.base.size))

    def all_reduce(self, x: Any, op: Any, options: CallOptions) -> Any:
        """Run an all_reduce of the workers through the servers; see ``Communicator.all_reduce``."""
        out, algorithm, async_op, deterministic, stream = options
        is_list = isinstance(x, list | tuple)
        arrays = list(x) if is_list else [x]
        outs = [None] * len(arrays) if out is None else list(out) if is_list else [out]
        if len(outs) != len(arrays):
            raise InvalidArgumentError(f"out has {len(outs)} arrays for {len(arrays)} in x")
        name = None if algorithm == PS else algorithm
        if deterministic is None:
            deterministic = internals_of(self.base).compiler.deterministic
        strict = bool(deterministic)
        with self._lock:
            works = [
                self._begin(one, op, target, name, strict, stream)
                for one, target in zip(arrays, outs, strict=True)
            ]
        work = ServedWork(works, self, is_list)
        if async_op:
            return work
        result = work.wait()
        return out if out is not None else result

    def _begin(
        self, x: Any, op: Any, out: Any, algorithm: str | None, strict: bool, stream: Any
    ) -> Work[Any]:
        base = self.base
        try:
            try:
                terms = self._terms(x, op, algorithm, strict)
            except Exception as error:
                # The other ranks wait in this operation, or will wait; this sends them the reason.
                self._announce(json.dumps({"refused": str(error)}).encode())
                internals_of(base).engine.refuse(str(error))
                raise
            self._announce(self._text_of(terms))
            # If this call raises, the base sends the reason to the ranks of the announced
            # operation.
            work: Work[Any] = base.all_reduce(
                x,
                terms.op,
                out=out,
                algorithm=algorithm,
                async_op=True,
                deterministic=strict,
                stream=stream,
            )
        except PycollError as error:
            self.name(error)
            raise
        return work

    def _terms(self, x: Any, op: Any, algorithm: str | None, strict: bool) -> Terms:
        """Return the terms of a call; InvalidArgumentError for a call that servers cannot run."""
        view = framework_of(x).view(x, "x")
        if isinstance(view, DeviceView):
            raise InvalidArgumentError(
                f"x is on {view.device}: servers combine arrays in host memory only; take another "
                "algorithm"
            )
        word = op.word if isinstance(op, ReduceOp) else op
        reduction = find_reduction(word, view.dtype, "all_reduce")
        if reduction.function is not None:
            raise InvalidArgumentError(
                f"op {word!r} is a function of this program, which servers do not have; take a "
                "builtin reduction or another algorithm"
            )
        if algorithm is not None:
            lookup(Collective.ALL_REDUCE, algorithm)
        terms = Terms(int(view.dtype), word, tuple(view.shape), algorithm, strict)
        terms.compile(self.base)
        self._newest = terms
        return terms

    def _text_of(self, terms: Terms) -> Any:
        text = self._texts.get(terms)
        if text is None:
            text = self._texts[terms] = json.dumps(terms._asdict()).encode()
        return text

    def _announce(self, text: bytes) -> None:
        """On worker 0: send a text to all servers. Short messages do not wait for receivers."""
        if self.base.rank != 0:
            return
        message = np.frombuffer(text, np.uint8)
        works = [self.base.isend(message, server, _TAG) for server in self.ranks]
        for work in works:
            work.wait()

    def name(self, error: PycollError) -> None:
        """Add to an error's text the server that it names, and the parts that this server owned."""
        rank = error.rank
        if rank is None or rank < self.workers or str(error).startswith("server "):
            return
        name = f"server {rank - self.workers} (rank {rank})"
        if isinstance(error, PeerLostError):
            owned = self._parts_of(rank)
            error.args = (f"{name} is lost, which owned {owned} of each message: {error}",)
        else:
            error.args = (f"{name}: {error}",)

    def _parts_of(self, rank: int) -> str:
        """Return which parts of a message the server owned in the newest operation, in words."""
        name = "servers" if self._newest is None else self._newest.algorithm_of(self.base)
        schedule = lookup(Collective.ALL_REDUCE, name).build(
            self.base.size, only=rank, topology=internals_of(self.base).compiler.topology
        )
        owned = sorted({t.chunk for t in schedule.transfers if t.destination == rank})
        if len(owned) == 1:
            return f"part {owned[0]} of parts 0 to {schedule.parts - 1}"
        return f"parts {owned[0]} to {owned[-1]} of parts 0 to {schedule.parts - 1}"

    def dup(self, name: str) -> Communicator:
        """Return a duplicate of the world, which has the same servers."""
        with self._lock:
            try:
                self._announce(_DUP)
                made = part_workers(dup_base(self.base), len(self.ranks), name)
            except PycollError as error:
                self.name(error)
                raise
        assert made is not None
        return made

    def open_store(self, meet: Callable[[Communicator], _Result]) -> _Result:
        """Have the servers open a store, and return what ``meet`` returns.

        ``meet``: takes part for this worker, on the communicator of all ranks.
        """
        with self._lock:
            try:
                self._announce(_STORE)
                with exchanging(self.base):
                    return meet(self.base)
            except PycollError as error:
                self.name(error)
                raise

    def failure(self) -> str | None:
        """Return the text of the error that ended the base, or None."""
        return self.base.failure

    def close(self) -> None:
        """Leave the base. Worker 0 tells the servers that the job has ended."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            # A server may be gone already.
            with contextlib.suppress(PycollError):
                if self.base.failure is None:
                    self._announce(_END)
            self.base.close()


class ServerLoop:
    """The loop of a server: it runs the operations that worker 0 announces, until the end."""

    def __init__(self, base: Communicator, workers: int) -> None:
        self.base = base
        self.workers = workers
        #: The number of operations that it has run.
        self.served = 0
        self._known: dict[bytes, Callable[[], Any]] = {_DUP: self._dup, _STORE: self._open_store}
        self._running: deque[Work[Any]] = deque()
        #: The loops of duplicates of the world, each with its thread.
        self._others: list[tuple[ServerLoop, threading.Thread]] = []
        #: The threads that serve stores; they may outlive the communicator of all ranks.
        self._stores: list[threading.Thread] = []
        #: The errors that have ended them.
        self._failures: list[PycollError] = []

    def run(self) -> int:
        """Serve until worker 0 ends, and return the number of operations.

        It includes those of duplicates of the world, and ends after them. Raises PeerLostError that
        names the rank that is gone, and the errors of operations that end the communicator. At the
        end it raises the error of a store that this server could not serve to its end.
        """
        try:
            while (text := self._next()) != _END:
                begin = self._known.get(text)
                if begin is None:
                    begin = self._known[text] = self._read(text)
                work = begin()
                if work is not None:
                    self._running.append(work)
                    self.served += 1
            while self._running:
                self._end(self._running.popleft())
        except PeerLostError:
            # The loss of a rank ends the collectives. A server with stores goes on until these end.
            if not self._stores:
                raise
        finally:
            self.base.close()
            for thread in self._stores:
                thread.join()
        for _, thread in self._others:
            thread.join()
        if self._failures:
            raise self._failures[0]
        return self.served + sum(loop.served for loop, _ in self._others)

    def _dup(self) -> None:
        """Take part in the duplication of the world, and serve the duplicate in a thread."""
        base = dup_base(self.base)
        part_workers(base, base.size - self.workers)
        loop = ServerLoop(base, self.workers)
        thread = threading.Thread(target=loop.run_until_failure, name="pycoll-server", daemon=True)
        thread.start()
        self._others.append((loop, thread))

    def _open_store(self) -> None:
        """Take part in opening a store, and serve it in a thread."""
        try:
            with exchanging(self.base):
                serve = serve_stores[0](self.base)
        except PycollError:
            # The workers raise the same error. If it ended the base, the next wait raises it.
            return
        thread = threading.Thread(
            target=self._serve, args=(serve,), name="pycoll-store", daemon=True
        )
        thread.start()
        self._stores.append(thread)

    def _serve(self, serve: Callable[[], None]) -> None:
        """Serve a store as a thread."""
        try:
            serve()
        except PycollError as error:
            self._failures.append(error)
            # Collectives and other stores go on, and run() raises the error at their end.
            warnings.warn(str(error), RuntimeWarning, stacklevel=1)

    def run_until_failure(self) -> None:
        """Serve as a thread: an error ends it, and the workers raise their own."""
        try:
            self.run()
        except PycollError:
            return

    def _next(self) -> bytes:
        """Return the next announcement. Meanwhile it looks for operations that have failed."""
        while True:
            while self._running and (self._running[0].done() or len(self._running) > AHEAD_MAX):
                self._end(self._running.popleft())
            try:
                found = self.base.probe(0, _TAG, timeout=_LOOK_S)
            except TimeoutError:
                continue
            text = np.empty(found.nbytes, np.uint8)
            self.base.recv(text, 0, _TAG)
            return text.tobytes()

    @staticmethod
    def _end(work: Work[Any]) -> None:
        # A worker may have refused its arguments; the communicator stays usable.
        with contextlib.suppress(InvalidArgumentError):
            work.wait()

    def _read(self, text: bytes) -> Callable[[], Any]:
        """Return a function that begins the announced operation."""
        said = json.loads(text)
        base = self.base
        if "refused" in said:
            reason = said["refused"]
            return lambda: internals_of(base).engine.refuse(reason)
        terms = Terms(**said)._replace(shape=tuple(said["shape"]))
        compiled, runner = terms.compile(base), internals_of(base).runner

        def begin() -> Any:
            return runner.start(compiled, None, None, [terms.elements], True, nothing)

        return begin
