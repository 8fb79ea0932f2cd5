"""Compares verbs with Open MPI over UCX and with the devices' own rate, on Soft-RoCE devices.

    .venv/bin/python bench/rdma.py --markdown bench/RESULTS.md

The benchmark needs no RDMA hardware: it runs in the virtual machine of tests/rdma, which is
emulated without KVM. The guest has Debian's kernel and its Open MPI 4.1 with UCX (rc_v). Two ranks
use the two devices rxe0 and rxe1, whose packets cross a bridge. Both libraries reduce arrays
(float32 sum, in place) through Python (pycoll, mpi4py). Their samples are interleaved
(bench/jobs.py), also with those of ib_write_bw of perftest, which runs in both directions at once.
Both libraries register the arrays, so that the device reads them in place.

The emulation slows user code down more than the kernel's work, which is the same for all libraries.
So the ratios weigh instructions in user space more than hardware would. No figure describes a real
network.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import page
from host_jobs import places_of
from jobs import ROOT, WORKER, Effort, Entrant, Start, Times, binaries_of, compare, start_jobs

TITLE = "Verbs on Soft-RoCE devices, in an emulated machine"
KIB, MIB = 1 << 10, 1 << 20
#: Targets by message size in bytes: Open MPI's time divided by pycoll's.
TARGETS = {8: 1.0, 256 * KIB: 1.2, 2 * MIB: 1.2}
#: Target of busbw as a share of ib_write_bw's rate in each direction, from that message size on.
WIRE_SHARE, WIRE_BYTES = 0.8, 256 * KIB
RANKS = 2
#: Factor of all time limits in the guest, where user code is slow.
SLOWNESS = 20.0
PACKAGES = ("openmpi-bin", "ucx-utils", "perftest")
_PORT = 4700
_LIBMPI = "/usr/lib/x86_64-linux-gnu/libmpi.so.40"
#: Each rank uses its own device. GID 0 is link-local IPv6. UCX would choose IPv4, over which these
#: devices do not answer its datagrams.
_UCX = {
    "UCX_TLS": "rc_v,self",
    "UCX_IB_GID_INDEX": "0",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "MPI4PY_LIBMPI": _LIBMPI,
}
_ON_ITS_DEVICE = 'export UCX_NET_DEVICES="rxe$OMPI_COMM_WORLD_LOCAL_RANK:1"; exec "$@"'
_UCX_ONLY = ("--mca", "pml", "ucx", "--mca", "osc", "ucx", "--mca", "btl", "^openib,ofi")


@dataclass(frozen=True)
class Row:
    """One size: seconds of each round by entrant; ``wire``: bytes/s of ib_write_bw each way."""

    nbytes: int
    batches: dict[str, list[float]]
    p99: dict[str, float]
    wire: float | None

    def median(self, name: str) -> float:
        return statistics.median(self.batches[name])

    def ratio(self) -> float | None:
        """Return the median over rounds of Open MPI's time divided by pycoll's; None without it."""
        if "openmpi" not in self.batches:
            return None
        pairs = zip(self.batches["openmpi"], self.batches["pycoll"], strict=True)
        return statistics.median(theirs / ours for theirs, ours in pairs)

    def busbw(self) -> float:
        """Return the bytes per second that each of two ranks must send: the whole message."""
        return self.nbytes / self.median("pycoll")

    def verdicts(self) -> list[str]:
        lines = []
        found = self.ratio()
        if found is not None:
            lines.append(page.verdict("UCX / pycoll", found, TARGETS[self.nbytes]))
        if self.wire is not None and self.nbytes >= WIRE_BYTES:
            lines.append(page.verdict("busbw / ib_write_bw", self.busbw() / self.wire, WIRE_SHARE))
        return lines


# In the guest


class Device:
    """The rate of ib_write_bw between the two devices, in both directions at once."""

    def __init__(self) -> None:
        self.samples: list[float] = []

    def sample(self) -> None:
        """Add one sample, unless perftest is missing or fails."""
        if shutil.which("ib_write_bw") is None:
            return
        line = ["ib_write_bw", "-F", "-x", "1", "-b", "-s", "65536", "-n", "200", "--report_gbits"]
        line += ["-p", str(_PORT)]
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        server = subprocess.Popen([*line, "-d", "rxe1"], **quiet)
        try:
            for _ in range(40):  # until the server listens
                done = subprocess.run(
                    [*line, "-d", "rxe0", "127.0.0.1"], capture_output=True, text=True, check=False
                )
                rate = gigabits(done.stdout)
                if rate is not None:
                    self.samples.append(rate * 1e9 / 8 / 2)
                    return
                time.sleep(0.25)
        finally:
            server.kill()
            server.wait()

    @property
    def median(self) -> float | None:
        return statistics.median(self.samples) if self.samples else None


def gigabits(text: str) -> float | None:
    """Parse the average of perftest's table, of both directions together; None without one."""
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 4 and words[0] == "65536":
            return float(words[3])
    return None


def starts_in_guest(name: str, ranks: int, path: str) -> list[Start]:
    """Return the starts for ``jobs.start_jobs``: rank r uses device rxe<r>."""
    worker = [str(binaries_of(name) / "python"), WORKER, name, path]
    if name == "openmpi":
        launcher = ["mpirun.openmpi", "-np", str(ranks), "--oversubscribe", *_UCX_ONLY]
        exports = [word for key in _UCX for word in ("-x", key)]
        return [Start([*launcher, *exports, "sh", "-c", _ON_ITS_DEVICE, "sh", *worker], _UCX)]
    places = places_of(name, "127.0.0.1", "lo", ranks)
    settings = {
        "PYCOLL_TRANSPORTS": "verbs",
        "PYCOLL_TUNING": "off",
        "PYCOLL_INIT_TIMEOUT_S": "600",
    }
    return [
        Start(worker, {**places(rank, rank), **settings, "PYCOLL_VERBS_DEVICES": f"rxe{rank}"})
        for rank in range(ranks)
    ]


def measure(sizes: Sequence[int], effort: Effort) -> Iterator[Row]:
    """Measure all sizes, each with its own samples of the devices' rate."""
    with contextlib.ExitStack() as cleanup:
        folder = cleanup.enter_context(tempfile.TemporaryDirectory())
        jobs = start_jobs(RANKS, folder, ("pycoll", "openmpi"), starts_in_guest, SLOWNESS)
        for job in jobs:
            cleanup.callback(job.close)
        entrants = [Entrant(job.name, job) for job in jobs]
        for nbytes in sizes:
            device = Device()
            between = device.sample if nbytes >= WIRE_BYTES else None
            times: dict[str, Times] = compare(entrants, "all_reduce", nbytes, effort, between)
            batches = {name: one.batches for name, one in times.items()}
            yield Row(nbytes, batches, {n: one.p99 for n, one in times.items()}, device.median)


# On the host of the virtual machine


def in_guest(words: Sequence[str], timeout_s: float) -> Iterator[Row]:
    """Run this program in the guest and yield its rows as they come. Raises SystemExit if it
    fails."""
    packages = [word for name in PACKAGES for word in ("--package", name)]
    line = [sys.executable, str(ROOT / "tests/rdma/guest.py"), "--timeout", f"{timeout_s:g}"]
    line += [*packages, "--", sys.executable, __file__, "--inside", *words]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as guest:
        assert guest.stdout is not None
        for text in guest.stdout:
            if text.startswith('{"nbytes"'):
                yield Row(**json.loads(text))
            else:
                print(text, end="", file=sys.stderr)
    if guest.returncode != 0:
        raise SystemExit(f"the guest ended with status {guest.returncode}")


def cells(row: Row, names: Sequence[str]) -> list[str]:
    """Return a table's row: bytes, times of each entrant, bandwidths, targets."""
    times = [
        " / ".join(map(page.us, (row.median(name), row.p99[name]))) if name in row.batches else "-"
        for name in names
    ]
    wire = "-" if row.wire is None else page.three_digits(row.wire / 1e6)
    busbw = page.three_digits(row.busbw() / 1e6)
    return [str(row.nbytes), *times, busbw, wire, "; ".join(row.verdicts())]


def head(names: Sequence[str]) -> list[str]:
    """Return the titles of the columns of ``cells``."""
    return ["bytes", *names, "busbw MB/s", "ib_write_bw MB/s", "targets"]


def write_markdown(path: Path, rows: Sequence[Row]) -> None:
    """Replace this command's section of the page."""
    names = list(dict.fromkeys(name for row in rows for name in row.batches))
    lines = [
        page.origin(),
        "",
        "all_reduce, float32 sum, in place, 2 ranks on two Soft-RoCE devices in a guest without "
        "KVM, where user code is 15 to 20 times slower; openmpi is Debian's 4.1 with UCX over "
        "rc_v; interleaved samples, microseconds of the slower rank, median / p99 (bench/rdma.py "
        "says how). ib_write_bw both ways at once, each way.",
        "",
        *page.table(head(names), [cells(row, names) for row in rows]),
    ]
    page.write_section(path, TITLE, lines)


def obstacle() -> str:
    """Return the reason why it cannot run here, or an empty text."""
    if shutil.which("qemu-system-x86_64") is None:
        return "no QEMU (Debian's package qemu-system-x86)"
    if shutil.which("apt-get") is None:
        return "no apt-get, which fetches the guest's packages"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--budget-s", type=float, default=60.0, help="longest time for one size")
    parser.add_argument("--timeout", type=float, default=1500.0, metavar="S", help="of the guest")
    parser.add_argument("--bytes", type=int, choices=TARGETS, action="append", help="only these")
    parser.add_argument("--markdown", type=Path, help="put the table on this page")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = options.bytes or list(TARGETS)
    if options.inside:
        for row in measure(sizes, Effort(options.rounds, options.budget_s)):
            print(json.dumps(asdict(row)), flush=True)
        return 0
    why = obstacle()
    if why:
        raise SystemExit(f"the guest cannot run here: {why}")
    words = ["--rounds", str(options.rounds), "--budget-s", str(options.budget_s)]
    words += [word for nbytes in sizes for word in ("--bytes", str(nbytes))]
    rows = []
    print("# us of the slower rank, median / p99; ratio of target")
    for row in in_guest(words, options.timeout):
        names = list(row.batches)
        pairs = zip(head(names), cells(row, names), strict=True)
        print("  ".join(f"{title}: {cell}" for title, cell in pairs), flush=True)
        rows.append(row)
    if options.markdown is not None:
        write_markdown(options.markdown, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
