"""Several operations as one: calls inside a ``with comm.group():`` block run at its end.

    inside the block      at its end
    all_reduce a  ---+--> one message [a | c], if op and dtype are equal and both are short
    isend b       ---|--> started first, so that sends and receives meet in any order
    all_reduce c  ---+
    broadcast d   ------> in the order of the calls

The calls are independent of each other: none may read memory that another one writes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from pycoll import _core
from pycoll.arrays.device_view import DeviceView, Where
from pycoll.arrays.registry import input_of
from pycoll.comm.codecs import Coding, behind, coding_of, runs_itself
from pycoll.comm.fused_batches import FusedBatch, Member, fused_view, members_of
from pycoll.comm.operations import (
    CallRunner,
    Ends,
    Internals,
    asks_for_servers,
    ends_of,
    nothing,
)
from pycoll.comm.work import Work
from pycoll.errors import InvalidArgumentError, PycollError
from pycoll.schedule.collectives import Collective

if TYPE_CHECKING:
    from pycoll.comm.plans import CallPlan, MessageKey
    from pycoll.comm.point_to_point import PointToPoint

_Finish = Callable[[], Any]
_MESSAGES = {"send": "isend", "isend": "isend", "recv": "irecv", "irecv": "irecv"}


class _UserReduction:
    """An all_reduce with a user's reduction, which runs at the end of the group."""

    def __init__(self, key: MessageKey, ends: Ends, work: Work, finish: _Finish) -> None:
        self.key = key
        self.ends = ends
        self.work = work
        self.finish = finish


class _UserFusion(list["_UserReduction"]):
    """All_reduces with a user's reduction that share a message."""

    @property
    def nbytes(self) -> int:
        """The bytes of all members."""
        return sum(one.ends.source.nbytes for one in self)


class _Coded(NamedTuple):
    """An all_reduce by a codec that keeps every element. ``feedback``: its Feedback, or None."""

    member: Member
    feedback: Any
    work: Work


class _CodedKey(NamedTuple):
    """The arguments that all_reduces by codecs have in common to share a message."""

    dtype: int
    op: Any
    algorithm: str | None
    deterministic: bool | None
    coding: Coding
    has_feedback: bool


class _CodedFusion(list["_Coded"]):
    """All_reduces by codecs that share a message, and their common key."""

    def __init__(self, key: _CodedKey) -> None:
        super().__init__()
        self.key = key

    @property
    def nbytes(self) -> int:
        """The bytes of all members."""
        return sum(one.member.ends.source.nbytes for one in self)


class _OnDevice(NamedTuple):
    """An all_reduce on a device array."""

    member: Member
    where: Where
    work: Work


class _Launch(list["_OnDevice"]):
    """All_reduces on device arrays that share a kernel launch, and their common key."""

    def __init__(self, key: MessageKey) -> None:
        super().__init__()
        self.key = key


class _List(NamedTuple):
    """An all_reduce of a list. Each of its arrays is a separate member of the group."""

    work: Work
    members: list[Work]
    out: Any

    def fill(self) -> None:
        made = [member.wait() for member in self.members]
        _core.fill_work(self.work, made if self.out is None else self.out)


class Group(_core.Group):
    """The context manager that ``Communicator.group`` returns. An inner group joins the outer one.

    Native code adds common all_reduce calls to the fusions of ``_core.Group``. This class keeps all
    other calls.
    """

    #: Run the calls that this class keeps; set with the first one.
    _runner: CallRunner
    _sender: PointToPoint

    #: Calls of send, isend, recv and irecv; None until Python adds the first call.
    _messages: list[tuple[str, tuple[Any, ...], dict[str, Any], Work]] | None = None
    _works: list[Work]
    _open: dict[MessageKey, _UserFusion]
    _launches: dict[MessageKey, _Launch]
    _coded: dict[_CodedKey, _CodedFusion]

    def add(
        self, internals: Internals, name: str, args: tuple[Any, ...], words: dict[str, Any]
    ) -> Work:
        """Add a call of the communicator with these internals.

        The Work holds its result after the end of the group.
        """
        if name == "irecv_any":
            raise InvalidArgumentError("irecv_any within a group: there a recv names its source")
        if self._messages is None:
            self._messages, self._works, self._open, self._launches = [], [], {}, {}
            self._coded = {}
            self._runner, self._sender = internals.runner, internals.messages
            self.add_other(None)  # makes native code call run() at the end
        words = {word: value for word, value in words.items() if word != "async_op"}
        if name == "all_reduce":
            work = self._add_reduction(*args, **words)
        else:
            work = _core.open_work()
            if name in _MESSAGES:
                self._messages.append((_MESSAGES[name], args, words, work))
            else:
                self.add_other((name, args, words, work))
        self._works.append(work)
        return work

    def _add_reduction(
        self,
        x: Any,
        op: Any = "sum",
        *,
        out: Any = None,
        algorithm: str | None = None,
        deterministic: bool | None = None,
        stream: Any = None,
        compress: Any = None,
        feedback: Any = None,
    ) -> Work:
        if compress is not None or feedback is not None:
            coding = None if runs_itself(compress) else coding_of(compress, feedback)
            if coding is not None and self._joins_codes(x, stream, feedback):
                key = _CodedKey(0, op, algorithm, deterministic, coding, feedback is not None)
                return self._add_coded(Member(x, out, ends_of(x, out)), key, feedback)
            words = {"algorithm": algorithm, "deterministic": deterministic, "stream": stream}
            coded = {"out": out, "compress": compress, "feedback": feedback}
            work = _core.open_work()
            self.add_other(("all_reduce", (x, op), {**words, **coded}, work))
            return work
        if asks_for_servers(algorithm):
            words = {"algorithm": algorithm, "deterministic": deterministic, "stream": stream}
            work = _core.open_work()
            self.add_other(("all_reduce", (x, op), {"out": out, **words}, work))
            return work
        is_list = isinstance(x, list | tuple)
        members = members_of(x, out) if is_list else [Member(x, out, ends_of(x, out))]
        on_devices = [isinstance(one.ends.source, DeviceView) for one in members]
        if any(on_devices) and not all(on_devices):
            words = {"algorithm": algorithm, "deterministic": deterministic, "stream": stream}
            work = _core.open_work()
            self.add_other(("all_reduce", (x, op), {"out": out, **words}, work))
            return work
        add: Callable[[Member, Any, str | None, bool | None], Work]
        if any(on_devices):
            add = functools.partial(self._add_on_device, stream=stream)
        else:
            Where(None, None, stream).need_none()
            add = self._add_member
        if not is_list:
            return add(members[0], op, algorithm, deterministic)
        for one in members:  # check all arrays before the first one is added
            self._compile_call(one, op, algorithm, deterministic)
        works = [add(one, op, algorithm, deterministic) for one in members]
        self._works += works
        work = _core.open_work()
        self.add_other(_List(work, works, out))
        return work

    def _add_member(
        self, member: Member, op: Any, algorithm: str | None, deterministic: bool | None
    ) -> Work:
        ends, finish = member.ends, member.finisher()
        compiled = self._compile_call(member, op, algorithm, deterministic)
        nbytes = ends.source.nbytes
        work = _core.open_work(finish, member)
        key = self._runner.compiler.plans.message_key(compiled, algorithm, deterministic)
        _core.note_array(self, ends.source.dtype, compiled.op, ends.source.shape)
        if not compiled.by_python:
            _core.fuse(self, work, key, ends.source, ends.target)
            self._runner.offer_member(ends, key)
            return work
        one = _UserReduction(key, ends, work, finish)
        fusion = self._open.get(key)
        if nbytes > _core.FUSED_BYTES_MAX:
            self.add_other(_UserFusion([one]))
        elif fusion is not None and fusion.nbytes + nbytes <= _core.MESSAGE_BYTES_MAX:
            fusion.append(one)
        else:
            fusion = self._open[key] = _UserFusion([one])
            self.add_other(fusion)
        return work

    def _joins_codes(self, x: Any, stream: Any, feedback: Any) -> bool:
        """Return whether an array may share a message of codes with others.

        A Feedback that serves two calls of the group serves them in turn.
        """
        if isinstance(x, list | tuple) or stream is not None:
            return False
        if isinstance(input_of(x, x)[1], DeviceView):
            return False
        used = (one for fusion in self._coded.values() for one in fusion)
        return feedback is None or all(one.feedback is not feedback for one in used)

    def _add_coded(self, member: Member, key: _CodedKey, feedback: Any) -> Work:
        source = member.ends.source
        key = key._replace(dtype=source.dtype)
        compiled = self._coded_call(key, source.nbytes)
        _core.note_array(self, source.dtype, compiled.op, source.shape)
        fusion = self._coded.get(key)
        if (
            fusion is None
            or source.nbytes > _core.FUSED_BYTES_MAX
            or fusion.nbytes + source.nbytes > _core.MESSAGE_BYTES_MAX
        ):
            fusion = _CodedFusion(key)
            self.add_other(fusion)
            if source.nbytes <= _core.FUSED_BYTES_MAX:
                self._coded[key] = fusion
        work = _core.open_work()
        fusion.append(_Coded(member, feedback, work))
        return work

    def _coded_call(self, key: _CodedKey, nbytes: int) -> CallPlan:
        compiled = self._runner.compiler.compile(
            Collective.ALL_REDUCE,
            key.dtype,
            key.op,
            0,
            nbytes,
            key.algorithm,
            key.deterministic,
            coding=key.coding,
        )
        return compiled

    def _add_on_device(
        self,
        member: Member,
        op: Any,
        algorithm: str | None,
        deterministic: bool | None,
        stream: Any,
    ) -> Work:
        compiled = self._compile_call(member, op, algorithm, deterministic)
        key = self._runner.compiler.plans.message_key(compiled, algorithm, deterministic)
        launch = self._launches.get(key)
        if launch is None or len(launch) == _core.DEVICE_PARTS_MAX:
            launch = self._launches[key] = _Launch(key)
            self.add_other(launch)
        work = _core.open_work()
        launch.append(_OnDevice(member, Where(member.ends.framework, member.x, stream), work))
        return work

    def _compile_call(
        self, member: Member, op: Any, algorithm: str | None, deterministic: bool | None
    ) -> CallPlan:
        """Compile the call now, so that it raises for wrong arguments, not the end of the block."""
        source = member.ends.source
        compiled = self._runner.compiler.compile(
            Collective.ALL_REDUCE, source.dtype, op, 0, source.nbytes, algorithm, deterministic
        )
        compiled.check_shape(source.shape)
        return compiled

    def run(self) -> None:
        """Run all operations at the end of the block, and raise the first error."""
        communicator, runner = self.communicator, self._runner
        calls = runner.engine.calls()
        try:
            pending = self._post_messages()
        except Exception as error:
            if any(entry is not None for entry in self.entries()):
                runner.handle_failure(error, "group", calls)
            raise
        for entry in self.entries():
            if isinstance(entry, int):
                _core.run_fusion(self, communicator, entry)
            elif isinstance(entry, _UserFusion):
                self._run_user_fusion(entry)
            elif isinstance(entry, _Launch):
                self._run_launch(entry)
            elif isinstance(entry, _CodedFusion):
                self._run_coded(entry)
            elif isinstance(entry, _List):
                entry.fill()
            elif entry is not None:
                name, args, words, work = entry
                _core.fill_work(work, getattr(communicator, name)(*args, **words))
        for work, started in pending:
            _core.fill_work(work, started.wait())
        if not all(work.done() for work in self._works):
            raise RuntimeError("a call of the group did not run: a fault of pycoll")
        self._messages = None

    def _post_messages(self) -> list[tuple[Work, Any]]:
        """Start the messages on the host, then launch those on devices.

        Return the Work of the group and the started Work of each message on the host. The Works of
        messages on devices are complete, since the host does not wait for a device.
        """
        sender = self._sender
        started, on_device = [], []
        for name, args, words, work in self._messages or ():
            sends = name == "isend"
            try:
                read = sender.read_send if sends else sender.read_recv
                message = read(*args, **words)
                if isinstance(message.view, DeviceView):
                    on_device.append((work, message))
                else:
                    started.append((work, sender.post(message, True)))
            except PycollError as error:
                self._runner.complete_error(error, name)
                raise
        if on_device:
            sender.exchange_on_devices([message for _, message in on_device], False)
        for work, message in on_device:
            _core.fill_work(work, message.result)
        return started

    def leave(self) -> None:
        """Leave the group after an exception in the block: nothing runs."""
        self.abandon(InvalidArgumentError("an exception ended the block of the group; nothing ran"))

    def abandon(self, error: BaseException) -> None:
        """Fail the Work of each call that has no result yet with ``error``."""
        self.abandon_fusions(error)
        for work in self._works if self._messages is not None else ():
            if not work.done():
                _core.fail_work(work, error)
        self._messages = None

    def _run_user_fusion(self, fusion: _UserFusion) -> None:
        runner, first = self._runner, fusion[0]
        if len(fusion) == 1:
            source, target = first.ends.source, first.ends.target
        else:
            memory = runner.fused_memory.take(fusion.nbytes)
            source = target = fused_view(memory[: fusion.nbytes], first.ends.source.dtype)
            _core.pack([one.ends.source for one in fusion], source)
        dtype, op, algorithm, deterministic, _ = first.key
        compiled = runner.compiler.compile(
            Collective.ALL_REDUCE, dtype, op, 0, source.nbytes, algorithm, deterministic
        )
        compiled = compiled.of_arrays(
            ((one.ends.source.nbytes, one.ends.source.shape) for one in fusion),
            _core.arrays_of(self),
        )
        runner.start(compiled, source, target, [source.count], False, nothing)
        if len(fusion) > 1:
            _core.unpack(target, [one.ends.target for one in fusion])
            runner.fused_memory.give(memory)
        for one in fusion:
            _core.fill_work(one.work, one.finish())

    def _run_coded(self, fusion: _CodedFusion) -> None:
        runner = self._runner
        calls = runner.engine.calls()
        ends = [one.member.ends for one in fusion]
        try:
            compiled = self._coded_call(fusion.key, fusion.nbytes).of_arrays(
                ((one.source.nbytes, one.source.shape) for one in ends), _core.arrays_of(self)
            )
            wheres = [Where(one.member.ends.framework, one.member.x, None) for one in fusion]
            for one in fusion:
                if one.feedback is not None:
                    one.feedback.check_free()
            batch, coded = FusedBatch(ends, compiled, wheres).with_codec(
                [(one.feedback, 0) for one in fusion]
            )
            for one in fusion:
                if one.feedback is not None:
                    one.feedback.ended()
            batch.start(runner, behind(coded, nothing), False).wait()
        except Exception as error:
            runner.handle_failure(error, "all_reduce", calls)
            raise
        for one in fusion:
            _core.fill_work(one.work, one.member.finisher()())

    def _run_launch(self, launch: _Launch) -> None:
        from pycoll.device.device_operations import OnDevice

        runner = self._runner
        dtype, op, algorithm, deterministic, _ = launch.key
        nbytes = sum(one.member.ends.source.nbytes for one in launch)
        compiled = runner.compiler.compile(
            Collective.ALL_REDUCE, dtype, op, 0, nbytes, algorithm, deterministic
        )
        compiled = compiled.of_arrays(
            (one.member.ends.source.nbytes, one.member.ends.source.shape) for one in launch
        )
        members = [
            OnDevice(one.member.ends.source, one.member.ends.target, one.where) for one in launch
        ]
        lanes = runner.compiler.plans.lanes(compiled.plan)
        runner.devices.open().run_list(compiled, members, lanes, False, nothing)
        for one in launch:
            _core.fill_work(one.work, one.member.finisher()())
