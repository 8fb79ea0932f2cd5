"""What every operation of a communicator goes through: preparation, the engine, errors."""

from __future__ import annotations

import atexit
import functools
import importlib
import itertools
import operator
import re
import sys
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np

from pycoll import _core
from pycoll.arrays import Framework, Shape, framework_of, input_of, output_view
from pycoll.collective import REDUCING, Collective
from pycoll.device_view import DeviceView, Where
from pycoll.errors import InvalidArgumentError, MismatchError, PycollError
from pycoll.ops import Reduction, UserRun, find_reduction
from pycoll.types import MEAN_RANKS_MAX, DType, ReduceOp

if TYPE_CHECKING:
    from array import array

    from pycoll.devices import Devices
    from pycoll.plans import Plans, Prepared
    from pycoll.topology import Topology

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_Self = TypeVar("_Self", bound="Core")

#: How exchanges of our own look in the texts of engines, and what users should know of them.
_EXCHANGES = r"(all_gather|broadcast) of \d+ int64"
_EXCHANGE_NOTE = (
    "all_gather, gather, split, all_to_all with splits and calls for objects begin with an "
    "all_gather of int64, scatter with a broadcast of one, and the first collective on device "
    "arrays with an all_gather of one int64"
)


def operation(function: Callable[Concatenate[_Self, _Arguments], Any]) -> Any:
    """A public method that groups defer, and whose errors say which operation it was.

    It becomes a ``_core.Method``; ``pycoll.signatures`` says what type checkers take it to be.

    Common calls are read and run by native code, which looks where ``_prepare`` does; the
    function defines what all of them do, and does the rest.
    """
    name = function.__name__
    # Errors about arguments name the class that users know.
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
            self._failed(error, name, calls)
            raise

    return _core.method(call, function)


def immediate(
    function: Callable[_Arguments, _Result], collective: bool = False
) -> Callable[_Arguments, _Result]:
    """A public method that groups refuse, and whose errors say which operation it was."""
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
                    error.operation = name  # which the exchanges that it is made of do not know
                self._failed(error, name, calls, False)
            raise

    return call


def immediate_collective(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """An immediate method that all ranks call."""
    return immediate(function, True)


class Core(_core.Calls):
    """State of a communicator and the common path of its operations. See ``Communicator``."""

    #: Connections of all ranks beside this communicator's own; a collective call.
    _wires: Callable[[], list[Any]]
    #: Equal for ranks of one host.
    _host: str
    #: Equal for the ranks of this communicator, and no other's.
    _identity: str
    _made_plans: Plans | None = None
    #: ``_native.calls()`` behind the newest exchange of our own.
    _exchanged = -1

    def __init__(
        self,
        rank: int,
        size: int,
        transports: list[Any],
        names: list[str],
        hosts: Sequence[int],
        timeout_s: float,
        deterministic: bool,
        inside: str,
        crowding: float,
        tuning: str,
        across: str,
        cores: int,
    ) -> None:
        from pycoll.topology import topology_of

        _finish_imports_at_exit()
        self.rank = rank
        self.size = size
        self._names = names
        self._topology: Topology = topology_of(hosts)
        self._native = _core.Communicator(rank, size, transports, timeout_s, names, cores)
        self._chosen_by = (tuning, inside, across, crowding)
        self._deterministic = deterministic
        #: Of channels on this rank's device.
        self._device_memory_max = 128 << 20
        self._device_protocol = "auto"
        self._device_rdma = True
        self._devices: Devices | None = None

    @property
    def _plans(self) -> Plans:
        # No cached_property: that would ask for __dict__, see bindings/calls.cpp.
        if self._made_plans is None:
            self._made_plans = self._make_plans()
        return self._made_plans

    def _make_plans(self) -> Plans:
        # Algorithms and proofs are two thirds of the package: neither importing it nor joining need
        # wait for them.
        from pycoll.plans import Plans
        from pycoll.tuning import from_text

        tuning, inside, across, crowding = self._chosen_by
        several = len(self._topology.hosts) > 1
        hosts = {name.rpartition(":")[0] for name in self._names}
        parameters = from_text(tuning).parameters(inside, several, hosts, across)
        return Plans(self.rank, self._topology, parameters.crowded(crowding))

    def _failed(
        self, error: Exception, name: str, calls: int | None, exchanges: bool = True
    ) -> None:
        """An operation raises this, which began when ``_native.calls()`` was so many.

        Where nothing has been started since, this rank takes no part in a collective that the
        others wait in, and they hear why. So it is, if one follows them, behind ``exchanges`` of
        our own. None: no other rank waits.
        """
        now = self._native.calls()
        if calls is not None and (now == calls or (exchanges and now == self._exchanged)):
            kind = "" if isinstance(error, PycollError) else f"{type(error).__name__}: "
            self._native.refuse(f"{kind}{error}")
        if isinstance(error, PycollError):
            self._complete(error, name)

    def _complete(self, error: PycollError, name: str) -> None:
        """Add what is known here to an error from below."""
        error.operation = error.operation or name
        if error.host is None and error.rank is not None and 0 <= error.rank < self.size:
            error.host = self._names[error.rank].rpartition(":")[0]
        if isinstance(error, MismatchError) and re.search(_EXCHANGES, str(error)):
            error.args = (f"{error} ({_EXCHANGE_NOTE})",)

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
    ) -> Prepared:
        """The prepared part of a call; ``op`` None where nothing is reduced.

        ``nbytes`` counts up to the next power of two, so that similar sizes are one entry. The
        native table of calls keeps the entries. A user's reduction may be registered anew, and is
        prepared each time.
        """
        bucket = (nbytes - 1).bit_length() if nbytes > 0 else -1
        word = op.word if isinstance(op, ReduceOp) else op
        strict = self._deterministic if deterministic is None else bool(deterministic)
        own = None if deterministic is None else strict
        key = (dtype, word, root, bucket, algorithm, own, shape_key)
        known: Prepared | None = _core.find_prepared(self, collective, key)
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
            collective, dtype, reduction, root, message, algorithm, strict, shape_key
        )
        if not found.by_python:
            _core.note(self, collective, key, found)
        return found

    def _start(
        self,
        prepared: Prepared,
        source: _core.BufferView | None,
        target: _core.BufferView | None,
        dtype: int,
        counts: list[int],
        count: int,
        async_op: bool,
        finish: Callable[[], Any],
        where: Where | None = None,
    ) -> Any:
        """Run the operation and give ``finish()``, or start it and give a Work that does.

        ``where`` is given for arrays of the caller's, which may be on a device.
        """
        if where is not None:
            if isinstance(source, DeviceView) or isinstance(target, DeviceView):
                lanes = self._plans.lanes(prepared.plan)
                return self._on_devices().run(
                    prepared, (source, target), dtype, counts, count, lanes, async_op, finish, where
                )
            where.need_none()
        user = prepared.user
        run = UserRun(user, dtype, self.size) if user is not None else None
        then = finish if run is None else run.judged(finish)
        if run is not None:
            self._native.begin_call()  # the operation and the exchange behind it
        try:
            work = self._native.run(
                prepared.plan,
                source,
                target,
                dtype=dtype,
                op=prepared.op,
                counts=counts,
                plan_key=prepared.key,
                count=count,
                segment_bytes=prepared.segment_bytes,
                user_op=run.native() if run is not None else None,
                asynchronous=async_op,
                finish=then if async_op else None,
                shape=prepared.shape,
            )
            if run is not None and self.size > 1:
                self._exchange_records(run, async_op)
        finally:
            if run is not None:
                self._native.end_call()
        return then() if work is None else work

    def _exchange_records(self, run: UserRun, async_op: bool) -> None:
        """Behind an operation: tell all ranks whether a user's reduction raised on any of them."""
        every, mine = _core.view(run.records), _core.view(run.record)
        counts = [len(run.record)] * self.size
        key = (salt("reductions"),)
        prepared = self._prepare(
            Collective.ALL_GATHER, DType.UINT8, None, 0, every.nbytes, None, None, key
        )
        # The engine reads the record when it begins, which is when the operation has ended.
        made = self._start(
            prepared, mine, every, DType.UINT8, counts, every.count, async_op, nothing
        )
        if async_op:
            run.exchange = made

    def _check_place(self, source: Any, target: Any, where: Where) -> None:
        """What ``_start`` would refuse of arrays and stream."""
        if isinstance(source, DeviceView) or isinstance(target, DeviceView):
            where.handle()
            self._on_devices().check(source, target)
        else:
            where.need_none()

    def _on_devices(self) -> Devices:
        if self._devices is None:
            from pycoll.devices import Devices

            self._devices = Devices(
                self._native,
                self._names,
                self._host,
                self._identity,
                self._device_memory_max,
                self._device_protocol,
                self._device_rdma,
                self._gather_blobs,
                self._wires,
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
        """New memory for the result, or that of ``out``, which must lie apart from the source; or
        one is that part of the other which begins at byte ``own_place``."""
        if out is not None:
            return None, output_view(out, dtype, shape, source, False, own_place)
        memory = framework.empty(x, shape, dtype)
        return memory, framework.result(memory)

    def _quickly_chosen(self) -> str | None:
        """The algorithm of what happens once: on one host that of one step. To predict them all
        would take longer than the exchange, with 8 ranks on 2 cores a third of a first split."""
        return "direct" if len(self._topology.hosts) == 1 else None

    def _all_gather_numbers(
        self, numbers: list[int], purpose: str, algorithm: str | None = None
    ) -> list[list[int]]:
        """Every rank's numbers, equally many: for arranging what follows."""
        from array import array

        count = len(numbers)
        every = array("q", bytes(8 * self.size * count))
        counts = [count] * self.size
        self._all_gather_own(DType.INT64, array("q", numbers), every, counts, purpose, algorithm)
        told = every.tolist()
        return [told[first : first + count] for first in range(0, len(told), count)]

    def _all_gather_own(
        self,
        dtype: int,
        mine: bytes | memoryview | array[int],
        every: bytearray | memoryview | array[int],
        counts: list[int],
        purpose: str,
        algorithm: str | None,
    ) -> None:
        """An all_gather of our own. Not of NumPy's arrays, whose first view takes 0.2 ms."""
        target = _core.view(every)
        prepared = self._prepare(
            Collective.ALL_GATHER,
            dtype,
            None,
            0,
            target.nbytes,
            algorithm,
            None,
            (salt(purpose),),
        )
        source = _core.view(mine)
        self._start(prepared, source, target, dtype, counts, target.count, False, nothing)
        self._exchanged = self._native.calls()

    def _broadcast_numbers(self, numbers: list[int] | None, length: int, root: int) -> list[int]:
        """The root's numbers, on all ranks."""
        from array import array

        line = array("q", bytes(8 * length) if numbers is None else numbers)
        view = _core.view(line)
        prepared = self._prepare(
            Collective.BROADCAST,
            DType.INT64,
            None,
            root,
            view.nbytes,
            None,
            None,
            (salt("header"),),
        )
        source = view if self.rank == root else None
        self._start(prepared, source, view, DType.INT64, [length], length, False, nothing)
        self._exchanged = self._native.calls()
        return line.tolist()

    def _gather_blobs(self, blob: bytes) -> list[bytes]:
        """Bytes of any length from every rank; the exchange that splits go through."""
        algorithm = self._quickly_chosen()
        lengths = [n for (n,) in self._all_gather_numbers([len(blob)], "blob", algorithm)]
        every = bytearray(sum(lengths))
        self._all_gather_own(DType.UINT8, blob, every, lengths, "blobs", algorithm)
        ends = itertools.accumulate(lengths)
        return [bytes(every[end - n : end]) for end, n in zip(ends, lengths, strict=True)]


def check_fit(function: Callable[..., Any], args: tuple[Any, ...], words: dict[str, Any]) -> None:
    """The TypeError of the call, for what is called later and under another name."""
    from inspect import signature

    try:
        signature(function).bind(*args, **words)
    except TypeError as error:
        raise TypeError(f"{function.__qualname__}(): {error}") from None


@functools.cache
def _finish_imports_at_exit() -> None:
    """Once in a process."""
    # Native code imports NumPy's interface, in a way that no thread may be in at the end.
    _core.view(np.empty(0))
    atexit.register(_finish_imports)


def _finish_imports() -> None:
    """Import what every collective imports when it first needs it.

    A daemon thread that the interpreter's end stops inside an import holds the import's lock for
    ever, and a finaliser that imports the same module waits for it. Until atexit's functions have
    run all threads go on, so that this waits for imports that are under way.
    """
    under_way = [name for name in sys.modules if name.startswith("pycoll.")]
    for name in ("pycoll.lists", "pycoll.plans", "pycoll.tuning", *under_way):
        importlib.import_module(name)


def nothing() -> None:
    """The result of operations that have none."""
    return None


def salt(purpose: str) -> int:
    """Keeps operations of our own apart from users': no dimension of an array is as large.

    Native exchanges compute the same (bindings/exchange.cpp).
    """
    return 1 << 62 | zlib.crc32(purpose.encode())


class Ends(NamedTuple):
    """Where an operation reads and writes; ``memory`` becomes the result if there is no out."""

    framework: Framework
    source: _core.BufferView
    memory: Any
    target: _core.BufferView


def ends_of(x: Any, out: Any) -> Ends:
    """For a result of the shape and type of ``x``."""
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
    """What gives the caller's result: ``out`` itself if there is one."""
    if out is not None:
        return lambda: out
    return lambda: framework.finish(like, memory)
