"""The facts of one host that matter to a job, as its doctor collects and sends them."""

from __future__ import annotations

import importlib.metadata
import json
import mmap
import os
import platform
import resource
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from pycoll import __version__
from pycoll.bootstrap.discovery.host import machine_identity, names_in, read_file
from pycoll.bootstrap.discovery.network import Interface, interfaces
from pycoll.config import Config
from pycoll.cores import cpu_quota
from pycoll.errors import PycollError
from pycoll.untrusted import json_object, read_json

#: Libraries whose versions should be alike on all hosts.
_LIBRARIES = ("numpy", "torch")
#: A limit that does not limit.
UNLIMITED = -1

#: Returns the addresses of a host name, or raises OSError.
Resolver = Callable[[str], list[str]]


@dataclass(frozen=True)
class HostFacts:
    """The facts of a doctor's host. Sizes are in bytes; UNLIMITED is a limit that is not set.

    ``label`` names the host in reports, ``name`` is its own host name, which resolves to
    ``addresses`` there, or does not resolve because of ``unresolved``. ``machine`` is equal for two
    doctors on one machine. ``ranks`` is the number of ranks planned for this host, 0 if unknown,
    and ``cpus`` are the numbers of the cores that they may use. ``quota`` is the processor time of
    its control groups in cores, 0 without a limit. ``files`` and ``files_hard`` limit open files,
    ``memlock`` locked memory. ``shm`` is the size of /dev/shm, 0 if there is none. ``memfd`` is the
    reason why no shared memory can be made, else empty. ``ptrace`` is yama's ptrace_scope, -1
    without yama. ``rdma`` names RDMA devices. ``networks`` are the interfaces with an address.
    ``routes_ipv6`` says whether an IPv6 default route exists. ``problems`` are refused settings.
    The doctor listens at ``port``, 0 if it cannot, and admits connections that begin with
    ``token``.
    """

    label: str
    name: str
    machine: str
    pycoll: str
    python: str
    libraries: dict[str, str]
    ranks: int
    cpus: list[int]
    quota: float
    files: int
    files_hard: int
    memlock: int
    shm: int
    memfd: str
    ptrace: int
    rdma: list[str]
    networks: list[Interface]
    routes_ipv6: bool
    addresses: list[str]
    unresolved: str
    problems: list[str]
    port: int
    token: str

    @property
    def cores(self) -> int:
        """The number of cores that the ranks of this host may use."""
        return len(self.cpus)

    def joined_by(self, other: HostFacts) -> HostFacts:
        """Return these facts with the ranks and cores of another doctor of this machine."""
        cpus = sorted({*self.cpus, *other.cpus})
        return replace(self, ranks=self.ranks + other.ranks, cpus=cpus)

    def encode(self) -> bytes:
        """Return the facts as JSON, for other hosts."""
        return json.dumps(asdict(self)).encode()

    def with_problem(self, text: str) -> HostFacts:
        """Return these facts with one problem more."""
        return replace(self, problems=[*self.problems, text])

    def as_report(self) -> dict[str, Any]:
        """Return the facts for a report, without the token."""
        shown = asdict(self) | {"networks": [one._asdict() for one in self.networks]}
        shown["cores"] = self.cores
        del shown["token"], shown["cpus"]
        return shown


_KINDS: dict[str, type] = {
    **dict.fromkeys((one.name for one in fields(HostFacts)), str),
    **dict.fromkeys(("ranks", "files", "files_hard", "memlock", "shm"), int),
    **{"ptrace": int, "port": int, "quota": float, "routes_ipv6": bool, "libraries": dict},
    **dict.fromkeys(("cpus", "rdma", "networks", "addresses", "problems"), list),
}


def decode_facts(blob: bytes) -> HostFacts:
    """Return the facts that another host has sent. Raises ValueError for other bytes."""
    found = json_object(read_json(blob), _KINDS)
    names = ("name", "address", "network", "speed")
    kinds = {"name": str, "address": str, "network": str, "speed": int}
    rows = [dict(zip(names, row, strict=True)) for row in found["networks"]]
    found["networks"] = [Interface(**json_object(row, kinds)) for row in rows]
    for name in ("rdma", "addresses", "problems"):
        found[name] = [str(one) for one in found[name]]
    found["cpus"] = [int(one) for one in found["cpus"]]
    bytes.fromhex(found["token"])
    return HostFacts(**found)


def resolve_here(name: str) -> list[str]:
    """Return the addresses of ``name`` as this host's resolver sees them. Raises OSError."""
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def collect_facts(
    label: str,
    ranks: int = 0,
    listener: tuple[int, str] = (0, ""),
    environ: Mapping[str, str] | None = None,
    resolver: Resolver = resolve_here,
) -> HostFacts:
    """Return the facts of this host. ``listener`` is the port and the token of its doctor."""
    name, addresses, unresolved = socket.gethostname(), list[str](), ""
    try:
        addresses = resolver(name)
    except OSError as error:
        unresolved = error.strerror or str(error)
    networks, problems = _networks(environ)
    soft, hard = map(_limit, resource.getrlimit(resource.RLIMIT_NOFILE))
    quota = cpu_quota()
    return HostFacts(
        label=label or name,
        name=name,
        machine=machine_identity(),
        pycoll=__version__,
        python=platform.python_version(),
        libraries=_libraries(),
        ranks=ranks,
        cpus=sorted(os.sched_getaffinity(0)),
        quota=0.0 if quota is None else quota.cores,
        files=soft,
        files_hard=hard,
        memlock=_limit(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        shm=_size_of_shm(),
        memfd=_missing_memfd(),
        ptrace=int(read_file("/proc/sys/kernel/yama/ptrace_scope") or -1),
        rdma=names_in("/sys/class/infiniband"),
        networks=networks,
        routes_ipv6=_has_default_ipv6(read_file("/proc/net/ipv6_route")),
        addresses=addresses,
        unresolved=unresolved,
        problems=problems,
        port=listener[0],
        token=listener[1],
    )


def size_text(value: float) -> str:
    """Return a number of bytes with its unit, a power of 1,024."""
    for unit, factor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value:.0f} B"


def _networks(environ: Mapping[str, str] | None) -> tuple[list[Interface], list[str]]:
    """Return the interfaces that the settings allow, or all of them and what is wrong."""
    try:
        return interfaces(Config.read(environ).interfaces), []
    except PycollError as error:
        return interfaces(), [str(error)]


def _libraries() -> dict[str, str]:
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found


def _limit(value: int) -> int:
    return UNLIMITED if value == resource.RLIM_INFINITY else value


def _size_of_shm() -> int:
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return 0
    return found.f_frsize * found.f_blocks


def _missing_memfd() -> str:
    try:
        file = os.memfd_create("pycoll-doctor", os.MFD_CLOEXEC)
        try:
            os.ftruncate(file, mmap.PAGESIZE)
            mmap.mmap(file, mmap.PAGESIZE).close()
        finally:
            os.close(file)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _has_default_ipv6(routes: str) -> bool:
    """Return whether the kernel's table has a route to ::/0 that is not one of loopback."""
    rows = [line.split() for line in routes.splitlines()]
    return any(row[0] == "0" * 32 and row[1] == "00" and row[-1] != "lo" for row in rows if row)
