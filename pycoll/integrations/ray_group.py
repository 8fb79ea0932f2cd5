"""The backend "PYCOLL" of ``ray.util.collective``; ``pycoll.integrations.ray.register`` adds it.

Ray passes each array in a list of one, and results go into the arrays of the caller.
"""

from __future__ import annotations

import importlib
from typing import Any

from ray.util.collective.collective_group.base_collective_group import BaseGroup
from ray.util.collective.types import (
    AllReduceOptions,
    BroadcastOptions,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
)

from pycoll.bootstrap import join
from pycoll.comm.communicator import Communicator
from pycoll.comm.start_tuning import tuning_text
from pycoll.config import Config
from pycoll.integrations.ray_store import RayStore
from pycoll.integrations.store_meeting import Gather, meet

NAME = "PYCOLL"
_OPERATIONS = {
    ReduceOp.SUM: "sum",
    ReduceOp.PRODUCT: "prod",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
}


class PycollGroup(BaseGroup):
    """A collective group of Ray over a communicator of its own.

    Arrays are those of NumPy, torch or CuPy, one in each call. ``PYCOLL_*`` variables of the actor
    set transports and limits. Methods raise ValueError for arrays that do not fit, and the errors
    of pycoll.
    """

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        config, name = Config.read(), f"ray/{group_name}"

        def make(all_gather: Gather) -> Communicator:
            joined = join(
                config, rank=rank, size=world_size, all_gather=all_gather, bring=tuning_text
            )
            return Communicator(joined, config, name)

        self._comm = meet(RayStore(name), rank, world_size, config.init_timeout_s, make)

    @classmethod
    def backend(cls) -> str:
        """Return the name of the backend."""
        return NAME

    @classmethod
    def check_backend_availability(cls) -> bool:
        """Return that pycoll can be used, as its import has shown."""
        return True

    def destroy_group(self) -> None:
        """Leave the group; its other members see an orderly end."""
        self._comm.close()

    def allreduce(self, tensor: list[Any], allreduce_options: Any = AllReduceOptions) -> None:
        """Reduce the arrays of all ranks in place."""
        x = _only(tensor)
        self._comm.all_reduce(x, _OPERATIONS[allreduce_options.reduceOp], out=x)

    def barrier(self, barrier_options: Any = None) -> None:
        """Wait until all ranks have called."""
        self._comm.barrier()

    def reduce(self, tensor: list[Any], reduce_options: Any = ReduceOptions) -> None:
        """Reduce the arrays of all ranks into that of the root; the others keep their values."""
        x, root = _only(tensor), reduce_options.root_rank
        out = x if self._rank == root else None
        self._comm.reduce(x, root, _OPERATIONS[reduce_options.reduceOp], out=out)

    def allgather(
        self, tensor_list: list[list[Any]], tensor: list[Any], allgather_options: Any = None
    ) -> None:
        """Copy the array of each rank into the list of every rank."""
        x, outs = _only(tensor), _only(tensor_list)
        _check_shapes(outs, x, "tensor_list")
        gathered = self._comm.all_gather(x[None], lengths=[1] * self._world_size)
        for out, part in zip(outs, gathered, strict=True):
            out[...] = part

    def broadcast(self, tensor: list[Any], broadcast_options: Any = BroadcastOptions) -> None:
        """Copy the root's array into those of all ranks."""
        x = _only(tensor)
        self._comm.broadcast(x, broadcast_options.root_rank, out=x)

    def reducescatter(
        self,
        tensor: list[Any],
        tensor_list: list[list[Any]],
        reducescatter_options: Any = ReduceScatterOptions,
    ) -> None:
        """Reduce the r-th arrays of all lists into the array of rank r."""
        out, inputs = _only(tensor), _only(tensor_list)
        _check_shapes(inputs, out, "tensor_list")
        framework = importlib.import_module(type(out).__module__.partition(".")[0])
        op = _OPERATIONS[reducescatter_options.reduceOp]
        out[...] = self._comm.reduce_scatter(framework.stack(inputs), op)[0]

    def send(self, tensor: list[Any], send_options: Any) -> None:
        """Send the array to a rank."""
        self._comm.send(_only(tensor), send_options.dst_rank)

    def recv(self, tensor: list[Any], recv_options: Any) -> None:
        """Receive the array from a rank, with as many bytes."""
        self._comm.recv(_only(tensor), recv_options.src_rank)


def _only(given: list[Any]) -> Any:
    if len(given) != 1:
        raise ValueError(
            f"{len(given)} arrays in one call: the backend {NAME} has one device for each actor"
        )
    return given[0]


def _check_shapes(arrays: list[Any], like: Any, name: str) -> None:
    for place, one in enumerate(arrays):
        if tuple(one.shape) != tuple(like.shape) or one.dtype != like.dtype:
            raise ValueError(
                f"{name}[{place}] has shape {tuple(one.shape)} and type {one.dtype}: expected "
                f"{tuple(like.shape)} and {like.dtype}, as the other array of the call"
            )
