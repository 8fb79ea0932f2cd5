"""Several hosts with sshd: network namespaces, a key of their own, and an ssh that knows them.

Every sshd has its configuration, keys and log in a folder of the test. The test's ``ssh`` stands
before the system's on PATH and adds that configuration; it is the system's client otherwise.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "bench"))
import hosts  # noqa: E402

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
PORT = 22
_CONFIG = """
Port {port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
PidFile none
PasswordAuthentication no
KbdInteractiveAuthentication no
PubkeyAuthentication yes
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
UseDNS no
PrintMotd no
MaxStartups 100
"""
_CLIENT = """
Host *
  IdentityFile {folder}/key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile /dev/null
  LogLevel ERROR
"""


def obstacle() -> str:
    """Why such hosts cannot be made here, or an empty text."""
    if not os.path.exists(SSHD) or shutil.which("ssh") is None:
        return "no sshd (openssh-server) or no ssh (openssh-client)"
    return hosts.obstacle()


class SshHosts:
    """Hosts that reach each other by ssh, as host0, host1 and so on, over IPv4 and IPv6."""

    def __init__(self, world: hosts.Hosts, folder: Path) -> None:
        self.world, self.folder = world, folder
        self.names = world.names
        self._servers: list[subprocess.Popen[bytes]] = []
        #: A folder whose files the first host alone has.
        self.hidden = folder / "hidden"
        (folder / "bin").mkdir(parents=True)
        self.hidden.mkdir()
        for name in ("host_key", "key"):
            line = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(line, check=True)
        shutil.copy(folder / "key.pub", folder / "authorized_keys")
        key = (folder / "host_key.pub").read_text().split()[:2]
        known = ",".join([*world.names, *world.addresses, *self.addresses6])
        (folder / "known_hosts").write_text(f"{known} {' '.join(key)}\n")
        (folder / "sshd_config").write_text(_CONFIG.format(port=PORT, folder=folder))
        (folder / "ssh_config").write_text(_CLIENT.format(folder=folder))
        ssh = folder / "bin" / "ssh"
        line = f'exec {shutil.which("ssh")} -F {folder}/ssh_config $SSH_TEST_OPTIONS "$@"'
        ssh.write_text(f"#!/bin/sh\n{line}\n")
        ssh.chmod(0o755)

    @property
    def addresses6(self) -> list[str]:
        return [f"fd78::{number + 1}" for number in range(len(self.names))]

    def serve(self) -> None:
        """Give each host an IPv6 address and an sshd, and wait until all listen."""
        os.makedirs("/run/sshd", exist_ok=True)
        for number, address in enumerate(self.addresses6):
            space = self.world.space(number)
            line = ["ip", "-n", space, "addr", "add", f"{address}/64", "dev", hosts.DEVICE, "nodad"]
            subprocess.run(line, check=True, capture_output=True)
            log = self.folder / f"sshd{number}.log"
            line = [SSHD, "-D", "-f", str(self.folder / "sshd_config"), "-E", str(log)]
            if number > 0:
                hide = f'mount -t tmpfs none {self.hidden} && exec "$0" "$@"'
                line = ["sh", "-c", hide, *line]
            self._servers.append(subprocess.Popen(self.world.on(number, line)))
        for number in range(len(self.names)):
            log = self.folder / f"sshd{number}.log"
            until = time.monotonic() + 20
            while not (log.exists() and "Server listening" in log.read_text()):
                assert time.monotonic() < until, f"sshd {number} does not listen"
                time.sleep(0.05)

    def stop(self) -> None:
        for server in self._servers:
            server.kill()
            server.wait()

    def start(
        self,
        line: Sequence[str],
        host: int = 0,
        cwd: Path | None = None,
        **environ: str,
    ) -> subprocess.Popen[str]:
        """Start a command on a host, in a session of its own."""
        clean = {n: one for n, one in os.environ.items() if not n.startswith(("PYCOLL_", "SSH_"))}
        path = f"{self.folder / 'bin'}{os.pathsep}{clean['PATH']}"
        own = {"PATH": path, "COLUMNS": "500", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(
            self.world.on(host, line),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd or self.folder,
            env={**clean, **own, **environ},
            start_new_session=True,
        )

    def processes(self, word: str) -> list[int]:
        """The processes of all hosts with ``word`` on their command line."""
        found = []
        for number in range(len(self.names)):
            line = ["ip", "netns", "pids", self.world.space(number)]
            listed = subprocess.run(line, capture_output=True, text=True, check=True).stdout
            for pid in map(int, listed.split()):
                with contextlib.suppress(OSError):
                    if word.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                        found.append(pid)
        return found


@contextlib.contextmanager
def made(count: int, folder: Path) -> Iterator[SshHosts]:
    """``count`` hosts with sshd."""
    with hosts.Hosts(count) as world:
        found = SshHosts(world, folder)
        try:
            found.serve()
            yield found
        finally:
            found.stop()
