"""The agent of one host: ``python -m pycoll.launch.host_agent``, started by the launcher over ssh.

Its stdin and stdout belong to the launcher (host_notes.py). The first order has everything that it
needs, the secret included. The answer has its findings on this host and, if it may become node 0,
the addresses where it listens. The second order has its number and the addresses of node 0. Then it
is a launcher like any other, which ends its ranks when its stdin ends.
"""

from __future__ import annotations

import base64
import contextlib
import os
import select
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from pycoll.bootstrap.dial import Candidate, order_candidates, probe, routes_to
from pycoll.bootstrap.discovery.host import machine_identity
from pycoll.bootstrap.discovery.network import interfaces, listen_in_range
from pycoll.bootstrap.discovery.versions import versions
from pycoll.config import Config
from pycoll.errors import InvalidArgumentError, PycollError
from pycoll.launch.elastic_jobs import ElasticOptions
from pycoll.launch.host_notes import read_order, write_note
from pycoll.launch.launcher import launch, threads_of_ranks
from pycoll.launch.node_meeting import NodeOptions, Verdict
from pycoll.launch.rank_crew import LaunchOptions
from pycoll.launch.rank_process import resolve_command

#: Names in the folder of a function that ranks call; see function_rank.py.
CALL, RESULT = "call.pickle", "result.{}"


def main() -> int:
    """Do what the launcher orders; returns the job's exit status."""
    try:
        order = read_order(0)
    except (EOFError, ValueError) as error:
        print(f"pycoll.launch.host_agent: {error}", file=sys.stderr)
        return 2
    mark = order["mark"]
    os.environ.update(order["environment"])
    listener: socket.socket | None = None
    try:
        os.chdir(order["folder"])
        # Before the ranks of any host start; the meeting of the nodes asks again.
        resolve_command(order["command"])
        config = Config.read()
        if order["listens"]:
            listener = listen_in_range(None, config.port_range)
        here = {**versions(), "machine": machine_identity(), "places": _places(listener, config)}
    except (PycollError, OSError) as error:
        why = f"folder {order['folder']}: {error.strerror}" if isinstance(error, OSError) else error
        write_note(mark, {**versions(), "machine": "", "places": [], "refusal": str(why)})
        return 2
    write_note(mark, {**here, "refusal": ""})
    try:
        go = read_order(0)
    except (EOFError, ValueError):
        return 2
    try:
        return _run(order, go, listener, config)
    except PycollError as error:
        write_note(mark, {"verdict": Verdict(str(error), 1)._asdict()})
        return 1


def _places(listener: socket.socket | None, config: Config) -> list[list[Any]]:
    """Return the addresses at which node 0 listens, for other hosts."""
    if listener is None:
        return []
    port = listener.getsockname()[1]
    found = [one for one in interfaces(config.interfaces) if not one.loopback]
    if listener.family == socket.AF_INET:
        found = [one for one in found if ":" not in one.address]
    return [list(Candidate(one.address, one.network, port, one.name, one.speed)) for one in found]


def _targets(places: list[list[Any]], config: Config) -> list[tuple[int, Any]]:
    """Return the socket addresses of node 0, those that answer first."""
    mine = interfaces(config.interfaces)
    candidates = order_candidates(mine, [Candidate(*one) for one in places], False)
    if not candidates:
        raise InvalidArgumentError(
            "node 0 has no address that this host could reach; it has "
            + (", ".join(str(one[0]) for one in places) or "none but loopback")
        )
    answered = [route.target for route in probe(routes_to(candidates, mine))]
    ordered = list(dict.fromkeys([*answered, *candidates]))
    families = {True: socket.AF_INET6, False: socket.AF_INET}
    return [(int(families[":" in one.address]), (one.address, one.port)) for one in ordered]


def _run(order: Mapping[str, Any], go: Any, listener: socket.socket | None, config: Config) -> int:
    if go["node"] != 0 and listener is not None:
        listener.close()
        listener = None
    targets = [] if listener is not None else _targets(go["places"], config)
    node = NodeOptions(
        nodes=go["nodes"],
        node=go["node"],
        secret=bytes.fromhex(order["secret"]),
        address=f"host {go['first']}" + "".join(f", {target[1][0]}" for target in targets),
        start_timeout_s=order["start_timeout_s"],
        host=order["host"],
        listener=listener,
        targets=targets,
    )
    met = threading.Event()

    def report_start() -> None:
        met.set()
        # From now on the launcher sends its pulse.
        write_note(order["mark"], {"started": True})

    def heard() -> None:
        # The launcher may have ended, which the end of stdin tells.
        with contextlib.suppress(OSError):
            write_note(order["mark"], {"heard": True})

    threading.Thread(target=_end_with_launcher, args=(met,), daemon=True).start()
    call = order["call"]
    held = folder_of_call(base64.b64decode(call)) if call is not None else None
    with held or contextlib.nullcontext("") as folder:
        options = LaunchOptions(
            ranks=order["slots"] - order["servers"],
            servers=order["servers"],
            command=[*order["command"], *([folder] if folder else [])],
            prefix=order["prefix"],
            environment=threads_of_ranks(order["slots"], os.environ),
            quiet=True,
            restarts=order["restarts"],
            tolerate=order["tolerate"],
            elastic=None if order["elastic"] is None else ElasticOptions(**order["elastic"]),
            node=node,
            output_folder=order["output_folder"],
            control=0,
            started=report_start,
            # The launcher takes the state of the job from node 0 only, so it has to know that node
            # 0 runs.
            heard=heard if go["node"] == 0 else None,
            ended=lambda verdict: write_note(order["mark"], {"verdict": verdict._asdict()}),
        )
        status = launch(options)
        _send_results(order["mark"], folder)
    return status


def _end_with_launcher(met: threading.Event) -> None:
    """End this process if the launcher ends, or sends a signal, before all ranks run. The meeting
    does not read stdin. Ranks that run already are ended by the guard process of ``launch``."""
    poller = select.poll()
    poller.register(0, select.POLLIN | select.POLLRDHUP)
    while not met.is_set():
        if poller.poll(200) and not met.is_set():
            os._exit(2)


@contextlib.contextmanager
def folder_of_call(call: bytes) -> Iterator[str]:
    """Make a folder of this user with a pickled call, where the ranks leave their results."""
    folder = tempfile.mkdtemp(prefix="pycoll-run-")
    try:
        with open(os.path.join(folder, CALL), "wb") as file:
            file.write(call)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _send_results(mark: str, folder: str) -> None:
    for name in sorted(os.listdir(folder)) if folder else ():
        number = name.removeprefix(RESULT.format(""))
        # A rank that is killed while it writes leaves a part.
        if number != name and number.isdecimal():
            with open(os.path.join(folder, name), "rb") as file:
                data = base64.b64encode(file.read()).decode()
            write_note(mark, {"result": int(number), "data": data})


if __name__ == "__main__":
    sys.exit(main())
