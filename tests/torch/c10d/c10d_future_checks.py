"""Checks of futures and of what their callbacks may do; see c10d_checks, which takes them in."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

#: On a busy machine.
ENDS_WITHIN_S = 10


def _sum_of(depth: int, group: Any = None) -> torch.Tensor:
    """1 + ... + depth times the ranks' number: each sum is waited for in a callback of the last."""
    future = dist.all_reduce(torch.full((2,), float(depth)), group=group, async_op=True)

    def go_on(done: Any) -> torch.Tensor:
        rest = _sum_of(depth - 1, group) if depth > 1 else torch.zeros(2)
        total: torch.Tensor = done.value()[0] + rest
        return total

    found: torch.Tensor = future.get_future().then(go_on).wait()
    return found


def check_callbacks_may_wait() -> None:
    for depth in (1, 2, 6):
        wanted = dist.get_world_size() * depth * (depth + 1) / 2
        assert _sum_of(depth).tolist() == [wanted] * 2


def check_threads_of_futures_end_with_the_group() -> None:
    group = dist.new_group()
    watcher = group._watcher
    for _ in range(3):
        _sum_of(5, group)
    # Threads whose callbacks have returned are about to end.
    limit = time.monotonic() + ENDS_WITHIN_S
    while len(watcher._threads) > 2 + 1 and time.monotonic() < limit:
        time.sleep(0.001)
    assert len(watcher._threads) <= 2 + 1, "more rest than one"
    ended = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    ended.wait()
    dist.barrier()
    threads = set(watcher._threads)
    dist.destroy_process_group(group)
    assert threads and not any(thread.is_alive() for thread in threads) and not watcher._threads
    assert ended.get_future().wait()[0].item() == dist.get_world_size()
    assert not watcher._threads
