"""HOROVOD_* variables: read, honoured, or named in a warning."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import free_port

from pycoll.tools import timelines
from pycoll.torch.horovod import variables
from pycoll.torch.horovod.variables import Variables

PYCOLL_RUN = (sys.executable, "-m", "pycoll", "run", "-n", "2", "--prefix")

PROGRAM = """
import time, torch
import pycoll.torch as hvd
from pycoll.torch.horovod import horovod_world as world

hvd.init()
with_groups = [torch.ones(4) for _ in range(5)]
hvd.grouped_allreduce(with_groups, name="group")
handles = [hvd.allreduce_async(torch.ones(1000), name=f"t{n}") for n in range(8)]
for handle in handles:
    assert hvd.synchronize(handle)[0] == 1
for known in range(2):
    if hvd.rank() == 1:
        time.sleep(0.7)
    hvd.allreduce(torch.ones(3), name="slow")
early = hvd.allreduce_async(torch.ones(3), name="late") if hvd.rank() == 0 else None
until = time.monotonic() + 0.7
for number in range(100):
    done = hvd.allreduce(torch.tensor(float(time.monotonic() > until)), op=hvd.Min, name="busy")
    time.sleep(0.02)
    if done:
        break
hvd.synchronize(early if early is not None else hvd.allreduce_async(torch.ones(3), name="late"))
controller = world.current_world().controller(0, hvd.global_process_set)
known = len(controller._negotiation._known)
fused = controller._settings.fusion_bytes
print(f"rank {hvd.rank()} of {hvd.size()}: {fused} {known}", flush=True)
net = torch.nn.Linear(2, 2)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), policy="fixed")
net(torch.ones(1, 2)).sum().backward()
optimizer.step()
print(f"rank {hvd.rank()} sends {optimizer.explain()}".splitlines()[0], flush=True)
"""


def run(words: tuple[str, ...], status: int = 0, **variables: str) -> str:
    """What the program says, warnings included."""
    env = {n: v for n, v in os.environ.items() if not n.startswith(("PYCOLL_", "HOROVOD_"))}
    env |= {"PYCOLL_TUNING": "off", "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, env=env, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_values_are_read() -> None:
    assert variables.read({}) == Variables()
    assert variables.read({"HOROVOD_CYCLE_TIME": ""}) == Variables()
    found = variables.read(
        {
            "HOROVOD_FUSION_THRESHOLD": "1048576",
            "HOROVOD_CYCLE_TIME": "2.5",
            "HOROVOD_CACHE_CAPACITY": "0",
            "HOROVOD_TIMELINE": "/tmp/t.json",
            "HOROVOD_TIMELINE_MARK_CYCLES": "1",
            "HOROVOD_STALL_CHECK_TIME_SECONDS": "7",
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "30",
        }
    )
    assert found == Variables(1 << 20, 0.0025, 0, "/tmp/t.json", True, False, 7.0, 30.0)
    assert found.warn_after_s == 7
    assert found._replace(stall_s=0.0).warn_after_s is None
    assert found._replace(no_stall_check=True).warn_after_s is None


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("HOROVOD_CYCLE_TIME", "soon", "expected milliseconds"),
        ("HOROVOD_CYCLE_TIME", "inf", "expected milliseconds"),
        ("HOROVOD_FUSION_THRESHOLD", "-1", "expected bytes"),
        ("HOROVOD_FUSION_THRESHOLD", "64MB", "expected bytes"),
        ("HOROVOD_CACHE_CAPACITY", "1.5", "expected a number"),
        ("HOROVOD_STALL_CHECK_DISABLE", "yes", "expected 1 or 0"),
    ],
)
def test_values_that_cannot_be_read_are_named(name: str, value: str, expected: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{name}='{value}': {expected}")):
        variables.read({name: value})


def test_variables_without_meaning_are_told_with_what_to_do_instead() -> None:
    found = variables.without_meaning(
        {
            "HOROVOD_AUTOTUNE": "1",
            "HOROVOD_AUTOTUNE_LOG": "x",
            "HOROVOD_LOG_LEVEL": "debug",
            "HOROVOD_GLOO_IFACE": "eth0",
            "HOROVOD_SPEED": "9",
            "HOROVOD_RANK": "0",
            "HOROVOD_WITH_PYTORCH": "1",
            "HOROVOD_GPU_OPERATIONS": "NCCL",
            "HOROVOD_CYCLE_TIME": "1",
            "PATH": "/bin",
        }
    )
    assert list(found) == [
        *("HOROVOD_AUTOTUNE", "HOROVOD_AUTOTUNE_LOG", "HOROVOD_GLOO_IFACE", "HOROVOD_LOG_LEVEL"),
        "HOROVOD_SPEED",
    ]
    assert 'policy="auto"' in found["HOROVOD_AUTOTUNE_LOG"]
    assert "PYCOLL_INTERFACES" in found["HOROVOD_GLOO_IFACE"]
    assert found["HOROVOD_SPEED"] == "pycoll has no such setting"


def test_advice_is_for_variables_that_have_no_meaning() -> None:
    for start in variables.ADVICE:
        assert not any(name.startswith(f"HOROVOD_{start}") for name in variables.VARIABLES)


def test_ranks_honour_them_and_tell_once(tmp_path: Path) -> None:
    program, timeline = tmp_path / "program.py", tmp_path / "t.json"
    program.write_text(PROGRAM)
    said = run(
        (*PYCOLL_RUN, str(program)),
        HOROVOD_FUSION_THRESHOLD="8000",
        HOROVOD_CACHE_CAPACITY="3",
        HOROVOD_TIMELINE=str(timeline),
        HOROVOD_TIMELINE_MARK_CYCLES="1",
        HOROVOD_STALL_CHECK_TIME_SECONDS="0.3",
        HOROVOD_AUTOTUNE="1",
    )
    assert sorted(re.findall(r"rank (\d) of 2: 8000 3", said)) == ["0", "1"], said
    assert said.count("HOROVOD_AUTOTUNE has no effect") == 1, said
    assert "allreduce.slow has been waiting 0.3 s for other ranks, at least one" in said, said
    assert "allreduce.late has been waiting 0.3 s for rank 1, while rank 0 had it" in said, said
    assert len(re.findall(r"fixed\(bucket_bytes=8000\)", said)) == 2, said
    for path, rank in ((timeline, 0), (tmp_path / "t.1.json", 1)):
        events = json.loads(path.read_text())
        assert {event["pid"] for event in events} == {rank}
        names = {event.get("name") for event in events}
        assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE", "CYCLE_START"} <= names
    together = timelines.merge(timelines.siblings(timeline))
    assert {event["pid"] for event in together if event.get("name") == "ALLREDUCE"} == {0, 1}


def test_what_cannot_be_read_stops_init() -> None:
    words = (sys.executable, "-c", "import pycoll.torch as hvd; hvd.init()")
    said = run(words, 1, HOROVOD_CYCLE_TIME="soon")
    assert "ValueError: HOROVOD_CYCLE_TIME='soon': expected milliseconds" in said


def test_ranks_that_horovods_launcher_started_find_each_other(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import pycoll.torch as hvd; hvd.init()\n"
        "print(hvd.allgather_object(hvd.rank()), hvd.local_rank(), hvd.size())"
    )
    env = {n: v for n, v in os.environ.items() if not n.startswith(("PYCOLL_", "HOROVOD_"))}
    env |= {
        "PYCOLL_TUNING": "off",
        "HOROVOD_SIZE": "2",
        "HOROVOD_LOCAL_SIZE": "2",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(free_port()),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(program)],
            env=env | {"HOROVOD_RANK": str(rank), "HOROVOD_LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=120)[0] for process in processes]
    assert said == ["[0, 1] 0 2\n", "[0, 1] 1 2\n"]
