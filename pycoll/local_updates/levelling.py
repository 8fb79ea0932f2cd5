"""Levelling: ranks that begin, return or join take the state of the most advanced rank."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from pycoll.gradients.scheduler import need_alike
from pycoll.local_updates.array_values import widen
from pycoll.local_updates.local_state import LocalState


class Met(NamedTuple):
    """The values of a rank after the comparison; ``extra`` is None where it has kept its own."""

    arrays: list[Any]
    state: LocalState
    extra: Any


def meet(
    arrays: Sequence[Any], state: LocalState, comm: Any, facts: list[Any], extra: Any = None
) -> Met:
    """Compare the ranks of ``comm`` and level their states. Collective.

    The ranks compare ``facts``. The root is the lowest of the ranks with the most synchronisations
    and, among these, the most steps. A rank with less takes the root's arrays, state and ``extra``
    (an object that can be pickled). It keeps its own residuals if it is behind in steps only, and
    forgets them otherwise. Before the first synchronisation of all, every rank takes these.
    Where ranks with the most steps hold different factors, as after loading checkpoints of
    different versions, all ranks drop theirs: a step needs the same ones on all ranks.

    Nothing is changed in place, so a failure leaves the rank as it was. MismatchError names the
    first fact that differs.
    """
    need_alike(comm, "the local updates", facts)
    mine = np.array([[state.progress, state.step, _checksum(state.factors)]], np.int64)
    rows = comm.all_gather(mine).tolist()
    keys = [(row[0], row[1]) for row in rows]
    best = max(keys)
    root = keys.index(best)
    first = best[0] == 0
    met = Met(list(arrays), state, None)
    if first or any(key < best for key in keys):
        behind = comm.rank != root and (first or keys[comm.rank] < best)
        taken = _from_root(arrays, state, comm, root, extra)
        if behind:
            residuals = state.residuals if keys[comm.rank][0] == best[0] else ()
            met = taken._replace(state=replace(taken.state, residuals=residuals))
    progress = max(1, met.state.progress)
    alike = len({row[2] for row, key in zip(rows, keys, strict=True) if key == best}) == 1
    factors = met.state.factors if alike and not first else ()
    return met._replace(state=replace(met.state, progress=progress, factors=factors, comm=comm))


def _from_root(arrays: Sequence[Any], state: LocalState, comm: Any, root: int, extra: Any) -> Met:
    """The root's arrays, state and extra, on every rank. Collective."""
    own = state.arrays()
    is_root = comm.rank == root
    present = {name: _presence(values) for name, values in own.items()}
    mine = (state.numbers(), present, state.factors, extra) if is_root else None
    numbers, present, factors, extra = comm.broadcast_object(mine, root)
    # Every rank passes arrays of equal shapes and types; only the root's values are sent.
    wide = [widen(one) for one in arrays]
    moved = [_start(comm, list(arrays), [True] * len(arrays), root)]
    moved += [
        _start(comm, own[name] if is_root else wide, there, root) for name, there in present.items()
    ]
    taken, *got = [[work and work.wait() for work in works or ()] for works in moved]
    found = {
        name: None if there is None else values
        for (name, there), values in zip(present.items(), got, strict=True)
    }
    return Met(taken, replace(LocalState.of(numbers, found), factors=factors), extra)


def _checksum(factors: Sequence[Any]) -> int:
    checksum = 0
    for one in factors:
        told = b"" if one is None else np.ascontiguousarray(one).tobytes()
        checksum = zlib.crc32(told, zlib.crc32(str(len(told)).encode(), checksum))
    return checksum


def _presence(values: Sequence[Any] | None) -> list[bool] | None:
    return None if values is None else [one is not None for one in values]


def _start(comm: Any, values: Any, there: list[bool] | None, root: int) -> list[Any] | None:
    """Start to broadcast the values whose ``there`` is set; None stands for the others."""
    if not there:
        return None
    return [
        comm.broadcast(value, root, async_op=True) if is_there else None
        for value, is_there in zip(values, there, strict=True)
    ]
