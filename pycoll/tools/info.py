"""``pycoll info``: prints facts about this installation and machine, and every setting."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
import socket
import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from pycoll.bootstrap.discovery.rails import Port

#: Array libraries and launchers with which pycoll works if they are installed.
_NEIGHBOURS = ("numpy", "ml_dtypes", "torch", "jax", "cupy", "numba", "mpi4py", "matplotlib")
_LAUNCHERS = ("mpirun", "mpiexec", "mpiexec.hydra", "torchrun", "srun")


#: Libraries whose distributions have several names, one per CUDA version.
_DISTRIBUTIONS = {"cupy": ("cupy", "cupy-cuda13x", "cupy-cuda12x")}


def _version(name: str) -> str:
    for distribution in _DISTRIBUTIONS.get(name, (name,)):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "not installed"


def _interfaces() -> str:
    try:
        return ", ".join(name for _, name in socket.if_nameindex())
    except OSError as error:
        return f"unknown ({error.strerror})"


def _verbs(missing: str) -> str:
    from pycoll.bootstrap.discovery.verbs import ports

    if missing:
        return missing
    found = "; ".join(f"{port}: {_try_port(port)}" for port in ports()) or "none"
    return f"built; used if PYCOLL_TRANSPORTS names it; active ports {found}"


def _try_port(port: Port) -> str:
    """Return whether the memory and the queue pair for one peer can be made on ``port``."""
    from pycoll import _core
    from pycoll.errors import PycollError

    try:
        _core.VerbsTransport(0, 2, [(port.device, port.number, port.gid_index)]).prepare(1, [0])
    except PycollError as error:
        return f"unusable, {error}"
    return "usable"


def _tuning() -> tuple[str, str]:
    """Return the origin of the links' costs, and the stores that fill slots."""
    from pycoll.comm.start_tuning import start_tuning
    from pycoll.config import Config
    from pycoll.cost import slot_stores, tuning_file
    from pycoll.errors import InvalidArgumentError

    try:
        config = Config.read()
        stored, used = tuning_file.find(config), start_tuning(config)
    except InvalidArgumentError as error:
        return str(error), "unknown, see costs of links"
    if stored.slot_stores is not None:
        return used.origin, f"{stored.slot_stores} stores, from {stored.origin}"
    if used.slot_stores is not None:
        how = "measured just now; pycoll tune stores the choice"
        return used.origin, f"{used.slot_stores} stores, {how}"
    return used.origin, f"{slot_stores.DEFAULT} stores, the built-in choice"


def _cores() -> str:
    from pycoll.cores import cpu_quota

    quota = cpu_quota()
    limit = "" if quota is None else f" of which a quota allows {quota.cores:g} at a time"
    return f"{len(os.sched_getaffinity(0))} usable cores{limit}"


def _domains() -> str:
    from pycoll.bootstrap.discovery.domains import find_domains
    from pycoll.cores import usable_cores

    return str(find_domains(usable_cores()))


def facts() -> list[tuple[str, str]]:
    """Return name and value of each fact about this installation."""
    from pycoll import _core

    origin, stores = _tuning()
    rows = [
        ("pycoll", _version("pycoll-comm")),
        ("Python", f"{platform.python_version()} ({sys.executable})"),
        ("machine", f"{platform.machine()}, {_cores()}, {platform.release()}"),
        ("domains of the cores", _domains()),
        ("build", "optimized with a profile" if _core.LAID_OUT else "plain; see make optimized"),
        ("reduction kernels", _core.isa()),
        ("costs of links", origin),
        ("transport shm", f"built; fills slots by {stores}; process_vm_readv is not used"),
        ("transport tcp", f"built; interfaces {_interfaces()}"),
        ("transport verbs", _verbs(_core.verbs_missing())),
        ("device cuda", _core.device_summary()),
        ("GPUDirect RDMA", _core.device_rdma_summary()),
        ("inside jax.jit", f"built; XLA's FFI {_core.XLA_FFI_VERSION} and later, on the CPU"),
    ]
    rows += [(f"with {name}", _version(name)) for name in _NEIGHBOURS]
    # Also in the folder of this Python, whose virtual environment need not be activated.
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    launchers = [name for name in _LAUNCHERS if shutil.which(name, path=path)]
    rows.append(("launchers found", ", ".join(["pycoll run", *launchers])))
    return rows


def print_information() -> None:
    """Print the facts and the settings."""
    from pycoll.config import describe

    console = Console(soft_wrap=True)
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in facts():
        table.add_row(name, value)
    console.print(table)
    console.print()
    settings = Table("variable", "now", "default", "meaning", box=None, pad_edge=False)
    for one in describe():
        now = os.environ.get(one.variable, "-")
        if now != "-" and one.variable == "PYCOLL_SECRET":
            now = "(set)"
        settings.add_row(one.variable, now, one.default, one.help)
    console.print(settings)
