"""Codecs: values that say how a collective holds floats in fewer bytes.

    comm.all_reduce(gradient, "avg", compress=Block("int8"), feedback=feedback)

``BF16``, ``FP8``, ``Block`` and ``Sign`` keep a few bits of every value. ``TopK``, ``Threshold``
and ``RandomK`` keep some values whole. ``PowerSGD`` keeps two thin matrices. ``Custom`` has two
functions of the program. ``Feedback`` owns residuals: the values minus their decoded codes.
docs/guides/compression.md says when they pay. ``Auto`` lets a scheduler of gradients pick.

The modules, bottom up:

    codec             the base of codecs
    dense             codecs of which the executor has kernels; ``native()`` describes them
    kept_arrays       the arrays that a Feedback keeps: residuals and velocities
    feedback          Feedback, which owns what codecs left out
    call_memory       the part of a Feedback that one call uses
    operands          the arrays of a call, on one axis
    coded_exchange    the ranks compare codecs; bytes to the owners of parts and back
    host_sums         which ranks encode, and the sums of the ranks of a host
    moved_codes       broadcast, all_gather and reduce_scatter of codecs without kernels
    composed          the base of codecs whose collectives are sequences of other collectives
    sparse            codecs of places and values
    low_rank          PowerSGD
    custom            codecs of two functions
    auto              a set of codecs for a scheduler's choice

A collective reads its argument ``compress`` so: ``codec.native()`` is a ``Native`` that the
executor runs, or None. Then the collective is the codec's method of that name, as
``ComposedCodec.all_reduce``.
"""

from __future__ import annotations

from pycoll.compress.auto import Auto
from pycoll.compress.codec import Codec
from pycoll.compress.custom import Custom
from pycoll.compress.dense import BF16, FP8, Block, Sign
from pycoll.compress.feedback import Feedback
from pycoll.compress.low_rank import PowerSGD
from pycoll.compress.sparse import RandomK, Threshold, TopK

__all__ = [
    "BF16",
    "FP8",
    "Auto",
    "Block",
    "Codec",
    "Custom",
    "Feedback",
    "PowerSGD",
    "RandomK",
    "Sign",
    "Threshold",
    "TopK",
]
