"""Bandwidth as nccl-tests defines it.

*algbw* is ``bytes / time``. *busbw* scales it by the least bytes that the slowest link must carry.
So figures of different collectives and world sizes compare with the hardware's rate:

* all_reduce: every byte is sent and received ``2(p-1)/p`` times (reduce_scatter, then all_gather);
* reduce_scatter, all_gather, all_to_all, gather, scatter: ``(p-1)/p`` of the total crosses a link
  (``bytes`` is the total, gathered size);
* broadcast, reduce, scan, exscan, send/recv: every byte passes the bottleneck once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


def bus_factor(collective: str, size: int) -> float:
    """Return busbw / algbw of ``collective`` on ``size`` ranks."""
    if size < 2:
        return 1.0
    if collective == "all_reduce":
        return 2 * (size - 1) / size
    if collective in ("reduce_scatter", "all_gather", "all_to_all", "gather", "scatter"):
        return (size - 1) / size
    return 1.0


def percentile(values: Sequence[float], share: float) -> float:
    """Return the nearest-rank percentile; ``share`` is in 0..1."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]


@dataclass(frozen=True)
class Measurement:
    """One measurement. Bytes are those of nccl-tests; times are in seconds per operation."""

    collective: str
    algorithm: str
    transport: str
    ranks: int
    bytes: int
    count: int
    dtype: str
    op: str
    root: int
    median_s: float
    p99_s: float
    wrong: int | None
    iterations: int
    #: The lower quartile, which other programs of the machine hardly disturb.
    quartile_s: float = 0.0
    #: The reached share of the hardware's limit; None if the limit is unknown.
    limit_share: float | None = None

    @property
    def algbw(self) -> float:
        """GB/s of user data."""
        return self.bytes / self.median_s * 1e-9 if self.median_s else 0.0

    @property
    def busbw(self) -> float:
        """GB/s that the slowest link had to carry at least."""
        return self.algbw * bus_factor(self.collective, self.ranks)
