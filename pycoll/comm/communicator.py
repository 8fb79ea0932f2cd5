"""The communicator: an ordered set of ranks with its own connections and order of operations."""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakSet

from pycoll import _core
from pycoll.arrays.registry import tell_of_refusal
from pycoll.comm.cpu_balancing import can_balance
from pycoll.comm.data_movement import Moving
from pycoll.comm.objects import Objects
from pycoll.comm.operations import Core, immediate, immediate_collective
from pycoll.comm.reductions import Reducing
from pycoll.comm.work import wait_all
from pycoll.errors import ClosedError, InvalidArgumentError, PycollError
from pycoll.foreign_words import CALLS, about_call, about_dtype, refuse_foreign_calls
from pycoll.schedule.collectives import Collective
from pycoll.types import DType, check_timeout

if TYPE_CHECKING:
    from pycoll import signatures
    from pycoll.arrays.device_view import DeviceView
    from pycoll.arrays.registered import Registered
    from pycoll.bootstrap import Joined, Successor
    from pycoll.comm.groups import Group
    from pycoll.config import Config
    from pycoll.device.device_registry import DeviceRegistry

#: Longest time that ``shrink`` may take, in seconds.
_SHRINK_S_MAX = 3600.0
_INT64 = range(-(2**63), 2**63)
#: Communicators of this process that may still be in use; ``abort`` ends all of them.
_open: WeakSet[Communicator] = WeakSet()


class Communicator(Reducing, Moving, Objects):
    """Collectives and messages between ``size`` ranks, of which this process (or thread) is one.

    ``pycoll.init``, ``pycoll.world``, ``pycoll.local_world``, ``split`` and ``dup`` return
    communicators; programs do not construct them. All ranks call the same collectives in the same
    order, and every call checks that they did. As a context manager a communicator closes at the
    end of the block.

    Arguments that all collectives share:

    * ``x``: any array that ``pycoll.arrays.registry`` lists, in host memory or on a CUDA device.
      Its dtype must be the same on all ranks; each method says the same of its shape.
    * ``out``: the memory for the result, with the shape and dtype of the result. It must be
      writable, and contiguous in C order unless it is on a device. None makes a new array of the
      framework of x. Some collectives take x itself as ``out`` and then work in place.
    * ``algorithm``: a name, or None for the choice of the cost model (``explain`` tells it). All
      ranks pass the same.
    * ``async_op``: True returns a Work at once; its ``wait()`` returns the result. Until then the
      program must leave x and ``out`` unchanged.
    * ``deterministic``: True folds in rank order, so the result has the same bits for every
      algorithm and transport. None takes the setting of the communicator. All ranks pass the same.
    * ``stream``: only for arrays on CUDA devices: the stream on which the operation is ordered.
      None takes the current stream of the framework of x. The host does not wait for a device: a
      later call, or ``synchronize()`` of the Work, raises the errors of such an operation.

    Errors that all operations share: InvalidArgumentError, before any byte moves; MismatchError,
    PeerLostError, TimeoutError, ClosedError and TransportError. MismatchError, PeerLostError,
    TimeoutError and TransportError end the communicator: every later call raises the same error
    again, and ``failure`` holds its text. A forked child gets ClosedError.

    Gradients do not flow through these calls. A tensor that requires grad needs ``out``, or the
    program detaches it first; ``pycoll.torch`` has collectives that differentiate.

    Threads: any thread may call any method. The order of collectives must be the same on all ranks,
    so normally one thread calls them.

    ``comm.all_reduce.bind(x, out=x)`` returns that call as a function without arguments, for
    repeated use; every operation has ``bind``. Each call reads the arrays as they are at that time.

    >>> with pycoll.init(rank=0, size=1) as comm:
    ...     total = comm.all_reduce(1.5)
    >>> total
    1.5
    """

    all_reduce: signatures.AllReduce
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
    sendrecv: signatures.Sendrecv
    wait_all = staticmethod(wait_all)

    def __init__(
        self, joined: Joined, config: Config, name: str, successor: Successor | None = None
    ) -> None:
        from pycoll.bootstrap import Successor
        from pycoll.bootstrap.discovery.identity import (
            cores_shared_by,
            domains_of,
            transport_across,
        )
        from pycoll.comm.groups import FusionBuffer, Group
        from pycoll.schedule.topology import topology_of, with_domains

        Core.__init__(
            self,
            joined.rank,
            joined.size,
            joined.transports,
            joined.names,
            with_domains(topology_of(joined.hosts), *domains_of(joined.identities)),
            config.timeout_s,
            config.deterministic,
            joined.inside,
            joined.oversubscription,
            joined.tuning,
            transport_across(joined.identities),
            cores_shared_by(joined.identities, joined.rank),
            config.cpu_balancing and joined.oversubscription > 1 and can_balance(),
        )
        self.name = name
        #: The name of the first communicator of the succession.
        self._origin_name = name
        self._config = config
        self._device_memory_max = config.device_memory_mib << 20
        self._device_protocol = config.device_protocol
        self._device_rdma = config.device_rdma
        self._tuning = joined.tuning
        #: ``split`` needs the transports and the identities of all ranks.
        self._transports = joined.transports
        self._identities = joined.identities
        self._splits = 0
        mine = joined.identities[joined.rank]
        self._host = f"{mine.machine} {mine.host_id}"
        self._identity = f"{joined.identities[0].nonce} {name}"
        #: What ``shrink`` needs; None where no other rank is there.
        self._successor = successor
        if joined.post is not None:
            self._successor = Successor(joined.post, joined.rank, joined.identities)
        self._released = False
        self._number = 0 if self._successor is None else self._successor.hold()
        #: Called with the communicator that takes the place of this one.
        self._replaced: Callable[[Communicator], None] | None = None
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
        """The place of this rank among the ranks of its host, from 0 to local_size - 1."""
        return self._topology.local_rank(self.rank)

    @property
    def local_size(self) -> int:
        """The number of ranks on this host."""
        return self._topology.local_size(self.rank)

    @property
    def cross_rank(self) -> int:
        """The place of this host among the hosts that have this local rank."""
        return self._topology.cross_rank(self.rank)

    @property
    def cross_size(self) -> int:
        """The number of hosts that have this local rank."""
        return self._topology.cross_size(self.rank)

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host: one tuple per host."""
        return self._topology.hosts

    @property
    def servers(self) -> tuple[int, ...]:
        """The ranks of the job that serve the ranks of this world; empty if none do.

        They follow the workers: the first server of 4 workers is rank 4.
        """
        return () if self._served is None else self._served.ranks

    @property
    def names(self) -> list[str]:
        """The name "host:pid" of each rank, in rank order."""
        return list(self._names)

    @property
    def timeout_s(self) -> float:
        """The deadline of an operation, in seconds. It can be set.

        Setting it raises InvalidArgumentError unless it is a number above 0; math.inf means no
        limit.
        """
        return float(self._native.timeout_s)

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self._native.timeout_s = check_timeout(seconds, "timeout_s")
        if self._served is not None:
            self._served.base.timeout_s = seconds

    @property
    def failure(self) -> str | None:
        """The text of the error that ended the communicator, or None."""
        served = self._served.failure() if self._served is not None else None
        own = self._native.failure() or (self._devices.failure() if self._devices else None)
        return own or served

    def transport_names(self) -> str:
        """Return the transports of this rank's messages: "shm", "tcp", "shm+tcp", or "self".

        "self" means that the communicator has one rank.
        """
        peers = (rank for rank in range(self.size) if rank != self.rank)
        return "+".join(sorted({self._native.transport_of(peer) for peer in peers})) or "self"

    @property
    def shares_arrays(self) -> bool:
        """Whether long arrays of frameworks lie in memory that peers on this host, or RDMA devices,
        reach. True if the setting ``shared_arrays`` is on and this rank uses shm or verbs."""
        reaching = {"shm", "verbs"} & set(self.transport_names().split("+"))
        return self._config.shared_arrays and bool(reaching)

    def choice(self, collective: str, nbytes: int, dtype: str = "float32", op: str = "sum") -> str:
        """Return the name of the algorithm that runs for a message of ``nbytes`` bytes.

        ``collective``: a name such as "all_reduce". ``nbytes``: at least 0. ``dtype`` and ``op``:
        names of the element type and the reduction. Raises InvalidArgumentError for unknown names.
        No other rank takes part.

        >>> name = comm.choice("all_reduce", 1 << 20)
        """
        return self._choice(collective, nbytes, dtype, op)

    def explain(
        self, collective: str, nbytes: int, compress: Any = None, memory: str = "shared"
    ) -> str:
        """Return a text: the algorithm for a message of ``nbytes`` bytes, its predicted time, and
        the reason for the choice.

        ``collective``: a name such as "all_reduce". ``nbytes``: at least 0. ``compress``: None, or
        a codec; then the text tells the bytes and the times of links and codec, with it and
        without, and whether it pays. ``memory``: "shared" predicts arrays that peers on the host
        read in place, "ordinary" those whose copies pass through slots; the choice does not depend
        on it, and codecs ignore it. Without a codec, over shared memory the text also names the
        stores that fill slots. Over verbs it says how many bytes of arrays are registered for
        sending without a copy, and why other arrays are not. Raises InvalidArgumentError for an
        unknown collective, a wrong ``nbytes`` or ``memory``, a collective that takes no codec, or a
        codec whose bytes follow from values or shapes. No other rank takes part.

        >>> text = comm.explain("all_reduce", 1 << 20)
        """
        from pycoll.cost.selection import explain_text, registered_text

        kind = _collective(collective)
        if compress is not None:
            return self._explain_codec(kind, _whole("nbytes", nbytes), compress)
        text = explain_text(
            kind,
            self._topology,
            _whole("nbytes", nbytes),
            parameters=self._plans.parameters,
            memory=memory,
        )
        for transport in self._transports:
            if transport.name == "shm":
                text += f"\n  slots      filled by {self._slot_stores} stores"
            if transport.name == "verbs":
                text += f"\n{registered_text(*transport.registered())}"
        return text

    def _explain_codec(self, kind: Collective, nbytes: int, compress: Any) -> str:
        from pycoll.comm.codecs import model_codec
        from pycoll.cost.codec_costs import coded_text

        coded = model_codec(kind, nbytes, compress)
        return coded_text(
            kind, self._topology, nbytes, repr(compress), coded, self._plans.parameters
        )

    def register(self, *arrays: Any) -> Registered:
        """Register arrays, so that operations on them need one copy less.

        ``arrays``: writable arrays of any shape and dtype.

        * In host memory: RDMA devices then send from the array in place. The array must support the
          buffer protocol. A tensor of the host is refused, because torch can replace its memory.
          Until the result is closed the memory is pinned, and the array must not be resized
          (``ndarray.resize(refcheck=False)`` breaks this rule); the program may use and change its
          elements. Arrays of ``pycoll.empty``, and NumPy arrays that lie in the same memory, need
          no registration. An array that cannot be registered is copied as before, and ``explain``
          tells the reason. Without RDMA devices nothing is registered. No other rank takes part.
        * On CUDA devices: peers then write results of collectives directly to the array, instead of
          to slots from which this rank copies. All ranks call this method with the same number of
          device arrays, of any lengths. An array that peers cannot map is no error; it works as
          before. The arrays stay alive until the result is closed, and the program must not free
          their memory earlier.

        Returns a Registered; its ``nbytes`` counts the bytes that peers or RDMA devices can reach.
        It is a context manager, and ``close()`` ends the registration.

        Raises InvalidArgumentError, and for device arrays the errors of a first collective.

        Cost: the system pins the memory of host arrays; device arrays take an exchange between all
        ranks.

        >>> gradients = np.full(4, comm.rank)  # on 3 ranks
        >>> with comm.register(gradients):
        ...     summed = comm.all_reduce(gradients, out=gradients)
        >>> summed
        array([3, 3, 3, 3])
        """
        from pycoll.arrays.registered import Registered

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
        """Run several operations as one: ``with comm.group(): ...``.

        A call inside the block returns a Work at once. All operations run at the end of the block;
        then ``wait()`` of each Work returns its result. An inner group joins the outer one.

        * all_reduce calls with equal op, dtype, algorithm and deterministic, of up to 256 KiB each,
          share messages of up to 16 MiB.
        * Sends and receives start together, so they cannot deadlock in a circle.
        * The other operations run in the order of the calls, which must be the same on all ranks.

        No operation of the group may read memory that another one writes. No other thread may use
        the communicator until the block ends. If the block raises an exception, nothing runs.

        A shared message is one all_reduce over its members end to end: all ranks get the same bits,
        and the algorithm is the one for the total length. With ``deterministic`` the bits are those
        of separate calls.

        Errors: a call raises InvalidArgumentError for its own arguments. The end of the block
        raises the first error of an operation, and each Work without a result raises it too.

        >>> with comm.group():
        ...     loss, hits = comm.all_reduce(loss), comm.all_reduce(hits)
        >>> loss, hits = loss.wait(), hits.wait()
        """
        return self._make_group(self)

    @immediate_collective
    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Form new communicators: one of all ranks that pass the same ``color``.

        ``color``: a whole number of 64 bits, or None for a rank that joins no new communicator.
        ``key``: a whole number of 64 bits; the new ranks are ordered by ``key``, then by rank. All
        ranks call this method.

        Returns the new communicator of this rank, or None where ``color`` is None. Its
        ``timeout_s`` and settings are those of this communicator now.

        Raises the errors of all_gather and of ``pycoll.init``.

        Cost: an all_gather of three numbers, and new connections: over this communicator if each
        group lies within a host, otherwise as ``init`` makes them.

        >>> with comm.split(comm.rank % 2) as part:
        ...     ranks = part.size
        >>> ranks  # on 3 ranks
        2
        """
        return self._split(color, key, self._tuning)

    @immediate_collective
    def dup(self) -> Communicator:
        """Return a new communicator of the same ranks, with its own connections and order.

        All ranks call this method. A library that communicates next to its caller needs it: the
        collectives and messages of the two communicators never meet. The new ``timeout_s`` and
        settings are those of this communicator now. If this is a world with servers, the new one
        has the same servers.

        Raises the errors of ``split``, and costs as much.

        >>> with comm.dup() as other:
        ...     total = other.all_reduce(1)
        >>> total
        3
        """
        if self._served is not None:
            self._splits += 1
            return self._served.dup(f"{self.name}/{self._splits}.dup")
        made = self._split(0, 0, self._tuning)
        assert made is not None
        return made

    def _split(self, color: int | None, key: int, tuning: str) -> Communicator | None:
        """Split as ``split`` does. ``tuning``: the text of a tuning file by which the new
        communicators choose algorithms; that of their first rank counts."""
        numbers = [color is not None, 0 if color is None else _integer("color", color)]
        numbers.append(_integer("key", key))
        choices = self._all_gather_numbers(numbers, "split", self._quick_algorithm())
        self._splits += 1
        name = f"{self.name}/{self._splits}.{color}"
        joined = self._join_part(choices, color, name, tuning)
        if joined is None:
            return None
        return Communicator(joined, self._config._replace(timeout_s=self.timeout_s), name)

    def _join_part(
        self, choices: Sequence[Sequence[int]], color: int | None, name: str, tuning: str
    ) -> Joined | None:
        """Connect this rank with its group.

        ``choices``: per rank whether it has a color, the color, and the key.
        """
        groups: dict[int, list[int]] = {}
        for rank in sorted(range(self.size), key=lambda rank: choices[rank][2]):
            if choices[rank][0]:
                groups.setdefault(choices[rank][1], []).append(rank)
        if not groups:
            return None
        members = [] if color is None else groups[color]
        return self._join(list(groups.values()), members, name, tuning)

    def _join(
        self, groups: list[list[int]], members: list[int], name: str, tuning: str
    ) -> Joined | None:
        """Connect this rank with its group. Return None where ``members`` is empty."""
        from pycoll.bootstrap import Parent, can_share, join_group, join_part, sit_out

        if can_share(self._identities, groups):
            shm = next((one for one in self._transports if one.name == "shm"), None)
            parent = Parent(
                self.rank,
                self._identities,
                shm,
                lambda numbers: self._all_gather_numbers(numbers, "part", self._quick_algorithm()),
                self._gather_blobs,
                self._splits,
                self._key_of_parts(),
            )
            return join_part(parent, groups, members, tuning)
        # Ranks outside all groups take part in the exchanges of the joining ranks.
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
        """Connect all ranks once more, as a split into one group would."""
        self._splits += 1
        everyone = list(range(self.size))
        name = f"{self.name}/{self._splits}.devices"
        joined = self._join([everyone], everyone, name, self._tuning)
        if joined is None:
            return []
        if joined.post is not None:
            joined.post.close()
        return joined.transports

    def _key_of_parts(self) -> bytes:
        """Return a key that only the ranks of this communicator know, for its parts."""
        import hmac

        key = b"" if self._successor is None else self._successor.post.key
        return hmac.digest(key, f"parts of {self.name}".encode(), "sha256")

    @immediate
    def shrink(self, timeout_s: float = 30.0) -> Communicator:
        """Return a communicator of the ranks that are left, after a rank was lost or on demand.

        ``timeout_s``: the longest wait, in seconds, at most 3600. Ranks that run and do not call
        ``shrink`` within a third of it are left out.

        Every rank that goes on calls this method, from one thread. A rank in an operation of this
        communicator raises PeerLostError when another one shrinks it, and then shrinks, too. All
        ranks that return have the same new communicator, with the old order of ranks; ranks that
        die meanwhile are dropped. This communicator is closed. If it was the world, the new one is
        the world. The new ``timeout_s`` and settings are those of this communicator now.

        More than half of the ranks may go on without the others, or half with the lowest rank among
        them. Fewer ranks may do so only if all others are gone: their processes have ended, or they
        have closed the communicator. docs/guides/staying-alive.md has the promises and their
        limits.

        Raises LeftOutError on a rank without which the others went on, and where too few ranks
        answered; ClosedError; InvalidArgumentError for a wrong ``timeout_s`` and where this
        communicator has a successor already; PeerLostError, TimeoutError or TransportError if no
        attempt to connect succeeded.

        Cost: two round trips of the lowest rank with each other one, one thread while it lasts, and
        new connections as ``init`` makes them.

        >>> with comm.dup() as part:
        ...     part = part.shrink()
        >>> part.size  # on 3 ranks
        3
        >>> part.close()
        """
        seconds = check_timeout(timeout_s, "timeout_s")
        if seconds > _SHRINK_S_MAX:
            raise InvalidArgumentError(
                f"timeout_s is {timeout_s!r}: expected at most {_SHRINK_S_MAX:.0f} seconds"
            )
        successor = self._successor
        if successor is None:
            return self._succeeded_by(self._split(0, 0, self._tuning))
        if not successor.post.is_open:
            raise ClosedError(
                f"{self.name} is closed, or belongs to the process from which this one was forked"
            )
        if successor.newest != self._number:
            raise InvalidArgumentError(
                f"{self.name} has been shrunk already: shrink the communicator that took its place"
            )
        self._native.abort("it called shrink()")
        config = self._config._replace(timeout_s=self.timeout_s)
        joined, name = successor.shrink(config, self._origin_name, self._tuning, seconds)
        made = Communicator(joined, config, name, successor)
        made._origin_name = self._origin_name
        return self._succeeded_by(made)

    @immediate_collective
    def grow(
        self, count: int, invite: Callable[[list[str]], object], timeout_s: float = 60.0
    ) -> Communicator:
        """Let ``count`` new ranks in, and return a communicator of the old and the new ranks.

        All ranks call this method. ``count``: the number of new ranks, equal on all, so that there
        are at most 4096. ``invite``: a function that rank 0 calls with a list of ``count`` tickets;
        it starts the new processes, or passes the tickets to processes that run, and does not wait
        for them. Each new process calls ``pycoll.init(ticket=...)``, or ``pycoll.init()`` with
        ``PYCOLL_TICKET`` set. A ticket is secret and serves once; pass it by the environment, a
        pipe or a private file, never on a command line. ``timeout_s``: the longest wait for the new
        ranks, in seconds.

        Returns the new communicator. The old ranks keep their numbers, the new ones follow in the
        order of their tickets. This communicator is closed. If it was the world, the new one is the
        world.

        Raises InvalidArgumentError for wrong arguments; what ``invite`` raises on rank 0, and
        PycollError that quotes it on the others; TimeoutError that names the new ranks that did not
        come, and the other errors of ``init``. After an error this communicator goes on, unless a
        rank has died.

        Cost: an all_gather of a few hundred bytes, and new connections as ``init`` makes them.

        >>> import threading
        >>> new = []
        >>> def invite(tickets):  # normally starts a process; here a thread, on 1 ranks
        ...     new.append(threading.Thread(target=lambda: pycoll.init(ticket=tickets[0])))
        ...     new[0].start()
        >>> with comm.dup() as part, part.grow(1, invite) as bigger:
        ...     size = bigger.size
        >>> size
        2
        >>> new[0].join()
        >>> pycoll.finalize()
        """
        numbers = [_integer("count", count)]
        if not callable(invite):
            raise InvalidArgumentError(
                f"invite is a {type(invite).__name__}: expected a function of a list of tickets"
            )
        numbers.append(int(1e3 * min(check_timeout(timeout_s, "timeout_s"), 1e6)))
        most = self._ranks_max() - self.size
        if not 1 <= count <= most:
            raise InvalidArgumentError(
                f"count is {count}: expected 1 to {most}, since a communicator has at most "
                f"{most + self.size} ranks"
            )
        rows = self._all_gather_numbers(numbers, "grow", self._quick_algorithm())
        differing = [rank for rank, row in enumerate(rows) if row[0] != count]
        if differing:
            raise InvalidArgumentError(
                f"count is {count} on rank {self.rank} and {rows[differing[0]][0]} on rank "
                f"{differing[0]}: expected the same on all ranks"
            )
        made = self._grow(count, invite, min(row[1] for row in rows) / 1e3)
        return self._succeeded_by(made)

    @staticmethod
    def _ranks_max() -> int:
        # ``init`` has imported this module; the import of pycoll has not.
        from pycoll.config import RANKS_MAX

        return RANKS_MAX

    def _grow(
        self, count: int, invite: Callable[[list[str]], object], seconds: float
    ) -> Communicator:
        from pycoll.bootstrap.deadline import Deadline
        from pycoll.bootstrap.recovery.growing import join_grown, open_place

        config = self._config._replace(timeout_s=self.timeout_s)
        size = self.size + count
        with ExitStack() as closing:
            place, failure, text = None, None, b""
            if self.rank == 0:
                try:
                    place = closing.enter_context(open_place(config))
                    invite(place.tickets(self.size, count))
                    text = b"+" + place.meeting.to_bytes()
                except Exception as error:
                    failure = error
                    text = f"-{type(error).__name__}: {error}".encode()
            told = bytes(self._gather_blobs(text)[0])
            if failure is not None:
                raise failure
            if told[:1] != b"+":
                reason = told[1:].decode(errors="replace")
                raise PycollError(f"rank 0 could not invite new ranks: {reason}", rank=0)
            joined = join_grown(
                place, told[1:], self.rank, size, config, self._tuning, Deadline(seconds)
            )
        return Communicator(joined, config, "world")

    def _succeeded_by(self, made: Communicator | None) -> Communicator:
        assert made is not None
        made._replaced = self._replaced
        if self._replaced is not None:
            self._replaced(made)
        self.close()
        return made

    def abort(self, reason: str = "", code: int = 1) -> NoReturn:
        """End the job: this process exits with ``code`` now, and every other rank raises an error.

        A rank calls this when it cannot go on while other ranks wait for it; any thread of it may.
        ``reason``: a text; the errors of the other ranks quote its first 60 characters. ``code``:
        the exit status, 1 to 255; 0 is refused, since launchers would report success. A number in
        the first place is the code, as in mpi4py, and a text in the second one is the reason.

        The other ranks raise PeerLostError, which names this rank and quotes the reason. A rank
        inside an operation of any communicator of this process raises it within 2 s; another rank
        raises it in its next operation. They are not killed, so they can save their state.
        ``pycoll run`` stops the remaining ranks when one rank has failed, and exits with the code
        of the first; with ``--restarts`` it counts this rank as failed. mpirun and srun treat it as
        any failed rank.

        Nothing else of this process runs: no ``finally`` block, no atexit function, no other
        thread. Standard output and error are flushed. Ranks that are threads of this process all
        end.

        Raises InvalidArgumentError for a wrong code or reason, and ClosedError in a forked child.
        """
        if not isinstance(reason, str):
            reason, code = code if isinstance(code, str) else "", reason
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
        # close() flushes the notices that travel over sockets.
        for one in [self, *mine]:
            one._native.close()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(code)

    def close(self) -> None:
        """Leave the communicator and free its resources. Peers see an orderly end.

        Later calls raise ClosedError. Host operations that still run fail with ClosedError. The
        call waits up to 5 s for operations on devices. The program must not launch CUDA graphs that
        contain operations of this communicator any more. Closing again does nothing.
        """
        if self._served is not None:
            self._served.close()
        if self._devices is not None:
            self._devices.close()
        self._native.close()
        self._shared_arrays = None
        if self._successor is not None and not self._released:
            self._released = True
            self._successor.release()
        if self._devices is not None:
            self._devices.end()

    def _fusion_view(self, nbytes: int, dtype: int) -> _core.BufferView:
        return self._fusion.view(nbytes, dtype)

    def _choice(self, collective: str, nbytes: int, dtype: str, op: str) -> str:
        from pycoll.ops import find_reduction
        from pycoll.schedule.collectives import REDUCING

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
