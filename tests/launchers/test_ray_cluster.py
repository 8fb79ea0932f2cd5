"""Ranks in a real Ray: tasks, collective groups of actors, Ray Train, two nodes."""

from __future__ import annotations

import secrets
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import mpi_hosts
import pytest
from engine_programs import ROOT, Program, environment, lines_of_page, needs

needs("ray")

BEGIN = """
import numpy as np, ray, time
import engine_ranks
from pycoll.integrations import ray as pycoll_ray
options = dict(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
ray.init(**options)

def show(*words):
    print(">", *words, flush=True)  # Ray prints lines of its own

"""
TASKS = """
show(pycoll_ray.run(engine_ranks.add, 2.0, size=3))
show("KeyError: 'rank 1 has no answer'" in engine_ranks.caught(
    lambda: pycoll_ray.run(engine_ranks.fail, 1, size=2, timeout_s=20)))
show("died" in engine_ranks.caught(
    lambda: pycoll_ray.run(engine_ranks.die, 0, size=1)))
show(engine_ranks.caught(lambda: pycoll_ray.run(engine_ranks.add, 2.0, size=0)))

# Ray can run 4 of the 6 ranks at a time.
begin = time.monotonic()
said = engine_ranks.caught(
    lambda: pycoll_ray.run(engine_ranks.add, 2.0, size=6, init_timeout_s=8))
show("waited 7 s for ranks" in said and " of 6" in said, time.monotonic() - begin < 40)

from ray.experimental.internal_kv import _internal_kv_list
name = pycoll_ray.run(engine_ranks.place, size=2)
show(name, [key for key in _internal_kv_list("", namespace="pycoll") if b"run-" not in key])
"""
GROUP = """
import time
import torch
from ray.util import collective

pycoll_ray.register()
pycoll_ray.register()

@ray.remote
class Member:
    def __init__(self):
        pycoll_ray.register()
    def arrays(self, rank, name):
        out = {}
        op = collective.types.ReduceOp
        x = np.full(3, rank + 1.0); collective.allreduce(x, name); out["sum"] = x.tolist()
        for word in ("PRODUCT", "MIN", "MAX"):
            t = torch.tensor([rank + 2, 5 - rank]); collective.allreduce(t, name, op[word])
            out[word] = t.tolist()
        into = [np.zeros((2, 2)) for _ in range(2)]
        collective.allgather(into, np.full((2, 2), rank + 0.5), name)
        out["gathered"] = [one[0].tolist() for one in into]
        t = torch.zeros(3)
        collective.reducescatter(t, [torch.full((3,), 10.0 * r + rank) for r in range(2)], name)
        out["scattered"] = t.tolist()
        x = np.full(2, rank); collective.broadcast(x, 1, name); out["broadcast"] = x.tolist()
        x = np.full(2, rank + 1); collective.reduce(x, 1, name, op.MAX); out["max"] = x.tolist()
        y = np.zeros(4)
        (collective.send if rank == 0 else collective.recv)(
            np.arange(4.0) if rank == 0 else y, 1 - rank, name)
        out["message"] = y.tolist()
        collective.barrier(name)
        out["wrong"] = engine_ranks.caught(
            lambda: collective.allgather([np.zeros(3), np.zeros(2)], np.zeros(2), name))
        out["place"] = collective.get_rank(name), collective.get_collective_group_size(name)
        collective.destroy_collective_group(name)
        return out
    def alone(self, name):
        import os
        os.environ["PYCOLL_INIT_TIMEOUT_S"] = "3"
        return engine_ranks.caught(
            lambda: collective.init_collective_group(2, 0, "PYCOLL", name))

def is_known(name):
    try:
        ray.get_actor("info_" + name)
    except ValueError:
        return False
    return True

members = [Member.remote() for _ in range(2)]
for _ in range(2):  # a name may be used again, once Ray has ended the actor that holds it
    while is_known("g"):
        time.sleep(0.05)
    collective.create_collective_group(members, 2, [0, 1], "PYCOLL", "g")
    results = ray.get([one.arrays.remote(rank, "g") for rank, one in enumerate(members)])
for one in results:
    show(one)
show(ray.get(members[0].alone.remote("other")))
"""
TRAIN = """
import sys
import ray.train, ray.train.torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

folder = sys.argv[1]
common = {"scaling_config": ScalingConfig(num_workers=2),
          "run_config": RunConfig(storage_path=folder)}

def note(name, value):
    from pathlib import Path
    rank = ray.train.get_context().get_world_rank()
    Path(folder, f"{name}-{rank}").write_text(str(value))

def with_torch(config):
    import sys, torch, torch.distributed as dist
    imported = "pycoll" in sys.modules and "pycoll.torch" in sys.modules
    model = ray.train.torch.prepare_model(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(20):
        x = torch.randn(16, 4)
        loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
    found = torch.cat([one.detach().flatten() for one in model.parameters()])
    every = [torch.zeros_like(found) for _ in range(dist.get_world_size())]
    dist.all_gather(every, found)
    config["note"]("torch", (dist.get_backend(), torch.equal(every[0], every[1]), loss < 1))

def with_pycoll(config):
    import numpy as np, pycoll, pycoll.torch as hvd
    hvd.init()
    total = pycoll.all_reduce(np.full(3, pycoll.rank() + 1.0))
    config["note"]("pycoll", (hvd.rank(), hvd.size(), total.tolist()))

config = {"note": note}
TorchTrainer(with_torch, train_loop_config=config,
             torch_config=TorchConfig(backend="pycoll"), **common).fit()
DataParallelTrainer(with_pycoll, train_loop_config=config,
                    backend_config=pycoll_ray.PycollConfig(), **common).fit()
"""


def script(tmp_path: Path, text: str) -> tuple[str, str]:
    (tmp_path / "script.py").write_text(BEGIN + text)
    return sys.executable, "script.py"


def shown(text: str) -> list[str]:
    return [line[2:] for line in text.splitlines() if line.startswith("> ")]


def test_tasks_are_ranks(program: Program, tmp_path: Path) -> None:
    assert shown(program(*script(tmp_path, TASKS))) == [
        "[(0, 3, [6.0, 6.0, 6.0]), (1, 3, [6.0, 6.0, 6.0]), (2, 3, [6.0, 6.0, 6.0])]",
        "True",
        "True",
        "InvalidArgumentError: size is 0: expected a whole number of at least 1",
        "True True",
        "[(0, 1, 1.0), (1, 1, 1.0)] []",
    ]


def test_a_collective_group_of_actors(program: Program, tmp_path: Path) -> None:
    *results, late = shown(program(*script(tmp_path, GROUP)))
    common = {
        "sum": [3.0, 3.0, 3.0],
        "PRODUCT": [6, 20],
        "MIN": [2, 4],
        "MAX": [3, 5],
        "gathered": [[0.5, 0.5], [1.5, 1.5]],
        "broadcast": [1, 1],
        "wrong": "ValueError: tensor_list[0] has shape (3,) and type float64: expected (2,) and "
        "float64, as the other array of the call",
    }
    own = [
        {"scattered": [1.0] * 3, "max": [1, 1], "message": [0.0] * 4, "place": (0, 2)},
        {"scattered": [21.0] * 3, "max": [2, 2], "message": [0.0, 1.0, 2.0, 3.0], "place": (1, 2)},
    ]
    assert [eval(line) for line in results] == [{**common, **one} for one in own]
    assert late.startswith("TimeoutError: init waited 2 s for rank 1 of 2")


def test_ray_train_by_a_string_and_by_a_config(program: Program, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    program(*script(tmp_path, TRAIN), str(notes))
    for rank in range(2):
        assert (notes / f"torch-{rank}").read_text() == "('pycoll', True, tensor(True))"
        assert (notes / f"pycoll-{rank}").read_text() == f"({rank}, 2, [3.0, 3.0, 3.0])"


#: Ranks whose data goes over IPv6 only; their meeting goes through Ray.
SIX = """
import os, sys, ray, engine_ranks
from pycoll.integrations import ray as pycoll_ray
env = {"env_vars": {"PYCOLL_INTERFACES": "six"}}
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR", runtime_env=env)
place = lambda: (*engine_ranks.place(), os.environ["PYCOLL_INTERFACES"])
found = pycoll_ray.run(place, size=4, options={"scheduling_strategy": "SPREAD"})
print(">", found, flush=True)
"""


def test_two_nodes_in_network_namespaces(tmp_path: Path) -> None:
    """`ray start` on two hosts; the ranks of a node share memory, those of different ones use
    sockets. Both hosts have an interface that leads nowhere, and a cable with IPv6 only."""
    if reason := mpi_hosts.hosts.obstacle():
        pytest.skip(f"needs root and network namespaces: {reason}")
    ray = [sys.executable, "-m", "ray.scripts.scripts"]
    stores = ["--num-cpus", "2", "--object-store-memory", "100000000", "--disable-usage-stats"]
    path = str(ROOT / "examples" / "train_on_engines.py")
    (tmp_path / "six.py").write_text(SIX)
    with mpi_hosts.two_hosts(tmp_path) as (two, _):
        head, other = two.addresses
        short = f"/tmp/ray-pycoll-{time.monotonic_ns() % 10**9}"
        own = environment(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
        # Else a later program of this user would look for this cluster, which is gone by then.
        own["RAY_TMPDIR"] = short
        options: dict[str, Any] = {"env": own, "cwd": tmp_path, "text": True}
        folder = ["--temp-dir", short]
        begin = [*ray, "start", "--node-ip-address"]

        def on(host: int, *line: str) -> str:
            done = subprocess.run(
                two.on(host, line), capture_output=True, check=False, timeout=300, **options
            )
            assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
            return str(done.stdout)

        first = [*begin, head, "--head", "--port", "6379", "--include-dashboard", "false"]
        on(0, *first, *stores, *folder)
        on(1, *begin, other, "--address", f"{head}:6379", *stores)
        said = on(
            0, sys.executable, path, "--engine", "ray", "--address", f"{head}:6379", "--ranks", "4"
        )
        by_six = on(0, sys.executable, "six.py", f"{head}:6379")
    assert said.splitlines()[-1] == lines_of_page("ray")[1], said
    assert shown(by_six) == [str([(rank, 2, 6.0, "six") for rank in range(4)])], by_six
