"""Slurm over emulated hosts: munged, one slurmctld, and a slurmd on each host.

All files are in a folder of the test. Each slurmd has its own mounts where the hosts share a file
system, so that its plug-ins find the folders of their own host only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import hosts

_DAEMONS = ("munged", "slurmctld", "slurmd", "srun", "sinfo")
_CONFIGURATION = """
ClusterName=test
SlurmctldHost={head}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SwitchType=switch/none
ReturnToService=2
MpiDefault={default}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
#: Most seconds until the nodes are ready.
_READY_S = 60.0


def obstacle() -> str:
    """Why Slurm cannot run here, or an empty text."""
    places = f"{os.environ['PATH']}:/usr/sbin"
    missing = [name for name in _DAEMONS if shutil.which(name, path=places) is None]
    if missing:
        return f"no {missing[0]} (apt: slurm-wlm, munge)"
    return hosts.obstacle()


class Slurm:
    """A cluster on the hosts of ``world``, whose daemons run inside a with statement."""

    def __init__(self, world: hosts.Hosts, folder: Path, default: str = "none") -> None:
        self._world, self._folder = world, folder
        self._started: list[subprocess.Popen[bytes]] = []
        for name in ("state", "spool", "host"):
            (folder / name).mkdir()
        for name in world.names:
            (folder / "spool" / name).mkdir()
        text = _CONFIGURATION.format(
            head=world.names[0], address=world.addresses[0], folder=folder, default=default
        )
        nodes = [
            f"NodeName={name} NodeAddr={address} CPUs=4 State=UNKNOWN\n"
            for name, address in zip(world.names, world.addresses, strict=True)
        ]
        (folder / "slurm.conf").write_text(text + "".join(nodes))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        (folder / "mpi.conf").write_text(f"PMIxCliTmpDirBase={folder}/host\n")
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "PATH": f"{os.environ['PATH']}:/usr/sbin",
            "SLURM_CONF": str(self._folder / "slurm.conf"),
        }

    def __enter__(self) -> Slurm:
        """Start the daemons and wait until all nodes are ready; if that fails, end them."""
        try:
            self._start_daemons()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start_daemons(self) -> None:
        files = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munge.pid"}
        files |= {"log-file": "munge.log", "seed-file": "munge.seed"}
        options = [f"--{name}={self._folder / file}" for name, file in files.items()]
        self._start(["munged", "--foreground", "--force", *options])
        self._start(self._world.on(0, ["slurmctld", "-D", "-i"]))
        for number in range(len(self._world.names)):
            # Mounts of this process only. slurmd looks at the first folder, PMIx uses the second.
            mounts = "mount -t tmpfs none /sys/fs/cgroup && mount -t tmpfs none"
            line = f'{mounts} {self._folder}/host && exec "$@"'
            self._start(self._world.on(number, ["sh", "-c", line, "sh", "slurmd", "-D"]))
        until = time.monotonic() + _READY_S
        wanted = len(self._world.names)
        while self._idle() < wanted:
            assert time.monotonic() < until, self._logs()
            time.sleep(0.2)

    def srun(self, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run srun on the first host."""
        return self.run("srun", *words, **environ)

    def run(self, *line: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run a command of Slurm on the first host."""
        return self._run(line, 120, **environ)

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._started):
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self, line: Sequence[str]) -> None:
        with open(self._folder / "daemons.log", "ab") as log:
            self._started.append(
                subprocess.Popen(line, stdout=log, stderr=log, env=self.environment)
            )

    def _idle(self) -> int:
        done = self._run(["sinfo", "-h", "-N", "-o", "%T"], 30)
        return done.stdout.split().count("idle")

    def _run(
        self, line: Sequence[str], limit_s: float, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self._world.on(0, line),
            capture_output=True,
            text=True,
            check=False,
            timeout=limit_s,
            env=self.environment | {"PYCOLL_INIT_TIMEOUT_S": "40"} | environ,
        )

    def _logs(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in self._folder.glob("*.log"))
