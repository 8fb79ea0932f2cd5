"""The exceptions of pycoll. Each carries its facts as attributes and says them in its text.

Wrong requests are found before any byte moves and leave the communicator usable; ranks that wait in
a collective that another one refuses raise InvalidArgumentError too, which names that rank
(``docs/refusals.md``). What the world
does (MismatchError out of an engine, PeerLostError, TimeoutError, TransportError) ends it: every
later call raises the same kind again.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence


class PycollError(Exception):
    """Base of everything that pycoll raises.

    ``rank``: the rank at fault, or None. ``ranks``: all ranks concerned. ``operation``: what was
    being done ("init", "all_reduce", ...). ``host``: where ``rank`` runs. ``how``: what was seen
    of the failure. None (or empty) where it is not known.
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
    """A wrong request, found before any byte moved; ``rank`` is set where another rank found it."""


class MismatchError(PycollError):
    """The ranks disagree about an operation."""


class ReductionError(PycollError):
    """A function from ``register_op`` raised on ``rank``. All ranks raise this; the result is lost,
    the communicator goes on."""


class PeerLostError(PycollError):
    """Another rank is gone."""


class TimeoutError(PycollError, builtins.TimeoutError):
    """A deadline passed; ``ranks`` are those at fault, and empty where no rank stands still.

    At fault is who had not arrived or stands still, at the end of the chain of ranks that wait for
    each other; docs/failures.md lists the texts, and what they cannot tell.
    """


class ClosedError(PycollError):
    """The communicator was closed, or belongs to the process that this one was forked from."""


class TransportError(PycollError):
    """The medium failed: an address cannot be reached or bound, a descriptor cannot be had."""
