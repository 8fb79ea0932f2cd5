"""Send Python objects between ranks: pickled, and moved as the communicator moves objects."""

from __future__ import annotations

from typing import Any

from pycoll.comm.operations import internals_of
from pycoll.comm.pickled import Parts, dump, load
from pycoll.errors import InvalidArgumentError
from pycoll.torch.horovod import horovod_world
from pycoll.torch.horovod.handles import run
from pycoll.torch.horovod.horovod_errors import HorovodInternalError
from pycoll.torch.horovod.moving_calls import place_of
from pycoll.torch.horovod.process_sets import ProcessSet, global_process_set
from pycoll.torch.horovod.tasks import Collective

try:
    from cloudpickle import dumps  # it can pickle more objects
except ImportError:
    from pickle import dumps


class _Objects(Collective):
    kind = "object"


def _dump(obj: Any) -> Parts | InvalidArgumentError:
    """Pickle the object, by cloudpickle where it is installed; the error where that fails."""
    try:
        return dump(obj, dumps=dumps)
    except InvalidArgumentError as error:
        return error


def _run_task(
    mine: Parts | InvalidArgumentError | None,
    task: _Objects,
    name: str | None,
    process_set: ProcessSet,
) -> Any:
    """Run the task and return its result.

    A rank whose object cannot be pickled raises InvalidArgumentError; the other ranks raise
    HorovodInternalError, which quotes it.
    """
    try:
        return run(task, name and f"{name}.bytes", process_set)
    except HorovodInternalError as error:
        if isinstance(mine, InvalidArgumentError):
            raise mine from error
        raise


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the object of the root on all ranks.

    Arguments: ``obj``, which must be picklable; ignored on other ranks. ``root_rank``: a rank of
    the whole world. ``name``: the key of the operation, equal on all ranks; without a name, calls
    are matched by their order. ``process_set``: the ranks that take part.

    Result: ``obj`` itself on the root, a copy on the other ranks.

    Errors: InvalidArgumentError on a root whose object cannot be pickled, HorovodInternalError on
    the other ranks then, and where the ranks disagree or a rank is lost. ValueError for a root that
    is not in the process set.

    Cost: one broadcast of the pickled bytes. Unpickling runs code that the root chooses (see
    SECURITY.md).

    >>> hvd.broadcast_object({"epoch": 3}, root_rank=0)
    {'epoch': 3}
    """
    is_root = horovod_world.rank() == root_rank
    root = place_of(root_rank, process_set)
    mine = _dump(obj) if is_root else None
    terms = {"what": "broadcast_object", "root_rank": root_rank}
    task = _Objects(terms, lambda comm: internals_of(comm).objects.broadcast_parts(mine, root))
    parts: Parts = _run_task(mine, task, name, process_set)
    return obj if is_root else load(parts)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the objects of all ranks on every rank.

    Arguments: ``obj``, which must be picklable. ``name``: the key of the operation, equal on all
    ranks; without a name, calls are matched by their order. ``process_set``: the ranks that take
    part.

    Result: a list in rank order, of copies.

    Errors: InvalidArgumentError on a rank whose object cannot be pickled, HorovodInternalError on
    the other ranks then, and where the ranks disagree or a rank is lost.

    Cost: one all-gather of the pickled bytes. Unpickling runs code that the other ranks choose (see
    SECURITY.md).

    >>> hvd.allgather_object({"rank": hvd.rank()})
    [{'rank': 0}]
    """
    mine = _dump(obj)
    task = _Objects(
        {"what": "allgather_object"}, lambda comm: internals_of(comm).objects.all_gather_parts(mine)
    )
    found: list[Parts] = _run_task(mine, task, name, process_set)
    return [load(one) for one in found]
