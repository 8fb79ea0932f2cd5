"""Starts each library under comparison with its ranks on several hosts (bench/hosts.py).

The settings make each library use TCP over the one interface, and no shared memory, which network
namespaces of one machine would allow. All other settings are the library's defaults.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hosts import DEVICE, Hosts
from jobs import WORKER, Start, binaries_of

_PORT = 29400
#: Most seconds for measuring a network.
_TUNE_S = 120
#: For MPICH, which would take the ranks of one machine for ranks of one host.
_NO_SHARED_MEMORY = {"MPIR_CVAR_NOLOCAL": "1", "UCX_TLS": "tcp", "UCX_NET_DEVICES": "eth0"}


def starts_on(
    hosts: Hosts, per_host: int, folder: Path, tuning: Path | None = None
) -> Callable[[str, int, str], list[Start]]:
    """Return the starts for ``jobs.start_jobs``: ranks in order, equally many on each host.

    ``tuning`` is the file in which ``tune`` has stored the measurements of the network.
    """
    agent = folder / "agent"
    hosts.write_agent(agent)
    names = ",".join(f"{name}:{per_host}" for name in hosts.names)

    def starts(name: str, ranks: int, path: str) -> list[Start]:
        worker = [str(binaries_of(name) / "python"), WORKER, name, path]
        if name == "openmpi":
            return [Start(hosts.on(0, _openmpi(names, per_host, agent, worker)))]
        if name == "mpich":
            return [Start(hosts.on(0, _mpich(names, ranks, agent, worker)), _NO_SHARED_MEMORY)]
        places = places_of(name, hosts.addresses[0], DEVICE, ranks)
        known = {} if tuning is None else {"PYCOLL_TUNING": str(tuning)}
        return [
            Start(hosts.on(rank // per_host, worker), {**places(rank, rank % per_host), **known})
            for rank in range(ranks)
        ]

    return starts


def tune(hosts: Hosts, per_host: int, path: Path) -> None:
    """Measure the network between the hosts with `pycoll tune`, as docs/choice.md advises."""
    places = places_of("pycoll", hosts.addresses[0], DEVICE, len(hosts.names) * per_host)
    line = (sys.executable, "-m", "pycoll", "tune", "--quick", "--output", str(path))
    ranks = [
        subprocess.Popen(
            hosts.on(rank // per_host, line),
            env={**os.environ, **places(rank, rank % per_host)},
            stdout=subprocess.DEVNULL,
        )
        for rank in range(len(hosts.names) * per_host)
    ]
    codes = [rank.wait(timeout=_TUNE_S) for rank in ranks]
    if any(codes):
        raise SystemExit(f"pycoll tune between hosts ended with {codes}")


def places_of(
    name: str, address: str, device: str, ranks: int, port: int = _PORT
) -> Callable[[int, int], Mapping[str, str]]:
    """Return a function from rank and local rank to the variables that place it in its world.

    The variables are for pycoll or Gloo. ``port`` and the next one are free at ``address``, the
    address of rank 0.
    """
    torchs = {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port if name == "gloo" else port + 1),
        "GLOO_SOCKET_IFNAME": device,
    }
    ours = {
        "PYCOLL_SIZE": str(ranks),
        "PYCOLL_ADDRESS": f"{address}:{port}",
        "PYCOLL_SECRET": secrets.token_hex(16),
    }

    def places(rank: int, local: int) -> Mapping[str, str]:
        found = {**torchs, "RANK": str(rank), "LOCAL_RANK": str(local)}
        return found if name == "gloo" else {**found, **ours, "PYCOLL_RANK": str(rank)}

    return places


def _openmpi(names: str, per_host: int, agent: Path, worker: list[str]) -> list[str]:
    launcher = str(binaries_of("openmpi") / "mpiexec")
    return [
        *(launcher, "--allow-run-as-root", "--host", names),
        *("--prtemca", "plm_ssh_agent", str(agent), "--prtemca", "prte_if_include", DEVICE),
        *("--mca", "pml", "ob1", "--mca", "btl", "tcp,self"),
        *("--map-by", f"ppr:{per_host}:node", "--mca", "btl_tcp_if_include", DEVICE, *worker),
    ]


def _mpich(names: str, ranks: int, agent: Path, worker: list[str]) -> list[str]:
    launcher = str(binaries_of("mpich") / "mpiexec")
    return [
        *(launcher, "-launcher", "rsh", "-launcher-exec", str(agent), "-iface", DEVICE),
        *("-n", str(ranks), "-hosts", names, *worker),
    ]


def told_by_rank_0(
    hosts: Hosts,
    line: Sequence[str],
    wait_s: float,
    settings: Mapping[str, str],
    per_host: int = 1,
) -> str:
    """Run ranks of pycoll on each host by the same command, and return what rank 0 prints.

    ``wait_s``: the most seconds for rank 0, and for the others after it. Raises SystemExit where a
    rank fails.
    """
    size = len(hosts.names) * per_host
    places = places_of("pycoll", hosts.addresses[0], DEVICE, size)
    ranks = [
        subprocess.Popen(
            hosts.on(rank // per_host, line),
            env={**os.environ, **settings, **places(rank, rank % per_host)},
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        text = ranks[0].communicate(timeout=wait_s)[0]
        codes = [rank.wait(timeout=wait_s) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if any(codes):
        raise SystemExit(f"the ranks ended with {codes}")
    return text
