"""What the ranks tell each other in the rounds of joining, read and checked.

Every rank sees the same blobs and therefore judges them alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pycoll.bootstrap.identity import Identity
from pycoll.errors import TransportError
from pycoll.untrusted import json_object, read_json, shown

#: The facts behind the first round; a rank tells those that it has.
_TYPES = {
    "error": str,
    "without": str,
    "tcp": list,
    "descriptors": list,
    "verbs": dict,
    "unreached": dict,
}
#: Of one entry of ``tcp``: address, network, port, device, speed (``dial.Candidate``).
_LISTENER = (str, str, int, str, int)


def identities_of(blobs: Sequence[bytes]) -> list[Identity]:
    """By rank. TransportError naming the first rank whose blob is no identity."""
    found = []
    for rank, blob in enumerate(blobs):
        try:
            found.append(Identity.from_bytes(blob))
        except ValueError as error:
            raise TransportError(
                f"rank {rank} {_unreadable(error)}", rank=rank, ranks=[rank], operation="init"
            ) from None
    return found


def facts_of(blobs: Sequence[bytes]) -> list[dict[str, Any]]:
    """By rank. A rank whose blob cannot be read counts as one that failed, with the reason."""
    return [_facts(blob) for blob in blobs]


def _facts(blob: bytes) -> dict[str, Any]:
    try:
        told = read_json(blob)
        known = {name: _TYPES[name] for name in told if name in _TYPES}
        facts = json_object(told, known)
        for listener in facts.get("tcp", ()):
            _check_listener(listener)
        _check_all("descriptors", facts.get("descriptors", (0, 0)), int, 2)
        for name in ("verbs", "unreached"):
            _check_all(name, facts.get(name, {}).values(), str)
            _check_numbers(name, facts.get(name, {}))
    except (ValueError, TypeError) as error:
        return {"error": _unreadable(error)}
    return facts


def _unreadable(error: Exception) -> str:
    return f"told what cannot be read: {error}; install the same pycoll everywhere"


def _check_listener(told: Any) -> None:
    import ipaddress

    if not isinstance(told, list) or len(told) != len(_LISTENER):
        raise ValueError(f"{shown(told)} is no listener")
    names = [str(place) for place in range(len(told))]
    json_object(dict(zip(names, told, strict=True)), dict(zip(names, _LISTENER, strict=True)))
    ipaddress.ip_address(told[0])
    if not 0 < told[2] < 65536:
        raise ValueError(f"{shown(told)} has no port")


def _check_all(name: str, told: Any, kind: type, count: int | None = None) -> None:
    values = list(told)
    fitting = all(isinstance(one, kind) and not isinstance(one, bool) for one in values)
    if not fitting or count not in (None, len(values)):
        raise ValueError(f"{name} is {shown(values)}")


def _check_numbers(name: str, told: dict[str, Any]) -> None:
    for peer in told:
        if not (peer.isascii() and peer.isdigit() and len(peer) < 10):
            raise ValueError(f"{name} tells of rank {shown(peer)}")
