"""The common path of all operations of a communicator: compilation, the engine, errors."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

import numpy as np

from pycoll import _core
from pycoll.arrays.device_view import DeviceView, Where
from pycoll.arrays.host_arrays import Framework, Shape
from pycoll.arrays.registry import framework_of, input_of, output_view
from pycoll.comm.codecs import behind, coded_ends
from pycoll.errors import InvalidArgumentError, MismatchError, PycollError
from pycoll.ops import Reduction, UserRun, find_reduction
from pycoll.schedule.collectives import REDUCING, Collective
from pycoll.types import ITEM_BYTES, MEAN_RANKS_MAX, DType, ReduceOp

if TYPE_CHECKING:
    from pycoll import signatures
    from pycoll.bootstrap import Joined
    from pycoll.comm.codecs import Coding
    from pycoll.comm.data_movement import DataMovement
    from pycoll.comm.exchanges import Exchanges
    from pycoll.comm.fused_batches import FusedMemory
    from pycoll.comm.lifecycle import Lifecycle
    from pycoll.comm.objects import ObjectExchange
    from pycoll.comm.plans import CallPlan, MessageKey, Plans
    from pycoll.comm.point_to_point import PointToPoint
    from pycoll.comm.reductions import Reductions
    from pycoll.config import Config
    from pycoll.device.device_operations import Devices
    from pycoll.device.device_registry import DeviceRegistry
    from pycoll.schedule.topology import Topology

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

#: Compiled calls that a communicator keeps at most.
_COMPILED_MAX = 4096
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


class Internals(NamedTuple):
    """The objects to which a communicator delegates its calls.

    Each has its own state, and none of them refers to the communicator.
    """

    engine: _core.Communicator
    config: Config
    joined: Joined
    compiler: CallCompiler
    exchanges: Exchanges
    lifecycle: Lifecycle
    devices: DeviceSide
    runner: CallRunner
    reductions: Reductions
    movement: DataMovement
    messages: PointToPoint
    objects: ObjectExchange


def internals_of(communicator: Any) -> Internals:
    """Return the objects behind a communicator, for other modules of pycoll."""
    found: Internals = communicator._internals
    return found


def operation(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """Make a public method. Groups defer its calls, and its errors name the operation.

    ``signature``: the class of ``pycoll.signatures`` by which type checkers know the calls. The
    method is a ``_core.Method``.

    The definition reads and checks the arguments, and reports the operation to native code
    (``CallRunner.run``, ``PointToPoint.post``). Native code repeats the operation for later calls
    with equal keys; all other calls run the definition.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        name = function.__name__
        collective = name.upper() in Collective.__members__

        @functools.wraps(function)
        def call(self: Any, *args: Any, **words: Any) -> Any:
            calls = self._native.calls() if collective else None
            try:
                if self._group is not None:
                    check_fit(function, (self, *args), words)
                    return self._group.add(self._internals, name, args, words)
                return function(self, *args, **words)
            except Exception as error:
                self._internals.runner.handle_failure(error, name, calls)
                raise

        return _core.method(call, function)

    return decorate


def immediate(
    function: Callable[_Arguments, _Result], collective: bool = False
) -> Callable[_Arguments, _Result]:
    """Make a public method that groups refuse, and whose errors name the operation."""
    name = function.__name__

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
                    error.operation = name  # the name of an internal exchange would mislead
                self._internals.runner.handle_failure(error, name, calls, False)
            raise

    return call


def repeatable(call: Callable[..., Any]) -> signatures.Sendrecv:
    """Let native code repeat the calls of an immediate method, as those of an ``operation``."""
    method: Any = call
    made: Any = _core.method(method, method.__wrapped__)
    return made  # type: ignore[no-any-return]


def immediate_collective(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Make an immediate method that all ranks call."""
    return immediate(function, True)


class CallOptions(NamedTuple):
    """The arguments that collectives share; ``Communicator`` describes them."""

    out: Any = None
    algorithm: str | None = None
    async_op: bool = False
    deterministic: bool | None = None
    stream: Any = None


class ModelValues(NamedTuple):
    """The values, equal on all ranks, from which the cost model makes its parameters.

    ``tuning``: the text of a tuning file. ``inside``: the medium between ranks of a host.
    ``across``: the transport between hosts. ``oversubscription``: ranks per core.
    """

    tuning: str
    inside: str
    across: str
    oversubscription: float


class CallCompiler:
    """Compiles calls: finds all that the engine needs of a call apart from its arrays.

    Equal calls on all ranks give equal results. It keeps what it has compiled. Threads: any.
    """

    def __init__(
        self,
        rank: int,
        names: list[str],
        topology: Topology,
        values: ModelValues,
        deterministic: bool,
    ) -> None:
        self.topology = topology
        self.deterministic = deterministic
        self._rank = rank
        self._names = names
        self._values = values
        self._plans: Plans | None = None
        self._known: dict[tuple[object, ...], CallPlan] = {}

    @property
    def plans(self) -> Plans:
        """The plans. The first access imports algorithms, proofs and the cost model."""
        if self._plans is None:
            self._plans = self._make_plans()
        return self._plans

    def _make_plans(self) -> Plans:
        # Algorithms and proofs are the larger part of the package. They are imported here, so that
        # neither the import of pycoll nor joining waits for them.
        from pycoll.comm.plans import Plans
        from pycoll.cost.tuning_file import from_text

        tuning, inside, across, oversubscription = self._values
        several = len(self.topology.hosts) > 1
        hosts = {name.rpartition(":")[0] for name in self._names}
        parameters = from_text(tuning).parameters(inside, several, hosts, across)
        return Plans(self._rank, self.topology, parameters.with_ranks_per_core(oversubscription))

    def follow(self, topology: Topology) -> None:
        """Compile for another topology of the same ranks from now on."""
        self.topology, self._plans, self._known = topology, None, {}

    @contextlib.contextmanager
    def following(self, topology: Topology) -> Iterator[None]:
        """Compile for another topology inside the block, in which no other thread compiles."""
        kept = self.topology, self._plans, self._known
        self.follow(topology)
        try:
            yield
        finally:
            self.topology, self._plans, self._known = kept

    def compile(
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
    ) -> CallPlan:
        """Return the part of a call that does not depend on its arrays.

        ``op`` is None where nothing is reduced. ``nbytes`` is rounded up to the next power of two,
        so similar sizes share an entry. A call with a user's reduction is compiled each time, since
        the program may register the name again.
        """
        bucket = (nbytes - 1).bit_length() if nbytes > 0 else -1
        word = op.word if isinstance(op, ReduceOp) else op
        strict = self.deterministic if deterministic is None else bool(deterministic)
        key = (collective, dtype, word, root, bucket, algorithm, strict, shape_key, coding)
        plain = isinstance(word, str | None) and isinstance(algorithm, str | None)
        known = self._known.get(key) if plain else None
        if known is not None:
            return known
        reduction: Reduction | None = None
        if op is not None or collective in REDUCING:
            reduction = find_reduction(op, dtype, collective.name.lower())
            size = self.topology.size
            if reduction.code is ReduceOp.AVG and size > MEAN_RANKS_MAX:
                raise InvalidArgumentError(
                    f"op 'avg' is defined for up to {MEAN_RANKS_MAX} ranks, here are {size}: "
                    "take 'sum' and divide"
                )
        message = 0 if bucket < 0 else 1 << bucket
        found = self.plans.compile(
            collective, dtype, reduction, root, message, algorithm, strict, shape_key, coding
        )
        if plain and (coding is not None or not found.by_python):
            if len(self._known) >= _COMPILED_MAX:
                self._known.clear()
            self._known[key] = found
        return found

    def choice(self, collective: str, nbytes: int, dtype: str, op: str) -> str:
        """Run ``Communicator.choice``."""
        from pycoll.comm.plans import choice

        return choice(self.plans, self.deterministic, collective, nbytes, dtype, op)

    def explain(
        self, transports: list[Any], collective: str, nbytes: int, compress: Any, memory: str
    ) -> str:
        """Run ``Communicator.explain``."""
        from pycoll.comm.plans import explain
        from pycoll.cost.slot_stores import slot_stores_of

        text = explain(self.plans, collective, nbytes, compress, memory)
        for one in transports if compress is None else ():
            if one.name == "shm":
                text += f"\n  slots      filled by {slot_stores_of(self._values.tuning)} stores"
            if one.name == "verbs":
                from pycoll.cost.selection import registered_text

                text += f"\n{registered_text(*one.registered())}"
        return text

    def compile_message(self, message: MessageKey, nbytes: int, arrays_key: int) -> _core.Request:
        """Return the request of a message of several arrays, for native code.

        ``arrays_key`` is a hash of its arrays, as ``_core.arrays_key`` makes it.
        """
        dtype, op, algorithm, deterministic, _ = message
        compiled = self.compile(
            Collective.ALL_REDUCE, dtype, op, 0, nbytes, algorithm, deterministic
        )
        compiled = compiled._replace(key=compiled.key ^ arrays_key)
        return compiled.request([nbytes // ITEM_BYTES[dtype]])


class DeviceSide:
    """The device side of a communicator, which its first operation on device arrays opens."""

    def __init__(self, make: Callable[[], Devices]) -> None:
        self._make = make
        self._devices: Devices | None = None

    def open(self) -> Devices:
        """Return the devices. They meet in their first collective, which all ranks call."""
        if self._devices is None:
            self._devices = self._make()
        return self._devices

    def register(
        self,
        exchange: Callable[[bytes], list[bytes]],
        in_group: bool,
        views: Sequence[DeviceView],
    ) -> tuple[DeviceRegistry, list[tuple[int, bool]]]:
        """Register arrays that peers may write to; see ``DeviceRegistry.enter``."""
        if in_group:
            raise InvalidArgumentError("register inside a group: leave the with block first")
        devices = self.open()
        return devices.registry, devices.register(views, exchange)

    def failure(self) -> str | None:
        """Return the text of the error that ended operations on devices, or None."""
        return None if self._devices is None else self._devices.failure()

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        """Close the devices, then run the block, which closes the engine, then free memory."""
        if self._devices is None:
            yield
            return
        self._devices.close()
        yield
        self._devices.end()


class CallRunner:
    """Runs compiled calls on the engine or on devices, and handles their failures.

    Threads: any. ``fused_memory``: memory for messages that hold several arrays.
    """

    def __init__(
        self,
        engine: _core.Communicator,
        names: list[str],
        compiler: CallCompiler,
        exchanges: Exchanges,
        devices: DeviceSide,
        fused_memory: FusedMemory,
    ) -> None:
        self.engine = engine
        self.rank = engine.rank
        self.size = engine.size
        self.compiler = compiler
        self.exchanges = exchanges
        self.devices = devices
        self.fused_memory = fused_memory
        self._names = names

    def handle_failure(
        self, error: Exception, name: str, calls: int | None, exchanges: bool = True
    ) -> None:
        """Handle ``error``, which operation ``name`` raises.

        ``calls``: the value of ``engine.calls()`` at the beginning of the operation; None where no
        other rank waits. If the engine has begun nothing since, the other ranks wait in a
        collective that this rank has refused. The engine then sends them the reason. With
        ``exchanges`` the same holds if the engine has run only internal exchanges since.
        """
        now = self.engine.calls()
        if calls is not None and (now == calls or (exchanges and now == self.exchanges.newest)):
            kind = "" if isinstance(error, PycollError) else f"{type(error).__name__}: "
            self.engine.refuse(f"{kind}{error}")
        if isinstance(error, PycollError):
            self.complete_error(error, name)

    def complete_error(self, error: PycollError, name: str) -> None:
        """Add the operation, the host and the note on internal exchanges to an engine's error."""
        error.operation = error.operation or name
        if error.host is None and error.rank is not None and 0 <= error.rank < self.size:
            error.host = self._names[error.rank].rpartition(":")[0]
        if isinstance(error, MismatchError) and re.search(_EXCHANGES, str(error)):
            error.args = (f"{error} ({_EXCHANGE_NOTE})",)
        if isinstance(error, MismatchError) and re.search(_CODED, str(error)):
            error.args = (f"{error} ({_CODED_NOTE})",)

    def run(
        self,
        compiled: CallPlan,
        ends: Ends,
        x: Any,
        options: CallOptions,
        counts: list[int],
        message: MessageKey | None = None,
        identity: bytes = b"",
        feedback: Any = None,
    ) -> Any:
        """Run the operation of a call, and return the call's result, or a Work of that.

        It reports the operation to native code, which can then repeat it. ``message``: as
        ``Plans.message_key`` returns it. ``identity``: the bytes of an element that replaces every
        element of this rank's result; empty: none. ``feedback``: the Feedback with the residuals of
        codecs.
        """
        framework, source, memory, target = ends
        out, _, async_op, _, stream = options
        where = Where(framework, x, stream)
        returns = memory is not None or out is not None
        finish = finisher(framework, x, memory, out) if returns else nothing
        if compiled.codec is not None and isinstance(source or target, DeviceView):
            from pycoll.device.coded_calls import Ready, run_coded

            ready = Ready(compiled, source, target, counts, where)
            return run_coded(self, ready, async_op, feedback, finish)
        residual = None
        if compiled.codec is not None:
            if feedback is not None:
                feedback.check_free()
            coded = coded_ends(source, target, compiled.divisor, feedback)
            source, target, residual = coded.source, coded.target, coded.residual
            finish = behind([coded], finish)
            if feedback is not None:
                feedback.ended()
        if identity and isinstance(target, DeviceView):
            lanes = self.compiler.plans.lanes(compiled.plan)
            return self.devices.open().run(
                compiled, (source, target), counts, lanes, async_op, finish, where, identity
            )
        offer = (memory is not None, message, identity)
        if identity:
            assert target is not None  # a rank that gets the identity has a result
            given, filled = finish, target

            def finish() -> Any:
                _core.fill(filled, identity)
                return given()

        told = None if identity and async_op else offer

        call = compiled, source, target, counts, async_op
        if feedback is None or not async_op:
            return self.start(*call, finish, where, told, residual)
        return feedback.serve(
            self.engine.failure,
            finish,
            lambda finish: self.start(*call, finish, where, told, residual),
        )

    def start(
        self,
        compiled: CallPlan,
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
        ``message`` and ``identity`` of ``run``. None: native code does not repeat the call.
        """
        if where is not None:
            if isinstance(source, DeviceView) or isinstance(target, DeviceView):
                lanes = self.compiler.plans.lanes(compiled.plan)
                return self.devices.open().run(
                    compiled, (source, target), counts, lanes, async_op, finish, where
                )
            where.need_none()
        user = compiled.user
        run = UserRun(user, compiled.dtype, self.size) if user is not None else None
        then = finish if run is None else run.guard(finish)
        if run is not None:
            self.engine.begin_call()  # covers the operation and the exchange after it
        try:
            request = compiled.request(counts, run.native() if run is not None else None)
            if offer is not None and not compiled.by_python:
                _core.offer(self.engine, request, source, target, *offer)
            work = self.engine.run(
                request, source, target, async_op, then if async_op else None, residual
            )
            if run is not None and self.size > 1:
                self._exchange_records(run, async_op)
        finally:
            if run is not None:
                self.engine.end_call()
        return then() if work is None else work

    def _exchange_records(self, run: UserRun, async_op: bool) -> None:
        """Exchange, after an operation, whether a user's reduction raised on any rank."""
        every, mine = _core.view(run.records), _core.view(run.record)
        counts = [len(run.record)] * self.size
        key = (salt("reductions"),)
        compiled = self.compiler.compile(
            Collective.ALL_GATHER, DType.UINT8, None, 0, every.nbytes, None, None, key
        )
        # The exchange begins after the operation has ended, so the engine reads the final record.
        made = self.start(compiled, mine, every, counts, async_op, nothing)
        if async_op:
            run.exchange = made

    def offer_member(self, ends: Ends, message: MessageKey) -> None:
        """Report to native code an array that waits for its message; see ``run``."""
        _core.offer(self.engine, None, ends.source, ends.target, ends.memory is not None, message)

    def check_place(self, source: Any, target: Any, where: Where) -> None:
        """Raise the errors about arrays and stream that ``start`` would raise."""
        if isinstance(source, DeviceView) or isinstance(target, DeviceView):
            where.handle()
            self.devices.open().check(source, target)
        else:
            where.need_none()


def result_memory(
    framework: Framework,
    x: Any,
    source: _core.BufferView | None,
    shape: Shape,
    dtype: int,
    out: Any,
    own_place: int | None = None,
) -> tuple[Any, _core.BufferView]:
    """Return new memory for the result, or None, and the view of the result's memory.

    ``out`` must lie apart from the source. ``own_place``: the byte offset at which the shorter of
    the two may instead lie inside the longer one; None: they must lie apart.
    """
    if out is not None:
        return None, output_view(out, dtype, shape, source, False, own_place)
    memory = framework.empty(x, shape, dtype)
    return memory, framework.result(memory)


def check_fit(function: Callable[..., Any], args: tuple[Any, ...], words: dict[str, Any]) -> None:
    """Raise TypeError unless the arguments fit; a group calls the function later."""
    from inspect import signature

    try:
        signature(function).bind(*args, **words)
    except TypeError as error:
        raise TypeError(f"{function.__qualname__}(): {error}") from None


@functools.cache
def finish_imports_at_exit() -> None:
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
