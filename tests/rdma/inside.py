"""The tests of verbs that run in the guest: conformance, all collectives, faults.

    python tests/rdma/inside.py [NAME...]

Ranks are processes; rank r uses the device rxe(r % DEVICES), or several from there on where it has
rails. Each check says what it found and how long that took; the first failure ends the run. Times
are those of an emulated machine.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import rank_of_guest
from guest import DEVICES, ROOT
from rank_of_guest import FailedError

#: Starts an interpreter for one rank; the job's name follows.
INTERPRETER = (sys.executable, rank_of_guest.__file__)
#: What ranks import at their start and at their first calls.
PRELOADED = (
    "numpy.random",
    "pycoll.bootstrap.connect",
    "pycoll.bootstrap.subcommunicators",
    "pycoll.comm.start_tuning",
    "pycoll.comm.world",
    "pycoll.device.coded_calls",
)
SECRET = "correct horse battery staple"
PORT = 4711
#: Seconds for which a check waits for a rank. Everything is 15 to 20 times slower here, and the
#: machine outside may have other work.
PATIENCE_S = 900.0


def limited_to(kib: int) -> tuple[str, ...]:
    """Leads a command that may lock so much memory, as root too: another user may not get at
    Python."""
    limit = ("sh", "-c", f'ulimit -l {kib}; exec "$@"', "sh")
    return ("setpriv", "--bounding-set", "-ipc_lock", "--inh-caps", "-ipc_lock", *limit)


LIMITED = limited_to(64)


def require(condition: bool, text: str) -> None:
    if not condition:
        raise FailedError(text)


_FORK = multiprocessing.get_context("fork")


class RankProcess:
    """One rank. Its output and its errors go to files."""

    def __init__(
        self, job: str, command: tuple[str, ...], environment: Mapping[str, str], folder: str
    ) -> None:
        where = Path(folder) / environment["PYCOLL_RANK"]
        self.output, self.errors = where.with_suffix(".out"), where.with_suffix(".err")
        with self.output.open("w") as out, self.errors.open("w") as errors:
            files = out.fileno(), errors.fileno()
            self._process = _FORK.Process(
                target=_run_rank, args=(job, command, environment, files), daemon=True
            )
            self._process.start()

    def kill(self) -> None:
        self._process.kill()

    def is_running(self) -> bool:
        return self._process.is_alive()

    def wait(self, timeout_s: float) -> tuple[int | None, str, str]:
        """Its status, or None if it still runs after the time; what it has said so far."""
        self._process.join(timeout_s)
        return self._process.exitcode, self.output.read_text(), self.errors.read_text()


def _run_rank(
    job: str, command: tuple[str, ...], environment: Mapping[str, str], files: tuple[int, int]
) -> None:
    os.environ.update(environment)
    for stream, file in enumerate(files, 1):
        os.dup2(file, stream)
    if command:
        os.execvp(command[0], [*command, job])
    rank_of_guest.run(job)


class Ranks:
    """Processes that run the same ``job`` of rank_of_guest.py over verbs, each over devices of its
    own.

    They are forks of this process: an interpreter and its imports take longer here than most jobs.
    Ranks that shall have an interpreter of their own get the ``command`` that starts it.
    """

    _port = PORT

    def __init__(
        self, size: int, job: str, command: tuple[str, ...] = (), rails: int = 1, **settings: str
    ) -> None:
        Ranks._port += 1
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self.processes = []
        for rank in range(size):
            environment = {
                "PYCOLL_RANK": str(rank),
                "PYCOLL_SIZE": str(size),
                "PYCOLL_ADDRESS": f"127.0.0.1:{Ranks._port}",
                "PYCOLL_SECRET": SECRET,
                "PYCOLL_TRANSPORTS": "verbs",
                "PYCOLL_VERBS_DEVICES": ",".join(
                    f"rxe{(rank * rails + rail) % DEVICES}" for rail in range(rails)
                ),
                "PYCOLL_TUNING": "off",
                "PYCOLL_TIMEOUT_S": "120",
                "PYCOLL_INIT_TIMEOUT_S": "600",
            }
            self.processes.append(
                RankProcess(job, command, environment | settings, self._folder.name)
            )

    def wait_for(self, rank: int, word: str) -> None:
        """Until ``rank`` prints ``word``."""
        process = self.processes[rank]
        while process.is_running() and not process.output.read_text().endswith("\n"):
            time.sleep(0.05)
        if process.output.read_text().strip() != word:
            self.kill()
            _, said, error = process.wait(PATIENCE_S)
            raise FailedError(f"rank {rank} said {said!r}, not {word!r}: {error[-2000:]}")

    def kill(self) -> None:
        for process in self.processes:
            process.kill()

    def ended(self) -> list[tuple[int, str, str]]:
        """Status, output and errors of each rank, once all have ended."""
        results = []
        for process in self.processes:
            status, out, error = process.wait(PATIENCE_S)
            if status is None:
                self.kill()
                told = [one.wait(PATIENCE_S) for one in self.processes]
                raise FailedError(f"a rank hangs: {told}")
            results.append((status, out, error))
        return results

    def succeed(self) -> list[str]:
        """The outputs; all ranks must end well."""
        results = self.ended()
        for rank, (status, _, error) in enumerate(results):
            require(status == 0, f"rank {rank} ended with {status}: {error[-3000:]}")
        return [out for _, out, _ in results]


def tc(*words: str) -> None:
    subprocess.run(["tc", "qdisc", *words], check=True, capture_output=True)


def conformance(devices: int) -> str:
    program = ROOT / "build/python/tests/rdma/rdma_conformance"
    done = subprocess.run(
        [program, "rxe", str(devices), "1"],
        check=False,
        text=True,
        capture_output=True,
        timeout=2 * PATIENCE_S,
        env=os.environ | {"PYCOLL_TEST_SLOWNESS": "10"},
    )
    require(done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:])
    return done.stdout.splitlines()[-1]


def collectives(size: int) -> str:
    outputs = Ranks(size, "collectives").succeed()
    require(all(out == outputs[0] for out in outputs), f"ranks differ: {outputs}")
    return outputs[0].strip()


def sent_packets() -> list[int]:
    """So far, by device."""
    counter = "/sys/class/infiniband/rxe{}/ports/1/hw_counters/sent_pkts"
    return [int(Path(counter.format(i)).read_text()) for i in range(DEVICES)]


def two_rails() -> str:
    """All collectives, with every packet count of a device near that of its rank's other one."""
    before = sent_packets()
    outputs = Ranks(2, "collectives", rails=2).succeed()
    sent = [after - count for after, count in zip(sent_packets(), before, strict=True)]
    require(outputs[0] == outputs[1], f"ranks differ: {outputs}")
    for pair in (sent[:2], sent[2:]):
        require(min(pair) > max(pair) / 2 > 500, f"packets by device: {sent}")
    return f"{outputs[0].strip()}; packets by device: {sent}"


def arrays(job: str) -> str:
    """What lies in memory of pycoll.empty() is registered, and long arrays of NumPy lie there."""
    outputs = Ranks(2, job, PYCOLL_SHARED_ARRAYS="1").succeed()
    for out in outputs:
        told = re.search(r"registered ([\d.]+) MiB of arrays$", out.strip())
        require(told is not None and float(told[1]) >= 8, f"not registered: {out}")
    return outputs[0].strip()


def codes() -> str:
    """Codes between hosts have the same sums on all ranks, and the same over TCP."""
    outputs = Ranks(2, "codes").succeed() + Ranks(2, "codes", PYCOLL_TRANSPORTS="tcp").succeed()
    digests, media = zip(*(out.split(" over ") for out in outputs), strict=True)
    require(len(set(digests)) == 1, f"results differ: {outputs}")
    require("verbs" in media[0] and "tcp" in media[2], f"not over both: {media}")
    return outputs[0].strip()


def arrays_kept() -> str:
    """Ordinary arrays that are registered are, and are no more when that is over."""
    outputs = Ranks(2, "kept", PYCOLL_SHARED_ARRAYS="0").succeed()
    for out in outputs:
        lines = out.splitlines()
        require(all(line.startswith(f"{1 << 23} B kept") for line in lines[:2]), f"not kept: {out}")
        require("registered 0 B of arrays" in lines[2], f"still registered: {out}")
    return outputs[0].splitlines()[0]


def arrays_limited() -> str:
    """Who may lock slots but not arrays gets right results, and is told why."""
    command = (*limited_to(10 * 1024), *INTERPRETER)
    outputs = Ranks(2, "arrays", command, PYCOLL_SHARED_ARRAYS="1").succeed()
    for out in outputs:
        require("cannot register" in out and "ulimit -l" in out, f"not told: {out}")
    return outputs[0].strip()[:300]


def killed_rank() -> str:
    """The other rank is told, and its interpreter ends."""
    ranks = Ranks(2, "loop", INTERPRETER)
    for rank in range(2):
        ranks.wait_for(rank, "running")
    started = time.monotonic()
    ranks.processes[1].kill()
    results = ranks.ended()
    seconds = time.monotonic() - started
    told = json.loads(results[0][1].splitlines()[-1])
    require(told["error"] == "PeerLostError", f"rank 0: {told}")
    require("rank 1" in told["text"], f"rank 0 does not name it: {told}")
    require(seconds < 60, f"told after {seconds:.1f} s")
    return f"told after {seconds:.1f} s: {told['text']}"


def link_down() -> str:
    ranks = Ranks(2, "loop", INTERPRETER)
    for rank in range(2):
        ranks.wait_for(rank, "running")
    started = time.monotonic()
    subprocess.run(["ip", "link", "set", "ve1", "down"], check=True)
    try:
        results = ranks.ended()
    finally:
        subprocess.run(["ip", "link", "set", "ve1", "up"], check=True)
    seconds = time.monotonic() - started
    told = [json.loads(out.splitlines()[-1]) for _, out, _ in results]
    for rank in range(2):
        require(told[rank]["error"] == "PeerLostError", f"rank {rank}: {told}")
    # Who sends hears no answer, or the device of rank 1 refuses to send and says why. Who notices
    # first ends, and for the other one that may be the first that it sees.
    texts = told[0]["text"] + told[1]["text"]
    silent, down = "does not answer over rxe", r"on rxe1 port 1 failed \(.*reported: port error"
    require(silent in texts or re.search(down, texts) is not None, f"no reason: {told}")
    return f"told after {seconds:.1f} s: {told[0]['text']}"


def disturbed(words: tuple[str, ...]) -> str:
    for device in ("ve0", "ve1"):
        tc("add", "dev", device, "root", "netem", *words)
    try:
        outputs = Ranks(2, "large").succeed()
    finally:
        for device in ("ve0", "ve1"):
            tc("del", "dev", device, "root")
    require(outputs[0] == outputs[1], f"ranks differ: {outputs}")
    return outputs[0].strip()


def locked_memory() -> str:
    """Who may lock 64 KiB only is told which limit to raise."""
    results = Ranks(2, "large", (*LIMITED, *INTERPRETER)).ended()
    for rank, (status, _, error) in enumerate(results):
        require(status != 0, f"rank {rank} did well")
        require("ulimit -l unlimited" in error, f"rank {rank} gives no advice: {error[-2000:]}")
    return results[0][2].strip().splitlines()[-1][:200]


def fall_back() -> str:
    """The same process gets tcp where that is allowed too; rank 0 says why, in one line."""
    results = Ranks(2, "large", (*LIMITED, *INTERPRETER), PYCOLL_TRANSPORTS="verbs,tcp").ended()
    for rank, (status, out, error) in enumerate(results):
        require(status == 0, f"rank {rank} ended with {status}: {error[-3000:]}")
        require("over tcp" in out, f"rank {rank} used something else: {out}")
        told = error.count("tcp is used instead of verbs: rank 0")
        require(told == (rank == 0), f"rank {rank} told it {told} times: {error[-2000:]}")
    require("ulimit -l unlimited" in results[0][2], f"no advice: {results[0][2][-2000:]}")
    return results[0][1].strip()


CHECKS: dict[str, Callable[[], str]] = {
    "conformance, 2 devices": lambda: conformance(2),
    "all collectives, 2 ranks": lambda: collectives(2),
    "all collectives, 4 ranks": lambda: collectives(4),
    "all collectives, 2 rails": two_rails,
    "arrays, registered": lambda: arrays("arrays"),
    "arrays of NumPy, registered": lambda: arrays("arrays of NumPy"),
    "arrays, kept": arrays_kept,
    "codes": codes,
    "arrays beyond locked memory": arrays_limited,
    "a killed rank": killed_rank,
    "lost packets": lambda: disturbed(("loss", "1%")),
    "damaged and doubled packets": lambda: disturbed(("corrupt", "1%", "duplicate", "2%")),
    "locked memory": locked_memory,
    "fallback on tcp": fall_back,
    "link down": link_down,
}


def main() -> int:
    words = sys.argv[1:]
    wanted = [name for name in CHECKS if not words or any(word in name for word in words)]
    if not wanted:
        print(f"no check is called {' or '.join(words)}; there are: {', '.join(CHECKS)}")
        return 2
    for module in PRELOADED:
        importlib.import_module(module)
    for name in wanted:
        check = CHECKS[name]
        started = time.monotonic()
        try:
            found = check()
        except FailedError as error:
            print(f"FAILED  {name}: {error}", flush=True)
            return 1
        print(f"ok  {time.monotonic() - started:5.1f} s  {name}: {found}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
