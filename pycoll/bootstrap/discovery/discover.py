"""Finds the rank, the size and the way to meet from arguments or a launcher's variables.

An inner launcher has precedence over an outer one (torchrun under srun, mpirun inside a Slurm job),
and explicit arguments have precedence over all launchers.

Ranks that an MPI launcher or Slurm started meet in the first of these ways that is there:

1. at the address of ``PYCOLL_ADDRESS``, if the user gave one;
2. at a unix socket, if the launcher says that all ranks are on this host: it is the quickest, and
   touches nothing that an MPI of the process uses;
3. over the MPI that mpi4py has initialized with this rank and size, since it may use the launcher's
   exchange in a way that leaves no place for a second user;
4. over the launcher's own exchange, PMI-1 (``PMI_FD``) or PMIx (``PMIX_SERVER_URI*``). Hydra offers
   the first, Open MPI the second, Slurm one of them, as ``--mpi`` says. It connects the ranks of
   all hosts and no other process, so the job needs neither an address nor a secret.

All ranks must come to the same choice, so they import mpi4py all before ``init()`` or all after it.
Before it is right with every launcher. After it, Slurm's pmi2 ends the job at MPI's own ``init``,
and Open MPI 5 was seen to hang in jobs on several hosts; late_mpi.py bounds that.
"""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.discovery.loaded_mpi import world_of_mpi4py
from pycoll.bootstrap.rendezvous import elastic_worker
from pycoll.bootstrap.rendezvous.exchange import Exchange, MpiExchange, SoloExchange
from pycoll.bootstrap.rendezvous.store import join_store, join_unix
from pycoll.bootstrap.rendezvous.torch_store import open_torch_store
from pycoll.config import RANKS_MAX, RENAMED, SECRET_LENGTH_MIN, Config, with_new_names
from pycoll.errors import InvalidArgumentError

if TYPE_CHECKING:
    from pycoll.bootstrap.rendezvous.launcher_meeting import LauncherExchange
    from pycoll.bootstrap.rendezvous.pmix import PmixExchange

#: Processes of Hydra; the pid and start time of one identify a job.
_HYDRA = ("hydra_pmi_proxy", "mpiexec.gforker", "hydra_persist")
#: Larger step numbers stand for the batch script, the interactive shell and the like. Slurm sets
#: SLURM_PROCID and SLURM_NTASKS there too, but no other task of the step runs.
_SLURM_STEP_MAX = 0xFFFFFFF0 - 1


class Placement(NamedTuple):
    """This process's rank and size, and how it meets the other ranks.

    ``source`` names the origin of both ("pycoll run", "Open MPI", ...). ``way`` is the kind of
    exchange: solo, store, unix, torch, mpi, function, ticket, pmi or pmix; empty if the ranks are
    on several hosts and nothing lets them meet. ``secret`` and ``address`` are for store; for pmi
    ``address`` is the number in PMI_FD. ``job_id`` keeps jobs apart. ``launcher`` is true if the
    launcher serves the store. ``comm`` is the communicator of mpi4py. ``all_gather`` is the
    program's function. ``ticket`` is that of a new rank. ``pmix`` is the open exchange, if the PMIx
    server told rank and size.
    """

    rank: int
    size: int
    source: str
    way: str
    job_id: str = ""
    address: str = ""
    secret: bytes = b""
    launcher: bool = False
    comm: Any = None
    all_gather: Callable[[bytes], Any] | None = None
    pmix: PmixExchange | None = None
    ticket: str = ""


def discover(
    config: Config,
    environ: Mapping[str, str] | None = None,
    *,
    rank: int | None = None,
    size: int | None = None,
    address: str | None = None,
    secret: str | bytes | None = None,
    comm: Any = None,
    all_gather: Any = None,
    ticket: Any = None,
) -> Placement:
    """Return the placement of this process; the arguments are those of ``pycoll.init``.

    Raises InvalidArgumentError for contradicting or incomplete arguments and variables; its text
    names what to set.
    """
    env = os.environ if environ is None else environ
    if address is not None and not isinstance(address, str):
        raise InvalidArgumentError(f'address is {address!r}: expected a text, "host:port"')
    if comm is not None:
        from_comm = _from_comm(comm, rank, size, address or all_gather)
        return from_comm._replace(secret=_with_secret(config, secret).secret or b"")
    if ticket is not None or (config.ticket and rank is None and all_gather is None):
        return _by_ticket(config, ticket, (rank, size, address, secret, all_gather))
    config = _with_secret(config, secret)
    if all_gather is not None:
        return _from_function(config, all_gather, rank, size, address)
    if rank is not None or size is not None:
        rank, size = _check_pair("rank", rank, "size", size)
        # A launcher's store expects the launcher's number of ranks, so it cannot serve a world
        # with explicit rank and size.
        where = address or (config.address if config.store == "rank0" else None)
        return _at_address(config._replace(store="rank0"), rank, size, where, "arguments", address)
    if environ is None:
        _refuse_worker(env)
    if config.elastic is not None:
        return _ask_for_place(config, config.elastic)
    if config.rank is not None or config.size is not None:
        rank, size = _check_pair("PYCOLL_RANK", config.rank, "PYCOLL_SIZE", config.size)
        source = "pycoll run" if config.store == "launcher" else "PYCOLL_RANK"
        return _at_address(config, rank, size, address or config.address, source, address)
    placement = _asked_pmix(config) if _only_pmix(env) else _placement_by_launcher(env)
    if placement is not None:
        placement = placement._replace(secret=config.secret or b"")
        if address or config.address:
            rank, size = placement.rank, placement.size
            where = address or config.address
            if placement.pmix is not None:
                placement.pmix.close()
            return _at_address(config, rank, size, where, placement.source, address)
        if placement.way == "":
            raise _several_hosts(placement, env)
        return placement
    if "PMI_PORT" in env and "PMI_ID" in env:
        raise InvalidArgumentError(
            f"PMI_PORT={env['PMI_PORT']}: the launcher tells rank and size only over this port, "
            "where pycoll does not ask: start without -pmi-port"
        )
    if address is not None or config.address is not None:
        raise InvalidArgumentError(
            f"address={address or config.address!r} is given without rank and size: set them too "
            "(rank=, size= or PYCOLL_RANK, PYCOLL_SIZE), or start with pycoll run"
        )
    return Placement(0, 1, "nothing found", "solo")


def _ask_for_place(config: Config, name: str) -> Placement:
    """Ask the elastic rendezvous for a place. The launcher limits the wait."""
    if config.elastic_worker is None or config.secret is None:
        raise InvalidArgumentError(
            f"PYCOLL_ELASTIC={name} is set without PYCOLL_ELASTIC_WORKER and PYCOLL_SECRET: "
            "pycoll run sets all of them"
        )
    place = elastic_worker.take_place(name, config.elastic_worker)
    way = "solo" if place.size == 1 else "store"
    return Placement(
        *(place.rank, place.size, "pycoll run", way, place.job_id, place.address),
        secret=config.secret,
        launcher=True,
    )


#: Variables that give one process its place in a world.
_PLACES = (
    *("PYCOLL_RANK", "PYCOLL_ELASTIC_WORKER", "RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK"),
    *("PMIX_RANK", "PMI_RANK", "SLURM_PROCID"),
)


def _refuse_worker(env: Mapping[str, str]) -> None:
    """Raise InvalidArgumentError in a worker of multiprocessing that imports the main module of a
    rank and inherits that rank's variables: it would join as the same rank a second time."""
    process = sys.modules.get("multiprocessing.process")
    # multiprocessing sets `_inheriting` while a spawned worker imports the main module.
    if process is None or not getattr(process.current_process(), "_inheriting", False):
        return
    try:
        with open(f"/proc/{os.getppid()}/environ", "rb") as file:
            outer = file.read().split(b"\0")
    except OSError:
        return
    for name in (*_PLACES, *RENAMED):
        if name in env and f"{name}={env[name]}".encode() in outer:
            raise InvalidArgumentError(
                f"init() runs in a worker process that has {name}={env[name]} from the rank that "
                "started it: put init() and what follows it behind "
                'if __name__ == "__main__": so that workers do not run it, or give rank=, size=, '
                "address= and secret= of a world of workers"
            )


def inside_job(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether a launcher, PYCOLL_RANK or a ticket makes this process one rank of a job."""
    env = with_new_names(os.environ if environ is None else environ)
    named = any(f"PYCOLL_{name}" in env for name in ("RANK", "ELASTIC", "TICKET"))
    return named or _placement_by_launcher(env) is not None or _only_pmix(env)


def _placement_by_launcher(env: Mapping[str, str]) -> Placement | None:
    return _torchrun(env) or _horovodrun(env) or _open_mpi(env) or _hydra(env) or _slurm(env)


def open_exchange(placement: Placement, config: Config, deadline: Deadline) -> Exchange:
    """Meet the other ranks. Raises the errors of the exchange; see store.py and exchange.py."""
    exchange = _open_exchange(placement, config, deadline)
    # A given secret guards the connections also if the exchange itself does not need it.
    exchange.secret = exchange.secret or placement.secret
    return exchange


def _open_exchange(p: Placement, config: Config, deadline: Deadline) -> Exchange:
    if p.way == "solo":
        return SoloExchange()
    if p.way == "ticket":
        from pycoll.bootstrap.rendezvous.tickets import meet_by_ticket

        return meet_by_ticket(p.ticket, config, deadline)
    if p.way == "mpi":
        return MpiExchange(p.comm, deadline)
    if p.all_gather is not None:
        # Few programs bring a function of their own.
        from pycoll.bootstrap.rendezvous.callable_exchange import CallableExchange

        return CallableExchange(p.all_gather, p.rank, p.size, deadline)
    if p.way == "unix":
        return join_unix(p.job_id, p.rank, p.size, deadline, p.secret)
    if p.way == "torch":
        return _join_torch(p, deadline)
    if p.way in ("pmi", "pmix"):
        from pycoll.bootstrap.rendezvous.launcher_meeting import meet

        return meet(lambda: _open_launcher(p, deadline), p.rank, p.size, config, deadline)
    return join_store(p.address, p.secret, p.job_id, p.rank, p.size, deadline, p.launcher)


def _check_pair(
    rank_name: str, rank: int | None, size_name: str, size: int | None
) -> tuple[int, int]:
    if rank is None:
        raise InvalidArgumentError(f"{size_name}={size} is given without {rank_name}: give both")
    if size is None:
        raise InvalidArgumentError(f"{rank_name}={rank} is given without {size_name}: give both")
    rank, size = _whole(rank_name, rank), _whole(size_name, size)
    if not 1 <= size <= RANKS_MAX:
        raise InvalidArgumentError(f"{size_name}={size}: expected 1 to {RANKS_MAX}")
    if not 0 <= rank < size:
        raise InvalidArgumentError(
            f"{rank_name}={rank} is out of range: {size_name}={size} allows 0 to {size - 1}"
        )
    return rank, size


def _whole(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidArgumentError(f"{name}={value!r}: expected a whole number") from None


def _with_secret(config: Config, secret: str | bytes | None) -> Config:
    if secret is None:
        return config
    if not isinstance(secret, str | bytes):
        raise InvalidArgumentError(f"secret is a {type(secret).__name__}: expected str or bytes")
    data = secret.encode() if isinstance(secret, str) else secret
    if len(data) < SECRET_LENGTH_MIN:
        raise InvalidArgumentError(
            f"secret has {len(data)} characters: expected at least {SECRET_LENGTH_MIN}; "
            "secrets.token_hex(32) makes a good one"
        )
    return config._replace(secret=data)


def _at_address(
    config: Config, rank: int, size: int, address: str | None, source: str, explicit: str | None
) -> Placement:
    if size == 1:
        return Placement(rank, size, source, "solo")
    if not address:
        raise InvalidArgumentError(
            f"rank={rank}, size={size} ({source}) without an address: give all ranks the same "
            'address="host:port" (or PYCOLL_ADDRESS), a free port on the host of rank 0, and the '
            "same secret"
        )
    if config.secret is None:
        raise InvalidArgumentError(
            f"address={address!r} is given without a secret: give all ranks the same secret= or "
            f"PYCOLL_SECRET, at least {SECRET_LENGTH_MIN} characters; secrets.token_hex(32) makes "
            "a good one"
        )
    launcher = config.store == "launcher" and not explicit
    return Placement(
        rank, size, source, "store", config.job_id or "", address, config.secret, launcher
    )


def _from_comm(comm: Any, rank: int | None, size: int | None, address: str | None) -> Placement:
    if rank is not None or size is not None or address is not None:
        raise InvalidArgumentError("comm= already says rank, size and where: give nothing else")
    needed = ("Get_rank", "Get_size", "Iallgather", "Iallgatherv")
    if not all(hasattr(comm, name) for name in needed):
        raise InvalidArgumentError(
            f"comm is a {type(comm).__name__}: expected a communicator of mpi4py, MPI.COMM_WORLD"
        )
    try:
        return Placement(comm.Get_rank(), comm.Get_size(), "mpi4py", "mpi", comm=comm)
    except Exception as error:  # an exception of mpi4py, which is not imported here
        raise InvalidArgumentError(
            f"comm cannot be used ({error}): expected a communicator that this process is in, "
            "like MPI.COMM_WORLD, and not MPI.COMM_NULL"
        ) from None


def _from_function(
    config: Config, all_gather: Any, rank: int | None, size: int | None, address: str | None
) -> Placement:
    if not callable(all_gather):
        raise InvalidArgumentError(
            f"all_gather is a {type(all_gather).__name__}: expected a function that takes bytes "
            "and returns the bytes of all ranks, as a list in rank order"
        )
    if address is not None:
        raise InvalidArgumentError(
            f"address={address!r} and all_gather= are two ways to meet: give one of them"
        )
    if rank is None and size is None:
        raise InvalidArgumentError(
            "all_gather= is given without rank= and size=: give all three, on every rank"
        )
    rank, size = _check_pair("rank", rank, "size", size)
    way = "solo" if size == 1 else "function"
    return Placement(
        rank, size, "all_gather", way, secret=config.secret or b"", all_gather=all_gather
    )


def _by_ticket(config: Config, ticket: Any, others: Sequence[Any]) -> Placement:
    from pycoll.bootstrap.rendezvous.tickets import read_ticket

    if any(one is not None for one in others):
        raise InvalidArgumentError("ticket= already says rank, size and where: give nothing else")
    text = config.ticket if ticket is None else ticket
    rank, size, _ = read_ticket(text)
    return Placement(rank, size, "ticket", "ticket", ticket=str(text))


def _numbers(env: Mapping[str, str], *names: str) -> list[int] | None:
    """Return the variables as whole numbers, or None unless each is set to one."""
    values = [env.get(name, "") for name in names]
    if not all(value.isascii() and value.isdigit() for value in values):
        return None
    return [int(value) for value in values]


def _check_placement(placement: Placement) -> Placement:
    _check_pair(f"rank of {placement.source}", placement.rank, "size", placement.size)
    return placement


def _torchrun(env: Mapping[str, str]) -> Placement | None:
    numbers = _numbers(env, "RANK", "WORLD_SIZE", "MASTER_PORT")
    if numbers is None or not env.get("MASTER_ADDR"):
        return None
    rank, size, port = numbers
    run = f"{env.get('TORCHELASTIC_RUN_ID', '')}/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    agent_serves = env.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
    return _check_placement(
        Placement(
            rank,
            size,
            "torchrun",
            "torch",
            run,
            f"{env['MASTER_ADDR']}:{port}",
            launcher=agent_serves,
        )
    )


def _join_torch(placement: Placement, deadline: Deadline) -> Exchange:
    prefix = f"pycoll/{placement.job_id}"
    host, _, port = placement.address.rpartition(":")
    serve = placement.rank == 0 and not placement.launcher
    return open_torch_store(
        host, int(port), prefix, placement.rank, placement.size, serve, deadline
    )


def _horovodrun(env: Mapping[str, str]) -> Placement | None:
    numbers = _numbers(env, "HOROVOD_RANK", "HOROVOD_SIZE")
    if numbers is None:
        return None
    rank, size = numbers
    local = _numbers(env, "HOROVOD_LOCAL_SIZE") or [0]
    # The launcher's own server, which lives as long as the job, identifies the job.
    job = f"{env.get('HOROVOD_GLOO_RENDEZVOUS_ADDR', '')}:" + env.get(
        "HOROVOD_GLOO_RENDEZVOUS_PORT", ""
    )
    one_host = local[0] == size and job != ":"
    return _check_placement(_on_host("horovodrun", rank, size, one_host, f"horovod {job}", {}))


def _open_mpi(env: Mapping[str, str]) -> Placement | None:
    numbers = _numbers(env, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    if numbers is None:
        return None
    rank, size = numbers
    local = _numbers(env, "OMPI_COMM_WORLD_LOCAL_SIZE") or [0]
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or ""
    one_host = local[0] == size and job != ""
    # A PMI_FD here belongs to a rank that started mpirun.
    pmix = {name: text for name, text in env.items() if name != "PMI_FD"}
    return _check_placement(_on_host("Open MPI", rank, size, one_host, f"ompi {job}", pmix))


def _hydra(env: Mapping[str, str]) -> Placement | None:
    numbers = _numbers(env, "PMI_RANK", "PMI_SIZE")
    if numbers is None:
        return None
    rank, size = numbers
    job = _ancestor(_HYDRA)
    if job is None:
        # Another process manager with PMI, such as Slurm's.
        return _slurm(env) or _check_placement(_on_host("PMI", rank, size, False, "", env))
    local = _numbers(env, "MPI_LOCALNRANKS")
    one_host = local is None or local[0] == size
    return _check_placement(_on_host("MPICH", rank, size, one_host, f"hydra {job}", env))


def _slurm(env: Mapping[str, str]) -> Placement | None:
    names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_JOB_ID", "SLURM_STEP_ID")
    merged = dict(env)
    merged.setdefault("SLURM_STEP_ID", env.get("SLURM_STEPID", ""))
    merged.setdefault("SLURM_JOB_ID", env.get("SLURM_JOBID", ""))
    # In an allocation SLURM_NTASKS may be the number of sbatch; the step's own number is exact.
    if "SLURM_STEP_NUM_TASKS" in env:
        merged["SLURM_NTASKS"] = env["SLURM_STEP_NUM_TASKS"]
    numbers = _numbers(merged, *names)
    if numbers is None or numbers[3] > _SLURM_STEP_MAX:
        return None
    rank, size, job, step = numbers
    nodes = _numbers(env, "SLURM_STEP_NUM_NODES") or _numbers(env, "SLURM_NNODES") or [1]
    return _check_placement(_on_host("srun", rank, size, nodes[0] == 1, f"slurm {job}.{step}", env))


def _on_host(
    source: str, rank: int, size: int, one_host: bool, job_id: str, env: Mapping[str, str]
) -> Placement:
    """Make the placement of a rank; the module's text gives the order of ways. ``way`` is "" if
    the ranks may be on several hosts and ``env`` offers no exchange: then they need a secret and
    an address."""
    if size == 1:
        return Placement(rank, size, source, "solo", job_id)
    if one_host:
        return Placement(rank, size, source, "unix", job_id)
    comm = world_of_mpi4py(rank, size)
    if comm is not None:
        return Placement(rank, size, source, "mpi", job_id, comm=comm)
    number = env.get("PMI_FD", "")
    if number.isascii() and number.isdigit():
        return Placement(rank, size, source, "pmi", job_id, number)
    return Placement(rank, size, source, "pmix" if _has_pmix(env) else "", job_id)


def _has_pmix(env: Mapping[str, str]) -> bool:
    return any(name.startswith("PMIX_SERVER_URI") for name in env)


def _only_pmix(env: Mapping[str, str]) -> bool:
    """Return whether a launcher with PMIx started this process and set no size (prterun)."""
    return _has_pmix(env) and _placement_by_launcher(env) is None and "PMIX_RANK" in env


def _open_launcher(p: Placement, deadline: Deadline) -> LauncherExchange:
    if p.way == "pmi":
        from pycoll.bootstrap.rendezvous.pmi import PmiExchange

        return PmiExchange(p.rank, p.size, int(p.address), deadline)
    return p.pmix or _open_pmix(deadline, p.rank, p.size)


def _open_pmix(
    deadline: Deadline, rank: int | None = None, size: int | None = None
) -> PmixExchange:
    from pycoll.bootstrap.rendezvous.pmix import open_pmix

    return open_pmix(deadline, rank, size)


def _asked_pmix(config: Config) -> Placement:
    exchange = _open_pmix(Deadline(config.init_timeout_s))
    placement = Placement(exchange.rank, exchange.size, "PMIx", "pmix", pmix=exchange)
    if exchange.size == 1:
        exchange.close()
        return placement._replace(way="solo", pmix=None)
    return placement._replace(secret=config.secret or b"")


def _several_hosts(placement: Placement, env: Mapping[str, str]) -> InvalidArgumentError:
    also = ""
    if placement.source in ("Open MPI", "MPICH"):
        also = ", or call pycoll.init(comm=MPI.COMM_WORLD) with mpi4py"
    elif "SLURM_JOB_ID" in env:
        also = ", or start with srun --mpi=pmix or --mpi=pmi2 (srun --mpi=list names what there is)"
    return InvalidArgumentError(
        f"{placement.source} started rank {placement.rank} of {placement.size}, not all of them "
        'on this host, and offers neither PMI_FD nor PMIx: set PYCOLL_ADDRESS="host:port" (a free '
        "port on the host of rank 0) and PYCOLL_SECRET "
        "(python -c 'import secrets; print(secrets.token_hex(32))') alike for all ranks"
        f"{also}"
    )


def _ancestor(names: tuple[str, ...]) -> str | None:
    """Return "pid@start" of the nearest ancestor with one of these names, or None."""
    pid = os.getppid()
    while pid > 1:
        try:
            with open(f"/proc/{pid}/stat") as file:
                stat = file.read()
        except OSError:
            return None
        name = stat[stat.index("(") + 1 : stat.rindex(")")]
        fields = stat[stat.rindex(")") + 2 :].split()
        # The kernel keeps 15 characters of a name.
        if any(name == known[:15] for known in names):
            return f"{pid}@{fields[19]}"
        pid = int(fields[1])
    return None
