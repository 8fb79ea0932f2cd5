"""``pycoll run``: starts N ranks of one command on this machine, watches them and ends them.

The launcher serves the store where the ranks meet, so no rank is special while joining. With
``LaunchOptions.node`` it is one of several launchers, each on its host, and that of node 0 serves
the ranks of all (node_meeting.py). Each rank has its own process group: the terminal's Ctrl-C
reaches only the launcher, which passes it on once. A guard process kills the ranks' process groups
if the launcher itself is killed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence

from pycoll.bootstrap.connect import as_error
from pycoll.bootstrap.discovery.network import listen_in_range, listen_tcp
from pycoll.bootstrap.discovery.torch_variables import (
    PORTS_PER_START,
    Meeting,
    Share,
    TorchPlaces,
    inherited_variables,
)
from pycoll.bootstrap.rendezvous.store_server import StoreServer
from pycoll.config import RANKS_MAX, Config
from pycoll.cores import core_count
from pycoll.errors import InvalidArgumentError, TransportError
from pycoll.launch.elastic_crew import ElasticCrew
from pycoll.launch.elastic_jobs import ElasticOptions
from pycoll.launch.elastic_meeting import ElasticSeat, ElasticServer, HostShare, join_job
from pycoll.launch.node_meeting import NodeOptions, NodeShare, meet_nodes
from pycoll.launch.rank_crew import Crew, LaunchOptions, say
from pycoll.launch.rank_process import program_of, resolve_command


def launch(options: LaunchOptions) -> int:
    """Run the command on all ranks and wait; returns the exit status.

    The status is 0 if every rank ended with 0, else that of the rank that failed first, 128 +
    number for a signal. No process of the launch is left running. Raises InvalidArgumentError for
    options that cannot work, and TransportError if the system lacks descriptors, processes or
    memory for so many ranks. Signals are passed on only when called from the main thread.
    """
    node = options.node
    command = list(options.command) if node is not None else resolve_command(options.command)
    # In a job of several hosts, a host may have servers only.
    least = 0 if node is not None and options.servers else 1
    if not least <= options.ranks <= RANKS_MAX:
        raise InvalidArgumentError(f"ranks={options.ranks}: expected 1 to {RANKS_MAX}")
    most = RANKS_MAX - options.ranks
    if not 0 <= options.servers <= most:
        raise InvalidArgumentError(
            f"servers={options.servers}: expected 0 to {most}, so that {options.ranks} ranks and "
            f"the servers are at most {RANKS_MAX}"
        )
    check_combination(options.restarts, options.tolerate, options.servers, options.elastic)
    environment = inherited_variables(os.environ) | dict(options.environment)
    if options.timeout_s is not None:
        environment["PYCOLL_TIMEOUT_S"] = f"{options.timeout_s:g}"
    config = Config.read(environment)
    try:
        if options.elastic is not None:
            return _launch_elastic(options, options.elastic, environment, config)
        if node is not None:
            return _launch_node(options, node, environment, config)
        return _launch_fixed(options, command, environment)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM):
            raise
        text = f"{options.ranks} ranks cannot be run here: {as_error(error)}"
        raise TransportError(text, operation="run") from error


def check_combination(
    restarts: int, tolerate: int, servers: int, elastic: ElasticOptions | None
) -> None:
    """Raise InvalidArgumentError if no job can have these options of LaunchOptions at once."""
    if restarts < 0:
        raise InvalidArgumentError(f"restarts={restarts}: expected 0 or more")
    if tolerate < 0 or (tolerate and elastic is not None):
        raise InvalidArgumentError(
            f"tolerate={tolerate}: expected 0 or more, and 0 in an elastic job, where "
            "--min-np says how many ranks may fail"
        )
    if servers and (elastic is not None or restarts):
        raise InvalidArgumentError(
            "servers end with the job that they serve: leave out --restarts, --min-np, --max-np "
            "and --host-discovery-script, or --servers"
        )


def _launch_fixed(
    options: LaunchOptions, command: Sequence[str], environment: dict[str, str]
) -> int:
    """Run a launch whose ranks form one world."""
    try:
        listener = listen_tcp("127.0.0.1")
    except OSError:
        listener = listen_tcp("::1")
    host, port = listener.getsockname()[:2]
    secret, job_id = secrets.token_hex(32), f"run-{secrets.token_hex(8)}"
    environment |= {
        "PYCOLL_SIZE": str(options.total),
        "PYCOLL_LOCAL_SIZE": str(options.total),
        "PYCOLL_ADDRESS": f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        "PYCOLL_SECRET": secret,
        "PYCOLL_JOB_ID": job_id,
        "PYCOLL_STORE": "launcher",
    }
    store = StoreServer(listener, options.total, secret.encode(), job_id, "pycoll run")
    torch = TorchPlaces(Share.whole(options.ranks), environment)
    try:
        with Crew(options, command, environment, torch, store=store) as crew:
            # The store's thread starts after the ranks, so that no thread of pycoll runs at a fork.
            store.start()
            if options.started is not None:
                options.started()
            status = crew.watch()
        crew.report()
        return status
    finally:
        store.close()


def _launch_node(
    options: LaunchOptions, node: NodeOptions, environment: dict[str, str], config: Config
) -> int:
    """Run the ranks of one node of a job of several."""
    with contextlib.ExitStack() as undo:
        listeners: list[socket.socket] = []
        command: list[str] = []

        def offer() -> tuple[int, list[int]]:
            listeners.append(listen_in_range(None, config.port_range))
            undo.callback(listeners[0].close)
            meetings = [Meeting() for _ in range(PORTS_PER_START * (options.restarts + 1))]
            for meeting in meetings:
                undo.callback(meeting.close)
            return listeners[0].getsockname()[1], [meeting.port for meeting in meetings]

        def check() -> None:
            command.extend(resolve_command(options.command))

        program = program_of(options.command) if options.ranks else ""
        mine = NodeShare(options.total, options.servers, options.tolerate, program)
        link = meet_nodes(node, mine, check, offer)
        undo.callback(link.close)
        share = link.share
        environment |= {
            "PYCOLL_SIZE": str(share.size),
            "PYCOLL_LOCAL_SIZE": str(share.ranks),
            "PYCOLL_ADDRESS": link.store_address,
            "PYCOLL_SECRET": link.rank_secret,
            "PYCOLL_JOB_ID": link.job_id,
            "PYCOLL_STORE": "launcher",
        }
        store = None
        if listeners:
            key = link.rank_secret.encode()
            store = StoreServer(listeners[0], share.size, key, link.job_id, "pycoll run")
            undo.callback(store.close)
        torch = TorchPlaces(link.workers, environment, link.torch_place)
        with Crew(options, command, environment, torch, link, store) as crew:
            if store is not None:
                store.start()
            if options.started is not None:
                options.started()
            status = crew.watch()
        crew.report()
        return status


def _launch_elastic(
    options: LaunchOptions,
    elastic: ElasticOptions,
    environment: dict[str, str],
    config: Config,
) -> int:
    """Run this host's ranks of a job whose ranks form one world after the other."""
    node, command, refusal = options.node, list(options.command), ""
    elastic.check(options.ranks if node is None else None)
    try:
        command = resolve_command(options.command)
    except InvalidArgumentError as error:
        refusal = str(error)
    share = HostShare(options.ranks, program_of(options.command), refusal)
    with contextlib.ExitStack() as undo:
        seat: ElasticSeat
        if node is not None and node.node != 0:
            seat = join_job(node, share)
        else:
            if node is not None:
                node.check()
            seat = ElasticServer(elastic, share, node, config.port_range, say)
        undo.callback(seat.close)
        environment |= {
            "PYCOLL_SECRET": seat.rank_secret,
            "PYCOLL_JOB_ID": seat.job_id,
            # Tells an optimizer that is made in a world of one rank that later ones may be larger.
            "HOROVOD_ELASTIC": "1",
        }
        torch = TorchPlaces(Share.whole(options.ranks), environment)
        with ElasticCrew(options, command, environment, torch, seat) as crew:
            if options.started is not None:
                options.started()
            status = crew.watch()
        crew.report()
        return status


def threads_of_ranks(ranks: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return OMP_NUM_THREADS=1 if there are more ranks than cores and the user has not set the
    variable; torchrun does the same. A line on stderr says so."""
    cores = core_count()
    if ranks <= cores or "OMP_NUM_THREADS" in environ:
        return {}
    print(
        f"pycoll run: {ranks} ranks share {cores} cores: OMP_NUM_THREADS=1 for each, unless you "
        "set it",
        file=sys.stderr,
        flush=True,
    )
    return {"OMP_NUM_THREADS": "1"}
