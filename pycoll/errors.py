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
    """


class MismatchError(PycollError):
    """The ranks passed different arguments to one operation, or called different operations.

    The text names the ranks that differ, and the descriptions of both sides. It ends the
    communicator, except from ``all_gather``, ``gather`` and codecs that send places or matrices:
    these compare before they move data.
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
    """


class PeerLostError(PycollError):
    """Another rank died, closed its communicator or called ``abort``; ``rank`` names it.

    It ends the communicator.
    """


class LeftOutError(PycollError):
    """``shrink`` gives this rank no new communicator: the other ranks went on without it, or too
    few of them answered to go on. ``rank`` is this rank.
    """


class TimeoutError(PycollError, builtins.TimeoutError):
    """A deadline passed; ``ranks`` names the ranks at fault, and is empty if no rank stands still.

    Ranks that wait for each other form chains. A rank at the end of a chain is at fault if it has
    not arrived in the operation or no longer moves data. ``docs/failures.md`` lists the texts and
    their limits. It is also the builtin TimeoutError.
    """


class RankFailedError(PycollError):
    """A rank that ``pycoll.run`` started has raised an exception, died or left no result.

    ``rank`` is the first such rank. The text holds its traceback, and ``__cause__`` is its
    exception, or None if that cannot be pickled or unpickled. A result that cannot be pickled or
    unpickled is such a failure too; ``__cause__`` is then the reason.
    """


class ClosedError(PycollError):
    """The communicator is closed, or belongs to the process from which this one was forked."""


class TransportError(PycollError):
    """The medium failed.

    For example, an address cannot be reached or bound, or the system gives no descriptor.
    """
