"""What a machine's links cost, as ``pycoll tune`` measured it, in a file per machine.

The file is ``$XDG_CACHE_HOME/pycoll/FINGERPRINT.json`` (``~/.cache`` if unset), or what
PYCOLL_TUNING names; "off" there means the built-in values. All ranks of a communicator must choose
alike, so its rank 0 reads its file and tells the text to the others when they join; their own files
are not read. A file that is broken, of another version or of another machine is refused with the
reason: by an error where PYCOLL_TUNING names it, by a warning and the built-in values where it was
found.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import platform
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pycoll.config import DEFAULT_TRANSPORTS, Config
from pycoll.errors import InvalidArgumentError
from pycoll.model import LINKS, SEGMENT_BYTES, Link, Parameters

#: Of the file's layout and of what its numbers mean; files of other versions are refused.
SCHEMA = 1
OFF = "off"
SEGMENT_BYTES_MIN = 4096
#: A file is a few hundred bytes; more than this is something else.
_FILE_BYTES_MAX = 1 << 16
_BUILT_IN = "built in"


@dataclass(frozen=True)
class Medium:
    """One transport: its link inside a host, and how long its segments should be."""

    link: Link
    segment_bytes: int = SEGMENT_BYTES


@dataclass(frozen=True)
class Tuning:
    """The values in use. ``origin`` says in words where they come from."""

    media: Mapping[str, Medium] = field(
        default_factory=lambda: {name: Medium(LINKS[name]) for name in DEFAULT_TRANSPORTS}
    )
    origin: str = _BUILT_IN

    def parameters(self, inside: str = "shm", several_hosts: bool = False) -> Parameters:
        """For a communicator whose ranks on one host talk over ``inside``.

        tcp was measured on one machine. A network between hosts is taken to be no faster than that,
        and no faster than the built-in values.
        """
        near, far, known = self.media[inside], self.media["tcp"], LINKS["tcp"]
        across = replace(
            far.link,
            alpha=max(far.link.alpha, known.alpha),
            beta=max(far.link.beta, known.beta),
        )
        segment_bytes = far.segment_bytes if several_hosts else near.segment_bytes
        return Parameters(near.link, across, segment_bytes, self.origin)

    def to_text(self) -> str:
        """For the other ranks; empty for the built-in values."""
        if self.origin == _BUILT_IN:
            return ""
        return json.dumps({"origin": self.origin, "media": _media_as_json(self)})


BUILT_IN = Tuning()


def from_text(text: str) -> Tuning:
    """What ``to_text`` told. InvalidArgumentError for anything else."""
    if not text:
        return BUILT_IN
    try:
        told = json.loads(text)
        return Tuning(_media(told["media"]), str(told["origin"]))
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidArgumentError(f"rank 0 told a tuning that cannot be read: {error}") from None


# Which machine, and which file


@functools.lru_cache(maxsize=1)
def fingerprint() -> str:
    """Equal on two machines only if one's figures hold for the other."""
    facts = (platform.machine(), _processor(), str(os.cpu_count()), _text("/etc/machine-id"))
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def _processor() -> str:
    for line in _text("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def default_path() -> Path | None:
    """This machine's file, there or not; None where no folder for it is known."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification says to ignore relative paths.
    if os.path.isabs(base):
        folder = Path(base)
    else:
        try:
            folder = Path.home() / ".cache"
        except RuntimeError:
            return None
    return folder / "pycoll" / f"{fingerprint()}.json"


def find(config: Config) -> Tuning:
    """The values that this process would bring into a communicator.

    InvalidArgumentError if PYCOLL_TUNING names a file that cannot be used.
    """
    if config.tuning == OFF:
        return BUILT_IN
    if config.tuning is not None:
        return load(Path(config.tuning))
    path = default_path()
    if path is None or not path.exists():
        return BUILT_IN
    try:
        return load(path)
    except InvalidArgumentError as error:
        warnings.warn(f"{error}; the built-in values are used instead", stacklevel=2)
        return BUILT_IN


def text_of(config: Config) -> str:
    """What rank 0 tells when it joins. Raises as ``find`` does."""
    return find(config).to_text()


# The file


def load(path: Path) -> Tuning:
    """Read and check a file. InvalidArgumentError with path and reason if it cannot be used."""
    try:
        if path.stat().st_size > _FILE_BYTES_MAX:
            raise ValueError(f"it has more than {_FILE_BYTES_MAX} bytes")
        told = json.loads(path.read_bytes())
        media = _checked(told)
    except OSError as error:
        raise _unusable(path, error.strerror or str(error)) from None
    except (ValueError, TypeError) as error:
        raise _unusable(path, str(error)) from None
    return Tuning(media, f"{path} of {told.get('made', 'unknown date')}")


def store(tuning: Tuning, path: Path, made: str) -> None:
    """Write the file in one step: readers see the old one or the new one. OSError if it fails."""
    told = {
        "schema": SCHEMA,
        "machine": fingerprint(),
        "processor": _processor(),
        "made": made,
        "media": _media_as_json(tuning),
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


def _unusable(path: Path, why: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"tuning file {str(path)!r} cannot be used: {why}; run pycoll tune, or set "
        "PYCOLL_TUNING=off"
    )


def _media_as_json(tuning: Tuning) -> dict[str, Any]:
    return {
        name: {**asdict(medium.link), "segment_bytes": medium.segment_bytes}
        for name, medium in tuning.media.items()
    }


def _checked(told: Any) -> dict[str, Medium]:
    if not isinstance(told, dict):
        raise ValueError("it is no JSON object")
    if told.get("schema") != SCHEMA:
        raise ValueError(f"its schema is {told.get('schema')!r}, expected {SCHEMA}")
    if told.get("machine") != fingerprint():
        raise ValueError(
            f"it was made on machine {told.get('machine')!r}, and this is {fingerprint()!r}"
        )
    return _media(told.get("media"))


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
}


def _medium(name: str, told: Any) -> Medium:
    names = {*_RANGES, "cache_bytes", "segment_bytes"}
    if not isinstance(told, dict) or set(told) != names:
        raise ValueError(f"{name} must have {', '.join(sorted(names))}")
    for word, (low, high) in _RANGES.items():
        value = told[word]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name}.{word} is {value!r}: expected a number")
        if not (math.isfinite(value) and low <= value <= high):
            raise ValueError(f"{name}.{word} is {value!r}: expected {low:g} to {high:g}")
    segment_bytes = _power_of_two(
        f"{name}.segment_bytes", told["segment_bytes"], SEGMENT_BYTES_MIN, SEGMENT_BYTES
    )
    cache_bytes = _power_of_two(f"{name}.cache_bytes", told["cache_bytes"], 1 << 10, 1 << 40)
    values = {word: float(told[word]) for word in _RANGES}
    return Medium(Link(**values, cache_bytes=cache_bytes), segment_bytes)


def _power_of_two(name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} is {value!r}: expected a whole number")
    if not low <= value <= high or value & (value - 1):
        raise ValueError(f"{name} is {value}: expected a power of two from {low} to {high}")
    return value


def local_parameters(config: Config, several_hosts: bool = False) -> Parameters:
    """What a job started here would use; for explanations."""
    inside = "shm" if "shm" in config.transports else "tcp"
    return find(config).parameters(inside, several_hosts)
