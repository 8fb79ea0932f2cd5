"""The communicator: an ordered set of ranks with its own connections and order of operations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from weakref import WeakSet

from pycoll import _core
from pycoll.arrays.registry import tell_of_refusal
from pycoll.comm.operations import CallOptions, immediate, immediate_collective, repeatable
from pycoll.comm.point_to_point import Probe
from pycoll.comm.work import wait_all
from pycoll.foreign_words import CALLS, refuse_foreign_calls
from pycoll.types import check_timeout

if TYPE_CHECKING:
    from pycoll.arrays.registered import Registered
    from pycoll.bootstrap import Joined, Successor
    from pycoll.comm.groups import Group
    from pycoll.comm.lifecycle import Membership
    from pycoll.comm.plans import MessageKey
    from pycoll.comm.served import Served
    from pycoll.config import Config
    from pycoll.errors import PycollError
    from pycoll.signatures import operation
else:
    from pycoll.comm.operations import operation

_T = TypeVar("_T")
#: Communicators of this process that may still be in use; ``abort`` ends all of them.
_open: WeakSet[Communicator] = WeakSet()


class Communicator(_core.Calls):
    """Collectives and messages between ``size`` ranks, of which this process (or thread) is one.

    ``pycoll.init``, ``split`` and others return communicators; the arguments of the class are
    internal. All ranks call the same collectives in the same order, and every call checks that they
    did. As a context manager a communicator closes at the end of the block.

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

    Errors: all operations, also those on objects, raise InvalidArgumentError before any byte moves,
    MismatchError, PeerLostError, TimeoutError, ClosedError and TransportError. MismatchError,
    PeerLostError, TimeoutError and TransportError end the communicator: every later call raises the
    same error again, and ``failure`` holds its text. A forked child gets ClosedError. Cost: the
    connections of this rank to all others. Properties raise nothing and cost nothing.

    Gradients do not flow through these calls. A tensor that requires grad needs ``out``, or the
    program detaches it first; ``pycoll.torch`` has collectives that differentiate. Any thread may
    call any method; normally one thread calls all collectives. ``comm.all_reduce.bind(x, out=x)``
    returns that call as a function without arguments, for repeated use; every operation has
    ``bind``. Each call reads the arrays as they are at that time.

    >>> with pycoll.init(rank=0, size=1) as comm:
    ...     total = comm.all_reduce(1.5)
    >>> total, comm.local_rank, comm.local_size, comm.cross_rank, comm.cross_size, comm.hosts
    (1.5, 0, 1, 0, 1, ((0,),))
    >>> comm.servers, len(comm.names), comm.timeout_s > 0, comm.shares_arrays, comm.failure
    ((), 1, True, False, 'the communicator was closed')
    """

    wait_all = staticmethod(wait_all)

    def __init__(
        self,
        joined: Joined,
        config: Config,
        name: str,
        successor: Successor | None = None,
        served: Served | None = None,
    ) -> None:
        """Take the place of a rank that has joined, with the fields of a ``Membership``."""
        from pycoll.comm.groups import Group
        from pycoll.comm.lifecycle import Membership, make_internals

        #: The objects that do the work; ``internals_of`` returns them to other modules.
        self._internals = make_internals(Membership(joined, config, name, successor), served)
        self._native = self._internals.engine
        self.rank = joined.rank
        self.size = joined.size
        self.name = name
        self._served = served
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

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()

    @property
    def local_rank(self) -> int:
        """The place of this rank among the ranks of its host, from 0 to local_size - 1."""
        return self._internals.compiler.topology.local_rank(self.rank)

    @property
    def local_size(self) -> int:
        """The number of ranks on this host."""
        return self._internals.compiler.topology.local_size(self.rank)

    @property
    def cross_rank(self) -> int:
        """The place of this host among the hosts that have this local rank."""
        return self._internals.compiler.topology.cross_rank(self.rank)

    @property
    def cross_size(self) -> int:
        """The number of hosts that have this local rank."""
        return self._internals.compiler.topology.cross_size(self.rank)

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host: one tuple per host."""
        return self._internals.compiler.topology.hosts

    @property
    def servers(self) -> tuple[int, ...]:
        """The ranks of the job that serve this world, from ``size`` on; empty if none do."""
        return () if self._served is None else self._served.ranks

    @property
    def names(self) -> list[str]:
        """The name "host:pid" of each rank, in rank order."""
        return list(self._internals.joined.names)

    @property
    def timeout_s(self) -> float:
        """The deadline of an operation, in seconds above 0; math.inf: no limit. It can be set."""
        return float(self._native.timeout_s)

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        """Set the deadline. Raises InvalidArgumentError for a value that is no number above 0."""
        self._native.timeout_s = check_timeout(seconds, "timeout_s")
        if self._served is not None:
            self._served.base.timeout_s = seconds

    @property
    def failure(self) -> str | None:
        """The text of the error that ended the communicator, or None."""
        served = None if self._served is None else self._served.failure()
        return self._native.failure() or self._internals.devices.failure() or served

    def transport_names(self) -> str:
        """Return the transports of this rank's messages: "shm", "tcp", "shm+tcp"; alone "self".

        Errors and cost: none.

        >>> comm.transport_names()  # on 2 ranks
        'shm'
        """
        peers = (rank for rank in range(self.size) if rank != self.rank)
        return "+".join(sorted({self._native.transport_of(peer) for peer in peers})) or "self"

    @property
    def shares_arrays(self) -> bool:
        """Whether peers on this host, or RDMA devices, reach long arrays of frameworks in memory.

        True if the setting ``shared_arrays`` is on and this rank uses shm or verbs.
        """
        reaching = {"shm", "verbs"} & set(self.transport_names().split("+"))
        return self._internals.config.shared_arrays and bool(reaching)

    @operation("AllReduce")
    def all_reduce(self, x: Any, op: Any = "sum", *, out: Any = None, algorithm: str | None = None,
                   async_op: bool = False, deterministic: bool | None = None, stream: Any = None,
                   compress: Any = None, feedback: Any = None) -> Any:  # fmt: skip
        """Combine the arrays ``x`` of all ranks; every rank gets the result with the same bits.

        ``x``: an array with the same shape and dtype on all ranks, or a list or tuple of arrays.
        ``op``: the reduction (docs/reductions.md). ``out``: None for a new array, an array of the
        shape and dtype of x, or x itself; for a list, a list of as many arrays. ``compress``: None,
        or a codec of pycoll.compress, the same on all ranks. With one, x is float16, bfloat16,
        float32 or float64 and ``op`` "sum" or "avg"; on a device it is not float64, and the codec
        keeps every element or is TopK (docs/gpu.md). ``feedback``: None, or a
        pycoll.compress.Feedback of this array or list, which keeps what the codec leaves out for
        the next call. ``algorithm``, ``async_op``, ``deterministic``, ``stream``: see Communicator.

        A codec that keeps every element, such as ``Block("int8")``, rounds no value more than twice
        (docs/guides/compression.md). Arrays of a list that have equal dtypes and up to 256 KiB
        travel in messages of up to 16 MiB; on a device up to 128 of them are one kernel launch.

        Returns an array with the shape and dtype of x, or ``out``; for a list, a list of results;
        with ``async_op``, a Work of that. The results are in place after ``wait()``. Errors: see
        Communicator. Cost: for long messages of n bytes about 2 n bytes sent per rank; for short
        ones log2(size) steps. Source: direct exchange, star, chain and recursive doubling (Thakur,
        Rabenseifner and Gropp 2005), ring (Patarasu and Yuan 2009), double binary tree (Sanders,
        Speck and Träff 2009), halving-doubling (Rabenseifner 2004), recursive multiplying
        (Ruefenacht, Bull and Booth 2017), parameter servers (Li et al. 2014, Jiang et al. 2020),
        and hierarchies of these. ``algorithm="ps"`` takes the best one with servers.

        >>> comm.all_reduce(np.ones(3))  # on 4 ranks
        array([4., 4., 4.])
        >>> comm.all_reduce([np.ones(2), 5])  # many at once, here too
        [array([4., 4.]), 20]
        """
        options = CallOptions(out, algorithm, async_op, deterministic, stream)
        return self._internals.reductions.all_reduce(self, x, op, options, compress, feedback)

    @operation("Reduce")
    def reduce(self, x: Any, root: int = 0, op: Any = "sum", *, out: Any = None,
               algorithm: str | None = None, async_op: bool = False,
               deterministic: bool | None = None, stream: Any = None) -> Any:  # fmt: skip
        """Combine the arrays ``x`` of all ranks; only ``root`` gets the result.

        ``x``: an array with the same shape and dtype on all ranks. ``root``: the receiver, from 0
        to size - 1, the same on all ranks. ``op``: the reduction (docs/reductions.md). ``out``: on
        the root as in all_reduce; on another rank it is checked but not written. ``algorithm``,
        ``async_op``, ``deterministic``, ``stream``: see Communicator. Returns on the root an array
        with the shape and dtype of x, or ``out``; on another rank its ``out``, or None; with
        ``async_op``, a Work of that. Errors: see Communicator. Cost: for long messages every rank
        sends its n bytes about once; for short ones log2(size) steps. Source: direct exchange,
        binomial tree and chain (Thakur et al. 2005), double binary tree (Sanders et al. 2009).

        >>> comm.reduce(np.ones(2), root=0)  # on 3 ranks; this is rank 0
        array([3., 3.])
        """
        options = CallOptions(out, algorithm, async_op, deterministic, stream)
        return self._internals.reductions.reduce(x, root, op, options)

    @operation("ReduceScatter")
    def reduce_scatter(self, x: Any, op: Any = "sum", splits: Sequence[int] | None = None, *,
                       out: Any = None, algorithm: str | None = None, async_op: bool = False,
                       deterministic: bool | None = None, stream: Any = None, compress: Any = None,
                       feedback: Any = None) -> Any:  # fmt: skip
        """Combine the arrays ``x`` of all ranks; every rank gets its rows of the result.

        ``x``: an array of at least one axis, with the same shape and dtype on all ranks. ``op``:
        the reduction (docs/reductions.md). ``splits``: one number of rows per rank, equal on all
        ranks, with the sum ``len(x)``; rank r gets the next ``splits[r]`` rows. None gives every
        rank ``len(x) // size`` rows, and the lowest ranks one more where size does not divide
        ``len(x)``. ``out``: memory apart from x. ``compress``, ``feedback``: as in all_reduce; each
        rank folds its rows in full precision; they are not encoded again. ``algorithm``,
        ``async_op``, ``deterministic``, ``stream``: see Communicator. Returns this rank's rows,
        with the trailing dimensions and dtype of x, or ``out``; with ``async_op``, a Work of that.
        Errors: see Communicator. Cost: each rank sends about the bytes of x. Source: ring (Patarasu
        and Yuan 2009), direct exchange (Thakur et al. 2005), halving-doubling (Rabenseifner 2004).

        >>> comm.reduce_scatter(np.arange(4.0))  # on 2 ranks; this is rank 1
        array([4., 6.])
        """
        options = CallOptions(out, algorithm, async_op, deterministic, stream)
        reductions = self._internals.reductions
        return reductions.reduce_scatter(self, x, op, splits, options, compress, feedback)

    @operation("ReducesAlike")
    def scan(self, x: Any, op: Any = "sum", *, out: Any = None, algorithm: str | None = None,
             async_op: bool = False, deterministic: bool | None = None,
             stream: Any = None) -> Any:  # fmt: skip
        """Combine the arrays ``x`` of ranks 0 to this one, in rank order.

        ``x``: an array with the same shape and dtype on all ranks. ``op``: the reduction
        (docs/reductions.md), but not "avg". ``out``: as in all_reduce. ``algorithm``, ``async_op``,
        ``deterministic``, ``stream``: see Communicator. Returns an array with the shape and dtype
        of x, or ``out``; with ``async_op``, a Work of that. Errors: see Communicator. Cost: for
        short messages log2(size) steps. Source: Hillis and Steele 1986; for long messages a
        pipelined chain (Thakur et al. 2005).

        >>> comm.scan(1)  # on rank 2
        3
        """
        options = CallOptions(out, algorithm, async_op, deterministic, stream)
        return self._internals.reductions.scan(x, op, options)

    @operation("ReducesAlike")
    def exscan(self, x: Any, op: Any = "sum", *, out: Any = None, algorithm: str | None = None,
               async_op: bool = False, deterministic: bool | None = None,
               stream: Any = None) -> Any:  # fmt: skip
        """Combine the arrays ``x`` of the ranks below this one, in rank order.

        ``x``: an array with the same shape and dtype on all ranks. ``op``: the reduction
        (docs/reductions.md), but not "avg", "maxloc" or "minloc". ``out``: as in all_reduce.
        ``algorithm``, ``async_op``, ``deterministic``, ``stream``: see Communicator. Returns an
        array with the shape and dtype of x, or ``out``; with ``async_op``, a Work of that. Rank 0
        gets the neutral element of op: 0 for sum, 1 for prod, the highest value of the type for
        min, the lowest for max, all bits for band. For an op from ``register_op`` it gets its
        ``identity``. Errors: see Communicator. Cost: for short messages log2(size) steps. Source:
        Hillis and Steele 1986; for long messages a pipelined chain (Thakur et al. 2005).

        >>> comm.exscan(1)  # on rank 2
        2
        """
        options = CallOptions(out, algorithm, async_op, deterministic, stream)
        return self._internals.reductions.exscan(x, op, options)

    @operation("Broadcast")
    def broadcast(self, x: Any, root: int = 0, *, out: Any = None, algorithm: str | None = None,
                  async_op: bool = False, stream: Any = None, compress: Any = None,
                  feedback: Any = None) -> Any:  # fmt: skip
        """Copy the root's ``x`` to every rank.

        ``x``: an array with the same shape and dtype on all ranks; only the root's values count.
        ``root``: the sender, from 0 to size - 1, the same on all ranks. ``out``: None for a new
        array, an array of the shape and dtype of x, or x itself. ``compress``, ``feedback``: as in
        all_reduce; the root encodes its values once, and all ranks, also the root, get what the
        codes decode to. ``algorithm``, ``async_op``, ``stream``: see Communicator. Returns an array
        with the shape and dtype of x, or ``out``; with ``async_op``, a Work of that. Errors: see
        Communicator. Cost: each rank receives n bytes and sends about n; log2(size) steps for short
        messages. Source: direct exchange, binomial tree and chain (Thakur et al. 2005), double
        binary tree (Sanders et al. 2009), scatter and all_gather (Barnett et al. 1994).

        >>> comm.broadcast(np.full(2, comm.rank), root=1)  # on 3 ranks
        array([1, 1])
        """
        options = CallOptions(out, algorithm, async_op, None, stream)
        return self._internals.movement.broadcast(self, x, root, options, compress, feedback)

    @operation("AllGather")
    def all_gather(self, x: Any, *, lengths: Sequence[int] | None = None, out: Any = None,
                   algorithm: str | None = None, async_op: bool = False, stream: Any = None,
                   compress: Any = None, feedback: Any = None) -> Any:  # fmt: skip
        """Join the arrays ``x`` of all ranks along axis 0, in rank order; every rank gets all rows.

        ``x``: an array; its first dimension may differ between ranks, its dtype and its other
        dimensions must not. A 0-d array or a number counts as one row. ``lengths``: the first
        dimension of each rank, the same sequence on all ranks; None lets the ranks exchange their
        first dimensions beforehand, also with ``async_op``. ``out``: an array with the rows of all
        ranks; on the host x may be this rank's rows of it, and the rest of ``out`` is not read.
        ``compress``, ``feedback``: as in all_reduce; each rank encodes its rows once, and all
        ranks, itself included, get what the codes decode to. ``algorithm``, ``async_op``,
        ``stream``: see Communicator. Returns an array with the rows of all ranks and the dtype of
        x, or ``out``; with ``async_op``, a Work of that. Errors: see Communicator. Where dtypes or
        trailing dimensions differ and ``lengths`` is None, it raises MismatchError and the
        communicator stays usable. Cost: every rank receives the rows of all other ranks, and
        without ``lengths`` an exchange of ten numbers per rank first. Source: ring (Patarasu and
        Yuan 2009), direct exchange and recursive doubling (Thakur et al. 2005), Bruck et al. 1997.

        >>> comm.all_gather(np.full((comm.rank, 2), comm.rank)).shape  # on 3 ranks
        (3, 2)
        """
        options = CallOptions(out, algorithm, async_op, None, stream)
        return self._internals.movement.all_gather(self, x, lengths, options, compress, feedback)

    @operation("Gather")
    def gather(self, x: Any, root: int = 0, splits: Sequence[int] | None = None, *,
               lengths: Sequence[int] | None = None, out: Any = None, algorithm: str | None = None,
               async_op: bool = False, stream: Any = None) -> Any:  # fmt: skip
        """Join the arrays ``x`` of all ranks along axis 0, in rank order, on ``root`` only.

        ``x``: as in all_gather. ``root``: the receiving rank, from 0 to size - 1, the same on all
        ranks. ``splits`` or ``lengths``: the rows of each rank, as ``lengths`` of all_gather; the
        two names mean the same, and a call passes at most one of them. ``out``: on the root an
        array with the rows of all ranks, of which x may be the root's own rows; on another rank it
        is not used. ``algorithm``, ``async_op``, ``stream``: see Communicator. Returns on the root
        an array with the rows of all ranks, or ``out``; on another rank its ``out``, or None; with
        ``async_op``, a Work of that. Raises the errors of all_gather. Cost: the root receives the
        rows of all other ranks; without ``splits`` or ``lengths`` all ranks exchange ten numbers
        each first. Source: direct exchange and binomial tree (Thakur et al. 2005).

        >>> comm.gather(np.full(1, comm.rank))  # on 2 ranks; this is rank 0
        array([0, 1])
        """
        options = CallOptions(out, algorithm, async_op, None, stream)
        return self._internals.movement.gather(x, root, splits, lengths, options)

    @operation("Scatter")
    def scatter(self, x: Any = None, root: int = 0, splits: Sequence[int] | None = None, *,
                out: Any = None, algorithm: str | None = None, async_op: bool = False,
                stream: Any = None) -> Any:  # fmt: skip
        """Split the root's ``x`` along axis 0; every rank gets its rows.

        ``x``: on the root an array of at least one axis. Another rank need not know its shape or
        dtype, since the root sends them beforehand, also with ``async_op``; there the type of x is
        the type of the result, and None means a NumPy array. ``root``: the sending rank, from 0 to
        size - 1, the same on all ranks. ``splits``: on the root one number of rows per rank, with
        the sum ``len(x)``; rank r gets the next ``splits[r]`` rows. None means the shares of
        reduce_scatter. ``splits`` of other ranks does not count. ``out``: on the root, on the host,
        it may be the root's own rows of x. ``algorithm``, ``async_op``, ``stream``: see
        Communicator. Returns this rank's rows, with the trailing dimensions and dtype of the root's
        x, or ``out``; with ``async_op``, a Work of that. Errors: see Communicator. Cost: every rank
        receives its rows, after a broadcast of the shape and dtype and, with ``splits``, one of the
        rows. Source: direct exchange and binomial tree (Thakur et al. 2005).

        >>> comm.scatter(np.arange(4.0) if comm.rank == 0 else None)  # on 2 ranks; this is rank 1
        array([2., 3.])
        """
        options = CallOptions(out, algorithm, async_op, None, stream)
        return self._internals.movement.scatter(x, root, splits, options)

    @operation("AllToAll")
    def all_to_all(self, x: Any, splits: Sequence[int] | None = None, *,
                   lengths: Sequence[Sequence[int]] | None = None, out: Any = None,
                   algorithm: str | None = None, async_op: bool = False,
                   stream: Any = None) -> Any:  # fmt: skip
        """Send rows of ``x`` to every rank, and join the rows from every rank in rank order.

        ``x``: an array of at least one axis; its dtype and all dimensions but the first must be the
        same on all ranks. ``splits``: one number of rows per rank, with the sum ``len(x)``; rank r
        gets the next ``splits[r]`` rows. None means equal shares; then size must divide ``len(x)``,
        and the shape of x must be the same on all ranks. Either all ranks pass ``splits`` or none
        does. ``lengths``: where all ranks know them, the ``splits`` of all ranks, one sequence per
        rank, the same on all ranks; then ``splits`` is None. ``out``: memory apart from x.
        ``algorithm``, ``async_op``, ``stream``: see Communicator. Returns the joined rows, with the
        trailing dimensions and dtype of x, or ``out``; with ``async_op``, a Work of that. Errors:
        see Communicator. Cost: every rank sends the rows of x for the other ranks. With ``splits``
        the ranks exchange them beforehand, also with ``async_op``; with ``lengths`` they do not.
        Source: direct exchange (Thakur et al. 2005), and Bruck et al. 1997 for short messages.

        >>> comm.all_to_all(np.array([0, 1]) + 10 * comm.rank)  # on 2 ranks; this is rank 1
        array([ 1, 11])
        """
        options = CallOptions(out, algorithm, async_op, None, stream)
        return self._internals.movement.all_to_all(x, splits, lengths, options)

    @operation("Barrier")
    def barrier(self, *, algorithm: str | None = None, async_op: bool = False) -> Any:
        """Wait until every rank has called this barrier.

        ``algorithm``, ``async_op``: see Communicator. Returns None; with ``async_op``, a Work of
        that. Errors: see Communicator. Cost: log2(size) steps of a few bytes. Source: dissemination
        (Hensgen et al. 1988), recursive doubling and direct exchange (Thakur et al. 2005).

        >>> comm.barrier()
        """
        return self._internals.movement.barrier(algorithm, async_op)

    @operation("Send")
    def send(self, x: Any, dest: int, tag: int = 0, *, stream: Any = None) -> None:
        """Send ``x`` to rank ``dest``; return when the program may change x again.

        ``x``: an array, in host memory or on a CUDA device. ``dest``: a rank from 0 to size - 1.
        ``tag``: a whole number from 0 to 2**31-1. ``stream``: only for device arrays, see
        Communicator. For a short message the call may return before the receiver has called recv;
        otherwise it returns after that. For a device array it returns at once, and the stream waits
        instead. Raises the errors of all operations. Cost: one message of the bytes of x.

        >>> comm.send(np.ones(2), dest=comm.rank)
        >>> comm.recv(np.zeros(2), source=comm.rank)
        array([1., 1.])
        """
        self._internals.messages.send(x, dest, tag, stream, False)

    @operation("Isend")
    def isend(self, x: Any, dest: int, tag: int = 0, *, stream: Any = None) -> Any:
        """Start to send ``x`` to rank ``dest``.

        The arguments are those of send. Returns a Work; the program must leave x unchanged until
        ``wait()`` has returned. Errors and cost: those of send.

        >>> work = comm.isend(np.ones(2), dest=comm.rank)
        >>> comm.recv(np.zeros(2), source=comm.rank)
        array([1., 1.])
        >>> work.wait()
        """
        return self._internals.messages.send(x, dest, tag, stream, True)

    @operation("Recv")
    def recv(self, out: Any, source: int, tag: int = 0, *, stream: Any = None) -> Any:
        """Receive a message from rank ``source`` into ``out``.

        ``out``: a writable array with exactly the bytes of the message; in host memory it must be
        contiguous in C order. ``source``: a rank from 0 to size - 1. ``tag``: from 0 to 2**31-1.
        ``stream``: see Communicator. Returns out. Raises the errors of all operations;
        MismatchError where the message has another number of bytes. Cost: one message.

        >>> comm.send(np.ones(2), dest=comm.rank)
        >>> comm.recv(np.zeros(2), source=comm.rank)
        array([1., 1.])
        """
        self._internals.messages.recv(out, source, tag, stream, False)
        return out

    @operation("Irecv")
    def irecv(self, out: Any, source: int, tag: int = 0, *, stream: Any = None) -> Any:
        """Start to receive a message from rank ``source`` into ``out``.

        The arguments are those of recv. Returns a Work of out. Errors and cost: those of recv.

        >>> work = comm.irecv(np.zeros(2), source=comm.rank)
        >>> comm.send(np.ones(2), dest=comm.rank)
        >>> work.wait()
        array([1., 1.])
        """
        return self._internals.messages.recv(out, source, tag, stream, True)

    @operation("IrecvAny")
    def irecv_any(self, out: Any, tag: int = 0) -> Any:
        """Start to receive the next message with ``tag``, from any rank, into ``out``.

        ``out``: as in recv, but in host memory only. ``tag``: from 0 to 2**31-1. Where two receives
        could take the same message, the earlier call gets it. Returns a Work whose ``wait()``
        returns the rank of the sender. Raises the errors of recv; InvalidArgumentError inside a
        ``group()`` and for device arrays. Cost: as recv.

        >>> work = comm.irecv_any(np.zeros(2))
        >>> comm.send(np.ones(2), dest=comm.rank)
        >>> work.wait()
        0
        """
        return self._internals.messages.irecv_any(out, tag)

    @repeatable
    @immediate
    def sendrecv(self, x: Any, dest: int, out: Any, source: int, tag: int = 0, *,
                 recv_tag: int | None = None, stream: Any = None) -> Any:  # fmt: skip
        """Send ``x`` to rank ``dest`` and receive from rank ``source`` into ``out`` at once.

        ``x`` and ``dest``: as in send. ``out`` and ``source``: as in recv; the memory of x and of
        out must not overlap. ``tag``: the tag of both messages, unless the received one has
        ``recv_tag``. ``stream``: only for device arrays, see Communicator. Ranks that shift data
        around a ring with this call cannot deadlock, whatever the lengths. Returns out. Raises the
        errors of send and recv, when both messages have ended; InvalidArgumentError inside a
        ``group()``, in which isend and irecv do the same. Cost: one message in each direction.

        >>> left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        >>> comm.sendrecv(np.full(2, comm.rank), right, np.zeros(2, int), left)  # on 3 ranks
        array([2, 2])
        """
        wanted = tag if recv_tag is None else recv_tag
        return self._internals.messages.sendrecv(x, dest, tag, out, source, wanted, stream)

    @immediate
    def probe(
        self, source: int | None = None, tag: int | None = 0, *, timeout: float | None = None
    ) -> Probe:
        """Wait for a message in host memory, and return its source, tag and bytes.

        ``source``: the sending rank, or None for any rank. ``tag``: a tag, or None for any tag.
        ``timeout``: seconds, or None for the ``timeout_s`` of the communicator. The call does not
        receive the message, and does not see one that an earlier irecv takes. pycoll keeps the part
        of a message that has arrived in memory of its own until a recv takes it. Returns a Probe.
        Raises TimeoutError where no message has arrived in time; the communicator stays usable.
        Raises PeerLostError where the source is gone, and InvalidArgumentError inside a
        ``group()``. Cost: the wait; the message is copied once more when a recv takes it.

        >>> comm.isend(np.zeros(3), dest=comm.rank, tag=7).wait()
        >>> comm.probe(comm.rank, tag=None)
        Probe(source=0, tag=7, nbytes=24)
        """
        return self._internals.messages.probe(source, tag, timeout)

    @immediate
    def iprobe(self, source: int | None = None, tag: int | None = 0) -> Probe | None:
        """Return what probe returns if such a message has arrived, otherwise None. Do not wait.

        ``source``, ``tag``: as in probe. Errors: those of probe but TimeoutError. Cost: none.

        >>> comm.iprobe(tag=8) is None
        True
        """
        return self._internals.messages.iprobe(source, tag)

    @immediate_collective
    def broadcast_object(self, obj: _T = None, root: int = 0) -> _T:  # type: ignore[assignment]
        """Copy the root's object to every rank.

        ``obj``: on the root any object that pickle can serialise; on other ranks it is not used.
        ``root``: the sending rank, from 0 to size - 1, the same on all ranks. Returns ``obj``
        itself on the root, and a copy on the other ranks. Unpickling runs code that the root
        chooses. Raises InvalidArgumentError on all ranks where the object cannot be pickled. Cost:
        two broadcasts, and one more for each buffer of 64 KiB and more.

        >>> comm.broadcast_object({"lr": 0.1} if comm.rank == 0 else None)
        {'lr': 0.1}
        """
        return self._internals.objects.broadcast(obj, root)

    @immediate_collective
    def all_gather_object(self, obj: _T) -> list[_T]:
        """Collect the objects of all ranks on every rank.

        ``obj``: any object that pickle can serialise. Returns a list in rank order. This rank's
        element is ``obj`` itself, the others are copies. Unpickling runs code that the other ranks
        choose. Raises InvalidArgumentError on all ranks where an object cannot be pickled. Cost:
        two all_gathers. With buffers of 64 KiB and more, one all_gather of their lengths and one
        for each buffer of the rank that has most of them.

        >>> comm.all_gather_object("r" * comm.rank)  # on 3 ranks
        ['', 'r', 'rr']
        """
        return self._internals.objects.all_gather(obj)

    @immediate_collective
    def gather_object(self, obj: _T, root: int = 0) -> list[_T] | None:
        """Collect the objects of all ranks on ``root``.

        ``obj``: any object that pickle can serialise. ``root``: the receiving rank, from 0 to size
        - 1, the same on all ranks. Returns on the root a list in rank order; its own element is
        ``obj`` itself. Returns None on the other ranks. Unpickling on the root runs code that the
        other ranks choose. Raises InvalidArgumentError on all ranks where an object cannot be
        pickled. Cost: an all_gather of a few numbers, and the messages of each rank to the root.

        >>> comm.gather_object(comm.rank ** 2)  # on 3 ranks
        [0, 1, 4]
        """
        return self._internals.objects.gather(obj, root)

    @immediate_collective
    def scatter_object(self, objs: Sequence[_T] | None = None, root: int = 0) -> _T:
        """Send element r of the root's ``objs`` to rank r.

        ``objs``: on the root a sequence of one object per rank; on other ranks it is not used.
        ``root``: the sending rank, from 0 to size - 1, the same on all ranks. Returns the element
        of this rank: on the root the object itself, elsewhere a copy. Unpickling runs code that the
        root chooses. Raises InvalidArgumentError on all ranks where an object cannot be pickled or
        ``objs`` has another length. Cost: a broadcast of all lengths, and messages to each rank.

        >>> comm.scatter_object([["a"], ["b"]] if comm.rank == 0 else None)  # on 2 ranks; rank 1
        ['b']
        """
        return self._internals.objects.scatter(objs, root)

    @immediate
    def send_object(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object to rank ``dest``, which receives it with ``recv_object``.

        ``obj``: any object that pickle can serialise. ``dest``: a rank from 0 to size - 1. ``tag``:
        from 0 to 2**31-1. Returns when the program may change ``obj`` again. Objects of one sender
        and tag keep their order. Each buffer of 64 KiB and more is a separate message. Therefore no
        other thread may send to this rank with this tag until the call returns. Raises
        InvalidArgumentError on both ranks where the object cannot be pickled, and the errors of
        send. Cost: one message, and one more for each buffer of 64 KiB and more.

        >>> comm.send_object({"step": 3}, dest=comm.rank)
        >>> comm.recv_object(source=comm.rank)
        {'step': 3}
        """
        self._internals.objects.send(obj, dest, tag)

    @immediate
    def recv_object(self, source: int, tag: int = 0) -> Any:
        """Receive an object that rank ``source`` sends with ``send_object``.

        ``source``: a rank from 0 to size - 1; ``probe`` finds the sender where any rank may send.
        ``tag``: from 0 to 2**31-1. No other thread may receive from this rank with this tag until
        the call returns. Unpickling runs code that the sender chooses. Returns the object. Raises
        InvalidArgumentError where the sender cannot pickle its object; MismatchError where the
        message is not an object, which is then lost; the errors of recv. Cost: as send_object.

        >>> comm.send_object({"step": 3}, dest=comm.rank)
        >>> comm.recv_object(source=comm.rank)
        {'step': 3}
        """
        return self._internals.objects.recv(source, tag)

    def group(self) -> AbstractContextManager[Group]:
        """Run several operations as one: ``with comm.group(): ...``.

        Returns a context manager. Calls in its block return a Work at once, and run at the end of
        the block; then ``wait()`` of each Work returns its result. An inner group joins the outer.

        * all_reduce calls with equal op, dtype, algorithm and deterministic, of up to 256 KiB each,
          share messages of up to 16 MiB.
        * Sends and receives start together, so they cannot deadlock in a circle.
        * The other operations run in the order of the calls, which must be the same on all ranks.

        No operation of the group may read memory that another one writes. No other thread may use
        the communicator until the block ends. If the block raises an exception, nothing runs. A
        shared message takes the algorithm for its total length; with ``deterministic`` the bits are
        those of separate calls. Errors: a call raises InvalidArgumentError for its own arguments.
        The end of the block raises the first error of an operation, and so does each Work without a
        result. Cost: that of the operations; a shared message is one all_reduce.

        >>> with comm.group():
        ...     loss, hits = comm.all_reduce(loss), comm.all_reduce(hits)
        >>> loss, hits = loss.wait(), hits.wait()
        """
        return self._make_group(self)

    def register(self, *arrays: Any) -> Registered:
        """Register arrays, so that operations on them need one copy less.

        ``arrays``: arrays in host memory, which support the buffer protocol, or on CUDA devices.
        RDMA devices send from host memory in place. Until the result is closed this memory is
        pinned, and the arrays must not be resized; the program may change the elements. Arrays of
        ``pycoll.empty`` need none. A tensor is refused, because torch can replace its memory. An
        array that cannot be registered is copied as before, and ``explain`` tells why. No other
        rank takes part. Peers write results of collectives directly to arrays on devices, instead
        of to slots from which this rank copies. All ranks call this method with the same number of
        device arrays, of any lengths. An array that peers cannot map works as before. The arrays
        stay alive until the result is closed; the program must not free their memory earlier.
        Returns a Registered, a context manager whose ``nbytes`` counts the bytes that peers or RDMA
        devices can reach; ``close()`` ends the registration. Raises InvalidArgumentError, and for
        device arrays the errors of a first collective. Cost: the system pins the memory of host
        arrays; device arrays take an exchange between all ranks.

        >>> gradients = np.full(4, comm.rank)  # on 3 ranks
        >>> with comm.register(gradients):
        ...     summed = comm.all_reduce(gradients, out=gradients)
        >>> summed
        array([3, 3, 3, 3])
        """
        from pycoll.arrays.registered import Registered

        verbs = [one for one in self._internals.joined.transports if one.name == "verbs"]
        devices, gather = self._internals.devices, self._internals.exchanges.gather_blobs
        enter = functools.partial(devices.register, gather, self._group is not None)
        return Registered(verbs[0] if verbs else None, arrays, enter)

    def choice(self, collective: str, nbytes: int, dtype: str = "float32", op: str = "sum") -> str:
        """Return the name of the algorithm that runs for a message of ``nbytes`` bytes.

        ``collective``: a name such as "all_reduce". ``nbytes``: at least 0. ``dtype``, ``op``:
        names of dtype and reduction. Raises InvalidArgumentError for others. Cost: no messages.

        >>> name = comm.choice("all_reduce", 1 << 20)
        """
        return self._internals.compiler.choice(collective, nbytes, dtype, op)

    def explain(
        self, collective: str, nbytes: int, compress: Any = None, memory: str = "shared"
    ) -> str:
        """Return a text: the algorithm for ``nbytes`` bytes, its predicted time, and the reason.

        ``collective``: a name such as "all_reduce". ``nbytes``: at least 0. ``compress``: None, or
        a codec; then the text tells the bytes and the times of links and codec, with it and
        without, and whether it pays. ``memory``: "shared" predicts arrays that peers on the host
        read in place, "ordinary" those whose copies pass through slots; codecs ignore it. Over
        shared memory the text names the stores that fill slots; over verbs the bytes of registered
        arrays, and why other arrays are not registered. Raises InvalidArgumentError for wrong names
        and numbers, and for a codec whose bytes follow from values or shapes. Cost: as choice.

        >>> text = comm.explain("all_reduce", 1 << 20)
        """
        compiler, transports = self._internals.compiler, self._internals.joined.transports
        return compiler.explain(transports, collective, nbytes, compress, memory)

    @immediate_collective
    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Form new communicators: one of all ranks that pass the same ``color``.

        ``color``: a whole number of 64 bits, or None for a rank that joins no new communicator.
        ``key``: a whole number of 64 bits; the new ranks are ordered by ``key``, then by rank. All
        ranks call this method. Returns the new communicator of this rank, or None where ``color``
        is None. Its ``timeout_s`` and settings are those of this communicator now. Raises the
        errors of all_gather and of ``pycoll.init``. Cost: an all_gather of three numbers, and new
        connections: over this communicator if each group lies within a host, else as ``init`` does.

        >>> with comm.split(comm.rank % 2) as part:
        ...     ranks = part.size
        >>> ranks  # on 3 ranks
        2
        """
        made = self._internals.lifecycle.split(color, key)
        return None if made is None else Communicator(*made)

    @immediate_collective
    def dup(self) -> Communicator:
        """Return a new communicator of the same ranks, with its own connections and order.

        All ranks call this. A library that communicates next to its caller needs it: collectives
        and messages of the two never meet. It has the settings of now and the same servers. Errors:
        as ``split``. Cost: an all_gather of three numbers and new connections.

        >>> with comm.dup() as other:
        ...     total = other.all_reduce(1)
        >>> total
        3
        """
        if self._served is not None:
            return self._served.dup(self._internals.lifecycle.name_dup())
        return Communicator(*self._internals.lifecycle.dup())

    @immediate
    def shrink(self, timeout_s: float = 30.0) -> Communicator:
        """Return a communicator of the ranks that are left, after a rank was lost or on demand.

        ``timeout_s``: the longest wait, in seconds, at most 3600. Ranks that run and do not call
        ``shrink`` within a third of it are left out. Every rank that goes on calls this method,
        from one thread. A rank in an operation of this communicator raises PeerLostError when
        another one shrinks it, and then shrinks, too. All ranks that return have the same new
        communicator, with the old order of ranks and the settings of now. This communicator is
        closed; if it was the world, the new one is the world. More than half of the ranks may go on
        without the others, or half with the lowest rank among them; fewer only if all others are
        gone (docs/guides/staying-alive.md). Raises LeftOutError on a rank without which the others
        went on, and if too few answered; ClosedError; InvalidArgumentError for a wrong
        ``timeout_s`` and where this communicator has a successor already; PeerLostError,
        TimeoutError or TransportError if no attempt to connect succeeded. Cost: two round trips of
        the lowest rank with every other, one thread, and new connections.

        >>> with comm.dup() as part:
        ...     part = part.shrink()
        >>> part.size  # on 3 ranks
        3
        >>> part.close()
        """
        return self._succeeded_by(self._internals.lifecycle.shrink(timeout_s))

    @immediate_collective
    def grow(
        self, count: int, invite: Callable[[list[str]], object], timeout_s: float = 60.0
    ) -> Communicator:
        """Let ``count`` new ranks in, and return a communicator of the old and the new ranks.

        All ranks call this method. ``count``: the number of new ranks, equal on all; in total there
        are at most 4096. ``invite``: a function that rank 0 calls with a list of ``count`` tickets;
        it starts the new processes, or passes the tickets to running ones, and does not wait. Each
        new process calls ``pycoll.init(ticket=...)``, or ``pycoll.init()`` with ``PYCOLL_TICKET``
        set. A ticket is secret and serves once; pass it by the environment, a pipe or a private
        file, never on a command line. ``timeout_s``: the longest wait for new ranks, in seconds.
        Returns the new communicator. The old ranks keep their numbers, the new ones follow in the
        order of their tickets. This communicator is closed; if it was the world, the new one is the
        world. Raises InvalidArgumentError for wrong arguments; what ``invite`` raises on rank 0,
        and PycollError that quotes it on the others; TimeoutError that names the new ranks that did
        not come, and the other errors of ``init``. After an error this communicator goes on, unless
        a rank has died. Cost: an all_gather, and new connections as ``init`` makes them.

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
        return self._succeeded_by(self._internals.lifecycle.grow(count, invite, timeout_s))

    def abort(self, reason: str = "", code: int = 1) -> NoReturn:
        """End the job: this process exits with ``code`` now, and every other rank raises an error.

        Any thread may call this when other ranks wait for a rank that cannot go on. ``reason``: a
        text; the errors of the other ranks quote its first 60 characters. ``code``: the exit
        status, 1 to 255; 0 is refused, since launchers would report success. A number in the first
        place is the code, as in mpi4py, and a text in the second one is the reason. The other ranks
        raise PeerLostError, which names this rank and quotes the reason: within 2 s in an operation
        of any communicator of this process, else in their next operation. They can save their
        state. All ranks of this process end: no ``finally`` block, atexit function or other thread
        runs. Standard output and error are flushed. Result: none. Raises InvalidArgumentError for a
        wrong code or reason, and ClosedError in a forked child. Cost: a notice to each other rank.

        >>> if comm.rank >= comm.size:  # a state in which this rank cannot go on
        ...     comm.abort("the state is lost", code=3)
        """
        others = [one._native for one in list(_open) if one is not self]
        self._internals.lifecycle.abort(others, reason, code)

    def close(self) -> None:
        """Leave the communicator and free its resources. Peers see an orderly end.

        Later calls, and host operations that still run, raise ClosedError. The program must not
        launch CUDA graphs that contain operations of this communicator any more. Closing again does
        nothing. Errors: none. Cost: a wait of up to 5 s for operations on devices.

        >>> part = comm.dup()
        >>> part.close()
        """
        if self._served is not None:
            self._served.close()
        with self._internals.devices.closing():
            self._native.close()
            self._shared_arrays = None
            self._internals.lifecycle.release()

    def _succeeded_by(self, membership: Membership) -> Communicator:
        """Return the communicator that takes the place of this one, which closes."""
        made, lifecycle = Communicator(*membership), self._internals.lifecycle
        made._internals.lifecycle.replaced = lifecycle.replaced
        if lifecycle.replaced is not None:
            lifecycle.replaced(made)
        self.close()
        return made

    # Native code calls these by name.

    def _complete(self, error: PycollError, name: str) -> None:
        self._internals.runner.complete_error(error, name)

    def _message(self, message: MessageKey, nbytes: int, arrays_key: int) -> _core.Request:
        return self._internals.compiler.compile_message(message, nbytes, arrays_key)

    def _resume(self, name: str, told: list[bytes], words: dict[str, Any]) -> Any:
        """Run a call whose first exchanges native code has made, with these outputs."""
        definition = getattr(type(self), name).definition
        return self._internals.exchanges.resume(told, lambda: definition(self, **words))


refuse_foreign_calls(Communicator)
