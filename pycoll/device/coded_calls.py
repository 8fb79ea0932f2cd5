"""Collectives with a dense codec for device arrays: collectives of bytes around kernels.

docs/gpu.md describes them; ``pycoll.device.device_codes`` has the steps.
"""

from __future__ import annotations

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
    from pycoll.comm.operations import Core
    from pycoll.comm.plans import PreparedCall
    from pycoll.comm.work import Work
    from pycoll.device.device_codes import CodedCall, Exchange

#: The collectives of bytes of each collective.
_EXCHANGES = {
    Collective.ALL_REDUCE: (Collective.ALL_TO_ALL, Collective.ALL_GATHER),
    Collective.REDUCE_SCATTER: (Collective.ALL_TO_ALL,),
    Collective.ALL_GATHER: (Collective.ALL_GATHER,),
    Collective.BROADCAST: (Collective.BROADCAST,),
}
#: Marks them. No dimension of an array is as large.
_MARK = 1 << 61


class Ready(NamedTuple):
    """A collective of one array. ``prepared`` holds all that ranks agree on."""

    prepared: PreparedCall
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

    def memory(self, move: Callable[[Any], Any], name: str) -> Any:
        return self.feedback.on_device(self.shape, self.number, move, name)


def run_coded(
    communicator: Core, ready: Ready, async_op: bool, feedback: Any, finish: Callable[[], Any]
) -> Any:
    """Run the collective of one array, and return ``finish()``, or a Work of that."""
    _check_type(ready)
    if feedback is not None:
        feedback.check_free()

    def start(finish: Callable[[], Any]) -> Any:
        return _launch(communicator, ready, async_op, feedback, 0, finish)

    return _served(communicator, start, async_op, feedback, finish)


def start_coded_list(
    communicator: Core,
    members: Sequence[Member],
    words: tuple[Any, str | None, bool | None, Coding],
    stream: Any,
    results: Callable[[], Any],
    async_op: bool,
    feedback: Any,
) -> Work:
    """Start the all_reduce of each array of a list in turn. The Work's result is ``results()``.

    ``words``: the arguments op, algorithm and deterministic, and the codec. Raises
    InvalidArgumentError unless all arrays are on a device.
    """
    if not all(isinstance(one.ends.source, DeviceView) for one in members):
        raise InvalidArgumentError(
            "x has arrays in host memory and on a device: with compress pass lists of one kind"
        )
    ready = [_member(communicator, one, stream, *words) for one in members]
    call = _core.CallArrays()
    for one in ready:
        _check_type(one)
        call.add(one.prepared.dtype, one.prepared.op, one.source.shape)
    if len(ready) > 1:  # a shorter list of another rank is found at its first array
        ready = [
            one._replace(prepared=one.prepared._replace(key=one.prepared.key ^ call.key))
            for one in ready
        ]
    if feedback is not None:
        feedback.check_free()

    def start(finish: Callable[[], Any]) -> Any:
        earlier = [
            _launch(communicator, one, async_op, feedback, number, _nothing)
            for number, one in enumerate(ready[:-1])
        ]

        def last() -> Any:
            for work in earlier:
                if work is not None:
                    work.wait()
            return finish()

        return _launch(communicator, ready[-1], async_op, feedback, len(earlier), last)

    made = _served(communicator, start, async_op, feedback, results)
    if async_op:
        return cast("Work", made)
    work = _core.open_work()
    _core.fill_work(work, made)
    return work


def _member(
    communicator: Core,
    member: Member,
    stream: Any,
    op: Any,
    algorithm: str | None,
    deterministic: bool | None,
    coding: Coding,
) -> Ready:
    """Return the all_reduce of one array of a list."""
    source = member.ends.source
    prepared = communicator._prepare(
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
    return Ready(prepared, source, member.ends.target, [source.count], place)


def _check_type(ready: Ready) -> None:
    if (ready.source or ready.target).dtype == DType.FLOAT64:
        raise InvalidArgumentError(
            "x is float64 on a device: compress takes float16, bfloat16 and float32 there; convert "
            "the array"
        )


def _nothing() -> None:
    pass


def _served(
    communicator: Core,
    start: Callable[[Callable[[], Any]], Any],
    async_op: bool,
    feedback: Any,
    finish: Callable[[], Any],
) -> Any:
    """Return ``start(finish)``, and count the call of a Feedback that is free."""
    if feedback is None:
        return start(finish)
    if async_op:
        devices = communicator._on_devices()

        def failure() -> Any:
            return communicator._native.failure() or devices.failure()

        made = feedback.serve(failure, finish, start)
    else:
        made = start(finish)
    feedback.ended()
    return made


def _launch(
    communicator: Core,
    ready: Ready,
    async_op: bool,
    feedback: Any,
    number: int,
    finish: Callable[[], Any],
) -> Any:
    """Launch the collective of one array, the ``number``-th of its call."""
    kept = None
    if feedback is not None and ready.source is not None:
        kept = _Kept(feedback, tuple(ready.source.shape), number)
    ends = (ready.source, ready.target)
    call = _call_of(communicator, ready.prepared, ready.counts)
    return communicator._on_devices().run_coded(call, ends, async_op, finish, ready.place, kept)


def _call_of(communicator: Core, prepared: PreparedCall, counts: list[int]) -> CodedCall:
    from pycoll.device.device_codes import CodedCall, Exchange, Parts, cut

    codec, size, plan = prepared.codec, communicator.size, prepared.plan
    assert codec is not None  # the caller has a codec
    collective = Collective(plan.collective)
    lengths = cut(counts[0], size) if collective is Collective.ALL_REDUCE else tuple(counts)
    parts = Parts(codec, lengths)

    def exchange(of: Collective) -> Exchange:
        blocks = {Collective.ALL_TO_ALL: size * size, Collective.ALL_GATHER: size}.get(of, 1)
        found = communicator._prepare(
            of, DType.UINT8, None, plan.root, parts.nbytes, None, None, (_MARK,)
        )
        # A sum and a mean have equal codes of the parts, so the key has to tell them apart.
        key = found.key ^ prepared.key ^ prepared.op << 40
        lanes = communicator._plans.lanes(found.plan)
        return Exchange(found._replace(key=key), lanes, [parts.stride] * blocks)

    averages = prepared.reduction is not None and prepared.op == ReduceOp.AVG and size > 1
    exchanges = [exchange(one) for one in _EXCHANGES[collective]]
    return CodedCall(
        collective, parts, communicator.rank, plan.root, size if averages else 0, exchanges
    )
