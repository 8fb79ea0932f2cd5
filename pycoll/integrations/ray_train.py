"""A backend of Ray Train: ``pycoll.init()`` and ``pycoll.torch.init()`` in the training function
find the world of the workers."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from ray.train.backend import Backend, BackendConfig

import pycoll
from pycoll.integrations.reserved_ports import clear_place, free_ports, reserve_port, set_place


@dataclass
class PycollConfig(BackendConfig):
    """Makes the workers of a trainer the ranks of one world, in the order of their ranks.

    The training function calls ``pycoll.init()`` without arguments, or ``hvd.init()`` of
    ``pycoll.torch``. For torch.distributed use ``TorchConfig(backend="pycoll")`` instead. Workers
    that Ray starts again form a new world, at another address and with another secret.
    """

    @property
    def backend_cls(self) -> type[Backend]:
        """Return the class that prepares the workers."""
        return _Pycoll


class _Pycoll(Backend):
    """Sets the variables of the workers before training, and ends their world after it."""

    def on_start(self, worker_group: Any, backend_config: PycollConfig) -> None:
        import ray

        size = len(worker_group)
        address = worker_group.execute_single(0, _reserve)
        secret, job_id = secrets.token_hex(32), f"ray-train-{secrets.token_hex(8)}"
        ray.get(
            [
                worker_group.execute_single_async(
                    rank, set_place, rank, size, address, secret, job_id
                )
                for rank in range(size)
            ]
        )

    def on_shutdown(self, worker_group: Any, backend_config: PycollConfig) -> None:
        worker_group.execute(_leave)


def _reserve() -> str:
    import ray

    return reserve_port(ray.util.get_node_ip_address())


def _leave() -> None:
    """End the world of this worker, if the training function has made one."""
    pycoll.finalize()
    clear_place()
    free_ports()
