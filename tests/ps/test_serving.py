"""Workers and servers: the same bits as without servers, and what each failure says."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from harness import ROOT, TIMEOUT_S, each, free_port, succeeded

import pycoll
from pycoll import InvalidArgumentError, MismatchError
from pycoll.bootstrap import join_threads
from pycoll.config import Config
from pycoll.optim import Entry, Scheduler

Comm = pycoll.Communicator
SECRET = "a secret of the tests"
#: Longer than a loaded machine needs to start six interpreters.
JOB_S = 110.0


class World:
    """Workers in threads, and servers that pycoll starts."""

    def __init__(self, workers: int, servers: int, hosts: list[int] | None = None) -> None:
        transports = "shm" if hosts is None else "shm,tcp"
        self.communicators = pycoll.local_world(
            workers, servers=servers, hosts=hosts, transports=transports, timeout_s=TIMEOUT_S
        )
        self._pool = ThreadPoolExecutor(workers)

    def outcomes(self, function: Callable[[Comm], Any]) -> list[Any]:
        return each(self._pool, function, self.communicators)

    def run(self, function: Callable[[Comm], Any]) -> list[Any]:
        return succeeded(self.outcomes(function))

    def close(self) -> None:
        for comm in self.communicators:
            comm.close()
        self._pool.shutdown()


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    made = World(4, 2)
    yield made
    made.close()


def values(rank: int, dtype: Any, count: int = 1000) -> np.ndarray:
    draw = np.random.default_rng(rank)
    if np.issubdtype(dtype, np.integer):
        return draw.integers(0, 100, count).astype(dtype)
    return (draw.standard_normal(count) * 10.0 ** draw.integers(-3, 3, count)).astype(dtype)


@pytest.mark.parametrize("algorithm", ["ps", "servers", "servers_mixed"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16, np.int8])
@pytest.mark.parametrize("op", ["sum", "avg", "max"])
def test_the_bits_are_those_of_a_deterministic_fold(
    world: World, algorithm: str, dtype: Any, op: str
) -> None:
    def rank(comm: Comm) -> None:
        for count in (0, 1, 1000, 70_000):
            x = values(comm.rank, dtype, count)
            plain = comm.all_reduce(x, op, deterministic=True)
            served = comm.all_reduce(x, op, algorithm=algorithm, deterministic=True)
            assert plain.tobytes() == served.tobytes(), count

    world.run(rank)


def test_calls_in_place_async_in_lists_and_in_groups(world: World) -> None:
    def rank(comm: Comm) -> None:
        x = np.full(500, comm.rank, np.float32)
        assert comm.all_reduce(x, out=x, algorithm="ps") is x
        assert (x == 6).all()
        works = [comm.all_reduce(i + comm.rank, algorithm="ps", async_op=True) for i in range(150)]
        assert [work.wait() for work in works] == [4 * i + 6 for i in range(150)]
        assert works[0].done()
        pair = comm.all_reduce([np.ones(3), np.full((2, 2), comm.rank)], algorithm="servers")
        assert pair[0].tolist() == [4, 4, 4]
        assert (pair[1] == 6).all()
        with comm.group():
            one = comm.all_reduce(1, algorithm="ps")
            two = comm.all_reduce(2)
        assert (one.wait(), two.wait()) == (4, 8)

    world.run(rank)


def test_size_counts_workers_and_servers_names_the_others(world: World) -> None:
    def rank(comm: Comm) -> tuple[int, tuple[int, ...], int]:
        with comm.split(comm.rank % 2) as part:
            assert part.servers == ()
        return comm.size, comm.servers, comm.all_reduce(1)

    assert world.run(rank) == [(4, (4, 5), 4)] * 4


def test_a_duplicate_has_the_servers_and_an_order_of_its_own(world: World) -> None:
    def rank(comm: Comm) -> None:
        with comm.dup() as other, other.dup() as third:
            assert other.servers == third.servers == comm.servers
            for round in range(3):
                pair = [other, comm][:: 1 if comm.rank % 2 else -1]
                works = [
                    one.all_reduce(round + comm.rank, algorithm="ps", async_op=True) for one in pair
                ]
                assert [work.wait() for work in works] == [4 * round + 6] * 2
            assert third.all_reduce(1, algorithm="servers") == 4
        assert comm.all_reduce(1, algorithm="ps") == 4

    world.run(rank)


def test_auto_measures_the_mixed_split_and_takes_one(world: World) -> None:
    entries = [Entry("a", (3000,)), Entry("b", (50_000,))]

    def rank(comm: Comm) -> tuple[str, str]:
        scheduler = Scheduler(comm, entries, policy="auto", architecture="ps")
        for step in range(5):
            for number, view in enumerate(scheduler.begin()):
                view[...] = step + number + comm.rank
                scheduler.ready(number)
            scheduler.wait()
        assert (scheduler.begin()[1] == 4 * 5 + 6).all()
        scheduler.wait()
        return scheduler.rates.push_pull_by, scheduler.explain()

    found = world.run(rank)
    assert len(set(found)) == 1
    by, text = found[0]
    assert by in ("ps", "servers_mixed") and f" by {by}; " in text


def test_hosts_reduce_among_themselves_first() -> None:
    world = World(4, 2, hosts=[0, 0, 1, 1, 2, 3])
    try:

        def rank(comm: Comm) -> None:
            x = np.arange(3000) * (comm.rank + 1)
            for name in ("hierarchical:direct+servers", "hierarchical:direct+servers_mixed", "ps"):
                assert (comm.all_reduce(x, algorithm=name) == np.arange(3000) * 10).all()

        world.run(rank)
        base = world.communicators[0]._served.base
        assert base.choice("all_reduce", 1 << 22).startswith("hierarchical:direct+servers")
    finally:
        world.close()


@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (1, 3), (2, 5), (3, 1)])
def test_any_numbers_of_workers_and_servers(workers: int, servers: int) -> None:
    world = World(workers, servers)
    try:

        def rank(comm: Comm) -> list[float]:
            x = np.full(10, comm.rank + 1.0)
            return [
                comm.all_reduce(x, op, algorithm=name)[0]
                for op in ("sum", "avg")
                for name in ("servers", "servers_mixed")
            ]

        total = workers * (workers + 1) / 2
        expected = [total, total, total / workers, total / workers]
        assert world.run(rank) == [expected] * workers
    finally:
        world.close()


# Bad input


def test_without_servers_the_call_says_how_to_start_some() -> None:
    (alone,) = pycoll.local_world(1)
    with pytest.raises(InvalidArgumentError, match=r"no rank next to these 1 serves.*--servers 2"):
        alone.all_reduce(1, algorithm="ps")
    with pytest.raises(InvalidArgumentError, match=r"needs at least one server, and none of the"):
        alone.all_reduce(1, algorithm="servers")
    assert alone.all_reduce(1, algorithm="servers_mixed") == 1
    alone.close()


@pytest.mark.parametrize("servers", [-1, True, 4096, "two"])
def test_numbers_of_servers_that_do_not_fit(servers: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"servers is .*: expected a whole number"):
        pycoll.local_world(1, servers=servers)


def test_what_servers_cannot_do_is_refused_on_all_ranks_and_the_world_goes_on(
    world: World,
) -> None:
    pycoll.register_op("ps_larger", np.maximum)
    refused: list[Callable[[Comm], Any]] = [
        lambda comm: comm.all_reduce(1.0, "ps_larger", algorithm="ps"),
        lambda comm: comm.all_reduce(1, algorithm="servers_or_so"),
        lambda comm: comm.all_reduce("text", algorithm="ps"),
        # One rank only:
        lambda comm: comm.all_reduce(1.0, "band" if comm.rank == 0 else "sum", algorithm="ps"),
        lambda comm: comm.all_reduce(
            np.ones(3), out=np.ones(2 if comm.rank == 1 else 3), algorithm="ps"
        ),
    ]
    for call in refused:
        outcomes = world.outcomes(call)
        assert all(isinstance(one, ValueError | TypeError) for one in outcomes), outcomes
        assert world.run(lambda comm: comm.all_reduce(comm.rank, algorithm="ps")) == [6] * 4


def test_workers_that_disagree_all_raise() -> None:
    world = World(3, 2)
    try:
        outcomes = world.outcomes(
            lambda comm: comm.all_reduce(np.ones(4 + (comm.rank == 2)), algorithm="servers")
        )
        assert all(isinstance(one, MismatchError) for one in outcomes), outcomes
        assert "5 float64" in str(outcomes[0])
        assert all(comm.failure for comm in world.communicators)
    finally:
        world.close()


@pytest.mark.parametrize(
    ("roles", "text"),
    [
        (
            ["server", "worker"],
            r"rank 0 \(.*\) serves, and rank 1 \(.*\) works: the ranks disagree",
        ),
        (["server", "server"], "all 2 ranks serve: start at least one worker"),
    ],
)
def test_roles_that_do_not_fit_are_named(roles: list[str], text: str) -> None:
    configs = [Config(role=role, transports=("shm",)) for role in roles]
    with pytest.raises(InvalidArgumentError, match=text):
        join_threads(2, configs)


def test_explain_knows_servers() -> None:
    from click.testing import CliRunner

    from pycoll.tools.cli import main

    def explain(*words: str) -> str:
        return str(CliRunner().invoke(main, ["explain", *words]).output)

    text = explain("all_reduce", "--size", "4", "--hosts", "4", "--servers", "2", "--rank", "5")
    assert "all_reduce of 1 MiB over 4 ranks and 2 servers on 6 hosts" in text
    assert "all_reduce, rank 5 of 6, the last 2 ranks serving" in text
    text = explain("all_gather", "--servers", "2")
    assert "--servers is 2, and all_gather has no algorithm with servers" in text
    assert "over its own links" in explain("--servers", "1", "--measured")
    assert "no forecast of larger worlds" in explain("--servers", "1", "--local-size", "2")


# Processes


def environment(**more: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYCOLL_")}
    return {**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def test_a_rank_that_serves_does_not_work() -> None:
    code = "import pycoll; pycoll.init()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(PYCOLL_ROLE="server"),
        capture_output=True,
        text=True,
        timeout=JOB_S,
        check=False,
    )
    assert "this rank serves; call pycoll.ps.serve() here" in done.stderr
    code = "import pycoll, pycoll.ps; pycoll.init(); pycoll.ps.serve()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=JOB_S,
        check=False,
    )
    assert "pycoll.ps.serve() was called after pycoll.init()" in done.stderr


def test_a_script_of_its_own_serves_and_counts() -> None:
    place = f"size=2, address='127.0.0.1:{free_port()}', secret={SECRET!r}"
    serve = f"import pycoll.ps; print(pycoll.ps.serve(rank=1, {place}))"
    work = (
        f"import pycoll; pycoll.init(rank=0, {place}); "
        "print([pycoll.all_reduce(i, algorithm='ps') for i in range(7)], pycoll.servers())"
    )
    server, worker = (
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for code in (serve, work)
    )
    try:
        assert worker.communicate(timeout=JOB_S)[0].strip() == "[0, 1, 2, 3, 4, 5, 6] (1,)"
        assert server.communicate(timeout=JOB_S)[0].strip() == "7"
    finally:
        server.kill()
        worker.kill()


def job(code: str, *words: str) -> tuple[int, str]:
    """The exit status and the output of ``pycoll run`` with this program."""
    done = subprocess.run(
        [sys.executable, "-m", "pycoll", "run", *words, sys.executable, "-c", code],
        env=environment(PYCOLL_TIMEOUT_S="30"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=JOB_S,
        check=False,
    )
    return done.returncode, " ".join(done.stdout.split())


HEAD = """
import os, signal, sys, time
import pycoll
pycoll.init()
rank = pycoll.rank()
assert pycoll.all_reduce(rank, algorithm="ps") == 1
"""
# The servers are the processes of this job with the role of a server.
FIND = """
def servers():
    found = {}
    for name in os.listdir("/proc"):
        try:
            text = open(f"/proc/{name}/environ").read().split(chr(0))
        except OSError:
            continue
        if "PYCOLL_JOB_ID=" + os.environ["PYCOLL_JOB_ID"] in text and "PYCOLL_ROLE=server" in text:
            found[next(one for one in text if one.startswith("PYCOLL_RANK="))] = int(name)
    return found
"""


def test_the_launcher_starts_servers_that_end_with_the_job() -> None:
    code = HEAD + 'print("size", pycoll.size(), "servers", pycoll.servers())\n'
    status, text = job(code, "-n", "2", "--servers", "2")
    assert status == 0, text
    assert text.count("size 2 servers (2, 3)") == 2


def test_servers_of_workers_that_never_join_are_dismissed() -> None:
    begun = time.monotonic()
    status, text = job("pass", "-n", "2", "--servers", "1")
    assert status == 0, text
    assert time.monotonic() - begun < 30 + 5


def test_a_server_that_dies_is_named_with_its_parts() -> None:
    code = (
        HEAD
        + FIND
        + """
if rank == 0:
    os.kill(servers()["PYCOLL_RANK=3"], signal.SIGKILL)
try:
    for _ in range(1_000_000):
        pycoll.all_reduce(rank, algorithm="servers")
except pycoll.PeerLostError as error:
    print("lost", error.rank, error)
    sys.exit(5)
"""
    )
    status, text = job(code, "-n", "2", "--servers", "2")
    assert status == 128 + 9, text
    lost = "lost 3 server 1 (rank 3) is lost, which owned part 1 of parts 0 to 1 of each message"
    assert text.count(lost) == 2, text
    assert "server 1 (rank 3, pid" in text


def test_an_optimizer_of_torch_steps_by_the_servers_to_the_same_bits() -> None:
    code = (
        FIND
        + """
import os, signal, sys
import torch
import pycoll
import pycoll.torch as hvd

hvd.init()
torch.set_num_threads(1)
words = []


def trained(policy, architecture):
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(6, 50), torch.nn.Tanh(), torch.nn.Linear(50, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(
        optimizer, net.named_parameters(), policy=policy, architecture=architecture
    )
    torch.manual_seed(hvd.rank())
    for _ in range(5):
        optimizer.zero_grad()
        net(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
    words.append(optimizer._gradients._scheduler._algorithms["ps"])
    return net, optimizer, values(net)


def values(net):
    return torch.cat([p.detach().flatten() for p in net.parameters()])


first = trained("bsp", "a2a")[2]
for policy, architecture in (("BSP-PS", None), ("wfbp", "ps")):
    net, optimizer, found = trained(policy, architecture)
    assert torch.equal(first, found), policy
assert pycoll.world().all_reduce(1, algorithm="ps") == 2
print("alike by", *set(words), flush=True)
if hvd.rank() == 0:
    os.kill(servers()["PYCOLL_RANK=3"], signal.SIGKILL)
try:
    for _ in range(1000):
        before = values(net)
        optimizer.zero_grad()
        net(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
except hvd.HorovodInternalError as error:
    assert torch.equal(before, values(net)), "half a step"
    print("lost", error, flush=True)
    sys.exit(5)
"""
    )
    status, text = job(code, "-n", "2", "--servers", "2")
    assert text.count("alike by ps") == 2, text
    # No rank has stepped by a part of its gradients.
    lost = "lost server 1 (rank 3) is lost, which owned part 1 of parts 0 to 1 of each message"
    assert text.count(lost) == 2, text
    assert status == 128 + 9, text


def test_a_worker_that_ends_early_is_named() -> None:
    code = (
        HEAD
        + """
if rank == 1:
    sys.exit(0)
try:
    pycoll.all_reduce(rank, algorithm="ps")
except pycoll.PeerLostError as error:
    print("lost", error.rank)
"""
    )
    status, text = job(code, "-n", "2", "--servers", "1")
    assert "lost 1" in text, text
    assert status == 1, text


@pytest.mark.parametrize("gone", [0, 1])
def test_a_worker_that_ends_within_a_step_ends_it_on_the_others(gone: int) -> None:
    """Nothing hangs, also where worker 0 ends, which announces messages to the servers."""
    world = World(2, 1)
    entries = [Entry(str(n), (50_000,)) for n in range(3)]

    def rank(comm: Comm) -> tuple[str, int | None]:
        scheduler = Scheduler(comm, entries, policy="WFBP-PS")
        scheduler.begin()
        scheduler.ready(0)
        if comm.rank == gone:
            comm.close()
        with pytest.raises(pycoll.PycollError) as caught:
            scheduler.wait()
        return type(caught.value).__name__, caught.value.rank

    found = world.run(rank)
    world.close()
    assert found[gone][0] == "ClosedError"
    assert found[1 - gone] == ("PeerLostError", gone)


def test_servers_import_the_package_of_the_launcher(tmp_path: Path) -> None:
    (tmp_path / "pycoll").mkdir()
    (tmp_path / "pycoll" / "__init__.py").write_text("raise ImportError('of this folder')")
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts" / "train.py"
    script.write_text(HEAD + 'print("sum", pycoll.all_reduce(rank + 1, algorithm="ps"))')
    start = "import sys; sys.path.pop(0); from pycoll.tools.cli import main; main()"
    words = ["run", "-n", "2", "--servers", "1", str(script)]
    done = subprocess.run(
        [sys.executable, "-c", start, *words],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=JOB_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 3") == 2


def test_a_node_of_servers_only() -> None:
    address = f"127.0.0.1:{free_port()}"
    code = HEAD + 'print("size", pycoll.size(), "servers", pycoll.servers())'
    commands = ([sys.executable, "-c", code], ["-m", "pycoll.ps"])
    nodes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "pycoll", "run", "--nnodes", "2", "-n", "2"),
                *("--node-rank", str(node), "--address", address, *command),
            ],
            env=environment(PYCOLL_SECRET=SECRET, PYCOLL_HOST_ID=f"host {node}"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node, command in enumerate(commands)
    ]
    try:
        texts = [node.communicate(timeout=JOB_S)[0] for node in nodes]
        assert [node.returncode for node in nodes] == [0, 0], texts
        assert texts[0].count("size 2 servers (2, 3)") == 2
    finally:
        for node in nodes:
            node.kill()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["-n", "2", "--servers", "4095"], "servers=4095: expected 0 to 4094"),
        (["-n", "2", "--servers", "1", "--restarts", "1"], "leave out --restarts"),
        (
            ["-H", "localhost:2", "-n", "2", "--servers", "1"],
            "2 ranks and servers=1 do not fit: the hosts have 2",
        ),
    ],
)
def test_launches_with_servers_that_cannot_work_are_refused(words: list[str], text: str) -> None:
    status, output = job("pass", *words)
    assert status != 0
    assert text in output.replace("│ ", ""), output


def test_a_store_outlives_a_server_of_a_job() -> None:
    code = (
        HEAD
        + FIND
        + """
import numpy as np
from pycoll import ps
store = ps.connect(consistency="asp", replicas=1)
store.init("w", np.zeros(5))
store.push("w", np.ones(5))
pycoll.barrier()
if rank == 0:
    os.kill(servers()["PYCOLL_RANK=2"], signal.SIGKILL)
while store.stats()["view"] == 1:
    time.sleep(0.01)
store.push("w", np.ones(5))
pycoll.barrier()
print("held", store.pull("w").sum(), flush=True)
"""
    )
    status, text = job(code, "-n", "2", "--servers", "3", "--tolerate", "1")
    assert status == 0, text
    assert text.count("held 20.0") == 2, text
    assert "server 0 (rank 2, pid" in text and "the others go on" in text
