"""Fits the values of a link to measured times: least squares on relative errors.

The model's times are linear in call, alpha, overhead, beta, gamma, spill and reach, once the size
from which messages spill is given (see pycoll/cost/model.py). The fit tries powers of two and the
values halfway between them for that size. For each it finds the values that minimise the squares of
(predicted - measured) / measured, none of them below a floor. Values that the measurements do not
determine stay near the starting values because of a weak pull.

Other work on the machine makes some times several times too long. Measurements that are far off
therefore get a lower weight in further rounds. Squares of relative errors would also prefer half of
a measured time to twice of it. The same weights correct that, so that the logarithm of predicted /
measured counts.

A link may have a sustained rate, which no series of messages exceeds. If there is one, many
messages move at about the highest observed cost per byte. The fit tries a few of the highest, and
the messages that move at that rate then determine no other value. It takes the rate if it explains
the times clearly better.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pycoll.cost.model import Link, Terms, spilled_bytes

#: Sizes tried as the size from which messages spill, in bytes.
_CACHE_BYTES = tuple(size for power in range(17, 28) for size in (1 << power, 3 << (power - 1)))
#: The weight of a starting value relative to one measurement. A starting value with the right order
#: of magnitude costs less than a percent of error in one measurement.
_PULL = 1e-3
#: The penalty per squared octave between a spill size and the size that the caches suggest.
#: Neighbouring sizes explain the times about equally well; without it noise would select one.
_LIKELY = 0.3
#: The fitted values in the order of Link.seconds, and their floors as shares of the starting
#: values. A floor excludes links that are implausibly better than existing machines.
_FLOORS = {
    "alpha": 0.15,
    "overhead": 0.02,
    "beta": 0.02,
    "gamma": 0.02,
    "spill": 0.0,
    "reach": 0.02,
    "call": 0.0,
}
#: Ratios that differ from 1 by less than this count as 1.
_EXACT = 1e-9
#: Rounds of reweighting.
_ROUNDS = 5
#: Errors above this multiple of the median error count as far off.
_FAR = 2.0
#: The quantiles of the observed costs per byte that are tried as sustained.
_SUSTAINED = (0.0, 0.05, 0.1, 0.2, 0.3)
#: A message counts as moved at the sustained rate if it takes at most this share longer.
_NEAR = 0.1
#: The errors must shrink to this share for a sustained rate, since a fit without one is simpler.
_CLEARLY = 0.8

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Observation:
    """A message of ``nbytes``, with the costs ``terms``, that took ``seconds``.

    It counts as ``weight`` observations.
    """

    terms: Terms
    nbytes: int
    seconds: float
    weight: float = 1.0


@dataclass(frozen=True)
class Fit:
    """A fitted link; ``errors`` are predicted / measured - 1 of each observation, in order."""

    link: Link
    errors: tuple[float, ...]


def fit(
    observations: Sequence[Observation],
    start: Link,
    free: Collection[str] = _FLOORS,
    spills_from: int | None = None,
) -> Fit:
    """The link that explains the observations best.

    Only the values named in ``free`` may differ from those of ``start``. ``spills_from`` is the
    size in bytes that the caches should hold, if known. Raises ValueError without observations.
    """
    if not observations:
        raise ValueError("there is nothing to fit")
    found = _fit_with(observations, start, free, spills_from, 0.0)
    rates = [o.seconds / o.terms.carried for o in observations if o.terms.carried]
    if rates:
        tried = dict.fromkeys(map(float, np.quantile(rates, _SUSTAINED)))
        best = min(
            (_fit_with(observations, start, free, spills_from, one) for one in tried), key=_off
        )
        if _off(best) < _CLEARLY * _off(found):
            return best
    return found


def _off(found: Fit) -> float:
    """The mean absolute error of the predictions, where each error counts as at most 1."""
    return float(np.minimum(np.abs(found.errors), 1.0).mean())


def _fit_with(
    observations: Sequence[Observation],
    start: Link,
    free: Collection[str],
    spills_from: int | None,
    sustained: float,
) -> Fit:
    """The best link with the given sustained cost per byte."""
    carrying = np.array([o.terms.carried * sustained for o in observations])
    seconds = np.array([o.seconds for o in observations])
    own = np.array([o.weight for o in observations])
    # In the first round, messages that take about that time count as moved at the sustained rate.
    weights = own * (seconds > carrying * (1 + _NEAR))
    for _ in range(_ROUNDS):
        _, bursting = min(
            (_fit_at(observations, weights, start, free, cache) for cache in _CACHE_BYTES),
            key=lambda pair: pair[0] * _unlikely(pair[1].cache_bytes, spills_from),
        )
        link = bursting._replace(sustained=sustained)
        busy = np.array([bursting.seconds(o.terms, o.nbytes) for o in observations])
        ratios = np.array([link.seconds(o.terms, o.nbytes) / o.seconds for o in observations])
        weights = own * _weights(ratios) * (busy >= carrying)
    return Fit(link, tuple(map(float, ratios - 1)))


def _unlikely(cache_bytes: int, spills_from: int | None) -> float:
    """The factor, at least 1, by which a spill size multiplies the squares of errors."""
    if spills_from is None:
        return 1.0
    return 1.0 + _LIKELY * math.log2(cache_bytes / spills_from) ** 2


def _weights(ratios: Array) -> Array:
    """Weights that make the squares of (ratio - 1) as steep as the squares of the logarithms.

    Ratios that are far off get the steepness of the limit from which they count as far off.
    """
    logs = np.log(ratios)
    far = max(_FAR * float(np.median(np.abs(logs))), 1e-6)
    steep = np.divide(logs, ratios - 1, out=np.ones_like(logs), where=abs(ratios - 1) > _EXACT)
    return np.minimum(1.0, far / np.maximum(np.abs(logs), _EXACT)) * steep / ratios


def _fit_at(
    observations: Sequence[Observation],
    weights: Array,
    start: Link,
    free: Collection[str],
    cache_bytes: int,
) -> tuple[float, Link]:
    """The sum of squares and the link, if messages spill from ``cache_bytes``.

    The sum includes the pull to the starting values.
    """
    origin = np.array([getattr(start, name) for name in _FLOORS])
    fixed = np.array([name not in free for name in _FLOORS])
    floors = np.where(fixed, origin, origin * np.array(list(_FLOORS.values())))
    roots = np.sqrt(weights)
    data = roots[:, None] * np.array([_row(one, start, cache_bytes) for one in observations])
    scale = _scale(start)
    matrix = np.vstack([data, np.diag(_PULL / scale)])
    wanted = np.concatenate([roots, _PULL * origin / scale])
    above = np.zeros(len(origin))
    columns = matrix[:, ~fixed]
    above[~fixed] = _not_negative(columns, wanted - matrix @ floors, scale[~fixed])
    values = floors + above
    residual = matrix @ values - wanted
    shift = _PULL * math.log2(cache_bytes / start.cache_bytes) if start.spill else 0.0
    figures = dict(zip(_FLOORS, map(float, values), strict=True))
    return float(residual @ residual) + shift**2, Link(**figures, cache_bytes=cache_bytes)


def _scale(start: Link) -> Array:
    """The plausible magnitude of each value.

    The time of a byte may be due to beta alone or to spill alone; a call may take as long as alpha.
    """
    byte = start.beta + start.spill
    sizes = start._asdict() | {"beta": byte, "spill": byte, "call": start.alpha}
    return np.array([sizes[name] or start.beta for name in _FLOORS])


def _row(one: Observation, start: Link, cache_bytes: int) -> tuple[float, ...]:
    """The coefficients of the values, in the order of _FLOORS, relative to the time."""
    terms = one.terms
    reached = terms.reached if start.reach else 0.0
    spill = spilled_bytes(terms, one.nbytes, cache_bytes)
    copied = terms.moved - reached
    called = terms.calls if terms.waits else 0.0
    costs = (terms.waits, terms.segments, copied, terms.combined, spill, reached, called)
    return tuple(cost / one.seconds for cost in costs)


def _not_negative(matrix: Array, wanted: Array, scale: Array) -> Array:
    """The x >= 0 for which ``matrix @ x`` is nearest to ``wanted``.

    At the solution some entries are 0 and the others solve the unbounded problem of their columns.
    Seven entries give 127 cases, few enough to try all of them.
    """
    count = matrix.shape[1]
    scaled = matrix * scale
    best: tuple[float, Any] = (float(wanted @ wanted), np.zeros(count))
    for length in range(1, count + 1):
        for used in itertools.combinations(range(count), length):
            part, *_ = np.linalg.lstsq(scaled[:, used], wanted, rcond=None)
            if (part < 0).any():
                continue
            x = np.zeros(count)
            x[list(used)] = part
            residual = scaled @ x - wanted
            square = float(residual @ residual)
            if square < best[0]:
                best = (square, x)
    found: Array = best[1] * scale
    return found
