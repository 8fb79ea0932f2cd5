"""What a machine's links cost, as ``pycoll tune`` measured it, in a file per machine.

The file is ``$XDG_CACHE_HOME/pycoll/FINGERPRINT.json`` (``~/.cache`` if unset), or what
PYCOLL_TUNING names; "off" there means the built-in values. All ranks of a communicator must choose
alike, so its rank 0 reads its file and tells the text to the others when they join; their own files
are not read. Where a job on several hosts was tuned, the file also has what their network costs;
which of several networks counts is a function of the hosts' names, so that too is agreed. A file
that is broken, of another version or of another machine is refused with the reason: by an error
where PYCOLL_TUNING names it, by a warning and the built-in values where it was found.
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
from pycoll.errors import InvalidArgumentError
from pycoll.model import LINKS, SEGMENT_BYTES, Link, Parameters
from pycoll.untrusted import read_file, read_json

if TYPE_CHECKING:
    # Ranks other than 0 read no file, and to import it takes milliseconds.
    from pathlib import Path

#: Of the file's layout and of what its numbers mean; files of other versions are refused.
SCHEMA = 1
OFF = "off"
SEGMENT_BYTES_MIN = 4096
#: A file is a few hundred bytes, and the names of hosts; more than this is something else.
_FILE_BYTES_MAX = 1 << 20
#: A file keeps so many networks, and so many names of their hosts together; ranks tell them when
#: they join.
_NETWORKS_MAX = 8
_HOSTS_MAX = 2048
_NAMES_SHOWN = 3
_ACROSS = ("tcp", "verbs")
_BUILT_IN = "built in"


class Medium(NamedTuple):
    """One transport: its link inside a host, and how long its segments should be."""

    link: Link
    segment_bytes: int = SEGMENT_BYTES


_BUILT_IN_MEDIA = {name: Medium(LINKS[name]) for name in DEFAULT_TRANSPORTS}


class Network(NamedTuple):
    """What a job on these hosts measured, all of its ranks together.

    ``hosts``: their names, sorted. ``transport``: tcp or verbs. ``across`` is the link between them
    and ``inside`` that of shared memory on the slowest of them; None if each had one rank only.
    """

    hosts: tuple[str, ...]
    transport: str
    across: Medium
    inside: Medium | None = None
    made: str = ""

    def __str__(self) -> str:
        names = self.hosts if len(self.hosts) <= _NAMES_SHOWN else (*self.hosts[:2], "...")
        return f"{self.transport} between {', '.join(names)} ({len(self.hosts)} hosts), {self.made}"


class Tuning(NamedTuple):
    """The values in use. ``origin`` says in words where they come from; ``networks`` come with the
    latest first."""

    media: Mapping[str, Medium] = _BUILT_IN_MEDIA
    origin: str = _BUILT_IN
    networks: tuple[Network, ...] = ()

    def network_of(self, hosts: Collection[str], transport: str | None) -> Network | None:
        """What is known of these hosts: measured on just them, else on the fewest that include
        them, else on those that have most in common with them; of equals the latest.

        None if nothing was measured over ``transport``, which is any if it is None.
        """
        wanted = set(hosts)
        fitting = [one for one in self.networks if transport in (None, one.transport)]

        def order(one: Network) -> tuple[int, int]:
            return -len(wanted.intersection(one.hosts)), len(one.hosts)

        return min(fitting, key=order, default=None) if wanted else next(iter(fitting), None)

    def with_network(self, network: Network) -> Tuning:
        """The same with this one, in the place of what was known of its hosts; old ones go."""
        kept, room = [network], _HOSTS_MAX - len(network.hosts)
        for one in self.networks:
            if (one.hosts, one.transport) == (network.hosts, network.transport):
                continue
            room -= len(one.hosts)
            if room < 0 or len(kept) == _NETWORKS_MAX:
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
        """For a communicator whose ranks on one host talk over ``inside``, those of different
        ``hosts`` over ``transport``; without names the hosts that were measured last count.

        Where no network was measured, tcp between hosts is taken to be no faster than tcp on this
        machine, and no faster than the built-in values; verbs are taken to be as those say.
        """
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
        segment_bytes = far.segment_bytes if several_hosts else near.segment_bytes
        return Parameters(near.link, across, segment_bytes, self.origin)

    def _medium(self, transport: str) -> Medium:
        """What is known of it on this machine; verbs, which are measured between hosts only, have
        tcp's segments until then, and while they are measured."""
        return self.media.get(transport) or self.media["tcp"]._replace(link=LINKS[transport])

    def to_text(self) -> str:
        """For the other ranks; empty for the built-in values."""
        if self.origin == _BUILT_IN:
            return ""
        return json.dumps({"origin": self.origin, **_as_json(self)})


BUILT_IN = Tuning()


def from_text(text: str) -> Tuning:
    """What ``to_text`` told. InvalidArgumentError for anything else."""
    if not text:
        return BUILT_IN
    try:
        told = read_json(text)
        return Tuning(_media(told["media"]), str(told["origin"]), _networks(told["networks"]))
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidArgumentError(f"rank 0 told a tuning that cannot be read: {error}") from None


# Which machine, and which file


@functools.lru_cache(maxsize=1)
def fingerprint() -> str:
    """Equal on two machines only if one's figures hold for the other."""
    facts = (platform.machine(), processor_name(), str(os.cpu_count()), _text("/etc/machine-id"))
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def processor_name() -> str:
    """The processor's name; empty where the system does not tell."""
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
    """This machine's file, there or not; None where no folder for it is known."""
    from pathlib import Path

    name = _default_name()
    return None if name is None else Path(name)


def _default_name() -> str | None:
    """Without pathlib, whose import is a tenth of what a process needs to join."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification says to ignore relative paths.
    if not os.path.isabs(base):
        home = os.path.expanduser("~")
        if not os.path.isabs(home):
            return None
        base = os.path.join(home, ".cache")
    return os.path.join(base, "pycoll", f"{fingerprint()}.json")


def find(config: Config) -> Tuning:
    """The values that this process would bring into a communicator.

    InvalidArgumentError if PYCOLL_TUNING names a file that cannot be used.
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


def text_of(config: Config) -> str:
    """What rank 0 tells when it joins. Raises as ``find`` does."""
    return find(config).to_text()


# The file


def load(path: Path | str) -> Tuning:
    """Read and check a file. InvalidArgumentError with path and reason if it cannot be used."""
    try:
        told = read_json(read_file(path, _FILE_BYTES_MAX))
        media, networks = _checked(told)
    except OSError as error:
        raise _unusable(path, error.strerror or str(error)) from None
    except (ValueError, TypeError) as error:
        raise _unusable(path, str(error)) from None
    return Tuning(media, f"{path} of {told.get('made', 'unknown date')}", networks)


def store(tuning: Tuning, path: Path, made: str) -> None:
    """Write the file in one step: readers see the old one or the new one. OSError if it fails."""
    told = {
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
            file.write(json.dumps(told, indent=1) + "\n")
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
    }


def _media_as_json(tuning: Tuning) -> dict[str, Any]:
    return {name: _medium_as_json(medium) for name, medium in tuning.media.items()}


def _medium_as_json(medium: Medium) -> dict[str, Any]:
    return {**medium.link._asdict(), "segment_bytes": medium.segment_bytes}


def network_as_json(network: Network) -> dict[str, Any]:
    """What ``network_from_json`` reads."""
    return {
        "hosts": list(network.hosts),
        "transport": network.transport,
        "made": network.made,
        "across": _medium_as_json(network.across),
        "inside": None if network.inside is None else _medium_as_json(network.inside),
    }


def network_from_json(told: Any) -> Network:
    """ValueError naming what is missing, too much or out of range."""
    names = {"hosts", "transport", "made", "across", "inside"}
    if not isinstance(told, dict) or set(told) != names:
        raise ValueError(f"a network must have {', '.join(sorted(names))}")
    hosts = told["hosts"]
    if not (isinstance(hosts, list) and hosts and all(isinstance(one, str) for one in hosts)):
        raise ValueError(f"network.hosts is {hosts!r}: expected names")
    if told["transport"] not in _ACROSS:
        raise ValueError(f"network.transport is {told['transport']!r}: expected tcp or verbs")
    inside = None if told["inside"] is None else _medium("network.inside", told["inside"])
    across = _medium("network.across", told["across"])
    return Network(tuple(hosts), told["transport"], across, inside, str(told["made"]))


def _networks(told: Any) -> tuple[Network, ...]:
    if not isinstance(told, list) or len(told) > _NETWORKS_MAX:
        raise ValueError(f"networks must be a list of at most {_NETWORKS_MAX}")
    return tuple(map(network_from_json, told))


def _checked(told: Any) -> tuple[dict[str, Medium], tuple[Network, ...]]:
    if not isinstance(told, dict):
        raise ValueError("it is no JSON object")
    if told.get("schema") != SCHEMA:
        raise ValueError(f"its schema is {told.get('schema')!r}, expected {SCHEMA}")
    if told.get("machine") != fingerprint():
        raise ValueError(
            f"it was made on machine {told.get('machine')!r}, and this is {fingerprint()!r}"
        )
    return _media(told.get("media")), _networks(told.get("networks", []))


def _media(told: Any) -> dict[str, Medium]:
    """ValueError naming the entry that is missing, too many or out of range."""
    if not isinstance(told, dict) or set(told) != set(DEFAULT_TRANSPORTS):
        raise ValueError(f"media must be {', '.join(DEFAULT_TRANSPORTS)}")
    return {name: _medium(name, told[name]) for name in DEFAULT_TRANSPORTS}


#: Seconds or seconds per byte: lowest and highest that can be meant.
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
#: What files from before there was such a figure leave out; 0 says that there is none.
_LATER = ("flow", "reach", "sustained", "call")


def _medium(name: str, told: Any) -> Medium:
    names = {*_RANGES, "cache_bytes", "segment_bytes"}
    if isinstance(told, dict):
        told = {**dict.fromkeys(_LATER, 0.0), **told}
    if not isinstance(told, dict) or set(told) != names:
        raise ValueError(f"{name} must have {', '.join(sorted(names))}")
    for word, (low, high) in _RANGES.items():
        value = told[word]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name}.{word} is {value!r}: expected a number")
        if not (math.isfinite(value) and low <= value <= high):
            raise ValueError(f"{name}.{word} is {value!r}: expected {low:g} to {high:g}")
    segment_bytes = _whole(
        f"{name}.segment_bytes", told["segment_bytes"], SEGMENT_BYTES_MIN, SEGMENT_BYTES, True
    )
    cache_bytes = _whole(f"{name}.cache_bytes", told["cache_bytes"], 1 << 10, 1 << 40)
    values = {word: float(told[word]) for word in _RANGES}
    return Medium(Link(**values, cache_bytes=cache_bytes), segment_bytes)


def _whole(name: str, value: Any, low: int, high: int, power_of_two: bool = False) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} is {value!r}: expected a whole number")
    if not low <= value <= high or (power_of_two and value & (value - 1)):
        kind = "power of two" if power_of_two else "whole number"
        raise ValueError(f"{name} is {value}: expected a {kind} from {low} to {high}")
    return value


def local_parameters(config: Config, several_hosts: bool = False) -> Parameters:
    """What a job started here would use; for explanations."""
    inside = "shm" if "shm" in config.transports else "tcp"
    return find(config).parameters(inside, several_hosts)
