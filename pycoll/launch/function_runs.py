"""``pycoll.run``: calls a function on ranks that it starts, here or on several hosts."""

from __future__ import annotations

import contextlib
import math
import numbers
import os
import pickle
import reprlib
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pycoll.config import RANKS_MAX
from pycoll.errors import InvalidArgumentError, RankFailedError
from pycoll.launch.host_agent import RESULT, folder_of_call
from pycoll.launch.host_list import HostSlots, parse_hosts, place_ranks
from pycoll.launch.host_starts import HostsOptions, Work, launch_on_hosts
from pycoll.launch.launcher import launch
from pycoll.launch.node_meeting import START_S, Verdict
from pycoll.launch.rank_crew import LaunchOptions

#: The command of a rank; the launcher of its host adds the folder of the call.
_COMMAND = ("-m", "pycoll.launch.function_rank")
_PORT_MAX = 65535


def run(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    np: int | None = None,
    hosts: str | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | os.PathLike[str] | None = None,
    start_timeout: float = START_S,
    network_interfaces: str | Sequence[str] = (),
) -> list[Any]:
    """Call ``function(*args, **kwargs)`` on every rank of a new job, and return all results.

    ``function``: it calls ``pycoll.init()`` itself. ``args``: a list or tuple of its arguments.
    ``kwargs``: a dict of those with names, or None. All of them and the results travel by
    cloudpickle where that is installed on all hosts, else by pickle, which takes functions of
    modules only. ``np``: the number of ranks; None for all slots of ``hosts``, or 1 without these.
    ``hosts``: "host:slots,host:slots", as for ``pycoll run -H``, and the other arguments are its
    options; None for this machine. ``ssh_port``: a port from 1 to 65535, or None for that of ssh.
    ``ssh_identity_file``: the path of a private key, or None. ``start_timeout``: the longest wait
    for the hosts, in seconds. ``network_interfaces``: a comma list or a sequence of names.

    Returns the results in rank order. Raises RankFailedError, with the traceback of the rank, if
    the function raises, a rank dies, or a result cannot be pickled or unpickled. Raises
    InvalidArgumentError, before it starts a process, for an argument of a wrong type or value and
    for a function that cannot be pickled. It also raises it for hosts that cannot work together.
    Raises TransportError for hosts that cannot be reached. Raises KeyboardInterrupt if the calling
    program gets SIGINT, after all ranks have ended. Cost: the start of the processes, and of an ssh
    connection to each host.

    >>> pycoll.run(divmod, (7, 2), np=2)
    [(3, 1), (3, 1)]
    """
    given = _checked_args(args), _checked_kwargs(kwargs)
    ranks = None if np is None else _whole("np", np, RANKS_MAX)
    options = HostsOptions(
        hosts=_host_slots(hosts, ranks),
        ssh_port=None if ssh_port is None else _whole("ssh_port", ssh_port, _PORT_MAX),
        identity=_path("ssh_identity_file", ssh_identity_file),
        start_timeout_s=_seconds("start_timeout", start_timeout),
        interfaces=_names("network_interfaces", network_interfaces),
    )
    call = _pickle(function, *given)
    outcomes: dict[int, bytes] = {}
    if hosts is None:
        size = 1 if ranks is None else ranks
        verdict = _run_here(call, size, outcomes)
    else:
        size = sum(host.slots for host in options.hosts)
        verdict = launch_on_hosts(options, Work(_COMMAND, call=call), outcomes.__setitem__)
    if verdict is not None and verdict.signum == signal.SIGINT:
        # No RankFailedError: a program that tries again after failures still ends at Ctrl-C.
        raise KeyboardInterrupt(verdict.text)
    return _results(outcomes, size, verdict)


def _checked_args(given: Any) -> tuple[Any, ...]:
    if not isinstance(given, Sequence) or isinstance(given, str | bytes | bytearray):
        raise InvalidArgumentError(
            f"args is {reprlib.repr(given)}: expected a tuple or list of the function's arguments; "
            "write (x,) for a single one"
        )
    return tuple(given)


def _checked_kwargs(given: Any) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise InvalidArgumentError(
            f"kwargs is {reprlib.repr(given)}: expected a dict from names of arguments to values"
        )
    return dict(given)


def _whole(name: str, given: Any, most: int) -> int:
    is_whole = isinstance(given, numbers.Integral) and not isinstance(given, bool)
    if not is_whole or not 1 <= given <= most:
        raise InvalidArgumentError(f"{name} is {given!r}: expected a whole number from 1 to {most}")
    return int(given)


def _seconds(name: str, given: Any) -> float:
    seconds = 0.0
    if isinstance(given, numbers.Real) and not isinstance(given, bool):
        with contextlib.suppress(OverflowError):
            seconds = float(given)
    if not 0 < seconds < math.inf:
        raise InvalidArgumentError(
            f"{name} is {given!r}: expected seconds, a finite number above 0"
        )
    return seconds


def _path(name: str, given: Any) -> str | None:
    if given is None:
        return None
    path = os.fspath(given) if isinstance(given, str | os.PathLike) else None
    if not isinstance(path, str) or not path:
        raise InvalidArgumentError(f"{name} is {given!r}: expected the name of a file")
    return path


def _names(name: str, given: Any) -> tuple[str, ...]:
    """Return the names of a comma list, as on the command line, or of a sequence."""
    names = given
    if isinstance(given, str):
        names = given.split(",") if given else ()
    is_list = isinstance(names, Sequence) and not isinstance(names, bytes | bytearray)
    if not is_list or not all(isinstance(one, str) and one.strip() for one in names):
        raise InvalidArgumentError(
            f'{name} is {given!r}: expected names, as a comma list "eth0,eth1" or a list of them'
        )
    return tuple(one.strip() for one in names)


def _host_slots(hosts: Any, ranks: int | None) -> list[HostSlots]:
    """Return the hosts with the number of their ranks; none for ranks on this machine."""
    if hosts is None:
        return []
    if not isinstance(hosts, str):
        raise InvalidArgumentError(f'hosts is {hosts!r}: expected a text, "host:slots,host:slots"')
    return place_ranks(parse_hosts(hosts), ranks)


def _pickle(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
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
    """Return what the function has returned on each rank. Raises RankFailedError."""
    values, failures = {}, {}
    for rank, data in sorted(outcomes.items()):
        # function_rank.py describes the outcomes.
        failure, packed = pickle.loads(data)
        if failure:
            failures[rank] = (failure, packed)
        else:
            values[rank] = packed
    if verdict is not None and verdict.rank not in failures and failures:
        # A rank was killed, or raised a BaseException such as SystemExit; other ranks failed after
        # it.
        failures = {} if verdict.rank >= 0 else failures
    if failures:
        rank = verdict.rank if verdict is not None and verdict.rank in failures else min(failures)
        text, packed = failures[rank]
        raise RankFailedError(text, rank=rank, ranks=[rank]) from _exception_of(packed)
    if verdict is not None:
        known = [verdict.rank] if verdict.rank >= 0 else []
        raise RankFailedError(verdict.text, rank=known[0] if known else None, ranks=known)
    if len(values) < size:
        missing = [rank for rank in range(size) if rank not in outcomes]
        raise RankFailedError(
            f"no result came from ranks {missing}, which ended before the function did",
            rank=missing[0] if len(missing) == 1 else None,
            ranks=missing,
        )
    return [_result_of(rank, packed) for rank, packed in values.items()]


def _exception_of(packed: bytes | None) -> BaseException | None:
    """Return the exception of a rank; None where it cannot be unpickled."""
    if packed is not None:
        with contextlib.suppress(Exception):
            found = pickle.loads(packed)
            return found if isinstance(found, BaseException) else None
    return None


def _result_of(rank: int, packed: bytes) -> Any:
    try:
        return pickle.loads(packed)
    except Exception as error:
        raise RankFailedError(
            f"the result of rank {rank} cannot be unpickled ({type(error).__name__}: {error})",
            rank=rank,
            ranks=[rank],
        ) from error
