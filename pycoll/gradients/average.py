"""Average nested structures of arrays over the ranks; each structure has its own Scheduler."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from pycoll import _core
from pycoll.arrays.device_view import DeviceView
from pycoll.arrays.registry import framework_of, input_of
from pycoll.compress import Auto
from pycoll.errors import InvalidArgumentError
from pycoll.gradients.layout import Entry
from pycoll.gradients.methods import method_of
from pycoll.gradients.policies import AUTO, Policy
from pycoll.gradients.scheduler import Scheduler, need_alike
from pycoll.gradients.structures import leaves, rebuilt
from pycoll.types import DType

#: The schedulers of each communicator, keyed by entries, host entries, method and op.
_schedulers: weakref.WeakKeyDictionary[Any, dict[Any, Scheduler]] = weakref.WeakKeyDictionary()


def average_gradients(
    tree: Any,
    *,
    comm: Any = None,
    policy: str | Policy = "auto",
    op: str = "avg",
    architecture: str | None = None,
    compress: Any = None,
    feedback: Any = None,
) -> Any:
    """Return a structure like ``tree`` whose arrays are the averages over all ranks.

    Every rank calls the function, which waits for the averages.

    Arguments:
        ``tree``: an array, or dicts, lists and tuples of trees; where JAX is loaded, also pytree
            nodes registered with JAX. None is an empty tree. Arrays have any shape and a dtype
            that all_reduce accepts. Arrays on a device are reduced there, as by
            ``all_reduce`` of a list.
        ``comm``: the communicator, by default the world. Nothing else may use it during the call.
        ``policy``: how arrays become messages, a name or a ``Policy``; see ``Scheduler``.
        ``op``: a reduction of all_reduce.
        ``architecture``: "a2a", "ps", "auto" or None; see ``Scheduler``. Arrays on a device are
            reduced by all_reduce.
        ``compress``: None, or a codec of ``pycoll.compress``. The arrays, in host memory, then are
            one all_reduce of a list with this codec; ``policy`` and ``architecture`` do not count.
            A ``pycoll.compress.Auto``, or "auto", lets the Scheduler pick a codec for each message.
        ``feedback``: None, or the ``pycoll.compress.Feedback`` of these arrays; None with ``Auto``,
            since the Scheduler keeps what codecs leave out.

    Result: new arrays of the same framework, shape and dtype, in the same structure.

    Errors: InvalidArgumentError for a leaf that is not an array and for
    an unknown policy, architecture or op. MismatchError where structure, shapes, dtypes, policy,
    architecture or op differ between ranks. It names the first difference if all ranks see their
    structure for the first time, and reads as that of any collective otherwise. Other errors are
    those of all_reduce.

    Cost: the function keeps a Scheduler for the next call with arrays of the same names, shapes and
    dtypes. The Scheduler times the first of these calls. Every call copies each host array into
    the memory of the Scheduler and the result out of it.

    >>> mine = {"weight": np.full((2, 2), comm.rank, np.float32), "bias": [np.array([3.0])]}
    >>> pycoll.optim.average_gradients(mine, comm=comm)["weight"]  # on 3 ranks
    array([[1., 1.],
           [1., 1.]], dtype=float32)
    """
    if comm is None:
        import pycoll

        comm = pycoll.world()
    named = list(leaves(tree, "tree"))
    views = [input_of(leaf, None, name)[1] for name, leaf in named]
    is_choice = isinstance(compress, Auto) or (isinstance(compress, str) and compress == AUTO)
    if is_choice and feedback is not None:
        raise InvalidArgumentError(
            f"compress is {compress!r} and there is a feedback: the scheduler keeps what codecs "
            "leave out; leave feedback out"
        )
    if not is_choice and (compress is not None or feedback is not None):
        given = [leaf for _, leaf in named]
        words = {"compress": compress, "feedback": feedback}
        return rebuilt(tree, iter(comm.all_reduce(given, op, **words) if given else []))
    entries = tuple(
        Entry(name, tuple(view.shape), DType(view.dtype).word)
        for (name, _), view in zip(named, views, strict=True)
    )
    there = [number for number, view in enumerate(views) if isinstance(view, DeviceView)]
    here = [number for number in range(len(views)) if number not in set(there)]
    method = method_of(policy, architecture)
    scheduler = _scheduler(comm, entries, here, method, (op, compress))
    memory = scheduler.begin()
    for place, number in enumerate(here):
        _core.pack([views[number]], _core.view(memory[place]))
        scheduler.ready(place)
    scheduler.wait()
    averages: list[Any] = [None] * len(views)
    for place, number in enumerate(here):
        averages[number] = _like(named[number][1], memory[place])
    # Device kernels reduce the arrays in place, without a copy; a list of arrays is one launch.
    made = comm.all_reduce([named[number][1] for number in there], op) if there else []
    for number, one in zip(there, made, strict=True):
        averages[number] = one
    return rebuilt(tree, iter(averages))


def _scheduler(
    comm: Any,
    entries: Sequence[Entry],
    here: Sequence[int],
    method: tuple[Policy, str | None],
    terms: tuple[str, Any],
) -> Scheduler:
    """The scheduler of the entries ``here``, which are in host memory; ``terms``: op and compress.

    For a new key the ranks compare all entries, those on devices included.
    """
    kept = _schedulers.setdefault(comm, {})
    op, compress = terms
    key = (tuple(entries), tuple(here), method, terms)
    if key not in kept:
        if len(here) < len(entries):
            places = dict.fromkeys(here, "in host memory")
            facts = [[*one, places.get(n, "on a device")] for n, one in enumerate(entries)]
            need_alike(comm, "the gradients", [facts, op])
        mine = [entries[number] for number in here]
        words: dict[str, Any] = {"policy": method[0], "architecture": method[1]}
        kept[key] = Scheduler(comm, mine, op=op, compress=compress, **words)
    return kept[key]


def _like(leaf: Any, memory: Any) -> Any:
    """Copy the values of ``memory`` into a new array of the leaf's framework."""
    framework, view = framework_of(leaf), _core.view(memory)
    made = framework.empty(leaf, view.shape, view.dtype)
    _core.unpack(view, [_core.view(made)])
    return framework.finish(leaf, made)
