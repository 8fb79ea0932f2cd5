"""Whole objects between ranks: pickled, and moved as the communicator moves objects."""

from __future__ import annotations

from typing import Any

from pycoll.errors import InvalidArgumentError
from pycoll.pickled import Parts, dump, load
from pycoll.torch import world
from pycoll.torch.errors import HorovodInternalError
from pycoll.torch.handles import run
from pycoll.torch.moving import place_of
from pycoll.torch.process_sets import ProcessSet, global_process_set
from pycoll.torch.tasks import Collective

try:
    from cloudpickle import dumps  # it knows more objects
except ImportError:
    from pickle import dumps


class _Objects(Collective):
    kind = "object"


def _dumped(obj: Any) -> Parts | InvalidArgumentError:
    """The object's parts; by cloudpickle where it is installed."""
    try:
        return dump(obj, dumps=dumps)
    except InvalidArgumentError as error:
        return error


def _moved(
    mine: Parts | InvalidArgumentError | None,
    task: _Objects,
    name: str | None,
    process_set: ProcessSet,
) -> Any:
    """What the task gives. A rank whose object cannot be pickled raises InvalidArgumentError, the
    others HorovodInternalError that quotes it."""
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
    """The root's object, on all ranks; what the others pass does not matter.

    ``root_rank`` counts in the whole world. Objects must be such that pickle can carry them.
    Unpickling runs code that the root chooses.
    """
    is_root = world.rank() == root_rank
    root = place_of(root_rank, process_set)
    mine = _dumped(obj) if is_root else None
    terms = {"what": "broadcast_object", "root_rank": root_rank}
    task = _Objects(terms, lambda comm: comm._broadcast_parts(mine, root))
    parts: Parts = _moved(mine, task, name, process_set)
    return obj if is_root else load(parts)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """All ranks' objects, in rank order, on every rank.

    Unpickling runs code that the other ranks choose.
    """
    mine = _dumped(obj)
    task = _Objects({"what": "allgather_object"}, lambda comm: comm._all_gather_parts(mine))
    found: list[Parts] = _moved(mine, task, name, process_set)
    return [load(one) for one in found]
