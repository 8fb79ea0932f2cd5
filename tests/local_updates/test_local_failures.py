"""A rank that is lost at a synchronisation: its name, parameters that are whole, the rest go on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import ProcessWorld, fresh_world

import pycoll
from pycoll import PeerLostError
from pycoll.optim import LocalUpdates


def moved(rank: int, step: int, params: Any) -> Any:
    return [one + (rank + 1) * step for one in params]


def dies(comm: Any, outer: Any) -> Any:
    """Rank 1 dies where the second round ends."""
    updates = LocalUpdates(2, outer=outer)
    params, state = updates.begin([np.zeros(3), np.zeros(100_000)], comm)
    for step in range(1, 4):
        params, state = updates.advance(moved(comm.rank, step, params), state)
    params = moved(comm.rank, 4, params)
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    before = [one.copy() for one in params]
    try:
        updates.advance(params, state)
    except PeerLostError as error:
        whole = all(a.tobytes() == b.tobytes() for a, b in zip(params, before, strict=True))
        return error.rank, state.step, whole
    return None


@pytest.mark.parametrize("outer", [None, {"lr": 0.5, "momentum": 0.5}])
def test_a_rank_that_dies_at_a_synchronisation_is_named_and_nothing_is_half_done(
    outer: Any,
) -> None:
    found = ProcessWorld(3, dies, outer).outcomes()
    assert found[0] == found[2] == (1, 3, True)
    assert isinstance(found[1], AssertionError)


@pytest.mark.parametrize("outer", [None, {"lr": 0.5, "momentum": 0.5}])
def test_the_rest_go_on_with_their_local_steps(outer: Any) -> None:
    updates = LocalUpdates(2, outer=outer)
    world = fresh_world(3)
    spare = {0: None, 2: None}
    for rank, comm in zip(spare, pycoll.local_world(2, timeout_s=30), strict=True):
        spare[rank] = comm

    def run(comm: pycoll.Communicator) -> Any:
        params, state = updates.begin([np.zeros(3)], comm)
        for step in range(1, 4):
            params, state = updates.advance(moved(comm.rank, step, params), state)
        if comm.rank == 1:
            comm.close()
            return None
        params = moved(comm.rank, 4, params)
        with pytest.raises(PeerLostError):
            updates.advance(params, state)
        params, state = updates.resume(params, state, spare[comm.rank])
        return updates.advance(params, state)

    found = world.run(run)
    world.close()
    # Two rounds of two steps: rank r adds (r + 1) times the number of the step.
    first = 3 * np.mean([1, 2, 3])
    second = 7 * np.mean([1, 3])
    if outer is None:
        wanted = first + second
    else:
        velocity = first
        wanted = 0.5 * velocity
        velocity = 0.5 * velocity + second
        wanted += 0.5 * velocity
    for rank in spare:
        params, state = found[rank]
        assert params[0].tolist() == [wanted] * 3
        assert state.synchronized and state.step == 4
    for comm in spare.values():
        comm.close()  # type: ignore[attr-defined]


#: Three workers, one of which is killed in a round; two go on from the last commit; a slot comes
#: back, and the new worker begins where the others are.
PROGRAM = """
import os, signal, sys, time
from pathlib import Path
import torch
import pycoll, pycoll.optim
import pycoll.torch as hvd

folder = Path(sys.argv[1])
hvd.init()
torch.set_num_threads(1)
model = torch.nn.Linear(2, 1, bias=False).double()
weight = model.weight
torch.nn.init.zeros_(weight)
optimizer = pycoll.optim.LocalSGD(torch.optim.SGD([weight], lr=0.5), every=2)


def tell(text):
    (folder / "fresh").write_text(text)
    (folder / "fresh").rename(folder / "slots")


@hvd.elastic.run
def train(state):
    print(f"rank {hvd.rank()} of {hvd.size()} begins at step {state.step}", flush=True)
    while state.step < 12:
        state.step += 1
        weight.grad = torch.full_like(weight, 2.0 * (hvd.rank() + 1))
        if hvd.size() == 3 and state.step == 4 and hvd.rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        if optimizer.synchronized:
            state.sizes = [*state.sizes, hvd.size()]
            if hvd.size() == 2 and state.step == 8 and hvd.rank() == 0:
                tell("localhost:2")
                time.sleep(1.5)
                tell("localhost:3")
            if hvd.size() == 2 and state.step == 8:
                state.save()
                while True:
                    time.sleep(0.02)
                    state.check_host_updates()
            state.commit()


state = hvd.elastic.TorchState(model, optimizer, step=0, sizes=[])
train(state)
wanted = sum(-0.5 * 2 * 2 * sum(range(1, n + 1)) / n for n in state.sizes)
assert weight.tolist() == [[wanted] * 2], (weight, wanted, state.sizes)
print(f"rank {hvd.rank()} of {hvd.size()}: {state.sizes} {weight.tolist()}", flush=True)
"""


def test_elastic_training_goes_on_with_fewer_ranks_and_then_with_more(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    program, slots = tmp_path / "program.py", tmp_path / "slots"
    program.write_text(PROGRAM)
    slots.write_text("localhost:3")
    command = [sys.executable, "-m", "pycoll", "run", "-n", "3", "--prefix", "--min-np", "2"]
    command += ["--host-discovery-script", f"cat {slots}", str(program), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    begun = re.findall(r"rank \d of (\d) begins at step (\d+)", said)
    wanted = [("3", "0")] * 3 + [("2", "2")] * 2 + [("3", "8")] * 3
    assert begun == wanted, said
    ends = re.findall(r"rank \d of 3: (\[.*?\]) (\S+ \S+)", said)
    assert len(ends) == 3 and len(set(ends)) == 1, said
    assert ends[0][0] == "[3, 2, 2, 2, 3, 3]", said
