"""pycoll: collective communication between the ranks of a parallel program, from any array.

    import pycoll
    pycoll.init()
    total = pycoll.all_reduce(x)

``pycoll.init`` joins the world of all ranks. ``Communicator`` has the operations.
``pycoll.arrays.registry`` lists the kinds of arrays that operations take. ``pycoll.errors`` lists
the exceptions that they raise.

The package imports its public names on first use. Therefore schedules, proofs and the launcher work
without the native module.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pycoll.comm.world import (
        ClosedError,
        Communicator,
        InvalidArgumentError,
        LeftOutError,
        MismatchError,
        PeerLostError,
        PycollError,
        RankFailedError,
        ReductionError,
        TimeoutError,
        TransportError,
        Work,
        abort,
        all_gather,
        all_gather_object,
        all_reduce,
        all_to_all,
        barrier,
        broadcast,
        broadcast_object,
        cross_rank,
        cross_size,
        dup,
        empty,
        explain,
        exscan,
        finalize,
        gather,
        gather_object,
        group,
        grow,
        init,
        iprobe,
        irecv,
        irecv_any,
        is_initialized,
        isend,
        local_rank,
        local_size,
        local_world,
        probe,
        rank,
        recv,
        recv_object,
        reduce,
        reduce_scatter,
        register_op,
        scan,
        scatter,
        scatter_object,
        send,
        send_object,
        sendrecv,
        servers,
        shared_arrays,
        shrink,
        size,
        split,
        wait_all,
        world,
    )
    from pycoll.launch.function_runs import run

__version__ = "0.1.0"

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
    "run",
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


def __getattr__(name: str) -> Any:
    if name not in __all__:
        from pycoll.foreign_words import about_call

        raise AttributeError(f"module 'pycoll' has no attribute {name!r}{about_call(name)}")
    try:
        # The launcher works without the native module.
        module = "pycoll.launch.function_runs" if name == "run" else "pycoll.comm.world"
        world = importlib.import_module(module)
    except ImportError as error:
        if "_core" not in str(error):
            raise
        raise ImportError(
            f"the native part of pycoll cannot be loaded from {__path__[0]}: {error}. If that is "
            "the source tree, install it (pip install . or pip install -e .) and, unless it was "
            "with -e, run from another folder"
        ) from error
    value = globals()[name] = getattr(world, name)
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
