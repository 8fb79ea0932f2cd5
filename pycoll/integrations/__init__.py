"""Adapters for engines that start the processes of a program: Ray, Dask and Spark.

The modules, bottom up:

    store_meeting    meeting over the key-value store of an engine
    ray_store        Ray's key-value store
    ray_world        actors and tasks of Ray join a world
    ray_group        the backend of Ray's collective groups
    ray_train        a backend of Ray Train
    ray              the functions for programs of Ray
    dask_store       the metadata of Dask's scheduler
    dask             one rank on each worker of a Dask client
    spark            the tasks of a Spark barrier stage

An adapter imports its engine when the program calls it. Each has a page in docs/guides.
"""

from __future__ import annotations

from typing import Any

from pycoll.errors import InvalidArgumentError


def check_size(size: Any) -> int:
    """Return the number of ranks that a program asks for. Raises InvalidArgumentError."""
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise InvalidArgumentError(f"size is {size!r}: expected a whole number of at least 1")
    return size
