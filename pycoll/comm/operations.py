"""The common path of all operations of a communicator: preparation, the engine, errors."""

from __future__ import annotations

import atexit
import functools
import importlib
import itertools
import operator
import re
import sys
import threading
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np

from pycoll import _core
from pycoll.arrays.device_view import DeviceView, Where
from pycoll.arrays.host_arrays import Framework, Shape
from pycoll.arrays.registry import framework_of, input_of, output_view
from pycoll.comm.coded_ends import behind, coded_ends
from pycoll.errors import InvalidArgumentError, MismatchError, PycollError
from pycoll.ops import Reduction, UserRun, find_reduction
from pycoll.schedule.collectives import REDUCING, Collective
from pycoll.types import ITEM_BYTES, MEAN_RANKS_MAX, DType, ReduceOp

if TYPE_CHECKING:
    from array import array

    from pycoll.comm.codecs import Coding
    from pycoll.comm.fused_memory import FusedMemory
    from pycoll.comm.plans import MessageKey, Plans, Prepared
    from pycoll.comm.served import Served
    from pycoll.device.device_operations import Devices
    from pycoll.schedule.topology import Topology

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_Self = TypeVar("_Self", bound="Core")

#: Prepared calls that a communicator keeps at most.
_PREPARED_MAX = 4096
#: Operations begin with internal exchanges. An engine's MismatchError may name such an exchange by
#: a text of this pattern; the note then tells the user which calls make them.
_EXCHANGES = r"(all_gather|broadcast) of \d+ int64"
_EXCHANGE_NOTE = (
    "all_gather, gather, split, all_to_all with splits and calls for objects begin with an "
    "all_gather of int64, scatter with a broadcast of one, and the first collective on device "
    "arrays with an all_gather of one int64"
)
#: With a codec, the engine compares the dtype of arrays, and avg of float64, only inside a hash.
#: Its MismatchError then names different algorithms, and the note adds these reasons.
_CODED = r"codec .*\(with different algorithms"
_CODED_NOTE = (
    "codes hold float32, so arrays of other dtypes, and 'sum' and 'avg' of float64, look alike here"
)
#: The name by which a call leaves the choice among the algorithms with servers to the cost model.
PS = "ps"


def asks_for_servers(algorithm: object) -> bool:
    """Return whether an algorithm's name is one of those with servers, or PS."""
    return isinstance(algorithm, str) and (algorithm == PS or "servers" in algorithm)


def operation(function: Callable[Concatenate[_Self, _Arguments], Any]) -> Any:
    """Make a public method from ``function``. Groups defer it, and its errors name the operation.

    The result is a ``_core.Method``; type checkers take its type from ``pycoll.signatures``.

    The function reads and checks the arguments, and tells native code what the call does
    (``Core._run``, ``Messages._offer``). Native code repeats that for later calls whose arguments
    look alike; all other calls come here.
    """
    name = function.__name__
    # A TypeError about arguments names the public class.
    function.__qualname__ = f"Communicator.{name}"

    collective = name.upper() in Collective.__members__

    @functools.wraps(function)
    def call(self: _Self, *args: _Arguments.args, **words: _Arguments.kwargs) -> Any:
        calls = self._native.calls() if collective else None
        try:
            if self._group is not None:
                check_fit(function, (self, *args), words)
                return self._group.add(name, args, words)
            return function(self, *args, **words)
        except Exception as error:
            self._handle_failure(error, name, calls)
            raise

    return _core.method(call, function)


def immediate(
    function: Callable[_Arguments, _Result], collective: bool = False
) -> Callable[_Arguments, _Result]:
    """Make a public method that groups refuse, and whose errors name the operation."""
    name = function.__name__
    function.__qualname__ = f"Communicator.{name}"

    @functools.wraps(function)
    def call(*args: _Arguments.args, **words: _Arguments.kwargs) -> _Result:
        self: Any = args[0] if args else None
        calls = self._native.calls() if collective and self is not None else None
        try:
            if getattr(self, "_group", None) is not None:
                raise InvalidArgumentError(f"{name} inside a group: leave the with block first")
            return function(*args, **words)
        except Exception as error:
            if self is not None:
                if isinstance(error, PycollError):
                    error.operation = name  # not the internal exchange that raised it
                self._handle_failure(error, name, calls, False)
            raise

    return call


def repeatable(call: Callable[_Arguments, Any]) -> Any:
    """Let native code repeat the calls of an immediate method, as those of an ``operation``."""
    method: Any = call
    return _core.method(method, method.__wrapped__)


def immediate_collective(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Make an immediate method that all ranks call."""
    return immediate(function, True)


class _Told(threading.local):
    """The outputs of the exchanges of a call that native code has begun on this thread."""

    def __init__(self) -> None:
        self.communicator: Any = None
        self.outputs: list[bytes] = []


class Core(_core.Calls):
    """State of a communicator and the common path of its operations. See ``Communicator``."""

    #: Makes transports of all ranks in addition to the communicator's own; a collective call.
    _wires: Callable[[], list[Any]]
    #: The same text on all ranks of a host.
    _host: str
    #: The same text on all ranks of this communicator; differs from that of any other.
    _identity: str
    _made_plans: Plans | None = None
    _made_fused: FusedMemory | None = None
    #: The servers of these ranks, if this is the world of a job that has some.
    _served: Served | None = None
    #: The outputs of exchanges that native code has made already, see ``_resume``.
    _told: _Told = _Told()
    #: The value of ``_native.calls()`` after the newest internal exchange.
    _exchanged = -1

    def __init__(
        self,
        rank: int,
        size: int,
        transports: list[Any],
        names: list[str],
        topology: Topology,
        timeout_s: float,
        deterministic: bool,
        inside: str,
        oversubscription: float,
        tuning: str,
        across: str,
        cores: int,
        cpu_balancing: bool,
    ) -> None:
        from pycoll.cost.slot_stores import slot_stores_of

        _finish_imports_at_exit()
        #: The stores that fill the slots of shared memory, the same on all ranks.
        self._slot_stores = slot_stores_of(tuning)
        for transport in transports:
            if transport.name == "shm":
                transport.use_stores(self._slot_stores)
        self.rank = rank
        self.size = size
        self._names = names
        self._topology = topology
        self._native = _core.Communicator(
            rank, size, transports, timeout_s, names, cores, cpu_balancing
        )
        self._chosen_by = (tuning, inside, across, oversubscription)
        self._deterministic = deterministic
        #: Limit in bytes for channels in the memory of this rank's device.
        self._device_memory_max = 128 << 20
        self._device_protocol = "auto"
        self._device_rdma = True
        self._devices: Devices | None = None

    @property
    def _plans(self) -> Plans:
        # cached_property would use __dict__, which native calls avoid: bindings/calls/calls.cpp.
        if self._made_plans is None:
            self._made_plans = self._make_plans()
        return self._made_plans

    @property
    def _fused_memory(self) -> FusedMemory:
        if self._made_fused is None:
            from pycoll.comm.fused_memory import FusedMemory

            self._made_fused = FusedMemory()
        return self._made_fused

    def _make_plans(self) -> Plans:
        # Algorithms and proofs are the larger part of the package. They are imported here, so that
        # neither the import of pycoll nor joining waits for them.
        from pycoll.comm.plans import Plans
        from pycoll.cost.tuning_file import from_text

        tuning, inside, across, oversubscription = self._chosen_by
        several = len(self._topology.hosts) > 1
        hosts = {name.rpartition(":")[0] for name in self._names}
        parameters = from_text(tuning).parameters(inside, several, hosts, across)
        return Plans(self.rank, self._topology, parameters.with_ranks_per_core(oversubscription))

    def _handle_failure(
        self, error: Exception, name: str, calls: int | None, exchanges: bool = True
    ) -> None:
        """Handle ``error``, which operation ``name`` raises.

        ``calls``: the value of ``_native.calls()`` at the beginning of the operation; None where no
        other rank waits. If the engine has begun nothing since, this rank takes no part in a
        collective in which the others wait, and the engine tells them the reason. With
        ``exchanges`` the same holds if the engine has run only internal exchanges since.
        """
        now = self._native.calls()
        if calls is not None and (now == calls or (exchanges and now == self._exchanged)):
            kind = "" if isinstance(error, PycollError) else f"{type(error).__name__}: "
            self._native.refuse(f"{kind}{error}")
        if isinstance(error, PycollError):
            self._complete(error, name)

    def _complete(self, error: PycollError, name: str) -> None:
        """Add the operation, the host and the note on internal exchanges to an engine's error."""
        error.operation = error.operation or name
        if error.host is None and error.rank is not None and 0 <= error.rank < self.size:
            error.host = self._names[error.rank].rpartition(":")[0]
        if isinstance(error, MismatchError) and re.search(_EXCHANGES, str(error)):
            error.args = (f"{error} ({_EXCHANGE_NOTE})",)
        if isinstance(error, MismatchError) and re.search(_CODED, str(error)):
            error.args = (f"{error} ({_CODED_NOTE})",)

    def _check_rank(self, value: Any, name: str) -> int:
        try:
            rank = operator.index(value)
        except TypeError:
            raise InvalidArgumentError(f"{name} is {value!r}: expected a rank") from None
        if not 0 <= rank < self.size:
            raise InvalidArgumentError(
                f"{name} is {rank}: expected a rank from 0 to {self.size - 1}"
            )
        return rank

    def _prepare(
        self,
        collective: Collective,
        dtype: int,
        op: Any,
        root: int,
        nbytes: int,
        algorithm: str | None,
        deterministic: bool | None,
        shape_key: tuple[int, ...] = (),
        coding: Coding | None = None,
    ) -> Prepared:
        """Return the part of a call that does not depend on its arrays.

        ``op`` is None where nothing is reduced. ``nbytes`` is rounded up to the next power of two,
        so similar sizes share an entry. A call with a user's reduction is prepared each time, since
        the program may register the name again.
        """
        bucket = (nbytes - 1).bit_length() if nbytes > 0 else -1
        word = op.word if isinstance(op, ReduceOp) else op
        strict = self._deterministic if deterministic is None else bool(deterministic)
        key = (collective, dtype, word, root, bucket, algorithm, strict, shape_key, coding)
        plain = isinstance(word, str | None) and isinstance(algorithm, str | None)
        known = self._plans.known.get(key) if plain else None
        if known is not None:
            return known
        reduction: Reduction | None = None
        if op is not None or collective in REDUCING:
            reduction = find_reduction(op, dtype, collective.name.lower())
            if reduction.code is ReduceOp.AVG and self.size > MEAN_RANKS_MAX:
                raise InvalidArgumentError(
                    f"op 'avg' is defined for up to {MEAN_RANKS_MAX} ranks, here are {self.size}: "
                    "take 'sum' and divide"
                )
        message = 0 if bucket < 0 else 1 << bucket
        found = self._plans.prepare(
            collective, dtype, reduction, root, message, algorithm, strict, shape_key, coding
        )
        if plain and (coding is not None or not found.by_python):
            if len(self._plans.known) >= _PREPARED_MAX:
                self._plans.known.clear()
            self._plans.known[key] = found
        return found

    def _offer_member(self, ends: Ends, message: MessageKey) -> None:
        """Tell native code of an array that waits for its message; see ``_run``."""
        _core.offer(self, None, ends.source, ends.target, ends.memory is not None, message)

    def _message(self, message: MessageKey, nbytes: int, arrays_key: int) -> _core.Request:
        """Return the request of a message, for native code.

        ``arrays_key`` is a hash of its arrays, as ``_core.arrays_key`` makes it.
        """
        prepared = self._prepare(
            Collective.ALL_REDUCE,
            message.dtype,
            message.op,
            0,
            nbytes,
            message.algorithm,
            message.deterministic,
        )
        prepared = prepared._replace(key=prepared.key ^ arrays_key)
        return prepared.request([nbytes // ITEM_BYTES[message.dtype]])

    def _resume(self, name: str, told: list[bytes], words: dict[str, Any]) -> Any:
        """Run a call whose first exchanges native code has made, with these outputs."""
        here = self._told
        before, here.communicator, here.outputs = (here.communicator, here.outputs), self, told
        try:
            return getattr(type(self), name).definition(self, **words)
        finally:
            here.communicator, here.outputs = before

    def _run(
        self,
        prepared: Prepared,
        ends: Ends,
        x: Any,
        out: Any,
        counts: list[int],
        async_op: bool,
        stream: Any,
        message: MessageKey | None = None,
        identity: bytes = b"",
        feedback: Any = None,
    ) -> Any:
        """Run the operation of a call, and return the call's result, or a Work of that.

        It tells native code what the call does, so that native code can repeat it. ``message``: as
        ``Plans.message_key`` returns it. ``identity``: the bytes of the element that fills the
        result of this rank in the end, whatever the operation computes. ``feedback``: the memory
        of what codecs leave out.
        """
        framework, source, memory, target = ends
        where = Where(framework, x, stream)
        returns = memory is not None or out is not None
        finish = finisher(framework, x, memory, out) if returns else nothing
        if prepared.codec is not None and isinstance(source or target, DeviceView):
            from pycoll.device.coded_calls import Ready, run_coded

            ready = Ready(prepared, source, target, counts, where)
            return run_coded(self, ready, async_op, feedback, finish)
        residual = None
        if prepared.codec is not None:
            if feedback is not None:
                feedback.check_free()
            coded = coded_ends(source, target, prepared.divisor, feedback)
            source, target, residual = coded.source, coded.target, coded.residual
            finish = behind([coded], finish)
            if feedback is not None:
                feedback.ended()
        if identity and isinstance(target, DeviceView):
            lanes = self._plans.lanes(prepared.plan)
            return self._on_devices().run(
                prepared, (source, target), counts, lanes, async_op, finish, where, identity
            )
        offer = (memory is not None, message, identity)
        if identity:
            assert target is not None  # a rank that gets the identity has a result
            given, filled = finish, target

            def finish() -> Any:
                _core.fill(filled, identity)
                return given()

        told = None if identity and async_op else offer

        def start(finish: Callable[[], Any]) -> Any:
            return self._start(
                prepared, source, target, counts, async_op, finish, where, told, residual
            )

        if feedback is None or not async_op:
            return start(finish)
        return feedback.serve(self._native.failure, finish, start)

    def _start(
        self,
        prepared: Prepared,
        source: _core.BufferView | None,
        target: _core.BufferView | None,
        counts: list[int],
        async_op: bool,
        finish: Callable[[], Any],
        where: Where | None = None,
        offer: tuple[bool, MessageKey | None, bytes] | None = None,
        residual: _core.BufferView | None = None,
    ) -> Any:
        """Run the operation and return ``finish()``. With ``async_op`` return a Work of that.

        ``where`` names the stream. It is None for barriers and for internal exchanges on the host.
        ``offer``: for native code, which repeats the call: whether the result is a new array, then
        ``message`` and ``identity`` of ``_run``. None: native code does not repeat the call.
        """
        if where is not None:
            if isinstance(source, DeviceView) or isinstance(target, DeviceView):
                lanes = self._plans.lanes(prepared.plan)
                return self._on_devices().run(
                    prepared, (source, target), counts, lanes, async_op, finish, where
                )
            where.need_none()
        user = prepared.user
        run = UserRun(user, prepared.dtype, self.size) if user is not None else None
        then = finish if run is None else run.guard(finish)
        if run is not None:
            self._native.begin_call()  # covers the operation and the exchange after it
        try:
            request = prepared.request(counts, run.native() if run is not None else None)
            if offer is not None and not prepared.by_python:
                _core.offer(self, request, source, target, *offer)
            work = self._native.run(
                request, source, target, async_op, then if async_op else None, residual
            )
            if run is not None and self.size > 1:
                self._exchange_records(run, async_op)
        finally:
            if run is not None:
                self._native.end_call()
        return then() if work is None else work

    def _exchange_records(self, run: UserRun, async_op: bool) -> None:
        """Exchange, after an operation, whether a user's reduction raised on any rank."""
        every, mine = _core.view(run.records), _core.view(run.record)
        counts = [len(run.record)] * self.size
        key = (salt("reductions"),)
        prepared = self._prepare(
            Collective.ALL_GATHER, DType.UINT8, None, 0, every.nbytes, None, None, key
        )
        # The exchange begins after the operation has ended, so the engine reads the final record.
        made = self._start(prepared, mine, every, counts, async_op, nothing)
        if async_op:
            run.exchange = made

    def _check_place(self, source: Any, target: Any, where: Where) -> None:
        """Raise the errors about arrays and stream that ``_start`` would raise."""
        if isinstance(source, DeviceView) or isinstance(target, DeviceView):
            where.handle()
            self._on_devices().check(source, target)
        else:
            where.need_none()

    def _on_devices(self) -> Devices:
        if self._devices is None:
            from pycoll.device.device_operations import Devices

            self._devices = Devices(
                self._native,
                self._names,
                self._host,
                self._identity,
                memory_max=self._device_memory_max,
                protocol=self._device_protocol,
                direct=self._device_rdma,
                exchange=self._gather_blobs,
                wires=self._wires,
            )
        return self._devices

    def _memory(
        self,
        framework: Framework,
        x: Any,
        source: _core.BufferView | None,
        shape: Shape,
        dtype: int,
        out: Any,
        own_place: int | None = None,
    ) -> tuple[Any, _core.BufferView]:
        """Return new memory for the result, or None, and the view of the result's memory.

        ``out`` must lie apart from the source. ``own_place``: the byte offset at which the shorter
        of the two may instead lie inside the longer one; None: they must lie apart.
        """
        if out is not None:
            return None, output_view(out, dtype, shape, source, False, own_place)
        memory = framework.empty(x, shape, dtype)
        return memory, framework.result(memory)

    def _quick_algorithm(self) -> str | None:
        """Return the algorithm for exchanges that happen once: on one host "direct", which takes
        one step. The prediction of all algorithms would take longer than such an exchange."""
        return "direct" if len(self._topology.hosts) == 1 else None

    def _all_gather_numbers(
        self, numbers: list[int], purpose: str, algorithm: str | None = None
    ) -> list[list[int]]:
        """Return the numbers of all ranks. Each rank passes the same count of numbers.

        ``purpose`` keeps different exchanges apart: the engine compares it on all ranks.
        """
        from array import array

        count = len(numbers)
        every = array("q", bytes(8 * self.size * count))
        counts = [count] * self.size
        self._all_gather_own(DType.INT64, array("q", numbers), every, counts, purpose, algorithm)
        flat = every.tolist()
        return [flat[first : first + count] for first in range(0, len(flat), count)]

    def _all_gather_own(
        self,
        dtype: int,
        mine: bytes | memoryview | array[int],
        every: bytearray | memoryview | array[int],
        counts: list[int],
        purpose: str,
        algorithm: str | None,
    ) -> None:
        """Run an internal all_gather. It avoids NumPy arrays, whose first view is slow."""
        nbytes = sum(counts) * ITEM_BYTES[dtype]
        prepared = self._prepare(
            Collective.ALL_GATHER, dtype, None, 0, nbytes, algorithm, None, (salt(purpose),)
        )
        self._run_exchange(prepared, _core.view(mine), every, counts)

    def _run_exchange(
        self,
        prepared: Prepared,
        mine: _core.BufferView | None,
        every: bytearray | memoryview | array[int],
        counts: list[int],
    ) -> None:
        """Run an internal exchange of a call, unless native code has run it already.

        It tells native code of the exchange. ``mine`` is the input, and None without one. ``every``
        receives the output. It may be the memory of ``mine``.
        """
        target = _core.view(every)
        request = prepared.request(counts)
        told = self._told
        if told.communicator is self and told.outputs:
            memoryview(every).cast("B")[:] = told.outputs.pop(0)
        else:
            self._native.run(request, mine, target)
        self._exchanged = self._native.calls()
        _core.offer_exchange(self, request, mine, target)

    def _broadcast_numbers(self, numbers: list[int] | None, length: int, root: int) -> list[int]:
        """Return the root's numbers on all ranks."""
        from array import array

        line = array("q", bytes(8 * length) if numbers is None else numbers)
        prepared = self._prepare(
            Collective.BROADCAST, DType.INT64, None, root, 8 * length, None, None, (salt("header"),)
        )
        mine = _core.view(line) if self.rank == root else None
        self._run_exchange(prepared, mine, line, [length])
        return line.tolist()

    def _gather_blobs(self, blob: bytes) -> list[bytes]:
        """Return bytes of any length from every rank; ``split`` exchanges identities this way."""
        algorithm = self._quick_algorithm()
        lengths = [n for (n,) in self._all_gather_numbers([len(blob)], "blob", algorithm)]
        every = bytearray(sum(lengths))
        self._all_gather_own(DType.UINT8, blob, every, lengths, "blobs", algorithm)
        ends = itertools.accumulate(lengths)
        return [bytes(every[end - n : end]) for end, n in zip(ends, lengths, strict=True)]


def check_fit(function: Callable[..., Any], args: tuple[Any, ...], words: dict[str, Any]) -> None:
    """Raise TypeError unless the arguments fit; a group calls the function later."""
    from inspect import signature

    try:
        signature(function).bind(*args, **words)
    except TypeError as error:
        raise TypeError(f"{function.__qualname__}(): {error}") from None


@functools.cache
def _finish_imports_at_exit() -> None:
    """Register ``_finish_imports`` with atexit, once in a process."""
    # The first view makes native code import NumPy's interface. No thread may be inside that import
    # when the interpreter ends.
    _core.view(np.empty(0))
    atexit.register(_finish_imports)


def _finish_imports() -> None:
    """Import the modules that collectives import on first use.

    The interpreter's end may stop a daemon thread inside an import. That thread then holds the
    import's lock for ever, and a finaliser that imports the same module deadlocks. All threads
    still run while atexit's functions run, so this function waits for imports that are under way.
    """
    under_way = [name for name in sys.modules if name.startswith("pycoll.")]
    for name in (
        "pycoll.comm.fused_batches",
        "pycoll.comm.plans",
        "pycoll.cost.tuning_file",
        *under_way,
    ):
        importlib.import_module(name)


def nothing() -> None:
    """Return None: the ``finish`` of operations without a result."""
    return None


def salt(purpose: str) -> int:
    """Return a number that marks an internal exchange. No dimension of an array is as large."""
    return 1 << 62 | zlib.crc32(purpose.encode())


class Ends(NamedTuple):
    """The views that an operation reads and writes, or None where this rank has none.

    ``memory`` becomes the result without ``out``.
    """

    framework: Framework
    source: Any
    memory: Any
    target: Any


def ends_of(x: Any, out: Any) -> Ends:
    """Return the ends of an operation whose result has the shape and dtype of ``x``."""
    if out is x:
        framework = framework_of(x)
        both = framework.out(x, "out")
        if both.contiguous and both.writable:
            return Ends(framework, both, None, both)
    framework, source = input_of(x, out)
    if out is None:
        memory = framework.empty(x, source.shape, source.dtype)
        return Ends(framework, source, memory, framework.result(memory))
    return Ends(framework, source, None, output_view(out, source.dtype, source.shape, source, True))


def finisher(framework: Framework, like: Any, memory: Any, out: Any) -> Callable[[], Any]:
    """Return a function that returns the caller's result: ``out`` itself where it was passed."""
    if out is not None:
        return lambda: out
    return lambda: framework.finish(like, memory)
