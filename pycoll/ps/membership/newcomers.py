"""Newcomers of a store: their entry in a view, tickets, and the start of a new worker."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from pycoll.errors import InvalidArgumentError
from pycoll.ps.messages import Kind, Message
from pycoll.untrusted import json_object, read_json

#: The version of the messages between the processes of a store.
VERSION = 2
#: The most newcomers of a store, so that serial numbers fit into the upper bits of request numbers.
NEWCOMERS_MAX = 1 << 16
_FACTS = {"serial": int, "rank": int, "serves": bool, "meeting": str}
_TICKET = {"store": str, "meeting": str}


class Newcomer(NamedTuple):
    """A process that joins. ``serial``: its number among all newcomers of the store, from 1.

    ``rank``: its rank, -1 before the manager assigns one. ``serves``: whether it is a server.
    ``meeting``: the address at which the others meet it, as the text of a ``Meeting``.
    """

    serial: int
    rank: int
    serves: bool
    meeting: str

    @property
    def first(self) -> int:
        """The number below its first request, and above all requests of earlier processes."""
        return self.serial << 32

    def to_bytes(self) -> bytes:
        """Return the form that ``from_bytes`` reads."""
        return json.dumps(self._asdict()).encode()

    @classmethod
    def from_bytes(cls, text: bytes) -> Newcomer:
        """Read a newcomer. Raises ValueError for what ``to_bytes`` did not make."""
        facts = json_object(read_json(text), _FACTS)
        if not 0 <= facts["serial"] <= NEWCOMERS_MAX or not -1 <= facts["rank"] < 1 << 31:
            raise ValueError("a serial number or a rank that cannot be")
        return cls(facts["serial"], facts["rank"], facts["serves"], facts["meeting"])


def make_ticket(store: str, meeting: str) -> str:
    """Return the text of a ticket, in characters that an environment variable can hold."""
    facts = {"store": store, "meeting": meeting}
    return base64.urlsafe_b64encode(json.dumps(facts).encode()).decode()


def read_ticket(ticket: Any) -> tuple[str, str]:
    """Return the store's name and the meeting of a ticket.

    Raises InvalidArgumentError, whose text does not quote the ticket, since that is secret.
    """
    try:
        if not isinstance(ticket, str):
            raise ValueError(f"it is a {type(ticket).__name__}, expected a text")
        facts = json_object(read_json(base64.urlsafe_b64decode(ticket.encode())), _TICKET)
    except (ValueError, TypeError, binascii.Error) as error:
        raise InvalidArgumentError(
            f"the ticket (ticket= or PYCOLL_TICKET) cannot be read: {error}; pass on a text that "
            "ticket() of a store returned, unchanged"
        ) from None
    return facts["store"], facts["meeting"]


def has_only_joined(seq: int) -> bool:
    """Return whether the newest update of a worker, with this number, is the JOIN of a newcomer."""
    serial = seq >> 32
    return serial > 0 and seq == (serial << 32) + 1


def agreed_start(answers: Sequence[Message]) -> tuple[int, int, list[Message]]:
    """Return the clock and the cut at which a new worker begins, and messages for older shards.

    ``answers``: by shard the answer to the worker's JOIN. Each shard counts the worker from its own
    version on; the newest version is the clock of all. Until the messages arrive, the older shards
    end no later round without the worker. So each round has it in all shards, or in none.
    """
    clock = max(one.round for one in answers)
    cut = max(one.key for one in answers)
    messages = [
        Message(Kind.CLOCK, shard, round=clock)
        for shard, one in enumerate(answers)
        if one.round < clock
    ]
    messages += [
        Message(Kind.CUT, shard, round=cut) for shard, one in enumerate(answers) if one.key < cut
    ]
    return clock, cut, messages
