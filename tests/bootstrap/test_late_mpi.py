"""An MPI that begins after joining by PMIx on several hosts: its import is bounded and told.

A package of this test stands for mpi4py: its MPI "begins" when its module is executed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import sys, warnings
from pycoll.bootstrap.rendezvous.late_mpi import watch_late_mpi
watch_late_mpi({rank}, {seconds})
watch_late_mpi({rank}, {seconds})
from mpi4py import MPI
import mpi4py.MPI as again
assert again is MPI and MPI.begun
assert type(MPI.__spec__.loader) is type(MPI.__loader__)
assert MPI.__loader__.__class__.__name__ == "SourceFileLoader"
assert not any("late_mpi" in type(finder).__module__ for finder in sys.meta_path)
print("imported")
"""


def run(
    folder: Path, begin: str, rank: int, seconds: float, first: str = "", **environ: str
) -> subprocess.CompletedProcess[str]:
    package = folder / "mpi4py"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "MPI.py").write_text(f"import time\n{begin}\nbegun = True\n")
    script = folder / "program.py"
    script.write_text(first + PROGRAM.format(rank=rank, seconds=seconds))
    line = [sys.executable, str(script)]
    env = {**os.environ, **environ}
    return subprocess.run(line, capture_output=True, text=True, timeout=60, check=False, env=env)


def test_an_mpi_that_begins_in_time_is_warned_about_once(tmp_path: Path) -> None:
    done = run(tmp_path, "", 0, 30)
    assert done.stdout == "imported\n", done.stderr
    assert done.stderr.count("import mpi4py.MPI before pycoll.init(), on all ranks") == 1
    assert "The job ends if it takes longer than 30 s" in done.stderr


def test_other_ranks_do_not_warn(tmp_path: Path) -> None:
    done = run(tmp_path, "", 3, 30)
    assert (done.stdout, done.stderr) == ("imported\n", "")


def test_an_mpi_that_never_begins_ends_its_process_with_the_reason(tmp_path: Path) -> None:
    start = time.monotonic()
    done = run(tmp_path, "time.sleep(50)", 2, 1)
    assert time.monotonic() - start < 20
    assert done.returncode == -15
    assert "pycoll: rank 2: MPI has not begun within 1 s" in done.stderr
    assert "import mpi4py.MPI before pycoll.init(), on all ranks" in done.stderr


def test_an_mpi_that_ignores_the_signal_is_killed(tmp_path: Path) -> None:
    begin = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(50)"
    assert run(tmp_path, begin, 2, 0.5).returncode == -9


def test_an_import_that_fails_is_not_hidden(tmp_path: Path) -> None:
    done = run(tmp_path, "raise OSError('no MPI here')", 1, 30)
    assert "OSError: no MPI here" in done.stderr


def test_the_watch_is_a_choice(tmp_path: Path) -> None:
    done = run(tmp_path, "", 0, 30, PYCOLL_MPI_WATCH="0")
    assert (done.stdout, done.stderr) == ("imported\n", "")


@pytest.mark.parametrize("program", ["/bin/false", "/none", "/bin/echo"])
def test_a_watcher_that_does_not_start_is_told_once(program: str, tmp_path: Path) -> None:
    done = run(tmp_path, "", 3, 30, first=f"import sys; sys.executable = {program!r}\n")
    assert done.stdout == "imported\n", done.stderr
    assert done.stderr.count("Warning") == 1
    assert "watched imports of mpi4py.MPI are off, since their self-test fails" in done.stderr
