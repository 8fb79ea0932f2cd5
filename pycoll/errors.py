"""The exceptions of pycoll. Each one states its facts in its text and as attributes.

InvalidArgumentError: the rank finds a wrong argument before it moves any byte, and the communicator
stays usable. The other ranks of that collective raise InvalidArgumentError too; their error names
the rank that refused the call (``docs/refusals.md``).

MismatchError from an engine, PeerLostError, TimeoutError of an operation and TransportError end the
communicator: every later call raises the same kind of error again (``docs/failures.md``).
"""

from __future__ import annotations

import builtins
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence


class PycollError(Exception):
    """Base class of all exceptions of pycoll.

    Each attribute is None, or empty, where its value is not known:

    * ``rank``: the rank at fault;
    * ``ranks``: all ranks concerned, a tuple;
    * ``operation``: the name of the operation ("init", "all_reduce", ...);
    * ``host``: the host on which ``rank`` runs;
    * ``how``: the observed sign of the failure.

    Errors and cost: none.

    >>> try:
    ...     pycoll.empty(-1)
    ... except pycoll.PycollError as error:
    ...     rank, name = error.rank, type(error).__name__
    >>> rank is None, name
    (True, 'InvalidArgumentError')
    """

    def __init__(
        self,
        text: str = "",
        *,
        rank: int | None = None,
        ranks: Sequence[int] = (),
        operation: str | None = None,
        host: str | None = None,
        how: str | None = None,
    ) -> None:
        super().__init__(text)
        self.rank = rank
        self.ranks = tuple(ranks)
        self.operation = operation
        self.host = host
        self.how = how


class InvalidArgumentError(PycollError, ValueError):
    """An argument is wrong; the rank found this before it moved any byte.

    ``rank`` is set where another rank refused the call. The communicator stays usable. It is also a
    ValueError.

    Errors and cost: none.

    >>> try:
    ...     pycoll.empty(-1)
    ... except pycoll.InvalidArgumentError as error:
    ...     text = str(error)
    >>> text
    'shape is -1: expected whole numbers of at least 0'
    """


class MismatchError(PycollError):
    """The ranks passed different arguments to one operation, or called different operations.

    The text names the ranks that differ, and the descriptions of both sides. It ends the
    communicator, except from ``all_gather``, ``gather`` and codecs that send places or matrices:
    these compare before they move data.

    Errors and cost: none.

    >>> left, right = pycoll.local_world(2)
    >>> works = [left.all_reduce(1, async_op=True), right.all_reduce(1.5, async_op=True)]
    >>> try:
    ...     pycoll.wait_all(works)
    ... except pycoll.MismatchError as error:
    ...     odd = error.ranks
    >>> odd
    (1,)
    """


def odd_ranks(tags: Mapping[int, Hashable]) -> tuple[int, list[int]]:
    """Return the lowest rank with the most frequent tag, and the ranks that have another one.

    ``tags``: what each rank has told, by rank in ascending order; at least one. Of equally frequent
    tags, that of the lowest rank counts.
    """
    usual = Counter(tags.values()).most_common(1)[0][0]
    odd = [rank for rank, tag in tags.items() if tag != usual]
    return next(rank for rank, tag in tags.items() if tag == usual), odd


class ReductionError(PycollError):
    """A function of the program, from ``register_op`` or ``Custom``, raised on ``rank``.

    Or ``rank`` sent codes of a compressed collective that do not decode. All ranks of the operation
    raise this error. The result is lost, and the communicator stays usable. Where a device found
    the codes, the result is NaN; later calls raise this error, since it ends the communicator.

    Errors and cost: none.

    >>> pycoll.register_op("ratio", lambda a, b: 1 / 0)
    >>> works = [comm.all_reduce(1, "ratio", async_op=True) for comm in pycoll.local_world(2)]
    >>> try:
    ...     pycoll.wait_all(works)
    ... except pycoll.ReductionError as error:
    ...     cause = error.__cause__
    >>> cause
    ZeroDivisionError('division by zero')
    """


class PeerLostError(PycollError):
    """Another rank died, closed its communicator or called ``abort``; ``rank`` names it.

    It ends the communicator.

    Errors and cost: none.

    >>> left, right = pycoll.local_world(2)
    >>> right.close()
    >>> try:
    ...     left.all_reduce(1)
    ... except pycoll.PeerLostError as error:
    ...     lost = error.rank
    >>> lost
    1
    """


class LeftOutError(PycollError):
    """``shrink`` gives this rank no new communicator.

    The other ranks went on without it, or too few of them answered to go on. ``rank`` is this rank.

    Errors and cost: none.

    >>> def go_on(comm):
    ...     try:
    ...         return comm.shrink()
    ...     except pycoll.LeftOutError:
    ...         return None
    >>> comm = go_on(pycoll.local_world(1)[0])
    >>> comm.size
    1
    """


class TimeoutError(PycollError, builtins.TimeoutError):
    """A deadline passed; ``ranks`` names the ranks at fault, and is empty if no rank stands still.

    Ranks that wait for each other form chains. A rank at the end of a chain is at fault if it has
    not arrived in the operation or no longer moves data. ``docs/failures.md`` lists the texts and
    their limits. It is also the builtin TimeoutError.

    Errors and cost: none.

    >>> left, right = pycoll.local_world(2, timeout_s=0.1)
    >>> try:
    ...     left.all_reduce(1)  # the other rank never calls it
    ... except pycoll.TimeoutError as error:
    ...     late = error.ranks
    >>> late
    (1,)
    """


class RankFailedError(PycollError):
    """A rank that ``pycoll.run`` started has raised an exception, died or left no result.

    ``rank`` is the first such rank. The text holds its traceback, and ``__cause__`` is its
    exception, or None if that cannot be pickled or unpickled. A result that cannot be pickled or
    unpickled is such a failure too; ``__cause__`` is then the reason.

    Errors and cost: none.

    >>> try:
    ...     pycoll.run(divmod, (1, 0))
    ... except pycoll.RankFailedError as error:
    ...     rank, cause = error.rank, type(error.__cause__).__name__
    >>> rank, cause
    (0, 'ZeroDivisionError')
    """


class ClosedError(PycollError):
    """The communicator is closed, or belongs to the process from which this one was forked.

    Errors and cost: none.

    >>> try:
    ...     pycoll.world()
    ... except pycoll.ClosedError as error:
    ...     text = str(error)
    >>> text
    'pycoll is not initialised: call pycoll.init() first'
    """


class TransportError(PycollError):
    """The medium failed.

    For example, an address cannot be reached or bound, or the system gives no descriptor.

    Errors and cost: none.

    >>> import socket
    >>> with socket.create_server(("127.0.0.1", 0)) as taken:
    ...     try:
    ...         address = f"127.0.0.1:{taken.getsockname()[1]}"
    ...         pycoll.init(rank=0, size=2, address=address, secret="x" * 16)
    ...     except pycoll.TransportError as error:
    ...         text = str(error)
    >>> "the port is in use" in text
    True
    """
