"""The rates of codecs on one core of this machine, for ``pycoll tune``.

An array is longer than the caches of a core, as gradients are. Encoding also writes the residual,
since feedback needs it. The best of several runs counts: disturbances only add time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pycoll.compress import BF16, FP8, Block, Codec, RandomK, Sign, TopK
from pycoll.compress.dense import kernels
from pycoll.cost.codec_rates import CodecRate

#: The bytes of the array, and the number of runs of which the best one counts.
NBYTES, RUNS = 8 << 20, 5
QUICK_NBYTES, QUICK_RUNS = 1 << 20, 2
#: The share of values of sparse codecs to which a rate applies.
_DENSITY = 0.01


def measured_rates(quick: bool = False) -> tuple[CodecRate, ...]:
    """Measure every codec that the cost model knows; takes about a second."""
    nbytes, runs = (QUICK_NBYTES, QUICK_RUNS) if quick else (NBYTES, RUNS)
    values = np.random.default_rng(1).standard_normal(nbytes // 4).astype(np.float32)
    codecs = (BF16(), FP8(), Block("int4"), Block("int8"), RandomK(_DENSITY, 1), Sign())
    return tuple(_measure(one, values, runs) for one in (*codecs, TopK(_DENSITY)))


def describe_codecs(rates: tuple[CodecRate, ...]) -> Iterator[str]:
    """The lines of the report."""
    for number, one in enumerate(rates):
        yield (
            f"  {'' if number else 'codecs':10} {one.name}: encodes {one.encode * 1e-9:.3g} GB/s, "
            f"decodes and adds {one.decode_add * 1e-9:.3g} GB/s"
        )


def _measure(codec: Codec, values: Any, runs: int) -> CodecRate:
    from pycoll import _core

    described_as = codec.modelled(len(values))
    assert described_as is not None  # the model knows all codecs above
    native = codec.native()
    codes = codec.encode(values)
    sums = np.zeros_like(values)
    if native is not None:
        rests, kernel = np.zeros_like(values), kernels(native)
        told, view, left, total = map(_core.view, (codes, values, rests, sums))

        def encode() -> Any:
            kernel.encode(told, view, left)

        def decode() -> Any:
            kernel.decode(total, told, True)

    else:

        def encode() -> Any:
            return codec.encode(values)

        def decode() -> Any:
            np.add(sums, codec.decode(codes, len(values)), out=sums)

    each = [values.nbytes / _best_s(call, runs) for call in (encode, decode)]
    return CodecRate(described_as.name, *each)


def _best_s(call: Callable[[], Any], runs: int) -> float:
    call()
    found = []
    for _ in range(runs):
        begin = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin)
    return max(min(found), 1e-9)
