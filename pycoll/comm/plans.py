"""The plans of a communicator: the choice of an algorithm, and the plans built so far.

The choice is a function of values that are the same on all ranks, so all ranks choose alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from pycoll import _core
from pycoll.algorithms import SERVED, TABLE, Algorithm, lookup
from pycoll.arrays.rows import Shape
from pycoll.comm.codecs import Coding, check_elements, model_codec
from pycoll.cost.codec_costs import coded_text
from pycoll.cost.copying import choose_copies
from pycoll.cost.model import DEFAULT, Parameters
from pycoll.cost.selection import (
    CODED,
    SERVED_HIERARCHIES,
    choose,
    choose_coded,
    coded_candidates,
    explain_text,
    followed_topology,
)
from pycoll.errors import InvalidArgumentError
from pycoll.foreign_words import about_call, about_dtype
from pycoll.ops import Reduction, find_reduction
from pycoll.plan.lowering import add_acknowledgements, lower
from pycoll.schedule.collectives import REDUCING, Collective
from pycoll.schedule.copies import Copies
from pycoll.schedule.topology import Topology, single_host
from pycoll.types import ITEM_BYTES, LOCATION, DType, ReduceOp, check_int64


class CallPlan(NamedTuple):
    """The part of a call that does not depend on its arrays.

    ``user``: the reduction, if it is a user's.
    """

    plan: _core.Plan
    key: int
    dtype: int
    op: int
    segment_bytes: int
    reduction: Reduction | None
    user: Reduction | None
    #: The array, or all arrays of the list or group to which a message belongs, for the text of a
    #: MismatchError; None where ranks compare no shape.
    arrays: _core.CallArrays | None = None
    #: How the plan's codes hold float32; None: the plan has none.
    codec: _core.Codec | None = None
    #: The divisor of the results after the collective; 1 for none.
    divisor: int = 1

    @property
    def by_python(self) -> bool:
        """Whether Python runs the call: the native fast path takes no user's function, no pairs of
        value and location, and no codec."""
        reduction = self.reduction
        if self.codec is not None:
            return True
        return reduction is not None and (self.user is not None or reduction.code in LOCATION)

    def request(self, counts: Sequence[int], user_op: _core.UserOp | None = None) -> _core.Request:
        """Return the request for blocks of so many elements each (csrc/plan/FORMAT.md)."""
        return _core.Request(
            self.plan,
            dtype=self.dtype,
            op=self.op,
            counts=counts,
            plan_key=self.key,
            segment_bytes=self.segment_bytes,
            user_op=user_op,
            arrays=self.arrays,
            codec=self.codec,
        )

    def check_shape(self, shape: tuple[int, ...], axes: int = 1) -> None:
        """Raise InvalidArgumentError unless the reduction takes arrays of this shape."""
        if self.reduction is not None:
            self.reduction.check_shape(shape, axes)

    def of_array(self, shape: Shape) -> CallPlan:
        """Return this call for one array, whose shape must be equal on all ranks."""
        call = _core.CallArrays()
        call.add(self.dtype, self.op, shape)
        return self.of_arrays([(0, shape)], call)

    def of_arrays(
        self, arrays: Iterable[tuple[int, Shape]], call: _core.CallArrays | None = None
    ) -> CallPlan:
        """Return this call for a message of several arrays.

        ``arrays``: pairs of bytes and shape, which must be equal on all ranks. ``call``: all arrays
        of the list or group, which a MismatchError names.
        """
        plan, key, dtype, op, segment_bytes, reduction, user, _, codec, divisor = self
        key ^= _core.arrays_key(list(arrays))
        # Every call comes here, and _replace() would take several times as long.
        return CallPlan(plan, key, dtype, op, segment_bytes, reduction, user, call, codec, divisor)


class MessageKey(NamedTuple):
    """The arguments that members of one fused batch of all_reduce have in common."""

    dtype: int
    op: str
    algorithm: str | None
    deterministic: bool | None
    #: The reduction's number, for native code.
    code: int


class _Key(NamedTuple):
    """All that the plans of a topology depend on; equal on all ranks."""

    collective: Collective
    name: str
    root: int
    copies: Copies
    is_coded: bool = False


class Plans:
    """The plans of one rank of one communicator. Threads: any.

    ``parameters`` are equal on all ranks; they determine algorithms and segment lengths.
    """

    def __init__(self, rank: int, topology: Topology, parameters: Parameters = DEFAULT) -> None:
        self.rank = rank
        self.topology = topology
        self.parameters = parameters.of_servers if topology.servers else parameters
        #: The topology of schedules without codes; codes travel between hosts only.
        self.followed = followed_topology(topology, parameters)
        self._plans: dict[_Key, _core.Plan] = {}
        self._keys: dict[_core.Plan, _Key] = {}
        self._lanes: dict[_core.Plan, int] = {}
        self._messages: dict[MessageKey, MessageKey] = {}

    def message_key(
        self, compiled: CallPlan, algorithm: str | None, deterministic: bool | None
    ) -> MessageKey:
        """Return the key of the messages that such an all_reduce may share.

        Equal keys are the same object.
        """
        name = compiled.reduction.name if compiled.reduction is not None else "sum"
        made = MessageKey(
            compiled.dtype,
            name,
            None if algorithm is None else str(algorithm),
            None if deterministic is None else bool(deterministic),
            compiled.op,
        )
        return self._messages.setdefault(made, made)

    def compile(
        self,
        collective: Collective,
        dtype: int,
        reduction: Reduction | None,
        root: int,
        nbytes: int,
        algorithm: str | None,
        deterministic: bool,
        shape_key: tuple[int, ...],
        coding: Coding | None = None,
    ) -> CallPlan:
        """Return what the engine needs for a call.

        ``nbytes``: the message in bytes. ``algorithm``: a name, or None for the choice of the cost
        model. ``shape_key``: further numbers that must be equal on all ranks. ``coding``: the
        codec, if data travels as codes; these hold float32, whatever the ``dtype`` of the arrays.
        Raises InvalidArgumentError for an algorithm or a codec that does not fit the call.
        """
        divisor, told = 1, ""
        if coding is not None:
            check_elements(collective, dtype, None if reduction is None else reduction.code)
        if coding is not None and dtype != DType.FLOAT32:
            told = f"/{DType(dtype).word} {'' if reduction is None else reduction.name}"
            if dtype == DType.FLOAT64 and reduction is not None and reduction.code is ReduceOp.AVG:
                reduction, divisor = find_reduction("sum", dtype, "all_reduce"), self.topology.size
            dtype, nbytes = DType.FLOAT32, nbytes // ITEM_BYTES[dtype] * ITEM_BYTES[DType.FLOAT32]
        if reduction is not None and nbytes:
            nbytes = reduction.wire_bytes(dtype, nbytes)
        name = self.algorithm_name(
            collective,
            dtype,
            reduction,
            root,
            nbytes,
            algorithm,
            deterministic,
            coding,
        )
        plan = self._plan(collective, name, root, nbytes, coding is not None)
        user = reduction if reduction is not None and reduction.function is not None else None
        word = user.name if user is not None else ""
        segment_bytes = self.parameters.segment_bytes
        if coding is not None and lookup(collective, name).sends_codes_only(self.topology):
            segment_bytes = coding.segment_bytes(segment_bytes, nbytes // self.topology.size)
        text = f"{name}/{segment_bytes}/{word}/{shape_key}"
        key = _hash(text if coding is None else f"{text}/{tuple(coding)}{told}")
        code = reduction.code if reduction is not None else 0
        codec = None if coding is None else coding.native()
        return CallPlan(
            plan, key, dtype, code, segment_bytes, reduction, user, None, codec, divisor
        )

    def algorithm_name(
        self,
        collective: Collective,
        dtype: int,
        reduction: Reduction | None,
        root: int,
        nbytes: int,
        algorithm: str | None,
        deterministic: bool,
        coding: Coding | None = None,
    ) -> str:
        """Return the caller's algorithm after a check, or the choice of the cost model.

        With a codec the model counts the bytes of codes where these travel.
        """
        is_coded = coding is not None
        needs = _Needs.of(dtype, reduction, root, deterministic)._replace(is_coded=is_coded)
        if algorithm is None:
            return self._choose(collective, nbytes, needs, 1.0 if coding is None else coding.ratio)
        if not isinstance(algorithm, str):
            raise InvalidArgumentError(f"algorithm is {algorithm!r}: expected a name or None")
        found = lookup(collective, algorithm)
        if is_coded and not found.coded:
            raise InvalidArgumentError(
                f"algorithm {algorithm!r} takes no codec: values would be rounded more than twice, "
                "or differ between ranks or from other algorithms; those that take one: "
                f"{', '.join(self._names(collective, needs))}"
            )
        if self.topology.size > 1 and not needs.met_by(found):
            raise InvalidArgumentError(
                f"algorithm {algorithm!r} does not {needs.words}; those that do: "
                f"{', '.join(self._names(collective, needs))}"
            )
        return algorithm

    def _choose(
        self, collective: Collective, nbytes: int, needs: _Needs, ratio: float = 1.0
    ) -> str:
        if needs.is_coded:
            return choose_coded(
                collective,
                self.topology,
                nbytes,
                deterministic=needs.rank_ordered,
                parameters=self.parameters,
                ratio=ratio,
            ).name
        names = self._names(collective, needs)
        choice = choose(collective, self.topology, nbytes, among=names, parameters=self.parameters)
        return choice.name

    def _names(self, collective: Collective, needs: _Needs) -> list[str]:
        if needs.is_coded:
            flat = coded_candidates(collective, single_host(self.topology.size), needs.rank_ordered)
            return [*flat, *(() if needs.rank_ordered else CODED[collective])]
        names = list(TABLE[collective])
        if self.topology.servers:
            found = SERVED[collective]
            names = [*found, *SERVED_HIERARCHIES] if found else []
        if collective not in REDUCING:
            return names
        return [name for name in names if needs.met_by(lookup(collective, name))]

    def _plan(
        self, collective: Collective, name: str, root: int, nbytes: int, is_coded: bool
    ) -> _core.Plan:
        copies = choose_copies(collective, self.topology.size, nbytes, self.parameters)
        key = _Key(collective, name, root, copies, is_coded)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = _core.Plan(_lower_plan(key, self._of(key), self.rank))
            self._keys[plan] = key
        return plan

    def _of(self, key: _Key) -> Topology:
        """Return the topology that the schedule of ``key`` follows."""
        return self.topology if key.is_coded else self.followed

    def lanes(self, plan: _core.Plan) -> int:
        """Return the most lanes that any rank's plan of this schedule has.

        The first call for a plan lowers the plans of all ranks.
        """
        lanes = self._lanes.get(plan)
        if lanes is None:
            key = self._keys[plan]
            all_ranks = (
                _core.Plan(_lower_plan(key, self._of(key), rank))
                for rank in range(self.topology.size)
            )
            lanes = self._lanes[plan] = max(one.lanes for one in all_ranks)
        return lanes


class _Needs(NamedTuple):
    """The order of folding that a call needs from an algorithm.

    ``rank_ordered``: one fold in exact rank order. ``keeps_order``: operands stay in rank order.
    ``is_coded``: data travels as codes.
    """

    rank_ordered: bool
    keeps_order: bool
    is_coded: bool = False

    @classmethod
    def of(cls, dtype: int, reduction: Reduction | None, root: int, deterministic: bool) -> _Needs:
        if reduction is None:
            return cls(False, False)
        commutes = reduction.commutative
        strict = (deterministic and reduction.is_rounded(dtype)) or (not commutes and root != 0)
        return cls(strict, not commutes)

    def met_by(self, algorithm: Algorithm) -> bool:
        if self.rank_ordered:
            return algorithm.rank_ordered
        return algorithm.keeps_order or not self.keeps_order

    @property
    def words(self) -> str:
        if self.rank_ordered:
            return (
                "fold in exact rank order (for deterministic=True, or an op that does not commute)"
            )
        return "keep the operands in rank order, which an op that does not commute needs"


def choice(
    plans: Plans, deterministic: bool, collective: str, nbytes: int, dtype: str, op: str
) -> str:
    """Return the name of the algorithm for a message; see ``Communicator.choice``."""
    kind = _collective_of(collective)
    words = {one.word: one for one in DType}
    if dtype not in words:
        raise InvalidArgumentError(
            f"dtype is {dtype!r}{about_dtype(dtype)}; there are {', '.join(words)}"
        )
    reduction = find_reduction(op, words[dtype], collective) if kind in REDUCING else None
    length = _length("nbytes", nbytes)
    message = 1 << (length - 1).bit_length() if length else 0
    return plans.algorithm_name(kind, words[dtype], reduction, 0, message, None, deterministic)


def explain(plans: Plans, collective: str, nbytes: int, compress: Any, memory: str) -> str:
    """Return the text of ``Communicator.explain``, without the lines of transports."""
    kind, length = _collective_of(collective), _length("nbytes", nbytes)
    topology, parameters = plans.topology, plans.parameters
    if compress is not None:
        coded = model_codec(kind, length, compress)
        return coded_text(kind, topology, length, repr(compress), coded, parameters)
    return explain_text(kind, topology, length, parameters=parameters, memory=memory)


def _collective_of(name: Any) -> Collective:
    words = {one.name.lower(): one for one in Collective}
    if name not in words:
        raise InvalidArgumentError(
            f"collective is {name!r}{about_call(str(name))}; there are {', '.join(words)}"
        )
    return words[name]


def _length(name: str, value: Any) -> int:
    number = check_int64(value, name)
    if number < 0:
        raise InvalidArgumentError(f"{name} is {number}: expected at least 0")
    return number


def plan_bytes(
    collective: str,
    size: int,
    rank: int,
    nbytes: int,
    topology: Topology,
    algorithm: str | None = None,
    root: int = 0,
) -> bytes:
    """Return the plan that ``rank`` of ``size`` runs for ``nbytes`` bytes, for inspection."""
    kind = Collective[collective.upper()]
    name = algorithm if algorithm is not None else choose(kind, topology, nbytes).name
    if not 0 <= rank < size or topology.size != size:
        raise InvalidArgumentError(
            f"rank is {rank} of {size}, and the topology has {topology.size} ranks"
        )
    copies = choose_copies(kind, size, nbytes, DEFAULT)
    groups = followed_topology(topology, DEFAULT)
    return _lower_plan(_Key(kind, name, root, copies), groups, rank)


def _lower_plan(key: _Key, topology: Topology, rank: int) -> bytes:
    algorithm = lookup(key.collective, key.name)
    schedule = algorithm.build(topology.size, root=key.root, only=rank, topology=topology)
    if key.is_coded:
        schedule = algorithm.encode(schedule, topology)
    return lower(add_acknowledgements(schedule), rank, key.copies)


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
