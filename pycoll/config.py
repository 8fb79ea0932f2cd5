"""The table of all ``PYCOLL_*`` environment variables, and their values as a frozen ``Config``."""

from __future__ import annotations

import difflib
import functools
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pycoll.errors import InvalidArgumentError

PREFIX = "PYCOLL_"
TRANSPORTS = ("shm", "verbs", "tcp")
#: The transports without a setting; ``pycoll tune`` measures these too.
DEFAULT_TRANSPORTS = ("shm", "tcp")
ISAS = ("reference", "portable", "avx2", "avx512", "avx512fp16")
STORES = ("rank0", "launcher")
#: The protocols by which bytes cross the memory of devices; see docs/internals/device.md.
DEVICE_PROTOCOLS = ("auto", "pattern", "ll", "ll128", "simple")
TCP_SOCKETS_MAX = 8
VERBS_RAILS_MAX = 4
SECRET_LENGTH_MIN = 16
#: The roles of ranks; servers combine the values of workers.
WORKER, SERVER = "worker", "server"
#: The most ranks of one world.
RANKS_MAX = 4096


def _text(text: str) -> str:
    if not text:
        raise ValueError("expected a text that is not empty")
    return text


def _secret(text: str) -> bytes:
    if len(text) < SECRET_LENGTH_MIN:
        raise ValueError(f"expected at least {SECRET_LENGTH_MIN} characters")
    return text.encode()


def _integer(low: int, high: int | None = None) -> Callable[[str], int]:
    wanted = f"expected a whole number of at least {low}"
    if high is not None:
        wanted = f"expected a whole number from {low} to {high}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError(wanted) from None
        if value < low or (high is not None and value > high):
            raise ValueError(wanted)
        return value

    return parse


def _seconds(text: str) -> float:
    wanted = "expected seconds, a finite number above 0"
    try:
        value = float(text)
    except ValueError:
        raise ValueError(wanted) from None
    if not 0 < value < float("inf"):
        raise ValueError(wanted)
    return value


def _boolean(text: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True}
    words |= {"0": False, "false": False, "no": False, "off": False}
    try:
        return words[text.lower()]
    except KeyError:
        raise ValueError("expected 1 or 0") from None


def _one_of(choices: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError("expected one of " + ", ".join(choices))
        return text

    return parse


def _words(text: str) -> tuple[str, ...]:
    words = tuple(word.strip() for word in text.split(",") if word.strip())
    if not words:
        raise ValueError("expected names separated by commas")
    return words


def _transports(text: str) -> tuple[str, ...]:
    return _order_transports(_words(text))


def _order_transports(names: Sequence[Any]) -> tuple[str, ...]:
    for name in names:
        if name not in TRANSPORTS:
            raise ValueError(f"{name!r} is no transport; there are " + ", ".join(TRANSPORTS))
    return tuple(name for name in TRANSPORTS if name in names)


def transports_from(given: Any) -> tuple[str, ...]:
    """Return the transports of an argument, in the order of ``TRANSPORTS``.

    ``given``: a sequence of names, or a comma list as in PYCOLL_TRANSPORTS. Raises
    InvalidArgumentError for anything else.
    """
    try:
        if isinstance(given, str):
            return _transports(given)
        if isinstance(given, list | tuple) and given:
            return _order_transports(given)
        raise ValueError("expected names, one or more of " + ", ".join(TRANSPORTS))
    except ValueError as error:
        raise InvalidArgumentError(f"transports is {given!r}: {error}") from None


def _port_range(text: str) -> tuple[int, int]:
    low, dash, high = text.partition("-")
    try:
        first, last = int(low), int(high if dash else low)
    except ValueError:
        first, last = 0, 0
    if not 1 <= first <= last <= 65535:
        raise ValueError('expected two ports, "first-last", within 1-65535')
    return first, last


#: Fields whose values no text shows.
_HIDDEN = ("secret", "ticket")


class Config(NamedTuple):
    """The settings of one process, made by ``Config.read``; ``SETTINGS`` describes each field."""

    rank: int | None = None
    size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None
    address: str | None = None
    secret: bytes | None = None
    job_id: str | None = None
    store: str = "rank0"
    elastic: str | None = None
    elastic_worker: int | None = None
    ticket: str | None = None
    host_id: str | None = None
    transports: tuple[str, ...] = DEFAULT_TRANSPORTS
    interfaces: tuple[str, ...] = ()
    verbs_devices: tuple[str, ...] = ()
    verbs_rails: int = VERBS_RAILS_MAX
    port_range: tuple[int, int] | None = None
    tcp_sockets: int = 2
    timeout_s: float = 300.0
    init_timeout_s: float = 60.0
    isa: str | None = None
    deterministic: bool = False
    tuning: str | None = None
    device_memory_mib: int = 128
    device_protocol: str = "auto"
    device_rdma: bool = True
    shared_arrays: bool = False
    cpu_balancing: bool = True
    deferred_steps: bool = True
    other_backends: bool = True
    compiler_rule: bool = True
    jax_cluster: bool = True
    mpi_watch: bool = True
    store_checks: bool = False
    server_silence_s: int = 30
    role: str = WORKER

    def __repr__(self) -> str:
        shown = self._asdict() | dict.fromkeys(_HIDDEN, "(hidden)")
        return f"Config({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> Config:
        """Parse ``environ`` (``os.environ`` if None).

        Old names of ``RENAMED`` count as their new ones. Raises InvalidArgumentError for a value
        that cannot be parsed, for a variable that is set under both names, and for an unknown
        ``PYCOLL_*`` name; the text then proposes the nearest known name.
        """
        source = with_new_names(os.environ if environ is None else environ)
        values: dict[str, Any] = {}
        for name in sorted(source):
            if not name.startswith(PREFIX):
                continue
            setting = _BY_NAME.get(name)
            if setting is None:
                raise InvalidArgumentError(_unknown(name))
            try:
                values[setting.field] = setting.parse(source[name])
            except ValueError as error:
                shown = "(hidden)" if setting.field in _HIDDEN else repr(source[name])
                raise InvalidArgumentError(f"{name}={shown}: {error}") from None
        return cls(**values)


class Setting(NamedTuple):
    """One environment variable: its name, the ``Config`` field it sets, its parser, its meaning."""

    variable: str
    field: str
    parse: Callable[[str], Any]
    help: str


SETTINGS: tuple[Setting, ...] = (
    Setting("PYCOLL_RANK", "rank", _integer(0), "this process's rank"),
    Setting("PYCOLL_SIZE", "size", _integer(1), "number of ranks"),
    Setting("PYCOLL_LOCAL_RANK", "local_rank", _integer(0), "rank among those of this host"),
    Setting("PYCOLL_LOCAL_SIZE", "local_size", _integer(1), "number of ranks on this host"),
    Setting("PYCOLL_ADDRESS", "address", _text, "host:port where the ranks meet"),
    Setting(
        "PYCOLL_SECRET",
        "secret",
        _secret,
        f"the job's secret, equal on all ranks, at least {SECRET_LENGTH_MIN} characters",
    ),
    Setting("PYCOLL_JOB_ID", "job_id", _text, "name of the job; keeps jobs apart"),
    Setting(
        "PYCOLL_STORE",
        "store",
        _one_of(STORES),
        "process that listens at PYCOLL_ADDRESS: rank0, or launcher (set by pycoll run)",
    ),
    Setting(
        "PYCOLL_ELASTIC",
        "elastic",
        _text,
        "address of the elastic rendezvous, which assigns ranks (set by pycoll run)",
    ),
    Setting(
        "PYCOLL_ELASTIC_WORKER",
        "elastic_worker",
        _integer(0),
        "number of this worker in an elastic job (set by pycoll run)",
    ),
    Setting(
        "PYCOLL_TICKET",
        "ticket",
        _text,
        "ticket by which this process joins a communicator that grows, or a store; it is secret",
    ),
    Setting(
        "PYCOLL_HOST_ID",
        "host_id",
        _text,
        "ranks with different values treat each other as being on different hosts",
    ),
    Setting(
        "PYCOLL_TRANSPORTS",
        "transports",
        _transports,
        "transports that may be used: comma list of " + ", ".join(TRANSPORTS),
    ),
    Setting(
        "PYCOLL_INTERFACES",
        "interfaces",
        _words,
        "network interfaces that tcp may use: comma list, eth0,eth1",
    ),
    Setting(
        "PYCOLL_VERBS_DEVICES",
        "verbs_devices",
        _words,
        "RDMA devices or ports that verbs may use: comma list, mlx5_0,mlx5_1:2",
    ),
    Setting(
        "PYCOLL_VERBS_RAILS",
        "verbs_rails",
        _integer(1, VERBS_RAILS_MAX),
        "most ports that verbs uses at once between two ranks; 3 counts as 2",
    ),
    Setting(
        "PYCOLL_PORT_RANGE", "port_range", _port_range, 'ports that tcp may listen on: "first-last"'
    ),
    Setting(
        "PYCOLL_TCP_SOCKETS",
        "tcp_sockets",
        _integer(1, TCP_SOCKETS_MAX),
        "tcp sockets per pair of ranks",
    ),
    Setting("PYCOLL_TIMEOUT_S", "timeout_s", _seconds, "longest wait of an operation, in seconds"),
    Setting(
        "PYCOLL_INIT_TIMEOUT_S", "init_timeout_s", _seconds, "longest wait for all ranks in init"
    ),
    Setting(
        "PYCOLL_ISA",
        "isa",
        _one_of(ISAS),
        "reduction kernels to use: " + ", ".join(ISAS) + "; the best that runs here if unset",
    ),
    Setting(
        "PYCOLL_DETERMINISTIC",
        "deterministic",
        _boolean,
        "1: the same bits for any algorithm, tile size and transport",
    ),
    Setting(
        "PYCOLL_TUNING",
        "tuning",
        _text,
        "tuning file that rank 0 reads for all ranks, or off; the file of its machine if unset",
    ),
    Setting(
        "PYCOLL_DEVICE_MEMORY_MIB",
        "device_memory_mib",
        _integer(1, 1 << 20),
        "memory in MiB that a communicator may use for channels on this rank's device",
    ),
    Setting(
        "PYCOLL_DEVICE_PROTOCOL",
        "device_protocol",
        _one_of(DEVICE_PROTOCOLS),
        "how collectives move bytes between devices that reach each other, alike on all ranks: "
        + ", ".join(DEVICE_PROTOCOLS),
    ),
    Setting(
        "PYCOLL_DEVICE_RDMA",
        "device_rdma",
        _boolean,
        "1: RDMA devices access device memory where they can; 0: the host copies it",
    ),
    Setting(
        "PYCOLL_SHARED_ARRAYS",
        "shared_arrays",
        _boolean,
        "1: long NumPy arrays and torch's gradient buckets of this process lie in memory that "
        "ranks on this host and RDMA devices reach (docs/shared-arrays.md); 0: in ordinary memory",
    ),
    Setting(
        "PYCOLL_CPU_BALANCING",
        "cpu_balancing",
        _boolean,
        "1: where ranks outnumber the cores of a host, a rank that waits moves itself to a core "
        "with fewer ranks (docs/process-wide.md); 0: only the scheduler moves threads",
    ),
    Setting(
        "PYCOLL_DEFERRED_STEPS",
        "deferred_steps",
        _boolean,
        "1: DistributedOptimizer with model= may defer steps to the next forward pass "
        "(docs/process-wide.md); 0: step() steps all parameters",
    ),
    Setting(
        "PYCOLL_OTHER_BACKENDS",
        "other_backends",
        _boolean,
        "1: a process group of torch hands tensors on a device to the backend that its backend "
        "string names (docs/process-wide.md); 0: pycoll serves all devices",
    ),
    Setting(
        "PYCOLL_COMPILER_RULE",
        "compiler_rule",
        _boolean,
        "1: torch.compile does not trace pycoll (docs/process-wide.md); 0: it does",
    ),
    Setting(
        "PYCOLL_JAX_CLUSTER",
        "jax_cluster",
        _boolean,
        "1: jax.distributed.initialize() asks pycoll run for its ranks (docs/process-wide.md); "
        "0: the program passes them",
    ),
    Setting(
        "PYCOLL_MPI_WATCH",
        "mpi_watch",
        _boolean,
        "1: an import of mpi4py.MPI after joining by PMIx on several hosts is bounded "
        "(docs/process-wide.md); 0: it may wait for ever",
    ),
    Setting(
        "PYCOLL_STORE_CHECKS",
        "store_checks",
        _boolean,
        "1: workers and servers of stores check the invariants of their protocol at run time "
        "(docs/internals/parameter-servers.md); 0: no checks",
    ),
    Setting(
        "PYCOLL_SERVER_SILENCE_S",
        "server_silence_s",
        _integer(2),
        "whole seconds without a sign of a server after which the other servers of a store go on "
        "without it; the lowest number of its first servers holds",
    ),
    Setting(
        "PYCOLL_ROLE",
        "role",
        _one_of((WORKER, SERVER)),
        "what this rank does: worker calls init(), server calls ps.serve() (set by pycoll run)",
    ),
)

_BY_NAME = {setting.variable: setting for setting in SETTINGS}
#: The new name of each renamed variable, by its old name.
RENAMED = {"PYCOLL_ROSTER": "PYCOLL_ELASTIC", "PYCOLL_MEMBER": "PYCOLL_ELASTIC_WORKER"}


def with_new_names(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return ``environ`` with the new name of each renamed variable that is set.

    Each old name causes one DeprecationWarning per process. Raises InvalidArgumentError for a
    variable that is set under both names.
    """
    old_names = [old for old in RENAMED if old in environ]
    if not old_names:
        return environ
    found = dict(environ)
    for old in old_names:
        new = RENAMED[old]
        if new in found:
            raise InvalidArgumentError(
                f"{old} and {new} are both set in the environment, and {old} is the old name of "
                f"{new}: set {new} only"
            )
        _warn_renamed(old, new)
        found[new] = found.pop(old)
    return found


@functools.cache
def _warn_renamed(old: str, new: str) -> None:
    warnings.warn(f"{old} is now called {new}", DeprecationWarning, stacklevel=4)


def is_on(field: str) -> bool:
    """Return a switch of the environment, for a feature that begins outside of ``init()``.

    ``field``: of the ``Config``. The default holds where the environment has an error, which
    ``init()`` raises.
    """
    try:
        return bool(getattr(Config.read(), field))
    except InvalidArgumentError:
        return bool(getattr(Config(), field))


def _unknown(name: str) -> str:
    known = [other.removeprefix(PREFIX) for other in _BY_NAME]
    near = difflib.get_close_matches(name.removeprefix(PREFIX), known, n=1, cutoff=0.5)
    advice = f"did you mean {PREFIX}{near[0]}?" if near else "known are " + ", ".join(_BY_NAME)
    return f"{name} is set in the environment, but pycoll knows no such variable: {advice}"


class Described(NamedTuple):
    """A variable with its value and default, as texts, for ``pycoll info`` and the documents."""

    variable: str
    value: str
    default: str
    help: str


def describe(config: Config | None = None) -> list[Described]:
    """Return all variables with the values of ``config``, or the defaults if it is None.

    The secret stays hidden.
    """
    shown, default = config or Config(), Config()
    return [
        Described(
            setting.variable,
            _show(setting.field, getattr(shown, setting.field)),
            _show(setting.field, getattr(default, setting.field)),
            setting.help,
        )
        for setting in SETTINGS
    ]


def _show(name: str, value: object) -> str:
    if value is None or value == ():
        return "-"
    if name in _HIDDEN:
        return "(set)"
    if name == "port_range" and isinstance(value, tuple):
        return "-".join(str(port) for port in value)
    if isinstance(value, tuple):
        return ",".join(str(item) for item in value)
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)
