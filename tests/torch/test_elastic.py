"""Training goes on with fewer ranks, and then with more: one is killed, and slots come back."""

from __future__ import annotations

import re
from pathlib import Path

from test_torch_scripts import PYCOLL_RUN, run

#: 3 ranks, one of which is killed; 2 ranks; then slots come back, and 3 ranks. Gradients are the
#: samples, and are added up, so the weight says what was stepped by, exactly.
PROGRAM = """
import os, signal, sys, time
from pathlib import Path
import torch
import pycoll.torch as hvd

folder = Path(sys.argv[1])
hvd.init()
torch.set_num_threads(1)
model = torch.nn.Linear(1, 1, bias=False).double()
torch.nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=hvd.Sum)
data = list(range(1, 25))
sampler = hvd.elastic.ElasticSampler(data)
resets = []


def tell(text):
    (folder / "fresh").write_text(text)
    (folder / "fresh").rename(folder / "slots")


@hvd.elastic.run
def train(state):
    print(f"rank {hvd.rank()} of {hvd.size()} begins with {state.commits} commits", flush=True)
    while state.epoch < 2:
        for number, place in enumerate(state.sampler):
            optimizer.zero_grad()
            (model(torch.ones(1, 1).double()) * data[place]).sum().backward()
            optimizer.step()
            if hvd.size() == 3 and state.commits == 3 and hvd.rank() == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            state.sampler.record_batch(number, 1)
            state.had = state.had + hvd.allgather_object((state.epoch, data[place]))
            state.commit()
        state.sampler.set_epoch(state.epoch + 1)
        state.epoch += 1
        state.commit()
        if hvd.size() == 2 and state.epoch == 1 and hvd.rank() == 0:
            tell("localhost:2")
            time.sleep(4)
            tell("localhost:3")
        while hvd.size() == 2 and state.epoch == 1:
            time.sleep(0.02)
            state.check_host_updates()


state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, had=[])
state.register_reset_callbacks([lambda: resets.append(hvd.size())])
train(state)
for epoch in range(2):
    assert {sample for e, sample in state.had if e == epoch} == set(data), state.had
assert model.weight.item() == -0.5 * sum(sample for _, sample in state.had)
print(f"rank {hvd.rank()} of {hvd.size()}: {resets} {model.weight.item()}", flush=True)
"""


def test_training_goes_on_with_fewer_ranks_and_then_with_more(tmp_path: Path) -> None:
    program, slots = tmp_path / "program.py", tmp_path / "slots"
    program.write_text(PROGRAM)
    slots.write_text("localhost:3")
    launcher = [*PYCOLL_RUN, "--min-np", "2", "--host-discovery-script", f"cat {slots}"]
    said = run(*launcher, str(program), str(tmp_path))
    begun = re.findall(r"rank (\d) of (\d) begins with (\d+) commits", said)
    # 3 steps of 3 ranks, 8 of 2, which have one of the 15 samples that are left twice, and 1 more.
    wanted = [("3", "0")] * 3 + [("2", "3")] * 2 + [("3", "12")] * 3
    assert [(size, commits) for _, size, commits in begun] == wanted, said
    ends = re.findall(r"rank (\d) of 3: \[(.*?)\] (\S+)", said)
    assert sorted(rank for rank, _, _ in ends) == ["0", "1", "2"], said
    assert sorted(resets for _, resets, _ in ends) == ["", "2, 3", "2, 3"], said
    assert len({weight for _, _, weight in ends}) == 1, said
