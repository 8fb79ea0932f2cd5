"""Ranks on the workers of a real Dask cluster."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mpi_hosts
import pytest
from engine_programs import ROOT, environment, lines_of_page, needs
from engine_ranks import add, die, fail

from pycoll import InvalidArgumentError, PeerLostError
from pycoll.integrations import dask

needs("distributed")
import distributed  # noqa: E402


@contextlib.contextmanager
def cluster(workers: int, **options: Any) -> Iterator[distributed.Client]:
    given = {"threads_per_worker": 1, "dashboard_address": ":0", "host": "127.0.0.1", **options}
    with (
        pytest.MonkeyPatch.context() as patch,
        distributed.LocalCluster(n_workers=0, **given) as made,
    ):
        patch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
        made.scale(workers)
        with distributed.Client(made) as client:
            if workers:
                client.wait_for_workers(workers, timeout=60)
            yield client


@pytest.fixture(scope="module")
def client() -> Iterator[distributed.Client]:
    with cluster(3) as found:
        yield found


def test_every_worker_is_a_rank(client: distributed.Client) -> None:
    results = dask.run(client, add, 2.0)
    assert results == [(rank, 3, [6.0, 6.0, 6.0]) for rank in range(3)]


def test_chosen_workers_have_the_order_of_ranks(client: distributed.Client) -> None:
    names = list(client.scheduler_info(n_workers=-1)["workers"])
    chosen = [names[2], names[0]]
    found = dask.run(client, worker_address, workers=chosen)
    assert found == chosen
    assert len(dask.run(client, add, 1.0)) == 3, "the workers serve the next world"


def worker_address() -> str:
    return str(distributed.get_worker().address)


def test_an_exception_of_one_rank_is_raised(client: distributed.Client) -> None:
    with pytest.raises(KeyError, match="rank 1 has no answer"):
        dask.run(client, fail, 1, timeout_s=20)
    assert len(dask.run(client, add, 1.0)) == 3


def test_a_worker_that_dies_is_named(client: distributed.Client) -> None:
    with pytest.raises(PeerLostError, match="rank 1"):
        dask.run(client, die, 1, timeout_s=20)
    client.wait_for_workers(3, timeout=60)
    assert len(dask.run(client, add, 1.0)) == 3


def test_a_single_worker_that_dies_is_named() -> None:
    with cluster(1) as alone, pytest.raises(PeerLostError, match="has left the cluster"):
        dask.run(alone, die, 0)


def test_workers_that_cannot_be_ranks(client: distributed.Client) -> None:
    (first, *_) = client.scheduler_info(n_workers=-1)["workers"]
    with pytest.raises(InvalidArgumentError, match="'tcp://nowhere:1', which is no worker"):
        dask.run(client, add, 1.0, workers=["tcp://nowhere:1"])
    with pytest.raises(InvalidArgumentError, match="names one worker twice"):
        dask.run(client, add, 1.0, workers=[first, first])
    with cluster(0) as empty, pytest.raises(InvalidArgumentError, match="has no workers"):
        dask.run(empty, add, 1.0)
    with (
        cluster(2, processes=False, host=None) as threads,
        pytest.raises(InvalidArgumentError, match="is a thread of this process"),
    ):
        dask.run(threads, add, 1.0)


@pytest.mark.parametrize("family", ["ipv4", "ipv6"])
def test_workers_on_two_hosts(family: str, tmp_path: Path) -> None:
    """A scheduler on the first host and a worker on each, as their commands start them. Both hosts
    have an interface that leads nowhere; with IPv6, no data goes by IPv4."""
    if reason := mpi_hosts.hosts.obstacle():
        pytest.skip(f"needs root and network namespaces: {reason}")
    with mpi_hosts.two_hosts(tmp_path) as (two, _), contextlib.ExitStack() as undo:
        six = family == "ipv6"
        addresses = ["[fd99::1]", "[fd99::2]"] if six else two.addresses
        scheduler = f"tcp://{addresses[0]}:8786"
        python = (sys.executable, "-m")
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
        only = {"PYCOLL_INTERFACES": mpi_hosts.SIX} if six else {}
        common: dict[str, Any] = {"env": environment(**only), "cwd": tmp_path}

        def serve(host: int, *line: str) -> None:
            process = subprocess.Popen(two.on(host, [*python, *line]), **common, **quiet)
            undo.callback(process.wait)
            undo.callback(process.kill)

        address = ("--host", addresses[0], "--port", "8786")
        serve(0, "distributed.cli.dask_scheduler", *address, "--no-dashboard", "--no-show")
        for host in range(2):
            options = ("--host", addresses[host], "--nworkers", "2", "--nthreads", "1")
            options += ("--no-dashboard",)
            serve(host, "distributed.cli.dask_worker", scheduler, *options)
        example = str(ROOT / "examples" / "train_on_engines.py")
        line = [sys.executable, example, "--engine", "dask", "--address", scheduler, "--ranks", "4"]
        done = subprocess.run(
            two.on(0, line), capture_output=True, text=True, timeout=200, check=False, **common
        )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.splitlines() == lines_of_page("dask")[1:]
