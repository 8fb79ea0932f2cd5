"""The backend pycoll of torch.distributed, on 1 to 4 ranks of real processes."""

from __future__ import annotations

import datetime
import functools
import os
import tempfile
import traceback
from pathlib import Path

import c10d_checks
import c10d_storages_checks
import c10d_training_checks
import pytest
from harness import python
from torch_processes import run_ranks
from torch_ranks import checks_of

MODULES = {one.__name__: one for one in (c10d_checks, c10d_storages_checks, c10d_training_checks)}
CASES = [(name, check) for name, module in MODULES.items() for check in checks_of(module)]
#: Longer than any healthy operation; shorter than the patience of whoever waits for a check.
TIMEOUT_S = 20


def run_rank(rank: int, size: int, module: str, folder: str, backend: str) -> None:
    """One rank: meets the others at a file, runs all checks, and writes what failed."""
    import torch
    import torch.distributed as dist

    import pycoll.torch  # the import registers the backend

    assert pycoll.torch.__doc__
    torch.set_num_threads(1)
    if module.endswith("storages_checks"):
        os.environ["PYCOLL_SHARED_ARRAYS"] = "1"
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=TIMEOUT_S),
    )
    for name in checks_of(MODULES[module]):
        path = Path(folder) / f"{name}.{rank}"
        try:
            getattr(MODULES[module], name)()
            path.write_text("")
        except Exception:
            path.write_text(traceback.format_exc())
        # A check that failed on one rank only must not take the next one with it.
        path.with_suffix(f".{rank}.done").touch()
        _meet(folder, name, size)
    dist.destroy_process_group()


def _meet(folder: str, name: str, size: int) -> None:
    import time

    limit = time.monotonic() + 2 * TIMEOUT_S
    while time.monotonic() < limit:
        if all((Path(folder) / f"{name}.{rank}.done").exists() for rank in range(size)):
            return
        time.sleep(0.01)


@functools.cache
def outcomes(module: str, size: int, backend: str) -> dict[str, str]:
    """What failed in each check, by rank."""
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(size, run_rank, module, folder, backend)
        found = {}
        for name in checks_of(MODULES[module]):
            texts = []
            for rank in range(size):
                path = Path(folder) / f"{name}.{rank}"
                text = path.read_text() if path.exists() else "did not come so far"
                texts += [f"rank {rank}: {text}"] if text else []
            found[name] = "\n".join(texts)
        return found


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(("module", "check"), CASES)
def test_check(module: str, check: str, size: int) -> None:
    failures = outcomes(module, size, "pycoll" if size != 3 else "cpu:pycoll")[check]
    assert not failures, failures


def test_importing_pycoll_registers_nothing() -> None:
    """Only torch's entry points do (test_backend_entry.py), which the variable turns off here."""
    code = "import torch.distributed as d, pycoll; print('PYCOLL' in d.Backend._plugins)"
    off = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    assert python(code, **off) == "False"
    assert python(code.replace("import", "import pycoll.torch,", 1), **off) == "True"
