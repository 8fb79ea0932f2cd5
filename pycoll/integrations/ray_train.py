"""A backend of Ray Train: ``pycoll.init()`` and ``pycoll.torch.init()`` in the training function
find the world of the workers."""

from __future__ import annotations

import functools
import secrets
from dataclasses import dataclass
from typing import Any

from ray.train.backend import Backend, BackendConfig

import pycoll
from pycoll.comm.world import join_by
from pycoll.integrations.ray_store import RayStore
from pycoll.integrations.ray_world import init


@dataclass
class PycollConfig(BackendConfig):
    """Makes the workers of a trainer the ranks of one world, in the order of their ranks.

    The training function calls ``pycoll.init()`` without arguments, or ``hvd.init()`` of
    ``pycoll.torch``. For torch.distributed use ``TorchConfig(backend="pycoll")`` instead. Workers
    that Ray starts again form a new world.
    """

    @property
    def backend_cls(self) -> type[Backend]:
        """Return the class that prepares the workers."""
        return _Pycoll


class _Pycoll(Backend):
    """Tells the workers their world before training, and ends it after."""

    _name = ""

    def on_start(self, worker_group: Any, backend_config: PycollConfig) -> None:
        import ray

        size, self._name = len(worker_group), f"train-{secrets.token_hex(8)}"
        ray.get(
            [
                worker_group.execute_single_async(rank, _tell, self._name, rank, size)
                for rank in range(size)
            ]
        )

    def on_shutdown(self, worker_group: Any, backend_config: PycollConfig) -> None:
        worker_group.execute(_leave)
        RayStore(self._name).clear()


def _tell(name: str, rank: int, size: int) -> None:
    """Let ``pycoll.init()`` in this worker join the world of the trainer."""
    join_by(functools.partial(init, name, rank, size))


def _leave() -> None:
    """End the world of this worker, if the training function has made one."""
    pycoll.finalize()
    join_by(None)
