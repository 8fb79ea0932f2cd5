"""A rank that is lost at a synchronisation: its name, parameters that are whole, the rest go on."""

from __future__ import annotations

import json
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
                time.sleep(4)
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


def run_elastic(folder: Path, text: str) -> str:
    """What the ranks of an elastic job say: 3 ranks, and from 2 on while slots are missing."""
    pytest.importorskip("torch", reason="no torch: pip install -r tests/requirements.txt")
    program, slots = folder / "program.py", folder / "slots"
    program.write_text(text)
    slots.write_text("localhost:3")
    command = [sys.executable, "-m", "pycoll", "run", "-n", "3", "--prefix", "--min-np", "2"]
    command += ["--host-discovery-script", f"cat {slots}", str(program), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return said


def test_elastic_training_goes_on_with_fewer_ranks_and_then_with_more(tmp_path: Path) -> None:
    said = run_elastic(tmp_path, PROGRAM)
    begun = re.findall(r"rank \d of (\d) begins at step (\d+)", said)
    wanted = [("3", "0")] * 3 + [("2", "2")] * 2 + [("3", "8")] * 3
    assert begun == wanted, said
    ends = re.findall(r"rank \d of 3: (\[.*?\]) (\S+ \S+)", said)
    assert len(ends) == 3 and len(set(ends)) == 1, said
    assert ends[0][0] == "[3, 2, 2, 2, 3, 3]", said


#: Three workers send their largest changes only. One is killed while the others hold values back
#: and have a fragment under way in their last commit; they go on. Values are whole multiples of 3
#: and powers of two, so sums, means of 2 and of 3 and the outer step are exact in float32.
CODED_PROGRAM = """
import json, os, signal, sys
from pathlib import Path
import torch
import pycoll.optim
import pycoll.torch as hvd
from pycoll.compress import TopK

folder = Path(sys.argv[1])
hvd.init()
torch.set_num_threads(1)
model = torch.nn.ParameterList([torch.zeros(8), torch.zeros(8)])
optimizer = pycoll.optim.DiLoCo(
    torch.optim.SGD(model.parameters(), lr=1.0), every=6, fragments=2, delay=2,
    outer={"lr": 0.5, "momentum": 0.5}, compress=TopK(0.25),
)
#: For each fragment that has been applied, by the step at which it was due: the ranks that sent
#: it, this rank's share, and the average that all got.
applied = {}


def flat(arrays):
    return [one for array in arrays if array is not None for one in array.flatten().tolist()]


def noted(before, after):
    pending = before and before.pending
    if pending is None or after.step < pending.due:
        return
    average = []
    for sent, was, now in zip(pending.sent, before.velocities, after.velocities):
        if sent is not None:
            average += (now - (0 if was is None else 0.5 * was)).tolist()
    applied[after.step] = [hvd.size(), pending.fragment, flat(pending.sent), average]


def told(name):
    held = [[0.0] * 8 if one is None else one.tolist() for one in optimizer.local_state.residuals]
    (folder / name).write_text(json.dumps([applied, held]))


@hvd.elastic.run
def train(state):
    for step in [one for one in applied if one > state.step]:
        del applied[step]
    print(f"rank {hvd.rank()} of {hvd.size()} begins at step {state.step}", flush=True)
    while state.step < 26:
        state.step += 1
        for number, weight in enumerate(model):
            places = torch.arange(8)
            weight.grad = 3.0 * ((places * 5 + hvd.rank() * 3 + state.step + number) % 7 - 2)
        if hvd.size() == 3 and state.step == 12 and hvd.rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        before = optimizer.local_state
        optimizer.step()
        noted(before, optimizer.local_state)
        if state.step in (10, 22):
            assert optimizer.local_state.pending is not None
            told(f"{state.step}.{hvd.size()}.{hvd.rank()}")
            state.commit()


state = hvd.elastic.TorchState(model, optimizer, step=0)
train(state)
told(f"end.{hvd.rank()}")
"""


def test_elastic_ranks_with_a_codec_send_what_they_have_held_back(tmp_path: Path) -> None:
    """What all have got is what all have given less what they hold, exactly; the lost rank's too"""
    said = run_elastic(tmp_path, CODED_PROGRAM)
    begun = re.findall(r"rank \d of (\d) begins at step (\d+)", said)
    assert begun == [("3", "0")] * 3 + [("2", "10")] * 2, said
    names = ("end.0", "end.1", "10.3.2")  # the last one is that of the rank that was lost
    every = [json.loads((tmp_path / name).read_text()) for name in names]
    ends = [np.array(held, np.float64) for _, held in every]
    assert all(one.any() for one in ends) and (ends[0] != ends[1]).any()
    got, given = np.zeros((2, 8)), np.zeros((2, 8))
    for step, (size, fragment, _, average) in every[0][0].items():
        sent = [one[0][step] for one in every if step in one[0]]
        assert len(sent) == size == (3 if int(step) <= 10 else 2), (step, said)
        assert all(one[1] == fragment and one[3] == average for one in sent)
        got[fragment] += size * np.array(average)
        given[fragment] += np.sum([one[2] for one in sent], axis=0)
    assert len(every[0][0]) == 8
    assert got.tolist() == (given - sum(ends)).tolist(), said
