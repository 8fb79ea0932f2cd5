"""Ranks on two hosts whose network cards read and write device memory; run as on_device.py is.

Only for the tests' own driver and its provider of verbs, libibverbs.so.1 next to it: on hardware it
would take two hosts. The tests are those of on_hosts.py.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Iterator

import pytest
from harness import ThreadWorld
from on_hosts import (
    HOSTS,
    SIZE,
    test_a_rank_that_does_not_come_is_named,
    test_graphs_are_replayed_between_calls,
    test_messages_within_and_across_hosts,
    test_ranks_that_disagree,
)
from on_hosts import test_long_messages as long_messages

from pycoll import _core
from pycoll.bootstrap.discovery import verbs
from pycoll.bootstrap.discovery.rails import Port

__all__ = [
    "test_a_rank_that_does_not_come_is_named",
    "test_graphs_are_replayed_between_calls",
    "test_messages_within_and_across_hosts",
    "test_ranks_that_disagree",
]

#: What sysfs would show of the provider's devices.
PORTS = [
    Port(f"fake{device}", 1, 0, f"::ffff:10.0.{device}.1", "RoCE IPv4", 100) for device in (0, 1)
]


@pytest.fixture(scope="module", autouse=True)
def ports() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verbs, "ports", lambda _: PORTS)
        yield


@pytest.fixture(scope="module")
def world(ports: None) -> Iterator[ThreadWorld]:
    made = ThreadWorld(SIZE, "shm,verbs", HOSTS)
    yield made
    made.close()


@pytest.fixture
def broken(ports: None) -> Iterator[ThreadWorld]:
    made = ThreadWorld(2, "shm,verbs", (0, 1))
    yield made
    made.close()


def test_no_host_copies(world: ThreadWorld) -> None:
    """What cards read on devices they write to devices, and nobody is warned."""
    library = ctypes.CDLL("libibverbs.so.1")
    counts = [library.pycoll_fake_taken_bytes, library.pycoll_fake_directly_written_bytes]
    for count in counts:
        count.restype = ctypes.c_uint64
    before = [count() for count in counts]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        long_messages(world)
    taken, placed = (count() - old for count, old in zip(counts, before, strict=True))
    assert taken == placed > 100_000
    summary = _core.device_rdma_summary()
    assert summary == "; ".join(f"{one} by dma-buf, writes flushed by the host" for one in (0, 1))
