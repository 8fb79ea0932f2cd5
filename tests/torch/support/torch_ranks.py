"""Many checks in one world of processes.

A check is a function ``check_...`` of a module, called on all ranks at once. Its failure on any
rank is that check's failure; the others run all the same.
"""

from __future__ import annotations

import importlib
import json
import secrets
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
from harness import free_port
from torch_processes import run_ranks

import pycoll
import pycoll.torch as hvd
from pycoll.gradients import scheduler
from pycoll.gradients.communication_plan import Rates

#: Of the operations in checks.
TIMEOUT_S = 20.0


def checks_of(module: Any) -> list[str]:
    return [name for name in vars(module) if name.startswith("check_")]


def _measure_once() -> None:
    """What messages cost is measured by the first optimizer of a world that asks; the others, of
    which there are dozens, share its figures, which are alike on all ranks."""
    measured: dict[tuple[Any, ...], Rates] = {}
    measure = scheduler.measure

    def remembered(comm: Any, *terms: Any) -> Rates:
        key = (comm.size, comm.servers, *terms)
        if key not in measured:
            measured[key] = measure(comm, *terms)
        return measured[key]

    scheduler.measure = remembered


def run_checks(comm: pycoll.Communicator, module: str, names: list[str]) -> dict[str, str]:
    """One rank: what each check raised, or "" """
    torch.set_num_threads(1)
    _measure_once()
    # A check that fails on one rank ends on the others before they are waited for in vain.
    comm.timeout_s = TIMEOUT_S
    hvd.init()
    comm.timeout_s = 3 * TIMEOUT_S
    found = {}
    for name in names:
        torch.manual_seed(0)
        try:
            getattr(importlib.import_module(module), name)()
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
            # Told at once: the other ranks may end without it.
            print(f"rank {comm.rank}, {name}: {found[name]}", file=sys.stderr)
        comm.barrier()
    hvd.shutdown()
    return found


def run_rank(
    rank: int, size: int, address: str, secret: str, module: str, names: list[str], folder: str
) -> None:
    """One rank: joins the others and leaves what its checks raised in a file.

    Only checks of where tensors lie have shared memory under them.
    """
    comm = pycoll.init(
        rank=rank,
        size=size,
        address=address,
        secret=secret,
        transports="shm",
        timeout_s=TIMEOUT_S,
        shared_arrays=module.endswith("storages_checks"),
    )
    found = run_checks(comm, module, names)
    Path(folder, str(rank)).write_text(json.dumps(found))
    pycoll.finalize()


def outcomes_of(size: int, module: Any, names: list[str]) -> dict[str, str]:
    """What failed in each check, by rank; "" where nothing did."""
    address, secret = f"127.0.0.1:{free_port()}", secrets.token_hex(16)
    with tempfile.TemporaryDirectory() as folder:
        codes = run_ranks(size, run_rank, address, secret, module.__name__, names, folder)
        assert codes == [0] * size, f"the ranks of {module.__name__} ended with {codes}"
        every = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(size)]
    return {
        name: "\n".join(f"rank {r}: {one[name]}" for r, one in enumerate(every) if one[name])
        for name in names
    }


def raised(
    kind: type[BaseException] | tuple[type[BaseException], ...],
    function: Any,
    *args: Any,
    **words: Any,
) -> str:
    """The text of the error that the call must raise."""
    try:
        function(*args, **words)
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind}")
