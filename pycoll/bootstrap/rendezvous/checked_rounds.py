"""Parses and checks the blobs that ranks send in the rounds of joining.

Every rank sees the same blobs, so all ranks come to the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pycoll.bootstrap.discovery.identity import Identity
from pycoll.bootstrap.discovery.versions import difference, versions
from pycoll.errors import MismatchError, TransportError, odd_ranks
from pycoll.untrusted import json_object, read_json, shown

#: The facts of the rounds after the first; a rank sends those that it has.
_TYPES = {
    "error": str,
    "without": str,
    "tcp": list,
    "post": list,
    "descriptors": list,
    "verbs": dict,
    "unreached": dict,
    "tuning": str,
}
#: Types of one entry of ``tcp`` and ``post``, a ``dial.Candidate``: address, network, port, device,
#: speed.
_LISTENER = (str, str, int, str, int)


def identities_of(blobs: Sequence[bytes]) -> list[Identity]:
    """Parse the identities, by rank.

    Raises MismatchError, which names the ranks whose version of pycoll or Python differs from that
    of most ranks. Raises TransportError, which names the first rank whose blob is not an identity.
    """
    values = [_value(blob) for blob in blobs]
    _compare_versions(values)
    found = []
    for rank, value in enumerate(values):
        try:
            if isinstance(value, ValueError):
                raise value
            found.append(Identity.from_json(value))
        except ValueError as error:
            raise TransportError(
                f"rank {rank} {_unreadable(error)}", rank=rank, ranks=[rank], operation="init"
            ) from None
    return found


def _value(blob: bytes) -> Any:
    """Return the JSON value of a blob, or the ValueError that says why it has none."""
    try:
        return read_json(blob)
    except ValueError as error:
        return error


def _compare_versions(values: Sequence[Any]) -> None:
    # Before the identities are checked: another version may have other fields. All have a name.
    sent = {
        rank: one
        for rank, one in enumerate(values)
        if isinstance(one, dict) and isinstance(one.get("name"), str)
    }
    if not sent:
        return
    tags = {rank: tuple(str(one.get(name)) for name in versions()) for rank, one in sent.items()}
    usual, odd = odd_ranks(tags)
    if not odd:
        return
    found = difference(sent[usual], sent[odd[0]])
    assert found is not None
    raise MismatchError(
        f"rank {odd[0]} ({shown(sent[odd[0]].get('name'))}) has {found.label} {found.theirs}, and "
        f"rank {usual} ({shown(sent[usual].get('name'))}) has {found.label} {found.mine}: install "
        "the same one on all hosts",
        rank=odd[0],
        ranks=odd,
        operation="init",
    )


def facts_of(blobs: Sequence[bytes]) -> list[dict[str, Any]]:
    """Parse the facts, by rank. A rank whose blob is unreadable counts as failed, with the reason
    as its "error"."""
    return [_facts(blob) for blob in blobs]


def _facts(blob: bytes) -> dict[str, Any]:
    try:
        sent = read_json(blob)
        known = {name: _TYPES[name] for name in sent if name in _TYPES}
        facts = json_object(sent, known)
        for listener in (*facts.get("tcp", ()), *facts.get("post", ())):
            _check_listener(listener)
        _check_all("descriptors", facts.get("descriptors", (0, 0)), int, 2)
        for name in ("verbs", "unreached"):
            _check_all(name, facts.get(name, {}).values(), str)
            _check_numbers(name, facts.get(name, {}))
    except (ValueError, TypeError) as error:
        return {"error": _unreadable(error)}
    return facts


def _unreadable(error: Exception) -> str:
    return f"sent unreadable data: {error}; install the same pycoll everywhere"


def _check_listener(listener: Any) -> None:
    import ipaddress

    if not isinstance(listener, list) or len(listener) != len(_LISTENER):
        raise ValueError(f"{shown(listener)} is no listener")
    names = [str(place) for place in range(len(listener))]
    json_object(dict(zip(names, listener, strict=True)), dict(zip(names, _LISTENER, strict=True)))
    ipaddress.ip_address(listener[0])
    if not 0 < listener[2] < 65536:
        raise ValueError(f"{shown(listener)} has no port")


def _check_all(name: str, sent: Any, kind: type, count: int | None = None) -> None:
    values = list(sent)
    fitting = all(isinstance(one, kind) and not isinstance(one, bool) for one in values)
    if not fitting or count not in (None, len(values)):
        raise ValueError(f"{name} is {shown(values)}")


def _check_numbers(name: str, by_peer: dict[str, Any]) -> None:
    for peer in by_peer:
        if not (peer.isascii() and peer.isdigit() and len(peer) < 10):
            raise ValueError(f"{name} has {shown(peer)} for a rank")
