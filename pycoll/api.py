"""The world: init and finalize, and every method of its communicator as a module function."""

from __future__ import annotations

import atexit
import functools
import os
import threading
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

import numpy as np

from pycoll import _core, dynamo
from pycoll.arrays import empty, shared_arrays
from pycoll.communicator import Communicator
from pycoll.errors import (
    ClosedError,
    InvalidArgumentError,
    MismatchError,
    PeerLostError,
    PycollError,
    ReductionError,
    TimeoutError,
    TransportError,
)
from pycoll.ops import register_op
from pycoll.work import Work, check_timeout, wait_all

if TYPE_CHECKING:
    from pycoll.config import Config

__all__ = [
    "ClosedError",
    "Communicator",
    "InvalidArgumentError",
    "MismatchError",
    "PeerLostError",
    "PycollError",
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
    "shared_arrays",
    "size",
    "split",
    "wait_all",
    "world",
]

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_Call = TypeVar("_Call")


class _World:
    """The one communicator of this process, and the process it was made in."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.communicator: Communicator | None = None
        self.pid = 0

    def set(self, communicator: Communicator | None) -> None:
        """From here on module functions mean this one."""
        self.communicator = communicator
        self.pid = os.getpid()
        _core.set_world(communicator)

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
# A child asks get(), which tells it what is wrong.
os.register_at_fork(after_in_child=lambda: _core.set_world(None))


def init(
    *,
    rank: int | None = None,
    size: int | None = None,
    address: str | None = None,
    secret: str | bytes | None = None,
    comm: Any = None,
    transports: str | list[str] | tuple[str, ...] | None = None,
    timeout_s: float | None = None,
    init_timeout_s: float | None = None,
    deterministic: bool | None = None,
    shared_arrays: bool | None = None,
) -> Communicator:
    """Join the world, and return its communicator; to be called by every rank once.

    Without arguments the world is found: started by pycoll run, mpirun, srun or torchrun, or from
    ``PYCOLL_*`` variables; alone, it has size 1. Explicitly: ``rank`` and ``size`` with ``address``
    ("host:port", free on the host of rank 0) and ``secret`` (at least 16 characters, alike
    everywhere); or ``comm``, an mpi4py communicator. ``transports`` restricts what may be used,
    ``timeout_s`` is the longest wait of an operation and ``init_timeout_s`` that of joining.
    ``deterministic`` is the default of that argument. ``shared_arrays``: whether NumPy's arrays of
    8 KiB and more, in all threads of this process, and torch's gradient buckets lie where ranks on
    this host and RDMA devices reach them (False unless ``PYCOLL_SHARED_ARRAYS`` says otherwise);
    docs/shared-arrays.md says what that does to a process. Arguments win over variables.

    Raises InvalidArgumentError (contradicting or missing settings, called twice), TimeoutError
    naming the ranks that did not come, TransportError, PeerLostError. A failed init leaves nothing
    behind and can be repeated.

    >>> pycoll.init(rank=0, size=1).size
    1
    """
    from pycoll.bootstrap import join

    config = _settings(
        transports=transports,
        timeout_s=timeout_s,
        init_timeout_s=init_timeout_s,
        deterministic=deterministic,
        shared_arrays=shared_arrays,
    )
    with _world.lock:
        if _world.communicator is not None and _world.pid == os.getpid():
            raise InvalidArgumentError(
                "pycoll.init() was called twice: use pycoll.world(), or call pycoll.finalize() "
                "before joining again"
            )
        joined = join(
            config,
            rank=rank,
            size=size,
            address=address,
            secret=secret,
            comm=comm,
            bring=_tuning_text,
        )
        communicator = Communicator(joined, config, "world")
        _world.set(communicator)
        return communicator


def _tuning_text(config: Config) -> str:
    """What rank 0 tells the others; none of them need import this."""
    from pycoll import tuning

    return tuning.text_of(config)


def _settings(**given: Any) -> Config:
    """The environment's settings, and over them the arguments that are not None, checked."""
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
    """Whether this process has a world."""
    return _world.communicator is not None and _world.pid == os.getpid()


def finalize() -> None:
    """Leave the world; peers see an orderly end, and no thread, descriptor or mapping is left.

    Happens by itself when the process ends. Without a world it does nothing. Afterwards init() may
    be called again.
    """
    with _world.lock:
        communicator, pid = _world.communicator, _world.pid
        _world.set(None)
        if communicator is not None and pid == os.getpid():
            communicator.close()


atexit.register(finalize)


def world() -> Communicator:
    """The communicator of all ranks. Raises ClosedError before init and after finalize."""
    return _world.get()


def rank() -> int:
    """This process's rank."""
    return _world.get().rank


def size() -> int:
    """How many ranks there are."""
    return _world.get().size


def local_rank() -> int:
    """This rank's place among the ranks of its host."""
    return _world.get().local_rank


def local_size() -> int:
    """How many ranks are on this host."""
    return _world.get().local_size


def cross_rank() -> int:
    """This host's place among the hosts that have this local rank."""
    return _world.get().cross_rank


def cross_size() -> int:
    """How many hosts have this local rank."""
    return _world.get().cross_size


def _on_world(method: _Call) -> _Call:
    """The method, called on the world's communicator."""
    called: Any = method
    return cast(_Call, _core.world_function(called, _world.get))


def _of_world(
    method: Callable[Concatenate[Communicator, _Arguments], _Result],
) -> Callable[_Arguments, _Result]:
    """The same for a method that is plain Python."""

    @functools.wraps(method)
    def call(*args: _Arguments.args, **words: _Arguments.kwargs) -> _Result:
        return method(_world.get(), *args, **words)

    call.__qualname__ = method.__name__
    call.__module__ = __name__
    # Signatures are read from there: that of a bound method has no self.
    call.__wrapped__ = types.MethodType(method, _world)
    return call


def local_world(
    count: int,
    *,
    transports: str | list[str] | tuple[str, ...] | None = None,
    hosts: Sequence[int] | None = None,
    timeout_s: float | None = None,
    deterministic: bool | None = None,
    shared_arrays: bool | None = None,
) -> list[Communicator]:
    """``count`` ranks as threads of this process: one communicator for each, over real transports.

    Collectives must then be called from one thread per rank, or with ``async_op``. ``hosts`` gives
    each rank a host number: ranks on different hosts talk over tcp, as if they were. The other
    arguments are those of ``init``. For tests, notebooks and programs with a thread per device.

    >>> left, right = pycoll.local_world(2)
    >>> works = [comm.all_reduce(comm.rank + 1, async_op=True) for comm in (left, right)]
    >>> [work.wait() for work in works]
    [3, 3]
    """
    from pycoll.bootstrap import join_threads
    from pycoll.config import RANKS_MAX

    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= RANKS_MAX:
        raise InvalidArgumentError(
            f"count is {count!r}: expected a whole number from 1 to {RANKS_MAX}"
        )
    if hosts is not None and not isinstance(hosts, Sequence):
        raise InvalidArgumentError(f"hosts is {hosts!r}: expected a host number for each rank")
    if hosts is not None and len(hosts) != count:
        raise InvalidArgumentError(f"hosts has {len(hosts)} entries for {count} ranks")
    config = _settings(
        transports=transports,
        timeout_s=timeout_s,
        deterministic=deterministic,
        shared_arrays=shared_arrays,
    )
    configs = [
        config if hosts is None else config._replace(host_id=str(hosts[number]))
        for number in range(count)
    ]
    joined = join_threads(count, configs, bring=_tuning_text)
    return [Communicator(one, configs[number], "local_world") for number, one in enumerate(joined)]


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


abort = _of_world(Communicator.abort)
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
sendrecv = _of_world(Communicator.sendrecv)
probe = _of_world(Communicator.probe)
iprobe = _of_world(Communicator.iprobe)
