"""A checkpoint on disk: safetensors files of arrays, and a manifest that names them.

The writer renames the manifest to its place after all its files are on the disk. So a directory
always holds one whole checkpoint, the earlier or the new one. Then the writer removes files that no
manifest names; if it is killed before, the next checkpoint removes them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pycoll.errors import InvalidArgumentError, PycollError
from pycoll.types import COMPLEX, ITEM_BYTES, DType, numpy_dtype
from pycoll.untrusted import json_object, read_file, read_json

Array = npt.NDArray[Any]

MANIFEST = "manifest.json"
FORMAT = "pycoll store"
#: The version of the manifest. A reader refuses others.
VERSION = 1
#: The bytes after which the writer begins a new file. Only the last array of a file exceeds them.
FILE_BYTES = 256 << 20
_MANIFEST_BYTES_MAX = 1 << 28
_FILE = re.compile(r"values-[0-9a-f]{16}-[0-9]{5}\.safetensors$")
_FACTS = {
    "format": str,
    "version": int,
    "consistency": str,
    "round": int,
    "clocks": list,
    "optimizer": str,
    "keys": list,
    "tables": list,
    "files": list,
    "digest": str,
}
_FILE_FACTS = {"name": str, "bytes": int, "sha256": str, "arrays": list}


def path_of(path: Any) -> Path:
    """Return the path of an argument. Raises InvalidArgumentError for anything else."""
    try:
        text = os.fspath(path)
    except TypeError:
        text = b""
    if not isinstance(text, str) or not text or "\0" in text:
        raise InvalidArgumentError(f"path is {path!r}: expected the name of a directory")
    return Path(text)


def _library() -> Any:
    """Return the package that writes and reads files of arrays."""
    try:
        import safetensors
        import safetensors.numpy
    except ImportError:
        raise InvalidArgumentError(
            "checkpoints of stores need safetensors, which the extra [checkpoint] installs: "
            "pip install '.[checkpoint]' in a checkout of pycoll"
        ) from None
    return safetensors


def as_file_type(data: Array, dtype: int, shape: tuple[int, ...]) -> Array:
    """Return the bytes of an array in a type of the file format.

    Types that NumPy lacks become whole numbers with the same bits. A complex number becomes two
    numbers, in a last axis of its own.
    """
    kind = DType(dtype)
    if kind in COMPLEX:
        half = np.float32 if kind is DType.COMPLEX64 else np.float64
        return data.view(half).reshape(*shape, 2)
    if kind in (DType.BFLOAT16, DType.FLOAT8_E4M3, DType.FLOAT8_E5M2):
        return data.view(np.uint16 if ITEM_BYTES[kind] == 2 else np.uint8).reshape(shape)
    made: Array = data.view(numpy_dtype(kind)).reshape(shape)
    return made


class CheckpointWriter:
    """Writes a checkpoint into a directory, which it makes. ``finish`` makes it the newest one.

    Raises InvalidArgumentError for a directory in which it cannot write, and where safetensors is
    missing; methods raise OSError, and the errors of safetensors.
    """

    def __init__(self, path: Any) -> None:
        self.path = path_of(path)
        self._save = _library().numpy.save_file
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidArgumentError(f"path is {str(path)!r}: {error.strerror}") from None
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise InvalidArgumentError(f"path is {str(path)!r}: this process may not write there")
        self._name = f"values-{secrets.token_hex(8)}"
        self._waiting: dict[str, Array] = {}
        self._files: list[dict[str, Any]] = []
        #: Whether the manifest is in its place.
        self.is_newest = False

    def add(self, name: str, array: Array) -> None:
        """Write an array, now or in ``finish``. The caller must not change it any more."""
        self._waiting[name] = array
        if sum(one.nbytes for one in self._waiting.values()) >= FILE_BYTES:
            self._flush()

    def _flush(self) -> None:
        if not self._waiting:
            return
        file = self.path / f"{self._name}-{len(self._files):05d}.safetensors"
        self._save(self._waiting, file)
        nbytes, digest = _digest_of(file, sync=True)
        facts = {"name": file.name, "bytes": nbytes, "sha256": digest}
        self._files.append({**facts, "arrays": list(self._waiting)})
        self._waiting = {}

    def finish(self, facts: dict[str, Any]) -> None:
        """Write the manifest with these facts, and rename it to its place."""
        self._flush()
        manifest = {"format": FORMAT, "version": VERSION, **facts, "files": self._files}
        manifest["digest"] = _digest(manifest)
        temporary = self.path / f"{self._name}.json"
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(json.dumps(manifest, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(self.path)
        os.replace(temporary, self.path / MANIFEST)
        self.is_newest = True
        _sync_folder(self.path)
        self._remove_others()

    def _remove_others(self) -> None:
        named = {one["name"] for one in self._files}
        for name in _own_files(self.path):
            if name not in named:
                with contextlib.suppress(OSError):
                    os.unlink(self.path / name)

    def abandon(self) -> None:
        """Remove the written files, unless they are the newest checkpoint already."""
        for name in _own_files(self.path):
            if name.startswith(self._name) and not self.is_newest:
                with contextlib.suppress(OSError):
                    os.unlink(self.path / name)


class CheckpointReader:
    """Reads a checkpoint. ``facts``: the manifest.

    All files are compared with their digests first. Raises InvalidArgumentError for a directory
    without a whole checkpoint of this format.
    """

    def __init__(self, path: Any) -> None:
        self.path = path_of(path)
        self._open = _library().safe_open
        self.facts = self._manifest()
        self._files: dict[str, str] = {}
        for one in self.facts["files"]:
            self._check(one)

    def _manifest(self) -> dict[str, Any]:
        if not self.path.is_dir():
            what = "a file" if self.path.exists() else "not there"
            raise self.invalid(f"it is {what}; expected a directory of Store.checkpoint")
        try:
            data = read_json(read_file(self.path / MANIFEST, _MANIFEST_BYTES_MAX))
        except FileNotFoundError:
            raise self.invalid(
                f"there is no {MANIFEST}: no checkpoint was completed in this directory"
            ) from None
        except (OSError, ValueError) as error:
            raise self.invalid(f"{MANIFEST} cannot be read: {error}") from None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise self.invalid(f"{MANIFEST} does not describe a checkpoint of a store")
        if data.get("version") != VERSION:
            raise self.invalid(
                f"{MANIFEST} has version {data.get('version')!r}: this pycoll reads {VERSION}"
            )
        try:
            facts = json_object(data, _FACTS)
            digest = facts.pop("digest")
        except ValueError as error:
            raise self.invalid(f"{MANIFEST} is damaged: {error}") from None
        if digest != _digest(facts):
            raise self.invalid(f"{MANIFEST} is damaged: its digest is another one")
        return facts

    def _check(self, one: Any) -> None:
        try:
            facts = json_object(one, _FILE_FACTS)
        except ValueError as error:
            raise self.invalid(f"{MANIFEST} is damaged: {error}") from None
        name = facts["name"]
        if not _FILE.match(name):
            raise self.invalid(f"{MANIFEST} names {name!r}, which is no file of a checkpoint")
        try:
            nbytes, digest = _digest_of(self.path / name)
        except OSError as error:
            raise self.invalid(f"{name} cannot be read: {error.strerror}") from None
        if nbytes != facts["bytes"]:
            raise self.invalid(f"{name} is damaged: {nbytes} bytes, not {facts['bytes']}")
        if digest != facts["sha256"]:
            raise self.invalid(f"{name} is damaged: its sha256 is {digest}, not {facts['sha256']}")
        self._files.update(dict.fromkeys(facts["arrays"], name))

    def array(self, name: str, nbytes: int) -> Array:
        """Return the bytes of an array. Raises InvalidArgumentError for another number of bytes."""
        if name not in self._files:
            raise self.invalid(f"no file holds {name!r}")
        with self._open(self.path / self._files[name], framework="np") as file:
            found: Array = np.ascontiguousarray(file.get_tensor(name))
        if found.nbytes != nbytes:
            raise self.invalid(f"{name!r} has {found.nbytes} bytes: expected {nbytes}")
        return found.reshape(-1).view(np.uint8)

    def invalid(self, why: str) -> InvalidArgumentError:
        """Return the error that names the directory."""
        return InvalidArgumentError(f"path is {str(self.path)!r}: {why}")


def has_checkpoint(path: Any) -> bool:
    """Return whether a checkpoint was completed in a directory."""
    return (path_of(path) / MANIFEST).exists()


@contextlib.contextmanager
def abandon_on_error(writer: CheckpointWriter) -> Iterator[None]:
    """Remove the written files if the block fails, and translate errors of the system.

    Raises PycollError for a directory in which writing fails.
    """
    try:
        yield
    except (OSError, _library().SafetensorError) as error:
        writer.abandon()
        if isinstance(error, PycollError):
            raise
        state = "may be lost with this host" if writer.is_newest else "was not written"
        raise PycollError(
            f"checkpoint in {str(writer.path)!r} {state}: {error}; an earlier one is whole",
            operation="ps",
        ) from error
    except BaseException:
        writer.abandon()
        raise


def _own_files(path: Path) -> list[str]:
    endings = re.compile(r"values-[0-9a-f]{16}(-[0-9]{5}\.safetensors|\.json)$")
    return [name for name in os.listdir(path) if endings.match(name)]


def _digest(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _digest_of(path: Path, sync: bool = False) -> tuple[int, str]:
    """Return the bytes and the SHA-256 of a file, and with ``sync`` wait for the disk first."""
    made, nbytes = hashlib.sha256(), 0
    with open(path, "rb", buffering=0) as file:
        if sync:
            os.fsync(file.fileno())
        while piece := file.read(4 << 20):
            made.update(piece)
            nbytes += len(piece)
    return nbytes, made.hexdigest()


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
