"""pycoll.jax: collectives inside compiled programs, on 1, 2 and 4 ranks, which are processes.

Four processes do all of it, since each takes seconds to import JAX: the smaller worlds are parts of
theirs.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import secrets
import subprocess
import tempfile
import traceback
from pathlib import Path
from unittest import mock

import pytest
from harness import HANG_S, ROOT, free_port, world_in_threads

import pycoll

jax = pytest.importorskip("jax", reason="no jax: pip install -r tests/requirements.txt")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

RANKS = 4
TIMEOUT_S = 60.0


def checks() -> list[tuple[str, int]]:
    """Each with all ranks; what depends most on their number also with fewer."""
    text = (Path(__file__).parent / "jit_checks.py").read_text()
    names = re.findall(r"^def (check_\w+)", text, re.M)
    return [*((name, RANKS) for name in names), (names[0], 1), *((one, 2) for one in names[:2])]


def example() -> str:
    """The programs of docs/jax.md; each goes on from the one before."""
    text = (ROOT / "docs" / "jax.md").read_text()
    found = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    assert len(found) == 2
    return "\n".join(found)


def run_rank(rank: int, address: str, secret: str, folder: str) -> None:
    """One rank: what each check raised, with communicators of each size."""
    import jit_checks

    comm = pycoll.init(
        rank=rank,
        size=RANKS,
        address=address,
        secret=secret,
        transports="shm",
        timeout_s=TIMEOUT_S,
    )
    found = {}
    parts = {size: comm.split(rank // size) for size in (1, 2, RANKS)}
    for name, size in checks():
        try:
            getattr(jit_checks, name)(parts[size])
            found[f"{name}-{size}"] = ""
        except (Exception, pytest.fail.Exception):
            found[f"{name}-{size}"] = traceback.format_exc()
        comm.barrier()
    with mock.patch("pycoll.init", lambda: comm):
        exec(example(), {})
    Path(folder, str(rank)).write_text(json.dumps(found))
    pycoll.finalize()


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["jax", "jax.numpy", "pycoll.jax", "pytest"])
    address, secret = f"127.0.0.1:{free_port()}", secrets.token_hex(16)
    with tempfile.TemporaryDirectory() as folder:
        words = (address, secret, folder)
        ranks = [context.Process(target=run_rank, args=(r, *words)) for r in range(RANKS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(HANG_S)
            if process.is_alive():
                process.kill()
        assert [process.exitcode for process in ranks] == [0] * RANKS
        every = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(RANKS)]
    return {
        name: "\n".join(f"rank {rank}: {one[name]}" for rank, one in enumerate(every) if one[name])
        for name in every[0]
    }


@pytest.mark.parametrize(("name", "size"), checks())
def test_inside_jit(name: str, size: int, outcomes: dict[str, str]) -> None:
    assert outcomes[f"{name}-{size}"] == ""


def test_ranks_that_are_threads_are_refused() -> None:
    import pycoll.jax as pj

    def run(comm: pycoll.Communicator) -> None:
        with pytest.raises(pycoll.InvalidArgumentError, match="threads of one process"):
            pj.all_reduce(1.0, comm=comm)

    world_in_threads(2).run(run)


def test_structures_are_laid_out_as_jaxlib_has_them() -> None:
    words = ["c++", "-std=c++20", "-fsyntax-only", f"-I{ROOT}", f"-I{jax.ffi.include_dir()}"]
    done = subprocess.run(
        [*words, str(Path(__file__).parent / "ffi_layout.cpp")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
