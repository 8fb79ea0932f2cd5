"""From measured times to a link's figures: least squares on relative errors.

The model's times are linear in call, alpha, overhead, beta, gamma, spill and reach once it is known
from which size on a message spills (see pycoll/model.py). So powers of two and the middles between
them are tried for that size, and for each the figures that make the squares of (predicted -
measured) / measured smallest, none of them below a floor. What the measurements do not tell apart,
a faint pull towards the starting values decides. Measurements that lie far off after that count
less in a further round, and so on: other work on the machine makes some times several times too
long. Squares of that kind would rather say half than twice; those rounds weigh them so that it is
the logarithm of predicted / measured that counts, and both are as bad.

What a link carries in the long run no message exceeds. If there is such a rate, many messages
are carried at about the highest that was seen; so a few of the highest are tried, and those
messages say nothing of the other figures then. It is taken if it explains clearly more.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pycoll.model import Link, Terms, spilled

#: Sizes tried for the beginning of spilling.
_CACHE_BYTES = tuple(size for power in range(17, 28) for size in (1 << power, 3 << (power - 1)))
#: Weight of a starting value beside one measurement: one that is right by its order of magnitude
#: costs less than a percent of error in one measurement.
_PULL = 1e-3
#: Half an octave from where caches say that messages begin to spill must explain a tenth better, an
#: octave by three tenths: sizes next to each other are about as good, and by chance the wrong one.
_LIKELY = 0.3
#: Figures in the order of Link.seconds, and their floors as shares of the starting values: links
#: are not fifty times better than present machines have them, and nothing is there at once.
_FLOORS = {
    "alpha": 0.15,
    "overhead": 0.02,
    "beta": 0.02,
    "gamma": 0.02,
    "spill": 0.0,
    "reach": 0.02,
    "call": 0.0,
}
#: Nearer to 1 a ratio is 1.
_EXACT = 1e-9
#: Rounds of weighing, and how many times the middle error is far off.
_ROUNDS = 5
_FAR = 2.0
#: Which of the observed rates are tried for that in the long run, as shares from the highest on.
_SUSTAINED = (0.0, 0.05, 0.1, 0.2, 0.3)
#: What takes so much longer at most is carried at that rate.
_NEAR = 0.1
#: Errors must get so much smaller by it: what else explains them is simpler.
_CLEARLY = 0.8

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Observation:
    """A message of ``nbytes`` whose plan costs ``terms`` took ``seconds``. ``weight``: as so many
    of them."""

    terms: Terms
    nbytes: int
    seconds: float
    weight: float = 1.0


@dataclass(frozen=True)
class Fit:
    """``errors``: predicted / measured - 1 of each observation, in order."""

    link: Link
    errors: tuple[float, ...]


def fit(
    observations: Sequence[Observation],
    start: Link,
    free: Collection[str] = _FLOORS,
    spills_from: int | None = None,
) -> Fit:
    """The link that explains the observations best, where only the figures named ``free`` may
    differ from the start's. ``spills_from``: for how many bytes there should be room in the caches,
    if that is known. ValueError without any observation."""
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
    """How far predictions are off in the middle, but for single ones that are far off."""
    return float(np.minimum(np.abs(found.errors), 1.0).mean())


def _fit_with(
    observations: Sequence[Observation],
    start: Link,
    free: Collection[str],
    spills_from: int | None,
    sustained: float,
) -> Fit:
    """The best link that carries just that in the long run."""
    carrying = np.array([o.terms.carried * sustained for o in observations])
    seconds = np.array([o.seconds for o in observations])
    own = np.array([o.weight for o in observations])
    # At first those are taken to be carried in the long run that take about so long.
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
    """What the squares of errors count by, at least 1."""
    if spills_from is None:
        return 1.0
    return 1.0 + _LIKELY * math.log2(cache_bytes / spills_from) ** 2


def _weights(ratios: Array) -> Array:
    """With these, squares of ratios - 1 are about as steep as those of their logarithms, and where
    a ratio is far off, no steeper than where it begins to be."""
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
    """Sum of squares, the pull's too, and link, if messages spill from ``cache_bytes`` on."""
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
    """How large each figure may reasonably be. A byte's time may be all beta's or all spill's, that
    of a call alpha's."""
    byte = start.beta + start.spill
    sizes = start._asdict() | {"beta": byte, "spill": byte, "call": start.alpha}
    return np.array([sizes[name] or start.beta for name in _FLOORS])


def _row(one: Observation, start: Link, cache_bytes: int) -> tuple[float, ...]:
    """Coefficients of the figures, in the order of _FLOORS, relative to the time."""
    terms = one.terms
    reached = terms.reached if start.reach else 0.0
    spill = spilled(terms, one.nbytes, cache_bytes)
    copied = terms.moved - reached
    called = terms.calls if terms.waits else 0.0
    costs = (terms.waits, terms.segments, copied, terms.combined, spill, reached, called)
    return tuple(cost / one.seconds for cost in costs)


def _not_negative(matrix: Array, wanted: Array, scale: Array) -> Array:
    """The x >= 0 for which ``matrix @ x`` is nearest to ``wanted``.

    At the solution some entries are 0 and the others solve the unbounded problem of their columns;
    seven entries make 127 cases, few enough to try them all.
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
