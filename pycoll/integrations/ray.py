"""Ray: a backend of its collective groups, a backend of Ray Train, and ranks in actors.

    from pycoll.integrations import ray as pycoll_ray

    pycoll_ray.register()                # on the driver and in every actor: backend="PYCOLL"
    comm = pycoll_ray.init("job", 0, 4)  # in actors of one's own: the world of pycoll
    results = pycoll_ray.run(train, 0.1, size=4)
    TorchTrainer(..., torch_config=TorchConfig(backend="pycoll"))  # needs no import of pycoll
    DataParallelTrainer(..., backend_config=pycoll_ray.PycollConfig())

The ranks meet over Ray's internal key-value store, so no address is needed.
"""

from __future__ import annotations

import importlib
import secrets
from collections.abc import Callable
from typing import Any

import pycoll
from pycoll.integrations import check_size
from pycoll.integrations.ray_store import RayStore
from pycoll.integrations.ray_world import init


def __getattr__(name: str) -> Any:
    if name == "PycollConfig":
        from pycoll.integrations.ray_train import PycollConfig

        return PycollConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register() -> None:
    """Register the backend "PYCOLL" of ``ray.util.collective`` in this process.

    Ray wants this call on the driver and in every actor of a group, before the group is made. The
    second call does nothing.

    Raises ImportError if Ray cannot be imported.

    Cost: none.

    >>> adapter.register()
    """
    registry = importlib.import_module("ray.util.collective.backend_registry")
    from pycoll.integrations.ray_group import NAME, PycollGroup

    if not registry._global_registry.is_registered(NAME):
        registry.register_collective_backend(NAME, PycollGroup)


def run(
    function: Callable[..., Any],
    *args: Any,
    size: int,
    options: dict[str, Any] | None = None,
    **words: Any,
) -> list[Any]:
    """Call ``function(*args)`` in ``size`` tasks of Ray, each a rank of one world.

    ``function``: what a rank runs, with the arguments ``args``. ``size``: the number of ranks; Ray
    must be able to run all of them at once. ``options``: arguments of ``ray.remote`` for the tasks,
    such as ``{"num_cpus": 2}``. ``words``: as for ``init``.

    Returns the results in rank order.

    Raises InvalidArgumentError for a size below 1. An exception of a rank is raised as Ray's
    RayTaskError; where several ranks fail, that of the rank that failed first. Ranks that Ray
    cannot start in time make the others raise TimeoutError.

    Cost: one task of Ray per rank and the cost of ``init``.

    >>> adapter.run(lambda: pycoll.rank(), size=2)
    [0, 1]
    """
    ray = importlib.import_module("ray")
    check_size(size)
    name = f"run-{secrets.token_hex(8)}"

    def task(rank: int) -> Any:
        init(name, rank, size, **words)
        try:
            return function(*args)
        finally:
            pycoll.finalize()

    remote = ray.remote(task).options(**{"max_retries": 0, **(options or {})})
    refs = [remote.remote(rank) for rank in range(size)]
    waiting = list(refs)
    try:
        while waiting:
            ready, waiting = ray.wait(waiting)
            ray.get(ready)
        return list(ray.get(refs))
    finally:
        for ref in waiting:
            ray.cancel(ref)
        RayStore(name).clear()
