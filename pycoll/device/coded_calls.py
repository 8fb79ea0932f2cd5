"""Collectives with a codec for device arrays: collectives of bytes around kernels.

docs/internals/device.md describes them; ``pycoll.device.coded_rounds`` has the steps of dense
codecs, and ``pycoll.device.sparse_rounds`` those of TopK.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from pycoll import _core
from pycoll.arrays.device_view import DeviceView, Where
from pycoll.errors import InvalidArgumentError
from pycoll.schedule.collectives import Collective
from pycoll.types import DType, ReduceOp

if TYPE_CHECKING:
    from pycoll.comm.codecs import Coding
    from pycoll.comm.fused_batches import Member
    from pycoll.comm.operations import CallRunner
    from pycoll.comm.plans import CallPlan
    from pycoll.comm.work import Work
    from pycoll.compress.sparse import TopK
    from pycoll.device.coded_rounds import CodedCall, Exchange
    from pycoll.device.sparse_rounds import SparseCall

#: Marks the collectives of bytes. No dimension of an array is as large.
_MARK = 1 << 61


class Ready(NamedTuple):
    """The array of a call. ``compiled`` holds all that ranks agree on."""

    compiled: CallPlan
    source: Any
    target: Any
    counts: list[int]
    place: Where


class _Kept(NamedTuple):
    """The memory of one array's feedback; see ``device_codes.Kept``."""

    feedback: Any
    shape: tuple[int, ...]
    number: int

    @property
    def momentum(self) -> float:
        return float(self.feedback.momentum)

    @property
    def masking(self) -> bool:
        return bool(self.feedback.masking)

    def memory(self, move: Callable[[Any], Any], name: str) -> Any:
        kept = self.feedback.residuals if name == "residuals" else self.feedback.velocities
        return kept.on_device(self.shape, self.number, move)


def run_coded(
    runner: CallRunner, ready: Ready, async_op: bool, feedback: Any, finish: Callable[[], Any]
) -> Any:
    """Run the collective of one array, and return ``finish()``, or a Work of that."""
    call = _call_of(runner, [ready])
    return _run(runner, [ready], call, async_op, feedback, finish)


def start_coded_list(
    runner: CallRunner,
    members: Sequence[Member],
    words: tuple[Any, str | None, bool | None, Coding],
    stream: Any,
    results: Callable[[], Any],
    async_op: bool,
    feedback: Any,
) -> Work:
    """Start the all_reduce of a list. The Work's result is ``results()``.

    ``words``: the arguments op, algorithm and deterministic, and the codec. Raises
    InvalidArgumentError unless all arrays are on a device.
    """
    ready = _members(runner, members, stream, words)
    call = _call_of(runner, ready)
    made = _run(runner, ready, call, async_op, feedback, results)
    if async_op:
        return cast("Work", made)
    work = _core.open_work()
    _core.fill_work(work, made)
    return work


def run_sparse(
    runner: CallRunner,
    members: Sequence[Member],
    codec: TopK,
    words: tuple[Any, bool | None],
    stream: Any,
    results: Callable[[], Any],
    async_op: bool,
    feedback: Any,
) -> Any:
    """Run the all_reduce of TopK. Return ``results()``, or a Work of that.

    ``codec``: with the density of this call. ``words``: the arguments op and deterministic. Raises
    InvalidArgumentError unless all arrays are on a device.
    """
    from pycoll.device.sparse_rounds import Chosen, SparseCall

    op, deterministic = words
    ready = _members(runner, members, stream, (op, None, deterministic, None))
    arrays = []
    for one in ready:
        count = one.source.count
        if count >= _core.DEVICE_SPARSE_MAX:
            raise InvalidArgumentError(
                f"x has {count} values on a device: TopK takes fewer than 2**32 there; pass a list "
                "of several arrays"
            )
        arrays.append(Chosen(count, codec.kept(count), one.source.dtype))
    warms = feedback is not None and feedback.is_warming
    call = SparseCall(arrays, runner.size, _divisor(runner, ready), warms)
    told = struct.unpack("<q", struct.pack("<d", codec.density))[0]
    return _run(runner, ready, call, async_op, feedback, results, (told,))


def _members(
    runner: CallRunner,
    members: Sequence[Member],
    stream: Any,
    words: tuple[Any, str | None, bool | None, Coding | None],
) -> list[Ready]:
    """Return the all_reduces of the arrays of a list; ``words`` as in ``start_coded_list``."""
    if not all(isinstance(one.ends.source, DeviceView) for one in members):
        raise InvalidArgumentError(
            "x has arrays in host memory and on a device: with compress pass lists of one kind"
        )
    return [_member(runner, one, stream, *words) for one in members]


def _member(
    runner: CallRunner,
    member: Member,
    stream: Any,
    op: Any,
    algorithm: str | None,
    deterministic: bool | None,
    coding: Coding | None,
) -> Ready:
    """Return the all_reduce of one array of a list."""
    source = member.ends.source
    compiled = runner.compiler.compile(
        Collective.ALL_REDUCE,
        source.dtype,
        op,
        0,
        source.nbytes,
        algorithm,
        deterministic,
        coding=coding,
    ).of_array(source.shape)
    place = Where(member.ends.framework, member.x, stream)
    return Ready(compiled, source, member.ends.target, [source.count], place)


def _check_type(ready: Ready) -> None:
    if (ready.source or ready.target).dtype == DType.FLOAT64:
        raise InvalidArgumentError(
            "x is float64 on a device: compress takes float16, bfloat16 and float32 there; convert "
            "the array"
        )


def _run(
    runner: CallRunner,
    ready: Sequence[Ready],
    call: CodedCall | SparseCall,
    async_op: bool,
    feedback: Any,
    finish: Callable[[], Any],
    told: tuple[int, ...] = (),
) -> Any:
    """Launch the collective of some arrays, and count the call of a Feedback that is free.

    ``told``: numbers below 2**62 that ranks compare besides the plans of the arrays.
    """
    from pycoll.device.device_operations import OnDevice

    for one in ready:
        _check_type(one)
    exchanges = _exchanges(runner, ready, call, told)
    members = [OnDevice(one.source, one.target, one.place) for one in ready]
    kept = [
        _Kept(feedback, tuple(one.source.shape), number)
        if feedback is not None and one.source is not None
        else None
        for number, one in enumerate(ready)
    ]
    devices = runner.devices.open()

    def start(finish: Callable[[], Any]) -> Any:
        return devices.run_coded(call, exchanges, members, kept, async_op, finish)

    if feedback is None:
        return start(finish)
    feedback.check_free()
    if async_op:

        def failure() -> Any:
            return runner.engine.failure() or devices.failure()

        made = feedback.serve(failure, finish, start)
    else:
        made = start(finish)
    feedback.ended()
    return made


def _call_of(runner: CallRunner, ready: Sequence[Ready]) -> CodedCall:
    from pycoll.device.coded_rounds import CodedCall, hosts_of, parts_of
    from pycoll.device.device_codes import Parts

    compiled = ready[0].compiled
    codec, size, plan = compiled.codec, runner.size, compiled.plan
    assert codec is not None  # the caller has a codec
    collective = Collective(plan.collective)
    hosts = hosts_of(runner.compiler.topology, collective)
    arrays = [
        parts_of(codec, one.counts[0], hosts, size)
        if collective is Collective.ALL_REDUCE
        else Parts(codec, tuple(one.counts), range(len(one.counts)))
        for one in ready
    ]
    divisor = _divisor(runner, ready)
    return CodedCall(collective, arrays, runner.rank, plan.root, divisor, hosts)


def _divisor(runner: CallRunner, ready: Sequence[Ready]) -> int:
    """Return what sums are divided by, or 0."""
    compiled, size = ready[0].compiled, runner.size
    averages = compiled.reduction is not None and compiled.op == ReduceOp.AVG and size > 1
    return size if averages else 0


def _exchanges(
    runner: CallRunner, ready: Sequence[Ready], call: CodedCall | SparseCall, told: tuple[int, ...]
) -> list[Exchange]:
    """Return the collectives of bytes of a call."""
    from pycoll.device.coded_rounds import Exchange

    compiled = ready[0].compiled
    # A sum and a mean have equal codes of the parts, so the key has to tell them apart.
    agreed = compiled.key ^ compiled.op << 40
    if len(ready) > 1:
        arrays = _core.CallArrays()
        for one in ready:
            arrays.add(one.compiled.dtype, one.compiled.op, one.source.shape)
        agreed ^= arrays.key
    exchanges = []
    nbytes = call.exchange_bytes
    for of, counts in call.exchanges():
        found = runner.compiler.compile(
            of, DType.UINT8, None, compiled.plan.root, nbytes, None, None, (_MARK, *told)
        )
        lanes = runner.compiler.plans.lanes(found.plan)
        exchanges.append(Exchange(found._replace(key=found.key ^ agreed), lanes, counts))
    return exchanges
