"""What each rank tells about itself, and what follows from it for every pair of ranks.

All functions of two identities are pure and symmetric, so both ends decide alike without asking.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import os
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from pycoll.bootstrap.cores import CpuQuota, core_numbers, cpu_quota, usable_cores
from pycoll.bootstrap.host import machine_identity, process_name, process_token
from pycoll.bootstrap.rails import RAIL_COUNTS, Port, networks_of, share_network
from pycoll.config import TCP_SOCKETS_MAX, Config
from pycoll.errors import InvalidArgumentError
from pycoll.untrusted import json_object, read_json, shown


class Identity(NamedTuple):
    """One rank: ``name`` is "host:pid"; ``nonce`` goes into the communicator's key.

    ``door`` is where processes of its host find it, empty if they cannot (``hub.Door``). ``cores``
    are those that it may run on; processes of ``quota_group`` may use ``quota_cores`` of them at a
    time, all if that is 0 (``pycoll.bootstrap.cores``). ``tuning`` is what rank 0 brings for all;
    empty from the others. ``verbs`` are its ports on RDMA networks, the preferred ones first,
    and ``verbs_rails`` how many rails to a peer it allows; ``without`` is why it has none though
    its settings name verbs. ``descriptors`` is how many files its process may open still.
    """

    name: str
    pid: int
    process: str
    machine: str
    host_id: str
    transports: tuple[str, ...]
    tcp_sockets: int
    nonce: str
    door: str = ""
    cores: str = "0"
    tuning: str = ""
    verbs: tuple[Port, ...] = ()
    verbs_rails: int = 1
    without: str = ""
    quota_group: str = ""
    quota_cores: float = 0.0
    descriptors: int = 1 << 30

    @classmethod
    def mine(
        cls,
        config: Config,
        tuning: str = "",
        verbs: tuple[Port, ...] = (),
        without: str = "",
        door: str = "",
        descriptors: int = 1 << 30,
    ) -> Identity:
        """This process's, with a fresh nonce."""
        quota = cpu_quota() or CpuQuota("", 0.0)
        return cls(
            name=process_name(),
            pid=os.getpid(),
            process=process_token(),
            machine=machine_identity(),
            host_id=config.host_id or "",
            transports=config.transports,
            tcp_sockets=config.tcp_sockets,
            nonce=os.urandom(32).hex(),
            door=door,
            cores=usable_cores(),
            tuning=tuning,
            verbs=verbs,
            verbs_rails=config.verbs_rails,
            without=without,
            quota_group=quota.group,
            quota_cores=quota.cores,
            descriptors=descriptors,
        )

    def to_bytes(self) -> bytes:
        """For the exchange."""
        ports = [port._asdict() for port in self.verbs]
        return json.dumps(self._asdict() | {"verbs": ports}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Identity:
        """ValueError if ``data`` is not an identity."""
        told = json_object(read_json(data), _TYPES)
        ports = tuple(Port(**json_object(port, _PORT_TYPES)) for port in told["verbs"])
        transports = tuple(told["transports"])
        if not all(isinstance(name, str) for name in transports):
            raise ValueError(f"transports is {shown(transports)}: expected names")
        for name, most in (("tcp_sockets", TCP_SOCKETS_MAX), ("verbs_rails", RAIL_COUNTS[0])):
            if not 1 <= told[name] <= most:
                raise ValueError(f"{name} is {told[name]}: expected 1 to {most}")
        core_numbers(told["cores"])
        if told["quota_cores"] < 0:
            raise ValueError(f"quota_cores is {told['quota_cores']}: expected 0 or more")
        return cls(**(told | {"transports": transports, "verbs": ports}))


#: Of an identity's members in JSON.
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
    """Whether they may share memory."""
    return a.machine == b.machine and a.host_id == b.host_id


def shares_memory(a: Identity, b: Identity) -> bool:
    """Whether shm joins the two, or would if they were different ranks."""
    return same_host(a, b) and "shm" in a.transports and "shm" in b.transports


def is_plain(identities: Sequence[Identity]) -> bool:
    """Whether all pairs are processes that share memory, so that nothing else is to be made."""
    return len({identity.process for identity in identities}) == len(identities) and all(
        shares_memory(identities[0], identity) for identity in identities
    )


def choose_transport(a: Identity, b: Identity) -> str | None:
    """The medium of a pair, the first that both allow: shm inside a host, verbs within one RDMA
    network, tcp. None if none goes."""
    if shares_memory(a, b):
        return "shm"
    both = [kind for kind in a.transports if kind in b.transports]
    if "verbs" in both and share_network(a.verbs, b.verbs):
        return "verbs"
    return "tcp" if "tcp" in both else None


def falls_back(a: Identity, b: Identity) -> bool:
    """Whether the two use tcp though both name verbs first, which could have joined them."""
    return choose_transport(a, b) == "tcp" and "verbs" in a.transports and "verbs" in b.transports


def socket_count(a: Identity, b: Identity) -> int:
    """tcp sockets between the two."""
    return min(a.tcp_sockets, b.tcp_sockets)


def choose_all(rank: int, identities: Sequence[Identity]) -> dict[int, str]:
    """The medium to each peer. Raises InvalidArgumentError for a pair that has none in common."""
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
    """What ranks of one host use: shm if every rank allows it, else as between hosts."""
    shared = all("shm" in identity.transports for identity in identities)
    return "shm" if shared else transport_across(identities)


def transport_across(identities: Sequence[Identity]) -> str:
    """What ranks of different hosts use: verbs if all are on one RDMA network, else tcp."""
    allowing = [one.verbs if "verbs" in one.transports else () for one in identities]
    networks = [{port.network for port in ports} for ports in allowing]
    return "verbs" if set.intersection(*networks) else "tcp"


def host_numbers(identities: Sequence[Identity]) -> list[int]:
    """The host of each rank, numbered from 0 in order of first appearance."""
    seen: dict[tuple[str, str], int] = {}
    return [seen.setdefault((i.machine, i.host_id), len(seen)) for i in identities]


def session_key(secret: bytes, communicator_id: str, identities: Sequence[Identity]) -> bytes:
    """The key that guards this communicator's connections; fresh by every rank's nonce."""
    text = "\n".join([communicator_id, *(identity.nonce for identity in identities)])
    return hmac.digest(
        hashlib.sha256(secret).digest(), b"pycoll session\0" + text.encode(), "sha256"
    )


def ranks_per_core(identities: Sequence[Identity]) -> float:
    """On the most crowded host, at least 1."""
    ranks = Counter(host_numbers(identities))
    return max(1.0, *(ranks[host] / cores for host, cores in _cores_by_host(identities).items()))


def cores_beside(identities: Sequence[Identity], rank: int) -> int:
    """How many cores the ranks on this rank's host may run on, all together; at least 1."""
    return max(1, math.floor(_cores_by_host(identities)[host_numbers(identities)[rank]]))


def _cores_by_host(identities: Sequence[Identity]) -> dict[int, float]:
    """Cores of all ranks of a host, or their quotas together where those allow less."""
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
