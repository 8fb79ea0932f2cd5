"""The checks: each one reads a survey and yields findings. ``CHECKS`` is the list of all."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator
from typing import NamedTuple

from pycoll.tools.doctor.host_facts import UNLIMITED, HostFacts, size_text
from pycoll.tools.doctor.probes import (
    NO_NETWORK,
    NO_ROUTE,
    REFUSED,
    SILENT,
    STRANGER,
    STUCK,
    Link,
)
from pycoll.tools.doctor.survey import Survey

#: An error keeps jobs from running, a warning costs time or breaks some programs. A note is worth
#: knowing, and nothing is wrong.
ERROR, WARNING, NOTE = "error", "warning", "note"
#: Open files that a rank needs for each rank of its host and of others, and for itself.
_FILES_PER_RANK, _FILES_OWN = 4, 64
_FILES_LOW = 1024
#: Locked memory below which registering memory for RDMA fails soon, in bytes.
_MEMLOCK_LOW = 1 << 30
#: Container engines make /dev/shm this long by default, in bytes.
_SHM_LOW = 64 << 20
#: Seconds; larger differences show in logs and timelines, and break time limits of certificates.
_CLOCK_S = 0.5


class Finding(NamedTuple):
    """A result of a check: its severity, the host, the check, the fact, and the advice."""

    severity: str
    host: str
    check: str
    what: str
    to_do: str


#: A check yields severity, host, fact and advice.
Told = Iterator[tuple[str, str, str, str]]


class Check(NamedTuple):
    """A check: its name in reports, what it looks at, and the function that does."""

    name: str
    summary: str
    find: Callable[[Survey], Told]


def findings_of(survey: Survey) -> list[Finding]:
    """Return what all checks find, errors first."""
    found = [
        Finding(severity, host, check.name, what, to_do)
        for check in CHECKS
        for severity, host, what, to_do in check.find(survey)
    ]
    return sorted(found, key=lambda one: (ERROR, WARNING, NOTE).index(one.severity))


# Hosts that cannot work together


def _absent(survey: Survey) -> Told:
    for host, reason in survey.absent.items():
        to_do = "make it reachable, or leave it out; the survey went on without it"
        yield ERROR, host, reason.removeprefix(f"host {host}: "), to_do


def _settings(survey: Survey) -> Told:
    for one in survey.hosts:
        for problem in one.problems:
            yield ERROR, one.label, problem, "correct the variable on this host, or unset it"


def _machines(survey: Survey) -> Told:
    for first, second in survey.doubles:
        what = f"{first} and {second} are one machine, in one network namespace"
        todo = "name it once, with all its slots"
        yield ERROR if survey.listed else NOTE, second, what, todo


def _versions(survey: Survey) -> Told:
    first = survey.hosts[0] if survey.hosts else None
    for one in survey.hosts[1:]:
        assert first is not None
        alike = {"pycoll": (first.pycoll, one.pycoll), "Python": (first.python, one.python)}
        alike |= {
            name: (version, one.libraries.get(name, ""))
            for name, version in first.libraries.items()
        }
        for name, (mine, theirs) in alike.items():
            if mine == theirs:
                continue
            same_minor = mine.split(".")[:2] == theirs.split(".")[:2]
            required = name == "pycoll" or (name == "Python" and not same_minor)
            severity = ERROR if required else NOTE if name == "Python" else WARNING
            what = f"{name} {theirs or 'is missing'} here, {mine or 'none'} on {first.label}"
            yield severity, one.label, what, f"install the same {name} on all hosts"


# Ways between hosts


class _Cause(NamedTuple):
    what: str
    to_do: str


def _cause_of(link: Link, port: int) -> _Cause:
    """Return in words why a way is closed."""
    if link.elsewhere and link.failure in (SILENT, NO_ROUTE):
        return _Cause(
            f"a firewall drops TCP to port {port}, and lets other ports through",
            "open the ports between these hosts; PYCOLL_PORT_RANGE=FIRST-LAST limits them",
        )
    if link.failure == REFUSED:
        return _Cause(
            f"TCP to port {port} is refused",
            "a firewall rejects it, or the address belongs to another machine: open the ports "
            "between these hosts (PYCOLL_PORT_RANGE limits them), or correct the address",
        )
    if link.failure == NO_NETWORK:
        return _Cause("this host has no route there", "add a route (ip route), or leave it out")
    if link.failure == NO_ROUTE:
        return _Cause(
            "no machine answers for this address",
            "check cable, switch and VLAN of the interface, or leave it out",
        )
    if link.failure == SILENT:
        return _Cause(
            "nothing answers",
            "a firewall drops all packets, or the network leads nowhere: open the ports between "
            "these hosts (PYCOLL_PORT_RANGE limits them), or leave the interface out",
        )
    if link.failure == STUCK:
        return _Cause(
            "connections open, but data does not arrive",
            "the largest packet may be too long for a part of the network: compare the MTU of "
            "both interfaces (ip link) and of what is between them",
        )
    if link.failure == STRANGER:
        return _Cause(
            "another machine answers at this address",
            "two machines have this address, or a proxy stands before it: leave it out",
        )
    return _Cause(link.failure, "look at this interface (ip addr, ip route), or leave it out")


def _reach(survey: Survey) -> Told:
    """Pairs of hosts without any way are errors; else a closed way is a warning."""
    hosts = survey.hosts
    for source, own in enumerate(hosts):
        for target, other in enumerate(hosts):
            if source == target or not other.port or other.label in survey.absent:
                continue
            if own.label in survey.absent:
                continue
            ways = [one for one in survey.links if (one.source, one.target) == (source, target)]
            closed = [one for one in ways if one.failure]
            if not ways:
                offered = ", ".join(one.address for one in other.networks) or "none"
                what = f"no way to {other.label}: its addresses are {offered}"
                yield ERROR, own.label, what, _no_address(other)
            elif len(closed) == len(ways):
                yield from _closed_pair(own, other, closed)
            else:
                yield from _closed_ways(own, other, ways)


def _no_address(other: HostFacts) -> str:
    if any(not one.loopback for one in other.networks):
        return "both hosts have the same addresses (a bridge of containers?): give each its own"
    return f"give {other.label} an address of a network that both have, besides loopback"


def _closed_pair(own: HostFacts, other: HostFacts, closed: list[Link]) -> Told:
    causes: dict[_Cause, list[Link]] = {}
    for link in closed:
        causes.setdefault(_cause_of(link, other.port), []).append(link)
    for cause, links in causes.items():
        tried = ", ".join(_way(one) for one in links)
        yield ERROR, own.label, f"does not reach {other.label}: {cause.what} ({tried})", cause.to_do


def _closed_ways(own: HostFacts, other: HostFacts, ways: list[Link]) -> Told:
    open_devices = dict.fromkeys(one.device for one in ways if not one.failure)
    for link in ways:
        if not link.failure:
            continue
        if ":" in link.address and link.failure == NO_NETWORK:
            continue  # the check of IPv6 tells it
        cause = _cause_of(link, other.port)
        what = f"does not reach {other.label} by {_way(link)}: {cause.what}"
        names = ",".join(open_devices)
        to_do = cause.to_do
        if link.device not in open_devices:
            to_do += f"; pycoll uses the open ways, and PYCOLL_INTERFACES={names} names only these"
        yield WARNING, own.label, what, to_do


def _way(link: Link) -> str:
    via = f" from {link.via}" if link.via else ""
    return f"{link.address} on {link.device}{via}"


def _clocks(survey: Survey) -> Told:
    told = set()
    for link in survey.links:
        pair = frozenset((link.source, link.target))
        if link.failure or pair in told or abs(link.clock_s) < _CLOCK_S:
            continue
        told.add(pair)
        own, other = survey.hosts[link.source].label, survey.hosts[link.target].label
        how = "ahead of" if link.clock_s > 0 else "behind"
        what = f"its clock is {abs(link.clock_s):.1f} s {how} that of {own}"
        yield WARNING, other, what, "let NTP set the clocks (chronyc tracking, timedatectl)"


# Names and address families


def _names(survey: Survey) -> Told:
    severity = WARNING if len(survey.hosts) > 1 else NOTE
    for one in survey.hosts:
        own = next((o.address for o in one.networks if not o.loopback), "its address")
        to_do = (
            f'have /etc/hosts or the name service say "{own} {one.name}"; pycoll exchanges '
            "addresses and needs no names, but torchrun, Gloo and MPI may offer this one to others"
        )
        loopback = [text for text in one.addresses if _is_loopback(text)]
        if one.unresolved:
            what = f"its own name {one.name} does not resolve ({one.unresolved})"
            yield severity, one.label, what, to_do
        elif loopback and one.name != "localhost":
            what = f"its own name {one.name} resolves to {loopback[0]}, which only it can reach"
            yield severity, one.label, what, to_do


def _is_loopback(text: str) -> bool:
    return ipaddress.ip_address(text.partition("%")[0]).is_loopback


def _ipv6(survey: Survey) -> Told:
    for source, one in enumerate(survey.hosts):
        lost = [
            link
            for link in survey.links
            if link.source == source and ":" in link.address and link.failure == NO_NETWORK
        ]
        own = [o.address for o in one.networks if ":" in o.address and not o.loopback]
        if lost:
            names = ", ".join(dict.fromkeys(survey.hosts[link.target].label for link in lost))
            what = f"no IPv6 route to {lost[0].address} of {names}"
            to_do = (
                "add a route (ip -6 route), or remove the addresses; IPv4 is used where it works"
            )
            yield WARNING, one.label, what, to_do
        elif own and not one.routes_ipv6:
            what = f"it has the IPv6 address {own[0]}, and no IPv6 default route"
            to_do = "nothing if all hosts are in its network; else add a route (ip -6 route)"
            yield NOTE, one.label, what, to_do


# Limits of one host


def _memory(survey: Survey) -> Told:
    for one in survey.hosts:
        if one.memfd:
            what = f"shared memory cannot be made: memfd_create or mmap failed ({one.memfd})"
            to_do = "allow memfd_create in the container's seccomp profile, or set "
            yield ERROR, one.label, what, to_do + "PYCOLL_TRANSPORTS=tcp"
        if one.rdma and UNLIMITED < one.memlock < _MEMLOCK_LOW:
            what = f"only {size_text(one.memlock)} of memory may be locked, and RDMA locks arrays"
            yield WARNING, one.label, what, "raise the limit: ulimit -l unlimited, limits.conf"
        if one.shm <= _SHM_LOW:
            what = f"/dev/shm has {size_text(one.shm)}"
            to_do = "nothing for pycoll; torch's DataLoader wants more: docker run --shm-size=1g"
            yield NOTE, one.label, what, to_do
        if one.ptrace > 0:
            what = f"yama's ptrace_scope is {one.ptrace}: processes do not read each other's memory"
            yield NOTE, one.label, what, "nothing for pycoll; Open MPI's vader/smsc cma wants 0"


def _files(survey: Survey) -> Told:
    total = sum(one.ranks for one in survey.hosts)
    for one in survey.hosts:
        needed = max(_FILES_LOW, _FILES_OWN + _FILES_PER_RANK * total)
        if UNLIMITED < one.files < needed:
            what = f"a process may open {one.files} files; {needed} are advisable"
            to_do = f"ulimit -n {needed}"
            if UNLIMITED < one.files_hard < needed:
                to_do += f"; the hard limit is {one.files_hard}: limits.conf, or the container's"
            yield WARNING, one.label, what, to_do


def _cores(survey: Survey) -> Told:
    for one in survey.hosts:
        usable = min(one.cores, one.quota) if one.quota else one.cores
        limit = f"a quota allows {one.quota:g} of {one.cores} cores at a time"
        if one.ranks > usable:
            what = f"{one.ranks} ranks share {usable:g} cores"
            what += f" ({limit})" if one.quota and one.quota < one.cores else ""
            yield WARNING, one.label, what, "start fewer ranks here, or give the host more cores"
        elif one.quota and one.quota < one.cores:
            yield NOTE, one.label, limit, "start at most as many ranks; pycoll counts the quota"


CHECKS: tuple[Check, ...] = (
    Check("hosts", "every host answers and takes part to the end", _absent),
    Check("settings", "PYCOLL_* can be read, interfaces exist, a port is free", _settings),
    Check("machines", "no two names mean one machine", _machines),
    Check("versions", "pycoll, Python, NumPy and torch are alike", _versions),
    Check("reach", "every host reaches every other one, by each interface", _reach),
    Check("clocks", "clocks differ by less than half a second", _clocks),
    Check("names", "the host's own name does not mean loopback", _names),
    Check("ipv6", "IPv6 addresses have routes", _ipv6),
    Check("memory", "shared memory, locked memory, /dev/shm, ptrace_scope", _memory),
    Check("files", "enough open files for the ranks", _files),
    Check("cores", "enough cores, and processor time by quota, for the ranks", _cores),
)
