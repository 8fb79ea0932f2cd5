"""What ranks do after one of torch's internals was broken; see test_doors.py.

Each rank is a process of its own, so the break ends with it.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo import convert_frame
from torch.nn.parallel import DistributedDataParallel

import pycoll
import pycoll.torch as hvd
from pycoll import _core
from pycoll.torch.memory import deferred_parameter

TIMEOUT_S = 30.0
WIDTH = 192


def _no_call_of_functions() -> None:
    none: Any = torch._C._disabled_torch_function_impl
    deferred_parameter.DeferredParameter.__torch_function__ = none


#: The breaks, by the name of the test.
BREAKS: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "setting": lambda: os.environ.update(PYCOLL_DEFERRED_STEPS="0"),
    "a context without effect": lambda: setattr(
        torch._C, "DisableTorchFunctionSubclass", contextlib.nullcontext
    ),
    "no call of functions": _no_call_of_functions,
    "no list of compiled frames": lambda: delattr(convert_frame, "input_codes"),
    "no swap": lambda: setattr(torch.UntypedStorage, "_swap_data_ptr_", None),
    "a swap without effect": lambda: setattr(
        torch.UntypedStorage, "_swap_data_ptr_", lambda one, other: None
    ),
    "no counter": lambda: delattr(torch._C, "_storage_Use_Count"),
    "a counter that misses users": lambda: setattr(torch._C, "_storage_Use_Count", lambda one: 2),
    "no backward pass": lambda: setattr(torch._C, "_current_graph_task_id", lambda: -1),
    "no other backends": lambda: os.environ.update(PYCOLL_OTHER_BACKENDS="0"),
    "an old torch": lambda: setattr(torch, "__version__", "2.12.9+cpu"),
    "no further backends": lambda: delattr(dist.ProcessGroup, "_register_backend"),
}


def train(rank: int, size: int, address: str, secret: str) -> list[str]:
    """Train with model=, twice, and next to it with torch alone."""
    pycoll.init(rank=rank, size=size, address=address, secret=secret, timeout_s=TIMEOUT_S)
    hvd.init()
    lines = []
    for _ in range(2):
        torch.manual_seed(0)
        nets = [
            torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
            for _ in range(2)
        ]
        nets[1].load_state_dict(nets[0].state_dict())
        plain = torch.optim.Adam(nets[1].parameters(), lr=0.1)
        ours: Any = hvd.DistributedOptimizer(
            torch.optim.Adam(nets[0].parameters(), lr=0.1),
            nets[0].named_parameters(),
            policy="fixed",
            model=nets[0],
        )
        types: set[str] = set()
        for step in range(4):
            x = torch.arange(8.0).reshape(2, 4) + step
            for net, one in zip(nets, (ours, plain), strict=True):
                one.zero_grad()
                net(x).square().mean().backward()
                one.step()
            types |= {type(one).__name__ for one in nets[0].parameters()}
        pairs = zip(*(net.parameters() for net in nets), strict=True)
        lines.append(f"equal {all(torch.equal(a, b) for a, b in pairs)}")
    lines += [f"deferred {'DeferredParameter' in types}", ours.explain().splitlines()[0]]
    hvd.shutdown()
    pycoll.finalize()
    return lines


def _init_group(backend: str, rank: int, size: int, address: str) -> None:
    host, port = address.split(":")
    store = dist.TCPStore(host, int(port), size, rank == 0)
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=TIMEOUT_S),
    )


def backends(rank: int, size: int, address: str, secret: str) -> list[str]:
    """Ask a group for its backend for tensors on another device."""
    _init_group("cpu:pycoll,meta:gloo", rank, size, address)
    group: Any = dist.group.WORLD
    found = group.backend_for("meta")
    lines = [f"for meta {found and type(found).__name__}"]
    dist.barrier()
    dist.destroy_process_group()
    return lines


def reduce(rank: int, size: int, address: str, secret: str) -> list[str]:
    """Reduce gradients of DistributedDataParallel, whose values are known, in two groups."""
    os.environ["PYCOLL_SHARED_ARRAYS"] = "1"
    _init_group("pycoll", rank, size, address)
    dist.new_group()
    net = torch.nn.Linear(WIDTH, WIDTH).double()
    model = DistributedDataParallel(net, gradient_as_bucket_view=True)
    lines = []
    grad = None
    for _ in range(5):
        x = torch.full((2, WIDTH), rank + 1.0, dtype=torch.float64)
        model(x).sum().backward()
        grad = net.weight.grad
        assert grad is not None
        # The mean over ranks of two rows each, of ones on rank 0 and twos on rank 1.
        lines.append(f"equal {torch.equal(grad, torch.full_like(grad, 3))}")
        net.zero_grad(set_to_none=False)
    assert grad is not None
    group: Any = dist.group.WORLD
    lines += [
        f"shared {_core.is_reachable(grad.data_ptr(), grad.nbytes)}",
        f"own backends {group.backend_for('cuda')} {group.backend_for('cpu')}",
    ]
    dist.destroy_process_group()
    return lines


def run_rank(
    rank: int, size: int, program: str, how: str, address: str, secret: str, folder: str
) -> None:
    """One rank: breaks something, runs the program, and writes what it found and was told."""
    torch.set_num_threads(1)
    BREAKS[how]()
    path = Path(folder, str(rank))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            run = {"train": train, "reduce": reduce, "backends": backends}[program]
            lines = run(rank, size, address, secret)
        except Exception:
            lines = [traceback.format_exc()]
    lines += [f"told {one.category.__name__}: {one.message}" for one in told]
    path.write_text("\n".join(lines))
