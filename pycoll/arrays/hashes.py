"""Hashes of whole numbers, for places and draws that are the same on every rank and machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

#: The distance of two numbers in the sequence of SplitMix64, whose outputs are the hashes.
STEP = np.uint64(0x9E3779B97F4A7C15)


def hashes(numbers: Any) -> npt.NDArray[np.uint64]:
    """Return a hash of each whole number of 64 bits; its bits are as good as random ones.

    Source: SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
    OOPSLA 2014).
    """
    mixed = np.asarray(numbers).astype(np.uint64)
    mixed += STEP
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed
