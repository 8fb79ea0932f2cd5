"""Tuning files: the costs of links and codecs of a machine, as ``pycoll tune`` measured them.

The file is ``$XDG_CACHE_HOME/pycoll/FINGERPRINT.json`` (``~/.cache`` if unset), or the file that
PYCOLL_TUNING names; PYCOLL_TUNING=off selects the built-in values. All ranks of a communicator must
choose alike. Its rank 0 therefore reads its file and sends the text to the other ranks when they
join; the other ranks do not read their files.

If a job on several hosts was tuned, the file also has the costs of their network. If it has several
networks, the choice between them is a function of the host names, so ranks agree on it too.

A file that is broken, lacks a field, or is of another schema or machine is refused with the
reason. If PYCOLL_TUNING names it, the refusal is an error. If it was found in its default place,
pycoll warns and uses the built-in values.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import platform
import warnings
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from pycoll.config import DEFAULT_TRANSPORTS, Config
from pycoll.cores import cpu_quota
from pycoll.cost import codec_rates, slot_stores
from pycoll.cost.codec_rates import CodecRate
from pycoll.cost.model import LINKS, SEGMENT_BYTES, Link, Parameters
from pycoll.errors import InvalidArgumentError
from pycoll.untrusted import read_file, read_json

if TYPE_CHECKING:
    # Ranks other than 0 read no file, so they avoid the import.
    from pathlib import Path

#: The version of the file's layout and of the meaning of its numbers; others are refused.
SCHEMA = 2
OFF = "off"
SEGMENT_BYTES_MIN = 4096
#: The most bytes of a file, which has link values and host names; a larger file is refused.
_FILE_BYTES_MAX = 1 << 20
#: The most networks of a file, and the most host names of all its networks together. The limits
#: bound the text that rank 0 sends when ranks join.
_NETWORKS_MAX = 8
_HOSTS_MAX = 2048
_NAMES_SHOWN = 3
_ACROSS = ("tcp", "verbs")
#: The transport of a network between the domains of one host.
DOMAINS = "shm"
_BUILT_IN = "built in"


class Medium(NamedTuple):
    """The values of one transport: its link inside a host, and its segment length in bytes."""

    link: Link
    segment_bytes: int = SEGMENT_BYTES


_BUILT_IN_MEDIA = {name: Medium(LINKS[name]) for name in DEFAULT_TRANSPORTS}


class Network(NamedTuple):
    """The costs of the network between ``hosts``, measured by all ranks of a job on them.

    ``hosts``: their names, sorted. ``transport``: tcp or verbs, or shm for the links between the
    domains of one host, which then take the place of hosts. ``across`` is the link between
    hosts. ``inside`` is the shared memory link of the slowest host, or None if each host had one
    rank only. ``made`` is the date of the measurement.
    """

    hosts: tuple[str, ...]
    transport: str
    across: Medium
    inside: Medium | None = None
    made: str = ""

    def __str__(self) -> str:
        if self.transport == DOMAINS:
            return f"shared memory between domains of {', '.join(self.hosts)}, {self.made}"
        names = self.hosts if len(self.hosts) <= _NAMES_SHOWN else (*self.hosts[:2], "...")
        return f"{self.transport} between {', '.join(names)} ({len(self.hosts)} hosts), {self.made}"


class Tuning(NamedTuple):
    """The values in use.

    ``origin`` is a text that names their source; ``networks`` are sorted, the latest first.
    ``slot_stores`` is a value of `pycoll.cost.slot_stores`, or None if it was not measured.
    ``codecs``: the rates of codecs on one core.
    """

    media: Mapping[str, Medium] = _BUILT_IN_MEDIA
    origin: str = _BUILT_IN
    networks: tuple[Network, ...] = ()
    slot_stores: str | None = None
    codecs: tuple[CodecRate, ...] = codec_rates.BUILT_IN

    def network_of(self, hosts: Collection[str], transport: str | None) -> Network | None:
        """The network that fits these hosts best.

        The order is: the network of exactly these hosts, then the network of the fewest hosts that
        include them, then the network with the most of these hosts. Among equals the latest
        network wins. The result is None if nothing was measured over ``transport``; None stands for
        any transport between hosts.
        """
        wanted = set(hosts)
        kinds = _ACROSS if transport is None else (transport,)
        fitting = [one for one in self.networks if one.transport in kinds]

        def order(one: Network) -> tuple[int, int]:
            return -len(wanted.intersection(one.hosts)), len(one.hosts)

        return min(fitting, key=order, default=None) if wanted else next(iter(fitting), None)

    def with_network(self, network: Network) -> Tuning:
        """Adds a network and drops the oldest ones beyond the limits.

        An earlier network of the same hosts and transport is replaced.
        """
        kept, names_left = [network], _HOSTS_MAX - len(network.hosts)
        for one in self.networks:
            if (one.hosts, one.transport) == (network.hosts, network.transport):
                continue
            names_left -= len(one.hosts)
            if names_left < 0 or len(kept) == _NETWORKS_MAX:
                break
            kept.append(one)
        return self._replace(networks=tuple(kept))

    def parameters(
        self,
        inside: str = "shm",
        several_hosts: bool = False,
        hosts: Collection[str] = (),
        transport: str | None = None,
    ) -> Parameters:
        """The parameters of a communicator.

        Ranks of one host use the transport ``inside``, ranks of different ``hosts`` use
        ``transport``. Without host names the hosts measured last count. If no network was measured,
        tcp between hosts is assumed to be no faster than tcp on this machine and no faster than the
        built-in values; verbs are assumed to have the built-in values.
        """
        links = self._links(inside, several_hosts, hosts, transport)
        return links._replace(codecs=self.codecs)

    def _links(
        self, inside: str, several_hosts: bool, hosts: Collection[str], transport: str | None
    ) -> Parameters:
        """The parameters with the built-in rates of codecs."""
        network = self.network_of(hosts, transport) if several_hosts else None
        if network is not None:
            near = self._medium(inside)
            if network.inside is not None and inside == "shm":
                near = network.inside
            origin = f"{self.origin}; {network}"
            return Parameters(near.link, network.across.link, network.across.segment_bytes, origin)
        near, far, known = self._medium(inside), self._medium(transport or "tcp"), LINKS["tcp"]
        across = far.link
        if transport != "verbs":
            across = across._replace(
                alpha=max(across.alpha, known.alpha), beta=max(across.beta, known.beta)
            )
        if several_hosts:
            return Parameters(near.link, across, far.segment_bytes, self.origin)
        alone = Parameters(near.link, across, near.segment_bytes, self.origin)
        return self._with_domains(alone, inside, hosts)

    def _with_domains(self, alone: Parameters, inside: str, hosts: Collection[str]) -> Parameters:
        """Adds the measured links between domains of these hosts; without names, the latest."""
        network = self.network_of(hosts, DOMAINS) if inside == "shm" else None
        if network is None or not set(hosts) <= set(network.hosts):
            return alone
        near = network.inside.link if network.inside is not None else alone.inside
        origin = f"{self.origin}; {network}"
        return alone._replace(inside=near, between=network.across.link, origin=origin)

    def _medium(self, transport: str) -> Medium:
        """The values of the transport on this machine.

        Verbs are measured between hosts only. Before and during that measurement they have the
        built-in link and the segment length of tcp.
        """
        return self.media.get(transport) or self.media["tcp"]._replace(link=LINKS[transport])

    def to_text(self) -> str:
        """The text for the other ranks; empty for the built-in values."""
        if self == BUILT_IN:
            return ""
        return json.dumps({"origin": self.origin, **_as_json(self)})


BUILT_IN = Tuning()


def from_text(text: str) -> Tuning:
    """The tuning that ``to_text`` encoded; raises InvalidArgumentError for any other text."""
    if not text:
        return BUILT_IN
    try:
        data = read_json(text)
        return _parse_values(data)._replace(origin=str(data["origin"]))
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidArgumentError(f"rank 0 sent a tuning that cannot be read: {error}") from None


# The machine and its file


@functools.lru_cache(maxsize=1)
def fingerprint() -> str:
    """A digest of the machine, equal only on machines that can share measured values.

    It contains the number of processors and, if that is less, the quota of processor time. The
    quota is that of a container or a job, so its ranks share it. Affinity masks do not count:
    launchers bind each rank to its own cores, and all ranks of a job must find the same file.
    """
    cores, quota = os.cpu_count() or 1, cpu_quota()
    count = f"{cores}" if quota is None or quota.cores >= cores else f"{quota.cores:g} of {cores}"
    facts = (platform.machine(), processor_name(), count, _text("/etc/machine-id"))
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def processor_name() -> str:
    """The processor's name; empty if the system does not report it."""
    for line in _text("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""


def default_path() -> Path | None:
    """The path of this machine's file, which need not exist; None if no cache folder is known."""
    from pathlib import Path

    name = _default_name()
    return None if name is None else Path(name)


def _default_name() -> str | None:
    """The path as a string: without pathlib, whose import would delay joining."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification requires to ignore relative paths.
    if not os.path.isabs(base):
        home = os.path.expanduser("~")
        if not os.path.isabs(home):
            return None
        base = os.path.join(home, ".cache")
    return os.path.join(base, "pycoll", f"{fingerprint()}.json")


def find(config: Config) -> Tuning:
    """The values that this process brings into a communicator.

    Raises InvalidArgumentError if PYCOLL_TUNING names a file that cannot be used.
    """
    if config.tuning == OFF:
        return BUILT_IN
    if config.tuning is not None:
        return load(config.tuning)
    name = _default_name()
    if name is None or not os.path.exists(name):
        return BUILT_IN
    try:
        return load(name)
    except InvalidArgumentError as error:
        warnings.warn(f"{error}; the built-in values are used instead", stacklevel=2)
        return BUILT_IN


# The file


def load(path: Path | str) -> Tuning:
    """Reads and checks a file; raises InvalidArgumentError with path and reason."""
    try:
        data = read_json(read_file(path, _FILE_BYTES_MAX))
        found = _parse_tuning(data)
    except OSError as error:
        raise _unusable(path, error.strerror or str(error)) from None
    except (ValueError, TypeError) as error:
        raise _unusable(path, str(error)) from None
    return found._replace(origin=f"{path} of {data['made']}")


def store(tuning: Tuning, path: Path, made: str) -> None:
    """Writes the file atomically: readers see the old file or the new one.

    Raises OSError if it fails.
    """
    data = {
        "schema": SCHEMA,
        "machine": fingerprint(),
        "processor": processor_name(),
        "made": made,
        **_as_json(tuning),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    import tempfile

    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".tuning-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(json.dumps(data, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _unusable(path: Path | str, why: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"tuning file {str(path)!r} cannot be used: {why}; run pycoll tune, or set "
        "PYCOLL_TUNING=off"
    )


def _as_json(tuning: Tuning) -> dict[str, Any]:
    return {
        "media": _media_as_json(tuning),
        "networks": [network_as_json(one) for one in tuning.networks],
        "slot_stores": tuning.slot_stores,
        "codecs": codec_rates.as_json(tuning.codecs),
    }


def _media_as_json(tuning: Tuning) -> dict[str, Any]:
    return {name: _medium_as_json(medium) for name, medium in tuning.media.items()}


def _medium_as_json(medium: Medium) -> dict[str, Any]:
    return {**medium.link._asdict(), "segment_bytes": medium.segment_bytes}


def network_as_json(network: Network) -> dict[str, Any]:
    """The JSON value that ``network_from_json`` reads."""
    return {
        "hosts": list(network.hosts),
        "transport": network.transport,
        "made": network.made,
        "across": _medium_as_json(network.across),
        "inside": None if network.inside is None else _medium_as_json(network.inside),
    }


def network_from_json(data: Any) -> Network:
    """The network of a JSON value.

    Raises ValueError that names the entry that is missing, unknown or out of range.
    """
    names = {"hosts", "transport", "made", "across", "inside"}
    if not isinstance(data, dict) or set(data) != names:
        raise ValueError(f"a network must have {', '.join(sorted(names))}")
    hosts = data["hosts"]
    if not (isinstance(hosts, list) and hosts and all(isinstance(one, str) for one in hosts)):
        raise ValueError(f"network.hosts is {hosts!r}: expected names")
    if data["transport"] not in (*_ACROSS, DOMAINS):
        raise ValueError(f"network.transport is {data['transport']!r}: expected tcp, verbs or shm")
    inside = None if data["inside"] is None else _medium("network.inside", data["inside"])
    across = _medium("network.across", data["across"])
    return Network(tuple(hosts), data["transport"], across, inside, str(data["made"]))


def _networks(data: Any) -> tuple[Network, ...]:
    if not isinstance(data, list) or len(data) > _NETWORKS_MAX:
        raise ValueError(f"networks must be a list of at most {_NETWORKS_MAX}")
    return tuple(map(network_from_json, data))


def _parse_tuning(data: Any) -> Tuning:
    if not isinstance(data, dict):
        raise ValueError("it is not a JSON object")
    if data.get("schema") != SCHEMA:
        raise ValueError(f"its schema is {data.get('schema')!r}, expected {SCHEMA}")
    if data.get("machine") != fingerprint():
        raise ValueError(
            f"it was made on machine {data.get('machine')!r}, and this is {fingerprint()!r}"
        )
    if "made" not in data:
        raise ValueError("it lacks made")
    return _parse_values(data)


def _parse_values(data: Any) -> Tuning:
    """The values that ``_as_json`` wrote; raises ValueError or TypeError for anything else."""
    missing = [name for name in _as_json(BUILT_IN) if name not in data]
    if missing:
        raise ValueError(f"it lacks {', '.join(missing)}")
    return Tuning(
        media=_media(data["media"]),
        networks=_networks(data["networks"]),
        slot_stores=slot_stores.parse_kind(data["slot_stores"]),
        codecs=codec_rates.parse_rates(data["codecs"]),
    )


def _media(data: Any) -> dict[str, Medium]:
    """The media of a JSON value.

    Raises ValueError that names the entry that is missing, unknown or out of range.
    """
    if not isinstance(data, dict) or set(data) != set(DEFAULT_TRANSPORTS):
        raise ValueError(f"media must be {', '.join(DEFAULT_TRANSPORTS)}")
    return {name: _medium(name, data[name]) for name in DEFAULT_TRANSPORTS}


#: The lowest and highest accepted value of each figure, in seconds or seconds per byte.
_RANGES = {
    "alpha": (1e-10, 10.0),
    "beta": (1e-14, 1.0),
    "gamma": (1e-14, 1.0),
    "overhead": (0.0, 10.0),
    "spill": (0.0, 1.0),
    "flow": (0.0, 1.0),
    "reach": (0.0, 1.0),
    "sustained": (0.0, 1.0),
    "call": (0.0, 10.0),
}


def _medium(name: str, data: Any) -> Medium:
    names = {*_RANGES, "cache_bytes", "segment_bytes"}
    if not isinstance(data, dict) or set(data) != names:
        raise ValueError(f"{name} must have {', '.join(sorted(names))}")
    for word, (low, high) in _RANGES.items():
        value = data[word]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name}.{word} is {value!r}: expected a number")
        if not (math.isfinite(value) and low <= value <= high):
            raise ValueError(f"{name}.{word} is {value!r}: expected {low:g} to {high:g}")
    segment_bytes = _whole(
        f"{name}.segment_bytes", data["segment_bytes"], SEGMENT_BYTES_MIN, SEGMENT_BYTES, True
    )
    cache_bytes = _whole(f"{name}.cache_bytes", data["cache_bytes"], 1 << 10, 1 << 40)
    values = {word: float(data[word]) for word in _RANGES}
    return Medium(Link(**values, cache_bytes=cache_bytes), segment_bytes)


def _whole(name: str, value: Any, low: int, high: int, power_of_two: bool = False) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} is {value!r}: expected a whole number")
    if not low <= value <= high or (power_of_two and value & (value - 1)):
        kind = "power of two" if power_of_two else "whole number"
        raise ValueError(f"{name} is {value}: expected a {kind} from {low} to {high}")
    return value


def local_parameters(config: Config, several_hosts: bool = False) -> Parameters:
    """The parameters of a job started on this machine, for explanations."""
    inside = "shm" if "shm" in config.transports else "tcp"
    return find(config).parameters(inside, several_hosts)
