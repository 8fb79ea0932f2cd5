"""The errors of a worker's requests. They name slow workers, gone processes and lost keys."""

from __future__ import annotations

from collections.abc import Sequence

from pycoll.errors import PeerLostError, PycollError, TimeoutError
from pycoll.ps.client_machine import WORKER_IS_GONE, Request
from pycoll.ps.consistency import Consistency
from pycoll.ps.messages import Kind
from pycoll.ps.views import View

#: The most keys and tables that the text of an error names.
_NAMES_MAX = 8


def timeout_error(requests: Sequence[Request], waited: str, view: View) -> TimeoutError:
    """Return the error of requests that have not all ended in time.

    ``waited``: the words for the call and its wait. ``view``: the newest one of the worker.
    """
    slowest = [one.slowest for one in requests if not one.ended and one.slowest is not None]
    if slowest:
        rank, clock = min(slowest, key=lambda one: one[1])
        reason = f"rank {rank} is the slowest worker, at clock {clock}"
        if requests[0].message.kind is Kind.CUT:
            reason = f"rank {rank} has not called checkpoint()"
        return TimeoutError(f"{waited}: {reason}", rank=rank, ranks=(rank,), operation="ps")
    shard = next(one for one in requests if not one.ended).message.shard
    chain = view.chains[shard]
    # Any server of the chain may be the one that does not answer.
    names = " or ".join(f"server rank {one}" for one in chain) or "no server"
    return TimeoutError(
        f"{waited}: {names} has not answered{view.gap_of(shard)}",
        rank=chain[0] if len(chain) == 1 else None,
        ranks=chain,
        operation="ps",
    )


def request_error(
    request: Request,
    what: str,
    consistency: Consistency,
    keys: Sequence[str],
    tables: Sequence[str],
) -> PycollError:
    """Return the error of a request that has failed.

    ``what``: the call. ``keys``: the keys with parts in the shard of the request. ``tables``: all
    tables of the store, since each has rows in every shard.
    """
    lost = request.lost
    if not lost:
        return PycollError(f"{what}: {request.failure}", operation="ps")
    if request.failure == WORKER_IS_GONE:
        text = f"{what}: worker rank {lost[0]} is gone, and {consistency} needs all"
    else:
        parts = [f"parts of {_list_names(keys, 'key')}"] if keys else []
        rows = [f"rows of {_list_names(tables, 'table')}"] if tables else []
        ranks = ", ".join(map(str, lost))
        text = (
            f"{what}: server rank {ranks} is lost, which held "
            f"{' and '.join(parts + rows) or 'no key and no table'}; no server that is left holds "
            "them: restore() a checkpoint in a new store"
        )
    return PeerLostError(text, rank=lost[0], ranks=lost, operation="ps")


def _list_names(names: Sequence[str], word: str) -> str:
    """Return the first names, and how many more there are. ``word``: for one of them."""
    first = ", ".join(map(repr, names[:_NAMES_MAX]))
    more = len(names) - _NAMES_MAX
    text = f"{first} and {more} more" if more > 0 else first
    return f"{word if len(names) == 1 else word + 's'} {text}"
