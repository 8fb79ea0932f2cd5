"""The hosts of a job, from ``-H host:slots,...`` or a host file, and the ranks that each gets."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import NamedTuple

from pycoll.errors import InvalidArgumentError
from pycoll.untrusted import read_file

_FILE_BYTES_MAX = 1 << 20


class HostSlots(NamedTuple):
    """A host, by the name that ssh gets, the number of its ranks, and how many of these serve."""

    name: str
    slots: int
    servers: int = 0

    @property
    def is_here(self) -> bool:
        """Whether the name surely means this machine."""
        own = socket.gethostname()
        return self.name in {"localhost", "127.0.0.1", "::1", own, own.split(".")[0]}


def parse_hosts(text: str) -> list[HostSlots]:
    """Parse "host:slots,host:slots"; a host without slots has one. Raises InvalidArgumentError."""
    found = [_host_of(word.strip(), f"hosts={text!r}") for word in text.split(",")]
    return _check_hosts(found, f"hosts={text!r}")


def read_hostfile(path: str) -> list[HostSlots]:
    """Read a file of hosts, one a line: "host", "host:slots", "host slots=n"; # begins a comment.

    Raises InvalidArgumentError, with the number of the line.
    """
    try:
        text = read_file(path, _FILE_BYTES_MAX).decode()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise InvalidArgumentError(f"hostfile={path!r}: {why}") from None
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if words:
            found.append(parse_line(words, f"hostfile={path!r}, line {number}"))
    return _check_hosts(found, f"hostfile={path!r}")


def parse_line(words: Sequence[str], where: str, least: int = 1) -> HostSlots:
    """Parse the words of a line; ``least`` is the smallest number of slots. Raises
    InvalidArgumentError, which begins with ``where``."""
    if len(words) == 1:
        return _host_of(words[0], where, least)
    options = " ".join(words[1:]).replace(" =", "=").replace("= ", "=").split()
    found = dict(one.split("=", 1) for one in options if "=" in one)
    # Open MPI's bound on further ranks of a host; pycoll starts none beyond the slots.
    known = {"slots", "max_slots", "max-slots"}
    if "slots" not in found or len(found) < len(options) or not known.issuperset(found):
        raise InvalidArgumentError(
            f"{where}: {' '.join(words)!r} is no host: expected host:slots or host slots=n"
        )
    return HostSlots(_name_of(words[0], where), _slots_of(found["slots"], where, least))


def _host_of(word: str, where: str, least: int = 1) -> HostSlots:
    """Parse "host" or "host:slots"; an IPv6 address stands in brackets."""
    name, colon, count = word.rpartition(":")
    if not colon or word.endswith("]"):
        return HostSlots(_name_of(word, where), 1)
    return HostSlots(_name_of(name, where), _slots_of(count, where, least))


def _name_of(word: str, where: str) -> str:
    bare = word[1:-1] if word.startswith("[") and word.endswith("]") else word
    if ":" in bare and bare == word:
        raise InvalidArgumentError(f"{where}: write an IPv6 address in brackets, [{word}]:slots")
    # ssh would take a name with a dash in front for an option.
    if not bare or bare.startswith("-") or not bare.isprintable() or " " in bare:
        raise InvalidArgumentError(f"{where}: {word!r} is no name of a host")
    return bare


def _slots_of(count: str, where: str, least: int) -> int:
    if not (count.isascii() and count.isdigit() and least <= int(count) < 1 << 20):
        raise InvalidArgumentError(f"{where}: {count!r} is no number of slots, {least} or more")
    return int(count)


def _check_hosts(hosts: list[HostSlots], where: str) -> list[HostSlots]:
    if not hosts:
        raise InvalidArgumentError(f"{where}: it names no host")
    names = [host.name for host in hosts]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidArgumentError(
            f"{where}: host {twice} is named twice: name it once, with all its slots"
        )
    return hosts


def place_ranks(hosts: Sequence[HostSlots], ranks: int | None, servers: int = 0) -> list[HostSlots]:
    """Return the hosts that get ranks, with the number of each: the slots are filled in order.

    ``ranks`` None: all slots that ``servers`` leave. The servers take the slots behind the ranks.
    Raises InvalidArgumentError if there are fewer slots.
    """
    total = sum(host.slots for host in hosts)
    workers = total - servers if ranks is None else ranks
    if workers + servers > total or workers < 1:
        listed = ", ".join(f"{host.name}:{host.slots}" for host in hosts[:8])
        wanted = f"{max(workers, 1)} ranks" + (f" and servers={servers}" if servers else "")
        raise InvalidArgumentError(
            f"{wanted} do not fit: the hosts have {total} slots "
            f"({listed}{', ...' * (len(hosts) > 8)}); give them more slots, or start fewer ranks"
        )
    found, left = [], workers + servers
    for host in hosts:
        if left > 0:
            slots = min(host.slots, left)
            serving = min(slots, max(0, servers - (left - slots)))
            found.append(host._replace(slots=slots, servers=serving))
            left -= slots
    return found
