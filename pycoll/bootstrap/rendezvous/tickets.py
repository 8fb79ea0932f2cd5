"""Tickets, by which new processes join a communicator that grows: where to meet, and as whom."""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any

from pycoll import errors
from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.rendezvous.meeting import Meeting, address_of
from pycoll.bootstrap.rendezvous.store import StoreExchange
from pycoll.config import RANKS_MAX, Config
from pycoll.untrusted import json_object, read_json

#: The job of the store at which the ranks meet.
JOB = "grow"
_FACTS = {"rank": int, "size": int, "meeting": str}


def make_ticket(rank: int, size: int, meeting: Meeting) -> str:
    """Return the ticket of a new rank, in characters that any variable can hold."""
    facts = {"rank": rank, "size": size, "meeting": meeting.to_bytes().decode()}
    return base64.urlsafe_b64encode(json.dumps(facts).encode()).decode()


def read_ticket(ticket: Any) -> tuple[int, int, Meeting]:
    """Return the rank, the size and the meeting of a ticket. Raises InvalidArgumentError; its text
    does not quote the ticket, which is secret."""
    try:
        if not isinstance(ticket, str):
            raise ValueError(f"it is a {type(ticket).__name__}, expected a text")
        facts = json_object(read_json(base64.urlsafe_b64decode(ticket.encode())), _FACTS)
        meeting = Meeting.from_bytes(facts["meeting"].encode())
        if not meeting.secret or not 0 < facts["rank"] < facts["size"] <= RANKS_MAX:
            raise ValueError("it has no secret, or a rank outside of its size")
    except (ValueError, TypeError, binascii.Error) as error:
        raise errors.InvalidArgumentError(
            f"the ticket (ticket= or PYCOLL_TICKET) cannot be read: {error}; pass on one of the "
            "texts that grow() gives to invite, unchanged"
        ) from None
    return facts["rank"], facts["size"], meeting


def meet_by_ticket(ticket: str, config: Config, deadline: Deadline) -> StoreExchange:
    """Return the exchange of a new rank."""
    rank, size, meeting = read_ticket(ticket)
    return meet_at(meeting, rank, size, config, deadline)


def meet_at(
    meeting: Meeting, rank: int, size: int, config: Config, deadline: Deadline
) -> StoreExchange:
    """Return the exchange of a rank other than 0, old or new."""
    return StoreExchange(address_of(meeting, config), meeting.secret, JOB, rank, size, deadline)
