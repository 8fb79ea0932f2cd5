"""Ranks that train, for bench/training.py, controlled by bench/jobs.py.

    python training_worker.py LIBRARY SOCKET [ENVIRONMENT ...]

Every environment, a JSON object of variables, makes one rank. All ranks are forked from one
process, since importing torch in each would be slow. Without any environment there is one rank.

An order names a way of training:

* a policy;
* "hvd": tensor by tensor;
* "ddp";
* "alone": nothing is reduced;
* "all_reduce": the same bytes in one piece, and nothing is computed;
* "ddp alone": nothing is reduced, but DDP's own copies are made;
* "ddp in step": like "ddp alone", and 32 bytes are reduced for each bucket, so that ranks wait for
  each other as with "ddp".

All ways have the same parameters in the same memory. During the timing the learning rate is 0.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

import torch
import training_models
from peer_worker import time_batch, time_each

#: Steps that count as one operation: a single step has no next forward pass.
STEPS = 4
#: Steps before the check, more than a scheduler needs to fix its communication plan.
WARM_UP = 8
RATE = 0.125
#: Policies that communicate until the next forward pass, and "auto", which may choose them.
LATE = ("bytescheduler", "dear", "auto")
#: Ways whose gradients stay different on each rank.
APART = ("alone", "all_reduce", "ddp alone", "ddp in step")
#: Elements that "ddp in step" reduces for each bucket.
FEW = 8


def left(_, bucket):  # no annotations: torch checks them and rejects annotations that are text
    """A hook of DistributedDataParallel that leaves the bucket as it is."""
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def in_step(_, bucket):
    """A hook that leaves the bucket as it is, and completes when it is ready on all ranks."""
    work = torch.distributed.all_reduce(torch.zeros(FEW), async_op=True)
    return work.get_future().then(lambda _: bucket.buffer())


HOOKS = {"ddp alone": left, "ddp in step": in_step}


class Pycoll:
    """Horovod's interface of pycoll.torch, and its backend of torch.distributed."""

    def __init__(self) -> None:
        import torch.distributed as dist

        import pycoll.torch as hvd

        hvd.init()
        dist.init_process_group("pycoll")
        self.hvd, self.dist = hvd, dist
        self.rank, self.size = hvd.rank(), hvd.size()

    def barrier(self) -> None:
        self.hvd.barrier()

    def all_reduce(self, flat: torch.Tensor) -> None:
        import pycoll

        pycoll.world().all_reduce(flat, "avg", out=flat)

    def wrapped(self, way: str, model: torch.nn.Module, optimizer: Any) -> tuple[Any, Any]:
        """Return the model or its wrapper, and the optimizer, for this way of training."""
        if way.startswith("ddp"):
            parallel = torch.nn.parallel.DistributedDataParallel(model)
            if way in HOOKS:
                parallel.register_comm_hook(None, HOOKS[way])
            return parallel, optimizer
        words: dict[str, Any] = {} if way == "hvd" else {"policy": way}
        if way in LATE:
            words["model"] = model
        named = model.named_parameters()
        return model, self.hvd.DistributedOptimizer(optimizer, named, **words)


class Gloo:
    """DistributedDataParallel over Gloo."""

    def __init__(self) -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        self.dist = dist
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def barrier(self) -> None:
        self.dist.barrier()

    def all_reduce(self, flat: torch.Tensor) -> None:
        self.dist.all_reduce(flat)
        flat /= self.size

    def wrapped(self, way: str, model: torch.nn.Module, optimizer: Any) -> tuple[Any, Any]:
        return torch.nn.parallel.DistributedDataParallel(model), optimizer


class Horovod:
    """horovod.torch."""

    def __init__(self) -> None:
        import horovod.torch as hvd

        hvd.init()
        self.hvd = hvd
        self.rank, self.size = hvd.rank(), hvd.size()

    def barrier(self) -> None:
        self.hvd.barrier()

    def all_reduce(self, flat: torch.Tensor) -> None:
        self.hvd.allreduce_(flat, name="flat")

    def wrapped(self, way: str, model: torch.nn.Module, optimizer: Any) -> tuple[Any, Any]:
        named = model.named_parameters()
        return model, self.hvd.DistributedOptimizer(optimizer, named)


LIBRARIES: dict[str, Callable[[], Any]] = {"pycoll": Pycoll, "gloo": Gloo, "horovod": Horovod}


class Training:
    """One way to train a model whose parameters have the memory of ``base``'s."""

    def __init__(self, library: Any, name: str, way: str, base: torch.nn.Module) -> None:
        self._library, self._name, self._way, self._base = library, name, way, base
        self._task = self._made()
        self._flat = torch.ones(self._task.nbytes // 4) if way == "all_reduce" else None
        optimizer = torch.optim.SGD(self._task.model.parameters(), lr=0.0)
        self._forward, self._optimizer = self._task.model, optimizer
        if way not in ("alone", "all_reduce"):
            found = library.wrapped(way, self._task.model, optimizer)
            self._forward, self._optimizer = found

    def _made(self) -> Any:
        task = training_models.made(self._name, self._library.rank)
        for mine, shared in zip(task.model.parameters(), self._base.parameters(), strict=True):
            mine.data = shared.data
        return task

    @property
    def nbytes(self) -> int:
        """The bytes of all gradients."""
        return int(self._task.nbytes)

    def step(self) -> None:
        """Run one step."""
        if self._flat is not None:
            self._library.all_reduce(self._flat)
            return
        self._optimizer.zero_grad()
        self._task.loss(self._forward).backward()
        self._optimizer.step()

    def operation(self) -> None:
        """Run several steps; the last one is complete on return."""
        for _ in range(STEPS):
            self.step()
        # A read of the optimizer's state completes a deferred step.
        len(self._optimizer.state)

    def explain(self) -> str:
        """Return the optimizer's explanation of its messages; empty if it has none."""
        explain = getattr(self._optimizer, "explain", None)
        return "" if explain is None else str(explain())

    def check(self) -> bool:
        """Return whether a step uses the averaged gradients of all ranks."""
        for _ in range(WARM_UP):
            self.step()
        if self._way in APART:
            return True
        parameters = list(self._task.model.parameters())
        before = [p.detach().clone() for p in parameters]
        self._optimizer.param_groups[0]["lr"] = RATE
        self.step()
        self._optimizer.param_groups[0]["lr"] = 0.0
        after = [p.detach().clone() for p in parameters]
        for parameter, old in zip(parameters, before, strict=True):
            parameter.data.copy_(old)
        return all(
            torch.allclose(new, old - RATE * grad, rtol=1e-4, atol=1e-6)
            for grad, old, new in zip(self._averaged(), before, after, strict=True)
        )

    def _averaged(self) -> list[torch.Tensor]:
        """Return the averaged gradients, reduced one by one with the library's all_reduce."""
        task = self._made()
        task.loss(task.model).backward()
        grads = []
        for parameter in task.model.parameters():
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            self._library.all_reduce(grad)
            grads.append(grad)
        return grads


def serve(library: Any, controller: socket.socket) -> None:
    orders = controller.makefile("r")
    trainings: dict[tuple[str, str], Training] = {}
    base: torch.nn.Module | None = None

    def answer(value: Any) -> None:
        controller.sendall((json.dumps(value) + "\n").encode())

    answer({"rank": library.rank, "size": library.size, "pid": os.getpid()})
    for line in orders:
        order = json.loads(line)
        key = (order["collective"], order["way"])
        if any(known[0] != key[0] for known in trainings) or base is None:
            # Keep one model at a time.
            trainings.clear()
            base = training_models.made(key[0], library.rank).model
        if key not in trainings:
            trainings[key] = Training(library, *key, base)
        training = trainings[key]
        if order["what"] == "bytes":
            answer(training.nbytes)
            continue
        if order["what"] == "check":
            answer(training.check())
            continue
        if order["what"] == "explain":
            answer(training.explain())
            continue
        library.barrier()
        training.operation()
        library.barrier()
        if order["what"] == "each":
            answer([took / STEPS for took in time_each(training.operation, order["batch"])])
        else:
            answer(time_batch(training.operation, order["batch"]) / STEPS)


def fork_for(environments: list[str]) -> None:
    """Fork a process for each environment but one; each process returns as one rank."""
    # Otherwise every rank imports this module when it makes its optimizer.
    importlib.import_module("torch._dynamo")
    for own in environments[:-1]:
        if os.fork() == 0:
            os.environ.update(json.loads(own))
            return
    os.environ.update(json.loads(environments[-1]))


def main() -> None:
    name, path, *environments = sys.argv[1:]
    if environments:
        fork_for(environments)
    torch.set_num_threads(1)
    library = LIBRARIES[name]()
    with socket.socket(socket.AF_UNIX) as controller:
        controller.connect(path)
        serve(library, controller)
    os._exit(0)


if __name__ == "__main__":
    main()
