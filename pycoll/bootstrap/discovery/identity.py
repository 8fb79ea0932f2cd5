"""The identity that each rank sends in the first round, and the choices that follow from it.

All functions of two identities are pure and symmetric, so both ends make the same choice without
an exchange.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from pycoll.bootstrap.discovery.domains import find_domains
from pycoll.bootstrap.discovery.host import machine_identity, process_name, process_token
from pycoll.bootstrap.discovery.rails import RAIL_COUNTS, Port, networks_of, share_network
from pycoll.bootstrap.discovery.versions import versions
from pycoll.config import SERVER, TCP_SOCKETS_MAX, WORKER, Config
from pycoll.cores import (
    CpuQuota,
    core_numbers,
    cpu_quota,
    usable_cores,
)
from pycoll.errors import InvalidArgumentError
from pycoll.untrusted import json_object, read_json, shown


class Identity(NamedTuple):
    """The facts of one rank. ``name`` is "host:pid"; ``nonce`` goes into the communicator's key.

    ``local_address`` is its abstract unix socket for processes of its host, empty if it has none
    (``LocalAddress``). ``cores`` are the cores that it may run on, as text (``cores.core_text``).
    The processes of ``quota_group`` together may use ``quota_cores`` cores at a time, 0 for no
    limit. ``verbs`` are its RDMA ports, the preferred ones first, and ``verbs_rails`` is the most
    rails to a peer that it allows. ``without`` is the reason why it has no ports though its
    settings name verbs.
    ``descriptors`` is how many more files its process may open. ``role`` is what the rank does.
    ``cache`` and ``memory`` name the domains of its cores (``domains.Domains``). ``pycoll`` and
    ``python`` are its versions (``versions.versions``).
    """

    name: str
    pid: int
    process: str
    machine: str
    host_id: str
    transports: tuple[str, ...]
    tcp_sockets: int
    nonce: str
    local_address: str = ""
    cores: str = "0"
    verbs: tuple[Port, ...] = ()
    verbs_rails: int = 1
    without: str = ""
    quota_group: str = ""
    quota_cores: float = 0.0
    descriptors: int = 1 << 30
    role: str = WORKER
    cache: str = ""
    memory: str = ""
    pycoll: str = ""
    python: str = ""

    @classmethod
    def mine(
        cls,
        config: Config,
        verbs: tuple[Port, ...] = (),
        without: str = "",
        local_address: str = "",
        descriptors: int = 1 << 30,
    ) -> Identity:
        """Make the identity of this process, with a fresh nonce."""
        quota = cpu_quota() or CpuQuota("", 0.0)
        cores = usable_cores()
        domains = find_domains(cores)
        return cls(
            name=process_name(),
            pid=os.getpid(),
            process=process_token(),
            machine=machine_identity(),
            host_id=config.host_id or "",
            transports=config.transports,
            tcp_sockets=config.tcp_sockets,
            nonce=os.urandom(32).hex(),
            local_address=local_address,
            cores=cores,
            verbs=verbs,
            verbs_rails=config.verbs_rails,
            without=without,
            quota_group=quota.group,
            quota_cores=quota.cores,
            descriptors=descriptors,
            role=config.role,
            cache=domains.cache,
            memory=domains.memory,
            **versions(),
        )

    def to_bytes(self) -> bytes:
        """Return the identity as JSON, for the exchange."""
        ports = [port._asdict() for port in self.verbs]
        return json.dumps(self._asdict() | {"verbs": ports}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Identity:
        """Parse ``data``. Raises ValueError if it is not an identity."""
        return cls.from_json(read_json(data))

    @classmethod
    def from_json(cls, value: Any) -> Identity:
        """Return the identity of a JSON value. Raises ValueError if it is none."""
        members = json_object(value, _TYPES)
        ports = tuple(Port(**json_object(port, _PORT_TYPES)) for port in members["verbs"])
        transports = tuple(members["transports"])
        if not all(isinstance(name, str) for name in transports):
            raise ValueError(f"transports is {shown(transports)}: expected names")
        for name, most in (("tcp_sockets", TCP_SOCKETS_MAX), ("verbs_rails", RAIL_COUNTS[0])):
            if not 1 <= members[name] <= most:
                raise ValueError(f"{name} is {members[name]}: expected 1 to {most}")
        core_numbers(members["cores"])
        if members["quota_cores"] < 0:
            raise ValueError(f"quota_cores is {members['quota_cores']}: expected 0 or more")
        if members["role"] not in (WORKER, SERVER):
            raise ValueError(f"role is {shown(members['role'])}: expected {WORKER} or {SERVER}")
        return cls(**(members | {"transports": transports, "verbs": ports}))


#: The types of an identity's members in JSON.
_TYPES: dict[str, type] = {
    **dict.fromkeys(Identity._fields, str),
    **dict.fromkeys(("pid", "tcp_sockets", "verbs_rails", "descriptors"), int),
    **dict.fromkeys(("transports", "verbs"), list),
    "quota_cores": float,
}
_PORT_TYPES: dict[str, type] = {
    **dict.fromkeys(("device", "gid", "network"), str),
    **dict.fromkeys(("number", "gid_index"), int),
    "rate": float,
}


def same_host(a: Identity, b: Identity) -> bool:
    """Return whether the two ranks are on one machine with one host id, so that they may share
    memory."""
    return a.machine == b.machine and a.host_id == b.host_id


def shares_memory(a: Identity, b: Identity) -> bool:
    """Return whether shm joins the two; also true for a rank and itself."""
    return same_host(a, b) and "shm" in a.transports and "shm" in b.transports


def is_plain(identities: Sequence[Identity]) -> bool:
    """Return whether all ranks are processes of their own that share memory, so that no socket
    is needed."""
    return len({identity.process for identity in identities}) == len(identities) and all(
        shares_memory(identities[0], identity) for identity in identities
    )


def choose_transport(a: Identity, b: Identity) -> str | None:
    """Return the medium of a pair: shm inside a host, else verbs within one RDMA network, else tcp.

    Both ranks must allow it. None if no medium is left.
    """
    if shares_memory(a, b):
        return "shm"
    both = [kind for kind in a.transports if kind in b.transports]
    if "verbs" in both and share_network(a.verbs, b.verbs):
        return "verbs"
    return "tcp" if "tcp" in both else None


def falls_back(a: Identity, b: Identity) -> bool:
    """Return whether the two use tcp although the settings of both name verbs."""
    return choose_transport(a, b) == "tcp" and "verbs" in a.transports and "verbs" in b.transports


def socket_count(a: Identity, b: Identity) -> int:
    """Return the number of tcp sockets between the two."""
    return min(a.tcp_sockets, b.tcp_sockets)


def choose_all(rank: int, identities: Sequence[Identity]) -> dict[int, str]:
    """Return the medium to each peer. Raises InvalidArgumentError for a pair without a common
    medium."""
    chosen = {}
    mine = identities[rank]
    for peer, other in enumerate(identities):
        if peer == rank:
            continue
        kind = choose_transport(mine, other)
        if kind is None:
            where = "one host" if same_host(mine, other) else "different hosts"
            if "verbs" in mine.transports + other.transports:
                ends = (networks_of(mine.verbs), networks_of(other.verbs))
                where += f", the one on {ends[0]}, the other on {ends[1]}"
            reasons = [(rank, mine.without), (peer, other.without)]
            why = "".join(f". On rank {r}: {without}" for r, without in reasons if without)
            raise InvalidArgumentError(
                f"rank {rank} ({mine.name}) allows {', '.join(mine.transports)}, rank {peer} "
                f"({other.name}) {', '.join(other.transports)}, and they are on {where}: no "
                f"transport is left; set PYCOLL_TRANSPORTS equally, with tcp between hosts{why}",
                rank=peer,
                operation="init",
            )
        chosen[peer] = kind
    return chosen


def transport_inside(identities: Sequence[Identity]) -> str:
    """Return the medium inside hosts: shm if every rank allows it, else that between hosts."""
    shared = all("shm" in identity.transports for identity in identities)
    return "shm" if shared else transport_across(identities)


def transport_across(identities: Sequence[Identity]) -> str:
    """Return the medium between hosts: verbs if all ranks are on one RDMA network, else tcp."""
    allowing = [one.verbs if "verbs" in one.transports else () for one in identities]
    networks = [{port.network for port in ports} for ports in allowing]
    return "verbs" if set.intersection(*networks) else "tcp"


def host_numbers(identities: Sequence[Identity]) -> list[int]:
    """Return the host of each rank, numbered from 0 in order of first appearance."""
    seen: dict[tuple[str, str], int] = {}
    return [seen.setdefault((i.machine, i.host_id), len(seen)) for i in identities]


def domains_of(identities: Sequence[Identity]) -> list[list[str | None]]:
    """Return the last-level cache and the memory domain of each rank; None where unknown."""
    return [[one.cache or None for one in identities], [one.memory or None for one in identities]]


def session_key(secret: bytes, communicator_id: str, identities: Sequence[Identity]) -> bytes:
    """Derive the key that guards this communicator's connections. The nonces of all ranks make it
    different for every communicator."""
    text = "\n".join([communicator_id, *(identity.nonce for identity in identities)])
    return hmac.digest(
        hashlib.sha256(secret).digest(), b"pycoll session\0" + text.encode(), "sha256"
    )


def ranks_per_core(identities: Sequence[Identity]) -> float:
    """Return the ranks per core of the host with the most ranks per core, at least 1."""
    ranks = Counter(host_numbers(identities))
    return max(1.0, *(ranks[host] / cores for host, cores in _cores_by_host(identities).items()))


def cores_shared_by(identities: Sequence[Identity], rank: int) -> int:
    """Return how many cores the ranks on this rank's host may use together, at least 1."""
    return max(1, math.floor(_cores_by_host(identities)[host_numbers(identities)[rank]]))


def _cores_by_host(identities: Sequence[Identity]) -> dict[int, float]:
    """Return, by host, the number of cores of all its ranks, or the sum of their quotas if that is
    less."""
    of_host: dict[int, list[Identity]] = {}
    for host, identity in zip(host_numbers(identities), identities, strict=True):
        of_host.setdefault(host, []).append(identity)
    return {host: _cores_of(ranks) for host, ranks in of_host.items()}


def _cores_of(ranks: Sequence[Identity]) -> float:
    cores: set[int] = set()
    for identity in ranks:
        cores |= core_numbers(identity.cores)
    quotas = {one.quota_group: one.quota_cores for one in ranks}
    return min(len(cores), sum(quotas.values())) if all(quotas.values()) else len(cores)
