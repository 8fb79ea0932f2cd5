"""``pycoll.run``: calls a function on ranks that it starts, here or on several hosts."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pycoll.errors import InvalidArgumentError, RankFailedError
from pycoll.launch.host_agent import RESULT, folder_of_call
from pycoll.launch.host_list import parse_hosts, place_ranks
from pycoll.launch.host_starts import HostsOptions, Work, launch_on_hosts
from pycoll.launch.launcher import launch
from pycoll.launch.node_meeting import START_S, Verdict
from pycoll.launch.rank_crew import LaunchOptions

#: The command of a rank; the launcher of its host adds the folder of the call.
_COMMAND = ("-m", "pycoll.launch.function_rank")


def run(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    np: int | None = None,
    hosts: str | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    start_timeout: float = START_S,
    network_interfaces: Sequence[str] = (),
) -> list[Any]:
    """Call ``function(*args, **kwargs)`` on every rank of a new job, and return all results.

    ``np`` is the number of ranks; with ``hosts``, all slots by default, else 1. ``hosts`` is
    "host:slots,host:slots", as for ``pycoll run -H``, and the following arguments are its options;
    ``start_timeout`` is in seconds. The function calls ``pycoll.init()`` itself. It, its arguments
    and its results travel by cloudpickle where that is installed on all hosts, else by pickle,
    which takes functions of modules only.

    Returns the results in rank order. Raises RankFailedError, with the traceback of the rank, if
    the function raises or a rank dies; InvalidArgumentError for a function that cannot be pickled
    and for hosts that cannot work together, and TransportError for hosts that cannot be reached.
    Costs the start of the processes, and of an ssh connection to each host.

    >>> pycoll.run(divmod, (7, 2), np=2)
    [(3, 1), (3, 1)]
    """
    call = _pickled(function, tuple(args), dict(kwargs or {}))
    outcomes: dict[int, bytes] = {}
    if hosts is None:
        size = 1 if np is None else np
        verdict = _run_here(call, size, outcomes)
    else:
        placed = place_ranks(parse_hosts(hosts), np)
        size = sum(host.slots for host in placed)
        options = HostsOptions(
            placed, ssh_port, ssh_identity_file, start_timeout, tuple(network_interfaces)
        )
        verdict = launch_on_hosts(options, Work(_COMMAND, call=call), outcomes.__setitem__)
    return _results(outcomes, size, verdict)


def _pickled(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    if not callable(function):
        raise InvalidArgumentError(
            f"function is a {type(function).__name__}: expected something to call"
        )
    try:
        import cloudpickle
    except ImportError:
        if getattr(function, "__module__", None) == "__main__":
            raise InvalidArgumentError(
                f"function {function.__name__!r} is defined in the program itself: move it to a "
                "module that all hosts can import, or install cloudpickle on all of them"
            ) from None
        dumps: Callable[..., bytes] = pickle.dumps
    else:
        dumps = cloudpickle.dumps
    try:
        return bytes(dumps((function, args, kwargs), protocol=5))
    except Exception as error:
        raise InvalidArgumentError(
            f"function and arguments cannot be pickled ({type(error).__name__}: {error})"
        ) from error


def _run_here(call: bytes, ranks: int, outcomes: dict[int, bytes]) -> Verdict | None:
    """Run the ranks on this machine."""
    found: list[Verdict] = []
    with folder_of_call(call) as folder:
        launch(LaunchOptions(ranks, [*_COMMAND, folder], quiet=True, ended=found.append))
        for rank in range(ranks):
            path = os.path.join(folder, RESULT.format(rank))
            with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
                outcomes[rank] = file.read()
    return found[0] if found else None


def _results(outcomes: Mapping[int, bytes], size: int, verdict: Verdict | None) -> list[Any]:
    results, failures = [], {}
    for rank, data in sorted(outcomes.items()):
        well, value, *error = pickle.loads(data)
        results.append(value)
        if not well:
            failures[rank] = (value, *error)
    if verdict is not None and verdict.rank not in failures and failures:
        # A rank was killed, or raised something that is no Exception: others failed after it.
        failures = {} if verdict.rank >= 0 else failures
    if failures:
        rank = verdict.rank if verdict is not None and verdict.rank in failures else min(failures)
        text, cause = failures[rank]
        raise RankFailedError(
            f"the function failed on rank {rank}:\n{text}", rank=rank, ranks=[rank]
        ) from cause
    if verdict is not None:
        known = [verdict.rank] if verdict.rank >= 0 else []
        raise RankFailedError(verdict.text, rank=known[0] if known else None, ranks=known)
    if len(results) < size:
        missing = [rank for rank in range(size) if rank not in outcomes]
        raise RankFailedError(
            f"no result came from ranks {missing}, which ended before the function did",
            rank=missing[0] if len(missing) == 1 else None,
            ranks=missing,
        )
    return results
