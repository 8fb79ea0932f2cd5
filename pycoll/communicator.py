"""The communicator: an ordered set of ranks with its own connections and order of operations."""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakSet

from pycoll import _core
from pycoll.arrays import tell_of_refusal
from pycoll.collective import Collective
from pycoll.core import Core, immediate_collective
from pycoll.errors import InvalidArgumentError, PycollError
from pycoll.foreign_words import CALLS, about_call, about_dtype, refuse_foreign_calls
from pycoll.moving import Moving
from pycoll.objects import Objects
from pycoll.reducing import Reducing
from pycoll.types import DType
from pycoll.work import check_timeout, wait_all

if TYPE_CHECKING:
    from pycoll import signatures
    from pycoll.bootstrap import Joined
    from pycoll.config import Config
    from pycoll.device_registry import DeviceRegistry
    from pycoll.device_view import DeviceView
    from pycoll.grouping import Group
    from pycoll.registered import Registered

_INT64 = range(-(2**63), 2**63)
#: Communicators of this process that may still be used, for ``abort``.
_open: WeakSet[Communicator] = WeakSet()


class Communicator(Reducing, Moving, Objects):
    """Collectives and messages between ``size`` ranks, of which this process (or thread) is one.

    From ``pycoll.world()``, ``split`` or ``pycoll.local_world``; not to be constructed. All ranks
    call the same collectives in the same order; that they did is checked in every call.

    Threads: any thread may call any method, but the order of collectives must be the same on all
    ranks, so normally one thread calls. A failure (MismatchError, PeerLostError, TimeoutError,
    TransportError) is final: every later call raises it again; see ``failure``. A child made by
    fork gets ClosedError.

    ``comm.all_reduce.bind(x, out=x)`` gives that call as a function without arguments, to be called
    again and again; so for every operation. Each time it reads the arrays as they are then.

    As a context manager it closes at the end.
    """

    all_reduce: signatures.ReducesAlike
    reduce: signatures.Reduce
    reduce_scatter: signatures.ReduceScatter
    scan: signatures.ReducesAlike
    exscan: signatures.ReducesAlike
    broadcast: signatures.Broadcast
    all_gather: signatures.AllGather
    gather: signatures.Gather
    scatter: signatures.Scatter
    all_to_all: signatures.AllToAll
    barrier: signatures.Barrier
    send: signatures.Send
    isend: signatures.Isend
    recv: signatures.Recv
    irecv: signatures.Irecv
    irecv_any: signatures.IrecvAny
    wait_all = staticmethod(wait_all)

    def __init__(self, joined: Joined, config: Config, name: str) -> None:
        from pycoll.bootstrap.identity import cores_beside, transport_across
        from pycoll.grouping import FusionBuffer, Group

        Core.__init__(
            self,
            joined.rank,
            joined.size,
            joined.transports,
            joined.names,
            joined.hosts,
            config.timeout_s,
            config.deterministic,
            joined.inside,
            joined.crowding,
            joined.tuning,
            transport_across(joined.identities),
            cores_beside(joined.identities, joined.rank),
        )
        self.name = name
        self._config = config
        self._device_memory_max = config.device_memory_mib << 20
        self._device_protocol = config.device_protocol
        self._device_rdma = config.device_rdma
        self._tuning = joined.tuning
        #: For splits: what joined the ranks, and what they told of themselves.
        self._transports = joined.transports
        self._identities = joined.identities
        self._splits = 0
        mine = joined.identities[joined.rank]
        self._host = f"{mine.machine} {mine.host_id}"
        self._identity = f"{joined.identities[0].nonce} {name}"
        self._fusion = FusionBuffer()
        self._make_group = Group
        self._shared_arrays = _core.SharedArrays() if self.shares_arrays else None
        if self._shared_arrays is not None:
            tell_of_refusal(self._shared_arrays.refusal)
        _open.add(self)

    def __repr__(self) -> str:
        return f"<pycoll.Communicator {self.name!r}: rank {self.rank} of {self.size}>"

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in CALLS or hasattr(self, name)]

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def local_rank(self) -> int:
        """This rank's place among the ranks of its host."""
        return self._topology.local_rank(self.rank)

    @property
    def local_size(self) -> int:
        """How many ranks are on this host."""
        return self._topology.local_size(self.rank)

    @property
    def cross_rank(self) -> int:
        """This host's place among the hosts that have this local rank."""
        return self._topology.cross_rank(self.rank)

    @property
    def cross_size(self) -> int:
        """How many hosts have this local rank."""
        return self._topology.cross_size(self.rank)

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of every host."""
        return self._topology.hosts

    @property
    def names(self) -> list[str]:
        """ "host:pid" of every rank."""
        return list(self._names)

    @property
    def timeout_s(self) -> float:
        """The longest that an operation may take, in seconds; can be set."""
        return float(self._native.timeout_s)

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self._native.timeout_s = check_timeout(seconds, "timeout_s")

    @property
    def failure(self) -> str | None:
        """Why the communicator can no longer be used, or None."""
        return self._native.failure() or (self._devices.failure() if self._devices else None)

    def transport_names(self) -> str:
        """What the messages of this rank travel over: "shm", "tcp", "shm+tcp", or "self"."""
        peers = (rank for rank in range(self.size) if rank != self.rank)
        return "+".join(sorted({self._native.transport_of(peer) for peer in peers})) or "self"

    @property
    def shares_arrays(self) -> bool:
        """Whether frameworks' long arrays are to lie where the other ranks on this host, or RDMA
        devices, reach them: there are such, and ``shared_arrays`` was asked for."""
        reaching = {"shm", "verbs"} & set(self.transport_names().split("+"))
        return self._config.shared_arrays and bool(reaching)

    def choice(self, collective: str, nbytes: int, dtype: str = "float32", op: str = "sum") -> str:
        """The algorithm that runs for a message of this many bytes."""
        return self._choice(collective, nbytes, dtype, op)

    def explain(self, collective: str, nbytes: int) -> str:
        """Which algorithm runs for a message of ``nbytes``, its predicted time, and why.

        Over verbs also how much memory of arrays is registered to be sent without a copy, and why
        no more is.
        """
        from pycoll.select import explain_text, registered_text

        text = explain_text(
            _collective(collective),
            self._topology,
            _whole("nbytes", nbytes),
            parameters=self._plans.parameters,
        )
        verbs = next((one for one in self._transports if one.name == "verbs"), None)
        return text if verbs is None else f"{text}\n{registered_text(*verbs.registered())}"

    def register(self, *arrays: Any) -> Registered:
        """Let RDMA devices read these arrays where they lie, instead of copying what is sent.

        Arrays on devices: let peers write results of collectives there, instead of to slots that
        this rank copies from. All ranks then call, with as many arrays on devices, of any lengths.
        What peers cannot map is no error and works as ever: ``nbytes`` of the result says what they
        can. They stay alive until the result is closed, and must not be freed under it.

        Arrays of the host: memory of ``pycoll.empty`` needs no such call, nor do NumPy's arrays
        that lie there as it says. ``arrays``: writable, of any shape and dtype, with the buffer
        protocol; tensors of the host, whose memory can be replaced under them, are refused. Until
        the result is closed their memory is pinned and they may not be resized
        (``ndarray.resize(refcheck=False)`` breaks that promise); they may be used and changed as
        ever. What cannot be registered is copied, and ``explain`` tells why; without RDMA devices
        nothing is registered. No other rank takes part. Raises InvalidArgumentError, and for arrays
        on devices what a first collective raises.

        >>> gradients = np.full(4, comm.rank)  # on 3 ranks
        >>> with comm.register(gradients):
        ...     summed = comm.all_reduce(gradients, out=gradients)
        >>> summed
        array([3, 3, 3, 3])
        """
        from pycoll.registered import Registered

        transports: list[Any] = [one for one in self._transports if one.name == "verbs"]
        return Registered(transports[0] if transports else None, arrays, self._register)

    def _register(
        self, views: Sequence[DeviceView]
    ) -> tuple[DeviceRegistry, list[tuple[int, bool]]]:
        if self._group is not None:
            raise InvalidArgumentError("register inside a group: leave the with block first")
        devices = self._on_devices()
        return devices.registry, devices.register(views, self._gather_blobs)

    def group(self) -> AbstractContextManager[Group]:
        """Several operations as one: ``with comm.group(): ...``.

        Calls inside return a Work at once; all run when the block ends, and each Work's wait()
        then gives its result. all_reduces of equal op, dtype, algorithm and deterministic, of up
        to 256 KiB each, share messages of up to 16 MiB; sends and receives are posted together, so
        they cannot wait for each other in a circle; the rest runs in the order of the calls, which
        must be the same on all ranks. No member may read what another writes, and no other thread
        may use the communicator meanwhile. If the block raises, nothing runs.

        A shared message is one all_reduce of its members end to end: the same bits, and the
        algorithm of that length. With ``deterministic`` they are those of separate calls.

        >>> with comm.group():
        ...     loss, hits = comm.all_reduce(loss), comm.all_reduce(hits)
        >>> loss, hits = loss.wait(), hits.wait()
        """
        return self._make_group(self)

    @immediate_collective
    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Ranks with equal ``color`` form new communicators, ordered by ``key``, then by rank.

        Every rank calls; one that passes None is in no group and gets None. Each group has its own
        connections, made here: within hosts over this communicator, otherwise as by init. Raises
        what an all_gather and what joining raises.
        """
        return self._split(color, key, self._tuning)

    @immediate_collective
    def dup(self) -> Communicator:
        """A new communicator of the same ranks with connections and an order of its own.

        All ranks call. For a library that communicates beside its caller, whose collectives and
        messages then never meet its own. Its ``timeout_s`` and settings are those of this one now.
        Raises what ``split`` raises.

        >>> with comm.dup() as other:
        ...     total = other.all_reduce(1)
        >>> total
        3
        """
        made = self._split(0, 0, self._tuning)
        assert made is not None
        return made

    def _split(self, color: int | None, key: int, tuning: str) -> Communicator | None:
        """Like split; ``tuning`` is what the new communicators choose by, of their first ranks."""
        numbers = [color is not None, 0 if color is None else _integer("color", color)]
        numbers.append(_integer("key", key))
        told = self._all_gather_numbers(numbers, "split", self._quickly_chosen())
        self._splits += 1
        name = f"{self.name}/{self._splits}.{color}"
        joined = self._join_part(told, color, name, tuning)
        if joined is None:
            return None
        return Communicator(joined, self._config._replace(timeout_s=self.timeout_s), name)

    def _join_part(
        self, told: Sequence[Sequence[int]], color: int | None, name: str, tuning: str
    ) -> Joined | None:
        groups: dict[int, list[int]] = {}
        for rank in sorted(range(self.size), key=lambda rank: told[rank][2]):
            if told[rank][0]:
                groups.setdefault(told[rank][1], []).append(rank)
        if not groups:
            return None
        members = [] if color is None else groups[color]
        return self._join(list(groups.values()), members, name, tuning)

    def _join(
        self, groups: list[list[int]], members: list[int], name: str, tuning: str
    ) -> Joined | None:
        """This rank's connections in its group; None where ``members`` is empty."""
        from pycoll.bootstrap import Parent, can_share, join_group, join_part, sit_out

        if can_share(self._identities, groups):
            shm = next((one for one in self._transports if one.name == "shm"), None)
            parent = Parent(
                self.rank,
                self._identities,
                shm,
                lambda numbers: self._all_gather_numbers(numbers, "part", self._quickly_chosen()),
                self._gather_blobs,
                self._splits,
            )
            return join_part(parent, groups, members, tuning)
        # Ranks that sit out take part in the rounds of those that join.
        if not members:
            sit_out(self._gather_blobs)
            return None
        return join_group(
            self._gather_blobs,
            members,
            members.index(self.rank),
            name,
            self._config,
            bring=lambda _: tuning,
        )

    def _wires(self) -> list[Any]:
        """As for a split that all ranks are in."""
        self._splits += 1
        everyone = list(range(self.size))
        name = f"{self.name}/{self._splits}.devices"
        joined = self._join([everyone], everyone, name, self._tuning)
        return [] if joined is None else joined.transports

    def abort(self, code: int = 1, reason: str = "") -> NoReturn:
        """End the job: this process exits with ``code`` now, and every other rank raises.

        For a rank that cannot go on while others wait for it. ``code``: 1 to 255, the exit status;
        0 is refused, since launchers would take the job for a success. ``reason``: a text of which
        the other ranks quote the first 60 characters.

        The others raise PeerLostError that names this rank and quotes the reason: within 2 s those
        that are in an operation of any communicator of this process, the rest in their next one.
        They are not killed, so they may save what they have; ``pycoll run`` stops the rest when
        one rank has failed and exits with the code of the first, and with ``--restarts`` counts
        this rank as one that failed. mpirun and srun do as they do for any failed rank.

        Nothing else of this process runs: no ``finally``, no atexit, no other thread; standard
        output and error are flushed. Ranks that are threads of one process all end. Raises
        InvalidArgumentError for a wrong code, and ClosedError in a forked child.
        """
        if isinstance(code, bool) or not isinstance(code, int) or not 1 <= code <= 255:
            raise InvalidArgumentError(f"code is {code!r}: expected an exit status from 1 to 255")
        why = f"it called abort({code})" + (f": {reason}"[:62] if reason else "")
        self._native.abort(why)
        print(f"pycoll: rank {self.rank} of {self.name} called abort({code}) {reason}".rstrip(),
              file=sys.stderr)  # fmt: skip
        mine = [one for one in list(_open) if one is not self]
        for one in mine:
            with suppress(PycollError):
                one._native.abort(why)
        # What goes over sockets is sent off by closing.
        for one in [self, *mine]:
            one._native.close()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(code)

    def close(self) -> None:
        """Leave: peers see an orderly end, and nothing is kept. Later calls raise ClosedError.

        Operations that still run fail with ClosedError; those on devices are waited for, 5 s at
        most, and graphs that hold some must not be launched any more. Closing again does nothing.
        """
        if self._devices is not None:
            self._devices.close()
        self._native.close()
        self._shared_arrays = None
        if self._devices is not None:
            self._devices.end()

    def _fusion_view(self, nbytes: int, dtype: int) -> _core.BufferView:
        return self._fusion.view(nbytes, dtype)

    def _choice(self, collective: str, nbytes: int, dtype: str, op: str) -> str:
        from pycoll.collective import REDUCING
        from pycoll.ops import find_reduction

        kind = _collective(collective)
        words = {one.word: one for one in DType}
        if dtype not in words:
            raise InvalidArgumentError(
                f"dtype is {dtype!r}{about_dtype(dtype)}; there are {', '.join(words)}"
            )
        reduction = find_reduction(op, words[dtype], collective) if kind in REDUCING else None
        bucket = (_whole("nbytes", nbytes) - 1).bit_length() if nbytes else -1
        return self._plans.algorithm_name(
            kind,
            words[dtype],
            reduction,
            0,
            0 if bucket < 0 else 1 << bucket,
            None,
            self._deterministic,
        )


refuse_foreign_calls(Communicator)


def _collective(name: Any) -> Collective:
    words = {one.name.lower(): one for one in Collective}
    if name not in words:
        raise InvalidArgumentError(
            f"collective is {name!r}{about_call(str(name))}; there are {', '.join(words)}"
        )
    return words[name]


def _integer(name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidArgumentError(f"{name} is {value!r}: expected a whole number") from None
    if number not in _INT64:
        raise InvalidArgumentError(f"{name} is {number}: expected -2**63 to 2**63-1")
    return number


def _whole(name: str, value: Any) -> int:
    number = _integer(name, value)
    if number < 0:
        raise InvalidArgumentError(f"{name} is {number}: expected at least 0")
    return number
