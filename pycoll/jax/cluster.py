"""JAX's detection of the launcher: ``jax.distributed.initialize()`` without arguments works under
``pycoll run`` in programs that import ``pycoll.jax``.

JAX itself reads JAX_COORDINATOR_ADDRESS and asks its list of cluster environments for the rest. The
class here adds pycoll's launcher in front of that list, since an inner launcher wins over an outer
one. The list is no public interface of JAX, so it has a door (docs/process-wide.md): where the door
is closed, nothing is added, and programs pass the values of the variables as arguments.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from pycoll.doors import Door, expect

#: The versions of JAX with which the tests have run, the oldest first.
TESTED = ("0.7.0", "0.10.2")
_METHODS = (
    *("is_env_present", "get_coordinator_address", "get_process_count", "get_process_id"),
    "get_local_process_id",
)
_NUMBERS = ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def register() -> None:
    """Add the class to JAX's list, once. ``PYCOLL_JAX_CLUSTER=0`` adds nothing."""
    if not CLUSTER.is_open():
        return
    base = _base()
    known = base._cluster_types
    if all(one.__name__ != "PycollCluster" for one in known):
        made = _make(base)
        # JAX has appended the class when it was made.
        known[:] = [made, *(one for one in known if one is not made)]


def _base() -> Any:
    return importlib.import_module("jax._src.clusters").ClusterEnv


def _test() -> None:
    """Raise unless JAX has the list and asks its classes by the methods that ours has."""
    base = _base()
    expect(isinstance(base._cluster_types, list), "JAX has no list of cluster environments")
    for name in _METHODS:
        expect(callable(getattr(base, name, None)), f"a cluster environment has no {name}")


#: The door to the list.
CLUSTER = Door(
    "answers of pycoll run to jax.distributed.initialize()",
    _test,
    "Pass num_processes= and process_id= (docs/guides/starting/jax-distributed.md).",
    "jax",
    TESTED,
    "jax_cluster",
)


def _make(base: Any) -> Any:
    class PycollCluster(base):
        """The ranks of ``pycoll run``, by the variables that it sets."""

        name = "pycoll"

        @classmethod
        def is_env_present(cls) -> bool:
            """Return whether ``pycoll run`` has set JAX's variables."""
            numbers = [os.environ.get(name, "") for name in _NUMBERS]
            launched = os.environ.get("PYCOLL_STORE") == "launcher"
            return launched and all(text.isascii() and text.isdigit() for text in numbers)

        @classmethod
        def get_coordinator_address(cls, *unused: Any, **words: Any) -> str:
            """Return where process 0 serves the coordinator."""
            return os.environ["JAX_COORDINATOR_ADDRESS"]

        @classmethod
        def get_process_count(cls) -> int:
            """Return the number of ranks."""
            return int(os.environ["JAX_NUM_PROCESSES"])

        @classmethod
        def get_process_id(cls) -> int:
            """Return the rank."""
            return int(os.environ["JAX_PROCESS_ID"])

        @classmethod
        def get_local_process_id(cls) -> int | None:
            """Return None: JAX sees all devices of the host, as without a launcher."""
            return None

    return PycollCluster
