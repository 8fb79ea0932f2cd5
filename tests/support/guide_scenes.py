"""Every console block of the guides about ways of starting, and how a test runs it."""

from __future__ import annotations

import sys

from guide_blocks import SECRET, Scene, fenced

(HELLO,) = fenced("agents", "python")
(HELLO_JAX,) = fenced("jax-distributed", "python")
(SUMS,) = fenced("launching", "python")
STEPS, _ = fenced("ssh", "python")
GLOO, *_ = fenced("engines", "python")
SURVIVE, _ = fenced("staying-alive", "python")
#: Rank 3 is killed while the others wait.
KILLED = """
import os, signal, time
import pycoll

comm = pycoll.init()
comm.barrier()
if comm.rank == 3:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""
#: The agent of node 1 is killed by its rank.
AGENT_KILLED = """
import os, signal, time
import pycoll

comm = pycoll.init()
comm.barrier()
if comm.rank == 1:
    os.kill(os.getppid(), signal.SIGKILL)
time.sleep(60)
"""
#: Rank 1 is killed, and then the agent of the last host by its first rank.
HOST_LOST = """
import os, signal
import pycoll

comm = pycoll.init()
mine, comrade = comm.rank, os.getppid()
comm.barrier()
for victim in (1, 4):
    try:
        if mine == victim:
            os.kill(os.getpid() if mine == 1 else comrade, signal.SIGKILL)
        comm.barrier()
        comm.barrier()
    except pycoll.PeerLostError:
        comm = comm.shrink()
"""
HOSTS_TXT = "host0 slots=2\nhost1 slots=2  # the new one\n"
HOSTS_SH = "#!/bin/sh\necho host0:2\necho host1:2\n"
WITHOUT_A_KEY = {"SSH_TEST_OPTIONS": "-o PubkeyAuthentication=no"}
#: On another host, sshd's own PATH leads to another Python.
PYTHON = {"python hello.py": f"{sys.executable} hello.py"}
#: Jobs of a test have numbers in the order in which they are submitted.
OUTPUT = {"cat slurm-1.out": "cat slurm-*.out"}
OTHER_AGENT = "pycoll run --nnodes 2 --node-rank 1 --address host0:5000 -n 1 train.py"
PODS = {"train-0.train": "host0", "train-0]": "host0]", "train-1]": "host1]"}

SCENES = (
    Scene("launching", (0,), "here", {"hello.py": HELLO}),
    Scene("launching", (1, 2), "hosts", {"hello.py": HELLO}),
    Scene("launching", (3,), "here", {"sums.py": SUMS}),
    Scene("launching", (4,), "ssh", {"sums.py": SUMS}),
    Scene("launching", (5, 6), "hosts", {"sums.py": SUMS}),
    Scene("agents", (0, 1), "hosts", {"hello.py": HELLO}),
    Scene("agents", (2, 3), "hosts", {"train.py": KILLED}, 137),
    Scene("agents", (4,), "hosts", {"train.py": AGENT_KILLED}, 1, others=(OTHER_AGENT,)),
    Scene("agents", (5,), "slurm", {"hello.py": HELLO}, replaced=OUTPUT),
    Scene(
        "kubernetes",
        (0, 1),
        "hosts",
        {"hello.py": HELLO, "secret": SECRET},
        replaced={**PODS, "/run/pycoll/secret": "secret"},
    ),
    Scene("staying-alive", (0,), "here", {"survive.py": SURVIVE}),
    Scene("staying-alive", (1,), "ssh", {"train.py": HOST_LOST}),
    Scene("ssh", (0,), "ssh", {"hello.py": HELLO}),
    Scene("ssh", (1,), "ssh", {"hello.py": HELLO, "hosts.txt": HOSTS_TXT}),
    Scene("ssh", (2,), "ssh", {"train.py": KILLED}, 137),
    Scene("ssh", (3,), "ssh", {"train.py": KILLED}, 1, environment=WITHOUT_A_KEY),
    Scene("ssh", (4,), "ssh", {"steps.py": STEPS, "hosts.sh": HOSTS_SH}),
    Scene("mpirun-srun", (0,), "mpi", {"hello.py": HELLO}, replaced=PYTHON),
    Scene("mpirun-srun", (1,), "mpi", {"hello.py": HELLO}, replaced=PYTHON),
    Scene("mpirun-srun", (2,), "slurm", {"hello.py": HELLO}),
    Scene("mpirun-srun", (3,), "slurm", {"hello.py": HELLO}, replaced=OUTPUT),
    Scene("torchrun", (0,), "frameworks", {"hello.py": HELLO}, errors=False),
    Scene("torchrun", (1, 2), "frameworks", {"hello.py": HELLO}, errors=False, together=True),
    Scene("jax-distributed", (0,), "frameworks", {"hello.py": HELLO_JAX}),
    Scene("jax-distributed", (1, 2), "frameworks", {"hello.py": HELLO_JAX}),
    Scene("ray", (0,), "engine", is_open=True),
    Scene("ray", (1,), "ray", replaced={"ray start": "ray start $HEAD"}),
    Scene("ray", (2,), "ray", replaced={"ray start": "ray start $NODE"}, first=1),
    Scene("ray", (3,), "ray", is_open=True),
    Scene("ray", (4,), "engine", is_open=True),
    Scene("dask", (0,), "engine", errors=False),
    Scene("dask", (1,), "dask", errors=False),
    Scene("spark", (0,), "engine", is_open=True),
    Scene("spark", (1,), "spark", is_open=True),
    Scene("engines", (0,), "frameworks", {"train.py": GLOO}, errors=False),
)
#: Blocks whose programs other tests run and compare.
ELSEWHERE = {("trainers", number): "launchers/test_trainers.py" for number in range(4)}
#: Blocks of commands without an output: ``kubectl`` needs a cluster, and what the others start
#: runs until it is stopped. Tests of clusters run the latter.
WITHOUT_OUTPUT = {
    "kubernetes": ("kubectl", "pycoll run"),
    "dask": ("dask",),
    "spark": ("spark-class",),
}
