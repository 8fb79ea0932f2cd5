"""A worker of multiprocessing that imports its rank's main module joined as that rank again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import multiprocessing, sys
import pycoll

pycoll.init(timeout_s=20, init_timeout_s=20)

def double(x):
    return 2 * x

if __name__ == "__main__":
    worker = multiprocessing.get_context(sys.argv[1]).Process(target=double, args=(1,))
    worker.start()
    worker.join()
    print("worker ended with", worker.exitcode)
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_worker_that_runs_init_again_is_told(tmp_path: Path, method: str) -> None:
    script = tmp_path / "program.py"
    script.write_text(CODE)
    command = [sys.executable, "-m", "pycoll", "run", "-n", "2", str(script), method]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["worker ended with 1"] * 2
    for rank in range(2):
        assert f"a worker process that has PYCOLL_RANK={rank} from the rank" in done.stderr
    assert 'if __name__ == "__main__":' in done.stderr
