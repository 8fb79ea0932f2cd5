"""Local updates of all ranks in one process, in the order of the papers: the reference."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Arrays = list[Any]


def mean(values: Sequence[Any]) -> Any:
    """The average, folded in the order of the ranks."""
    return functools.reduce(operator.add, values) / len(values)


def oracle(
    start: Arrays,
    size: int,
    steps: int,
    inner: Callable[[int, int, Arrays], Arrays],
    every: Sequence[int],
    outer: tuple[float, float, bool] = (1, 0, False),
    fragments: Sequence[Sequence[int]] | None = None,
    delay: int = 0,
    mix: float = 0,
) -> list[Arrays]:
    """The parameters of each rank after ``steps``.

    ``inner(rank, step, params)``: new parameters. ``every``: the length of each round; the last one
    repeats. ``fragments``: the numbers of the arrays in each fragment.
    """
    lr, momentum, nesterov = outer
    averages = (lr, momentum) == (1, 0)
    parts = fragments or [range(len(start))]
    x = [[one.copy() for one in start] for _ in range(size)]
    a, v = [one.copy() for one in start], [np.zeros_like(one) for one in start]
    begun, rounds, sends, under_way = 0, list(every), [], {}
    for step in range(1, steps + 1):
        x = [inner(rank, step, x[rank]) for rank in range(size)]
        if step > begun and not sends:
            sends = [begun + (f + 1) * rounds[0] // len(parts) for f in range(len(parts))]
        for f, part in enumerate(parts):
            if step == sends[f]:
                for n in part:
                    shares = [x[r][n] if averages else a[n] - x[r][n] for r in range(size)]
                    under_way[n] = (step + delay, mean(shares))
        for n, (due, average) in list(under_way.items()):
            if step == due:
                del under_way[n]
                if averages:
                    a[n] = average
                else:
                    v[n] = v[n] * momentum + average
                    a[n] = a[n] - (average + v[n] * momentum if nesterov else v[n]) * lr
                for r in range(size):
                    x[r][n] = x[r][n] * mix + a[n] * (1 - mix) if mix else a[n].copy()
                    x[r][n] = x[r][n].astype(start[n].dtype)
        if step == sends[-1]:
            begun, sends = step, []
            rounds = rounds[1:] or rounds
    return x
