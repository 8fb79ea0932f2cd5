"""The world: init, finalize, and a module function for each method of its communicator."""

from __future__ import annotations

import atexit
import functools
import os
import threading
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

import numpy as np

from pycoll import _core
from pycoll.arrays.registry import empty, shared_arrays
from pycoll.comm import dynamo
from pycoll.comm.communicator import Communicator
from pycoll.comm.operations import internals_of
from pycoll.comm.work import Work, wait_all
from pycoll.errors import (
    ClosedError,
    InvalidArgumentError,
    LeftOutError,
    MismatchError,
    PeerLostError,
    PycollError,
    RankFailedError,
    ReductionError,
    TimeoutError,
    TransportError,
)
from pycoll.ops import register_op
from pycoll.types import check_timeout

if TYPE_CHECKING:
    from pycoll.bootstrap import Joined
    from pycoll.config import Config

__all__ = [
    "ClosedError",
    "Communicator",
    "InvalidArgumentError",
    "LeftOutError",
    "MismatchError",
    "PeerLostError",
    "PycollError",
    "RankFailedError",
    "ReductionError",
    "TimeoutError",
    "TransportError",
    "Work",
    "abort",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_object",
    "cross_rank",
    "cross_size",
    "dup",
    "empty",
    "explain",
    "exscan",
    "finalize",
    "gather",
    "gather_object",
    "group",
    "grow",
    "init",
    "iprobe",
    "irecv",
    "irecv_any",
    "is_initialized",
    "isend",
    "local_rank",
    "local_size",
    "local_world",
    "probe",
    "rank",
    "recv",
    "recv_object",
    "reduce",
    "reduce_scatter",
    "register_op",
    "scan",
    "scatter",
    "scatter_object",
    "send",
    "send_object",
    "sendrecv",
    "servers",
    "shared_arrays",
    "shrink",
    "size",
    "split",
    "wait_all",
    "world",
]

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_Call = TypeVar("_Call")


class _World:
    """The world's communicator, and the id of the process that made it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.communicator: Communicator | None = None
        self.pid = 0
        #: Joins the world of the engine that has started this process; see join_by.
        self.engine: Callable[..., Communicator] | None = None

    def refuse_second(self) -> None:
        """Raise InvalidArgumentError if this process has a world."""
        if self.communicator is not None and self.pid == os.getpid():
            raise InvalidArgumentError(
                "pycoll.init() was called twice: use pycoll.world(), or call pycoll.finalize() "
                "before joining again"
            )

    def set(self, communicator: Communicator | None) -> None:
        """Make module functions use this communicator; None means that there is no world."""
        self.communicator = communicator
        self.pid = os.getpid()
        _core.set_world(communicator)

    def replace(self, communicator: Communicator) -> None:
        """Make this communicator the world, unless the program has left the world."""
        with self.lock:
            if self.communicator is not None and self.pid == os.getpid():
                self.set(communicator)

    def get(self) -> Communicator:
        found = self.communicator
        if found is None:
            raise ClosedError("pycoll is not initialised: call pycoll.init() first")
        if self.pid != os.getpid():
            raise ClosedError(
                f"this process was forked from process {self.pid}, whose world it cannot use: call "
                "pycoll.init() here, or start workers with the 'spawn' method"
            )
        return found


_world = _World()
dynamo.leave_pycoll_alone()
# In a forked child, native calls then ask _World.get(), which raises the ClosedError.
os.register_at_fork(after_in_child=lambda: _core.set_world(None))


def init(
    *,
    rank: int | None = None,
    size: int | None = None,
    address: str | None = None,
    secret: str | bytes | None = None,
    comm: Any = None,
    all_gather: Callable[[bytes], Sequence[bytes]] | None = None,
    ticket: str | None = None,
    transports: str | list[str] | tuple[str, ...] | None = None,
    timeout_s: float | None = None,
    init_timeout_s: float | None = None,
    deterministic: bool | None = None,
    shared_arrays: bool | None = None,
) -> Communicator:
    """Join the world of all ranks, and return its communicator. Every rank calls this once.

    Without arguments ``init`` finds the world: from pycoll run, mpirun, srun or torchrun, from Ray
    Train with ``PycollConfig``, or from ``PYCOLL_*`` variables. A process that is started alone is
    a world of size 1. An argument wins over its variable. Arguments:

    * ``rank``, ``size``, ``address``, ``secret``: an explicit world. ``address`` is "host:port",
      with a port that is free on the host of rank 0; ``secret`` has at least 16 characters and is
      the same on all ranks.
    * ``comm``: an mpi4py communicator, whose ranks form the world.
    * ``all_gather``: a function by which the ranks of ``rank=`` and ``size=`` meet, instead of
      ``address``. It takes bytes and returns the bytes of all ranks, unchanged, as a list in rank
      order. Every rank calls it equally often, at most 5 times, with a few KiB; rank 0 sends up to
      1 MiB more where it has a tuning file. docs/guides/starting/engines.md has the whole contract.
    * ``ticket``: a text that ``grow`` of a running communicator gave, which this process then joins
      as a new rank. ``PYCOLL_TICKET`` does the same. It holds a secret.
    * ``transports``: the transports that may be used, of "shm", "verbs" and "tcp".
    * ``timeout_s``: the deadline of an operation, in seconds.
    * ``init_timeout_s``: the deadline of joining, in seconds.
    * ``deterministic``: the default of the argument ``deterministic`` of collectives.
    * ``shared_arrays``: True puts NumPy arrays of 8 KiB and more, in all threads of this process,
      into memory that ranks on this host and RDMA devices reach; torch's gradient buckets too. The
      default is False unless ``PYCOLL_SHARED_ARRAYS`` is set. docs/shared-arrays.md describes the
      effects on the process.

    Returns the communicator of all ranks.

    Raises InvalidArgumentError (contradicting or missing settings, a second call), TimeoutError
    (names the missing ranks), TransportError and PeerLostError. A failed init leaves nothing
    behind, and the program can call it again.

    Cost: one rendezvous of all ranks, and the connections of this rank to all others.

    >>> pycoll.init(rank=0, size=1).size
    1
    """
    from pycoll.bootstrap import join

    settings = {
        "transports": transports,
        "timeout_s": timeout_s,
        "init_timeout_s": init_timeout_s,
        "deterministic": deterministic,
        "shared_arrays": shared_arrays,
    }
    places = (rank, size, address, secret, comm, all_gather, ticket)
    if _world.engine is not None and all(one is None for one in places):
        _world.refuse_second()
        return _world.engine(**settings)
    config = _settings(**settings)
    if config.role != "worker":
        raise InvalidArgumentError(
            "PYCOLL_ROLE is server: this rank serves; call pycoll.ps.serve() here instead of "
            "pycoll.init()"
        )
    with _world.lock:
        _world.refuse_second()
        joined = join(
            config,
            rank=rank,
            size=size,
            address=address,
            secret=secret,
            comm=comm,
            all_gather=all_gather,
            ticket=ticket,
            bring=_tuning_text,
        )
        communicator = _workers_communicator(joined, config)
        internals_of(communicator).lifecycle.replaced = _world.replace
        _world.set(communicator)
        return communicator


def join_by(engine: Callable[..., Communicator] | None) -> None:
    """Let an ``init()`` that gives no rank and no place return ``engine(...)``.

    ``engine`` gets the other arguments by name. Adapters use this for engines that tell a process
    its world before the program runs. None: ``init()`` finds the world itself again.
    """
    _world.engine = engine


def _workers_communicator(joined: Joined, config: Config) -> Communicator:
    """Return the communicator of the workers, among all ranks of a job."""
    from pycoll.bootstrap.discovery.roles import count_servers

    servers = count_servers(joined.identities)
    if servers == 0:
        return Communicator(joined, config, "world")
    from pycoll.comm.served import part_workers

    made = part_workers(Communicator(joined, config, "workers and servers"), servers)
    assert made is not None
    return made


def _tuning_text(config: Config) -> str:
    """Return the tuning that rank 0 sends to the other ranks. Only rank 0 imports that module."""
    from pycoll.comm.start_tuning import tuning_text

    return tuning_text(config)


def _settings(**given: Any) -> Config:
    """Return the environment's settings, overridden by the checked arguments that are not None."""
    from pycoll.config import Config, transports_from

    values = {name: value for name, value in given.items() if value is not None}
    for name in ("timeout_s", "init_timeout_s"):
        if name in values:
            values[name] = check_timeout(values[name], name)
    if "transports" in values:
        values["transports"] = transports_from(values["transports"])
    for name in ("deterministic", "shared_arrays"):
        if not isinstance(values.get(name, False), bool | np.bool_):
            raise InvalidArgumentError(f"{name} is {values[name]!r}: expected True or False")
    return Config.read()._replace(**values)


def is_initialized() -> bool:
    """Return whether this process has joined a world and not left it.

    Errors and cost: none.

    >>> pycoll.init(rank=0, size=1).size, pycoll.is_initialized()
    (1, True)
    """
    return _world.communicator is not None and _world.pid == os.getpid()


def finalize() -> None:
    """Leave the world and free its threads, descriptors and mappings. Peers see an orderly end.

    The end of the process does the same. Without a world the call does nothing. Afterwards the
    program may call ``init`` again.

    Errors: none. Cost: that of ``Communicator.close``.

    >>> pycoll.init(rank=0, size=1).size
    1
    >>> pycoll.finalize()
    >>> pycoll.is_initialized()
    False
    """
    with _world.lock:
        communicator, pid = _world.communicator, _world.pid
        _world.set(None)
        if communicator is not None and pid == os.getpid():
            communicator.close()


atexit.register(finalize)


def world() -> Communicator:
    """Return the communicator of all ranks.

    Errors: ClosedError before ``init``, after ``finalize`` and in a forked child. Cost: none.

    >>> pycoll.init(rank=0, size=1) is pycoll.world()
    True
    """
    return _world.get()


def rank() -> int:
    """Return the rank of this process, from 0 to size() - 1.

    Errors: ClosedError before ``init``. Cost: none.

    >>> pycoll.init(rank=0, size=1).rank == pycoll.rank()
    True
    """
    return _world.get().rank


def size() -> int:
    """Return the number of ranks.

    Errors: ClosedError before ``init``. Cost: none.

    >>> pycoll.init(rank=0, size=1).size == pycoll.size()
    True
    """
    return _world.get().size


def servers() -> tuple[int, ...]:
    """Return the ranks of the job that serve; size() does not count them.

    They follow the workers: with 4 workers and 2 servers they are ranks 4 and 5. The tuple is empty
    in a job without servers.

    Errors: ClosedError before ``init``. Cost: none.

    >>> pycoll.init(rank=0, size=1).servers == pycoll.servers()
    True
    """
    return _world.get().servers


def local_rank() -> int:
    """Return the place of this rank among the ranks of its host, from 0.

    Errors: ClosedError before ``init``. Cost: none.

    >>> pycoll.init(rank=0, size=1).local_rank == pycoll.local_rank() == 0
    True
    """
    return _world.get().local_rank


def local_size() -> int:
    """Return the number of ranks on this host.

    Errors: ClosedError before ``init``. Cost: none.

    >>> pycoll.init(rank=0, size=1).local_size == pycoll.local_size() == 1
    True
    """
    return _world.get().local_size


def cross_rank() -> int:
    """Return the place of this host among the hosts that have this local rank.

    Errors: ClosedError before ``init``. Cost: none.

    >>> pycoll.init(rank=0, size=1).cross_rank == pycoll.cross_rank() == 0
    True
    """
    return _world.get().cross_rank


def cross_size() -> int:
    """Return the number of hosts that have this local rank.

    Errors: ClosedError before ``init``. Cost: none.

    >>> pycoll.init(rank=0, size=1).cross_size == pycoll.cross_size() == 1
    True
    """
    return _world.get().cross_size


def _on_world(method: _Call) -> _Call:
    """Make a module function that calls the method on the world's communicator."""
    called: Any = method
    return cast(_Call, _core.world_function(called, _world.get))


def _of_world(
    method: Callable[Concatenate[Communicator, _Arguments], _Result],
) -> Callable[_Arguments, _Result]:
    """Make a module function from a method that native code does not run, as ``_on_world`` does."""

    @functools.wraps(method)
    def call(*args: _Arguments.args, **words: _Arguments.kwargs) -> _Result:
        return method(_world.get(), *args, **words)

    call.__qualname__ = method.__name__
    call.__module__ = __name__
    # inspect.signature() follows __wrapped__, and the signature of a bound method has no self.
    call.__wrapped__ = types.MethodType(method, _world)
    return call


def local_world(
    count: int,
    *,
    transports: str | list[str] | tuple[str, ...] | None = None,
    hosts: Sequence[int] | None = None,
    servers: int = 0,
    timeout_s: float | None = None,
    deterministic: bool | None = None,
    shared_arrays: bool | None = None,
) -> list[Communicator]:
    """Make ``count`` ranks inside this process, connected by real transports.

    ``count``: the number of ranks, 1 to 4096. ``hosts``: one host number per rank; ranks with
    different numbers use tcp, as ranks on different hosts do. None puts all ranks on one host.
    ``servers``: the number of further ranks, threads of pycoll, that serve these; ``hosts`` then
    names their hosts too. The other arguments are those of ``init``.

    The program calls collectives from one thread per rank, or with ``async_op``. This function is
    for tests, notebooks and programs with a thread per device.

    Returns a list of one communicator per rank, in rank order.

    Raises InvalidArgumentError for wrong arguments, and the errors of ``init``.

    Cost: as ``init``, for each rank, and a thread for each server.

    >>> left, right = pycoll.local_world(2)
    >>> works = [comm.all_reduce(comm.rank + 1, async_op=True) for comm in (left, right)]
    >>> tuple(work.wait() for work in works)
    (3, 3)
    """
    from pycoll.bootstrap import join_threads
    from pycoll.config import RANKS_MAX

    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= RANKS_MAX:
        raise InvalidArgumentError(
            f"count is {count!r}: expected a whole number from 1 to {RANKS_MAX}"
        )
    if hosts is not None and not isinstance(hosts, Sequence):
        raise InvalidArgumentError(f"hosts is {hosts!r}: expected a host number for each rank")
    total = count + _checked_servers(servers, RANKS_MAX - count)
    if hosts is not None and len(hosts) != total:
        raise InvalidArgumentError(f"hosts has {len(hosts)} entries for {total} ranks")
    config = _settings(
        transports=transports,
        timeout_s=timeout_s,
        deterministic=deterministic,
        shared_arrays=shared_arrays,
    )
    configs = [
        config if hosts is None else config._replace(host_id=str(hosts[number]))
        for number in range(total)
    ]
    joined = join_threads(total, configs, bring=_tuning_text)
    made = [Communicator(one, configs[number], "local_world") for number, one in enumerate(joined)]
    if servers == 0:
        return made
    from pycoll.comm.served import part_threads

    return part_threads(made, servers)


def _checked_servers(servers: int, most: int) -> int:
    if isinstance(servers, bool) or not isinstance(servers, int) or not 0 <= servers <= most:
        raise InvalidArgumentError(
            f"servers is {servers!r}: expected a whole number from 0 to {most}"
        )
    return servers


all_reduce = _on_world(Communicator.all_reduce)
reduce = _on_world(Communicator.reduce)
broadcast = _on_world(Communicator.broadcast)
reduce_scatter = _on_world(Communicator.reduce_scatter)
all_gather = _on_world(Communicator.all_gather)
gather = _on_world(Communicator.gather)
scatter = _on_world(Communicator.scatter)
all_to_all = _on_world(Communicator.all_to_all)
scan = _on_world(Communicator.scan)
exscan = _on_world(Communicator.exscan)
barrier = _on_world(Communicator.barrier)
send = _on_world(Communicator.send)
recv = _on_world(Communicator.recv)
isend = _on_world(Communicator.isend)
irecv = _on_world(Communicator.irecv)
irecv_any = _on_world(Communicator.irecv_any)
sendrecv = _on_world(Communicator.sendrecv)


abort = _of_world(Communicator.abort)
grow = _of_world(Communicator.grow)
shrink = _of_world(Communicator.shrink)
split = _of_world(Communicator.split)
dup = _of_world(Communicator.dup)
group = _of_world(Communicator.group)
explain = _of_world(Communicator.explain)
broadcast_object = _of_world(Communicator.broadcast_object)
all_gather_object = _of_world(Communicator.all_gather_object)
gather_object = _of_world(Communicator.gather_object)
scatter_object = _of_world(Communicator.scatter_object)
send_object = _of_world(Communicator.send_object)
recv_object = _of_world(Communicator.recv_object)
probe = _of_world(Communicator.probe)
iprobe = _of_world(Communicator.iprobe)
