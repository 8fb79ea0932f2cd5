"""Whole programs: one that was written for Horovod, the examples, and ranks that die."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent.parent
#: With the rank before each line, for so no line is torn by another rank's.
PYCOLL_RUN = (sys.executable, "-m", "pycoll", "run", "-n", "2", "--prefix")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")

#: Nothing in it but the name of the module is ours.
HOROVOD_PROGRAM = """
import torch
import horovod.torch as hvd
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

hvd.init()
torch.manual_seed(42 + hvd.rank())
torch.set_num_threads(1)
inputs = torch.linspace(-1, 1, 256).reshape(-1, 1)
data = TensorDataset(inputs, 3 * inputs + 0.5)
sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(data, batch_size=16, sampler=sampler)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=hvd.Compression.none,
    op=hvd.Average, gradient_predivide_factor=2.0)

def metric(value, name):
    return hvd.allreduce(torch.tensor(value), name=name).item()

for epoch in range(8):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        with optimizer.skip_synchronize():
            optimizer.step()
print(f"rank {hvd.local_rank()} of {hvd.size()}: {metric(loss.item(), 'avg_loss'):.5f} "
      f"{model.weight.item():.3f} {model.bias.item():.3f}")
"""

DYING_PROGRAM = """
import os, sys, time, torch
import pycoll.torch as hvd

hvd.init()
hvd.allreduce(torch.ones(3), name="x")
if hvd.rank() == 1:
    os._exit(3)
begin = time.monotonic()
try:
    hvd.allreduce(torch.ones(3), name="x")
except hvd.HorovodInternalError as error:
    print(f"told after {time.monotonic() - begin:.1f} s: {error}", flush=True)
"""

ELASTIC_PROGRAM = """
import torch
import pycoll.torch as hvd
from torch.utils.data import DataLoader, TensorDataset

hvd.init()
torch.set_num_threads(1)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
data = TensorDataset(torch.arange(30.0).reshape(15, 2))
failures, resets, seen = [], [], []


@hvd.elastic.run
def train(state):
    for state.epoch in range(state.epoch, 3):
        loader = DataLoader(data, batch_size=2, sampler=state.sampler)
        for number, (x,) in enumerate(loader):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            state.sampler.record_batch(number, len(x))
            seen.append((state.epoch, len(x)))
            state.commit()
            if state.epoch == 1 and number == 1 and not failures:
                failures.append(1)
                with torch.no_grad():
                    model.weight.fill_(float("nan"))
                hvd.allreduce(torch.ones(1 + hvd.rank()), name="differs")
        state.sampler.set_epoch(state.epoch + 1)
    state.epoch = 3
    return "trained"


state = hvd.elastic.TorchState(model, optimizer, sampler=hvd.elastic.ElasticSampler(data), epoch=0)
state.register_reset_callbacks([lambda: resets.append(1)])
assert train(state) == "trained" and state.epoch == 3
assert failures == resets == [1] and torch.isfinite(model.weight).all()
weights = hvd.allgather(model.weight.detach())
assert torch.equal(weights[:1], weights[1:])
assert sum(n for epoch, n in seen if epoch == 1) == 8, seen
state.epoch = 1


@hvd.elastic.run
def fail(state):
    hvd.allreduce(torch.ones(1 + hvd.rank()), name="differs")


try:
    fail(state)
except hvd.HorovodInternalError as error:
    print(f"rank {hvd.rank()} gave up: {error}", flush=True)
"""

#: Rank 0 dies in epoch 1, once; its successor has nothing but what rank 1 committed.
REPLACED_PROGRAM = """
import os, sys
import torch
import pycoll.torch as hvd

hvd.init()
torch.set_num_threads(1)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
data = list(range(24))
sampler = hvd.elastic.ElasticSampler(data)
died = sys.argv[1]
seen, resets = [], []


@hvd.elastic.run
def train(state):
    print(f"rank {hvd.rank()} begins at epoch {state.epoch}, {state.commits} commits", flush=True)
    for state.epoch in range(state.epoch, 3):
        for number, sample in enumerate(state.sampler):
            if hvd.rank() == 0 and state.commits == 17 and not os.path.exists(died):
                open(died, "w").close()
                os._exit(9)
            optimizer.zero_grad()
            model(torch.full((1, 2), float(sample))).sum().backward()
            optimizer.step()
            seen.append((state.epoch, sample))
            state.sampler.record_batch(number, 1)
            state.commit()
        state.sampler.set_epoch(state.epoch + 1)


state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)
state.register_reset_callbacks([lambda: resets.append(1)])
train(state)
assert state.commits == 36, state.commits
assert len(resets) == hvd.rank()
every = hvd.allgather_object((seen, model.weight.tolist()))
assert every[0][1] == every[1][1]
for epoch in (1, 2):
    had = sorted(s for mine, _ in every for e, s in mine if e == epoch)
    # What rank 0 had before it died went with it.
    assert had == data if epoch == 2 else set(had) <= set(data) and len(had) == 19, (epoch, had)
print(f"rank {hvd.rank()} has trained", flush=True)
"""


def run(*words: str, status: int = 0) -> str:
    """What the program prints; it must end with ``status``."""
    env = {name: v for name, v in os.environ.items() if not name.startswith("PYCOLL_")}
    env |= {"PYCOLL_TUNING": "off", "OMP_NUM_THREADS": "1", "PYCOLL_TIMEOUT_S": "60"}
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=280, env=env, cwd=ROOT, check=False
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def test_a_program_for_horovod_needs_one_other_import(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(HOROVOD_PROGRAM.replace("horovod.torch", "pycoll.torch"))
    lines = re.findall(r"rank (\d) of 2: (\S+) (\S+) (\S+)", run(*PYCOLL_RUN, str(program)))
    assert sorted(line[0] for line in lines) == ["0", "1"]
    assert lines[0][1:] == lines[1][1:], "the ranks ended with different models"
    assert float(lines[0][1]) < 0.01 and abs(float(lines[0][2]) - 3) < 0.3


def test_survivors_are_told_who_died(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(DYING_PROGRAM)
    said = run(*PYCOLL_RUN, str(program), status=3)
    told = re.search(r"told after (\S+) s: (.*)", said)
    assert told is not None, said
    assert float(told[1]) < 5 and "rank 1" in told[2], said


def test_training_goes_on_from_the_last_commit(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(ELASTIC_PROGRAM)
    said = run(*PYCOLL_RUN, str(program))
    assert len(re.findall(r"rank \d gave up: the ranks disagree about", said)) == 2, said


def test_a_rank_that_died_is_replaced(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(REPLACED_PROGRAM)
    launcher = (*PYCOLL_RUN, "--restarts", "1")
    said = run(*launcher, str(program), str(tmp_path / "died"))
    begun = re.findall(r"rank (\d) begins at epoch (\d), (\d+) commits", said)
    assert sorted(begun) == [
        *(("0", "0", "0"), ("0", "1", "17")),
        *(("1", "0", "0"), ("1", "1", "17")),
    ], said
    assert len(re.findall(r"rank \d has trained", said)) == 2, said


def test_the_example_in_horovods_style() -> None:
    said = run(*PYCOLL_RUN, str(ROOT / "examples/torch_digits.py"))
    right = re.search(r"2 ranks: (\S+)% of 357 unseen digits", said)
    assert right is not None and float(right[1]) > 90, said


@pytest.mark.parametrize(("launcher", "steps"), [(PYCOLL_RUN, 150), (TORCHRUN, 2)])
def test_the_example_of_torch_distributed(launcher: Sequence[str], steps: int) -> None:
    assert torch.distributed.is_available()
    said = run(*launcher, str(ROOT / "examples/torch_ddp.py"), "--steps", str(steps))
    right = re.search(rf"2 ranks on pycoll: (\S+)% right after {steps} steps", said)
    assert right is not None and (steps < 150 or float(right[1]) > 80), said
