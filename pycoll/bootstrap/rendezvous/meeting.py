"""A meeting place that one rank offers and hands to others as bytes: addresses, port, secret."""

from __future__ import annotations

import ipaddress
import json
import secrets
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

from pycoll import errors
from pycoll.bootstrap.dial import Candidate, order_candidates, probe, routes_to
from pycoll.bootstrap.discovery.host import machine_identity
from pycoll.bootstrap.discovery.network import interfaces
from pycoll.bootstrap.rendezvous.store_connection import StoreAddress
from pycoll.config import Config
from pycoll.untrusted import json_object, read_json

_FACTS = {"secret": str, "machine": str, "port": int, "addresses": list}
SECRET_BYTES = 32


class Meeting(NamedTuple):
    """The place where ranks meet: the addresses and the machine of the rank that serves the store.

    ``secret`` is empty where the ranks know one already.
    """

    secret: bytes
    machine: str
    candidates: tuple[Candidate, ...]

    def to_bytes(self) -> bytes:
        """Return the meeting in the form that ``from_bytes`` reads."""
        facts = {
            "secret": self.secret.hex(),
            "machine": self.machine,
            "port": self.candidates[0].port,
            "addresses": [[one.address, one.network] for one in self.candidates],
        }
        return json.dumps(facts).encode()

    @classmethod
    def from_bytes(cls, blob: bytes) -> Meeting:
        """Parse a meeting. Raises ValueError unless ``to_bytes`` could have made it."""
        facts = json_object(read_json(blob), _FACTS)
        secret = bytes.fromhex(facts["secret"])
        if len(secret) not in (0, SECRET_BYTES) or not 0 < facts["port"] < 65536:
            raise ValueError("a secret or a port that cannot be")
        candidates = []
        for one in facts["addresses"]:
            if not isinstance(one, list) or len(one) != 2:
                raise ValueError("an address without its network")
            address, network = map(str, one)
            ipaddress.ip_address(address)
            candidates.append(Candidate(address, network, facts["port"]))
        if not candidates:
            raise ValueError("no address")
        return cls(secret, facts["machine"], tuple(candidates))


def offer(config: Config, listener: socket.socket, secret: bytes | None = None) -> Meeting:
    """Return the meeting that this rank serves at ``listener``. None makes a secret.

    Raises TransportError if this rank has no address that another host can use.
    """
    port = int(listener.getsockname()[1])
    families = (4, 6) if listener.family == socket.AF_INET6 else (4,)
    candidates = [
        Candidate(one.address, one.network, port)
        for one in interfaces(config.interfaces)
        if ipaddress.ip_address(one.address).version in families
    ]
    if not candidates:
        raise errors.TransportError(
            "this rank has no address for the other hosts: see PYCOLL_INTERFACES", operation="init"
        )
    made = secrets.token_bytes(SECRET_BYTES) if secret is None else secret
    return Meeting(made, machine_identity(), tuple(candidates))


def address_of(meeting: Meeting, config: Config) -> StoreAddress:
    """Return the serving rank's addresses, those that answer first. Raises TransportError if none
    can be used from here."""
    mine = interfaces(config.interfaces)
    same = meeting.machine == machine_identity()
    usable = order_candidates(mine, meeting.candidates, same)
    offered = ", ".join(map(str, meeting.candidates))
    if not usable:
        raise errors.TransportError(
            f"rank 0 offers {offered}, which leads nowhere from this host: PYCOLL_INTERFACES "
            "chooses its networks",
            rank=0,
            operation="init",
        )
    if len(usable) > 1:
        answered = [route.target for route in probe(routes_to(usable, mine))]
        usable = sorted(usable, key=lambda one: one not in answered)
    return StoreAddress(f"its addresses ({offered})", targets_of(usable))


def targets_of(candidates: Sequence[Candidate]) -> list[tuple[int, Any]]:
    """Return (family, socket address) of each candidate."""
    return [
        (int(socket.AF_INET6 if ":" in one.address else socket.AF_INET), (one.address, one.port))
        for one in candidates
    ]
