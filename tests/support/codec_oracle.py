"""The codecs of csrc/kernels/codecs.h in NumPy, one block after the other: the kernels' oracle."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = Any
#: In the order of CodecKind.
BF16, INT8, INT4, FP8, SIGN = range(5)
_LARGEST = {INT8: 127, INT4: 7, FP8: 448}
_F32 = np.float32
_NAN = np.uint32(0x7FC00000).view(_F32)


def e4m3_values() -> Array:
    """The number of each code of float8_e4m3; the two NaN codes read as 480."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    normal = (8 + mantissa) * 2.0 ** (exponent - 10.0)
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, normal)
    return np.where(codes & 128, -magnitude, magnitude).astype(_F32)


_E4M3 = e4m3_values()


def _nearest_e4m3(y: Array) -> Array:
    """The codes nearest to ``y``; of two that are as near, the even one."""
    order = np.argsort(_E4M3[:127], kind="stable")
    distance = np.abs(np.abs(y)[:, None].astype(np.float64) - _E4M3[order][None].astype(np.float64))
    least = distance == distance.min(axis=1, keepdims=True)
    even = least & (order[None] % 2 == 0)
    code = np.where(even.any(axis=1), even.argmax(axis=1), least.argmax(axis=1))
    return np.where(np.signbit(y), code + 128, code)


def chances(seed: int, first: int, block: int) -> Array:
    """The 16 random bits of each value of the block that begins at index ``first``."""
    with np.errstate(over="ignore"):
        mixed = np.uint64(seed) ^ (np.uint64(first) * np.uint64(0x9E3779B97F4A7C15))
        mixed *= np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0x94D049BB133111EB)
        h = np.arange(block, dtype=np.uint32) * np.uint32(0x9E3779B1)
        h += np.uint32(mixed >> np.uint64(32))
        h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
        return (h ^ (h >> np.uint32(16))) >> np.uint32(16)


def _scaled_block(kind: int, x: Array, drawn: Array | None) -> tuple[Array, Array, Array]:
    """The scale, the codes and their numbers, of a block of 8-bit floats or integers."""
    largest = _F32(_LARGEST[kind])
    most = np.abs(x).max(initial=_F32(0))
    if not np.isfinite(most):
        return _NAN, np.zeros(len(x), np.int32), np.zeros(len(x), _F32)
    scale, inverse = most / largest, largest / most
    if most < largest * _F32(2.0**-126):
        scale = inverse = _F32(0)
    y = x * inverse
    if drawn is not None:
        fixed = (y * _F32(65536)).astype(np.int32) + drawn.astype(np.int32)
        code = fixed >> 16
        return scale, code, code.astype(_F32)
    if kind == FP8:
        code = _nearest_e4m3(y)
        number = _E4M3[code]
    else:
        code = np.rint(y).astype(np.int32)
        number = code.astype(_F32)
    far = np.abs(number * scale * _F32(0.5)) > np.abs(x)
    return scale, np.where(far, 0, code), np.where(far, _F32(0), number)


def _sign_block(x: Array, block: int) -> tuple[Array, Array]:
    """The scale of a block, and the values of its codes."""
    padded = np.zeros(block, _F32)
    padded[: len(x)] = np.abs(x)
    sums = np.zeros(16, _F32)
    for row in padded.reshape(-1, 16):
        sums += row
    for half in (8, 4, 2, 1):
        sums = sums[:half] + sums[half:]
    scale = sums[0] / _F32(len(x))
    scale = scale if np.isfinite(scale) else _NAN
    return scale, np.where(np.signbit(x), -scale, scale)


def encode(
    kind: int, values: Array, block: int, seed: int | None = None, first: int = 0
) -> tuple[bytes, Array, Array]:
    """The bytes, what they decode to, and what they leave out. ``seed``: rounds by chance."""
    with np.errstate(all="ignore"):
        if kind == BF16:
            bits = values.view(np.uint32)
            codes = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> 16
            codes = np.where(np.isnan(values), 0x7FC0, codes).astype(np.uint32)
            sent = (codes << np.uint32(16)).view(_F32)
            return codes.astype("<u2").tobytes(), sent, _rests(values, sent)
        told, sent = b"", []
        for at in range(0, len(values), block):
            x = values[at : at + block]
            if kind == SIGN:
                scale, decoded = _sign_block(x, block)
                codes = np.packbits(np.signbit(x), bitorder="little").tobytes()
            else:
                drawn = None if seed is None else chances(seed, first + at, block)[: len(x)]
                scale, code, number = _scaled_block(kind, x, drawn)
                decoded = number * scale
                codes = _packed(kind, code, block)
            told += scale.astype("<f4").tobytes() + codes
            sent.append(decoded)
        everything = np.concatenate(sent) if sent else np.zeros(0, _F32)
        return told, everything, _rests(values, everything)


def _rests(values: Array, sent: Array) -> Array:
    rests = values - sent
    return np.where(np.isfinite(rests), rests, _F32(0))


def _packed(kind: int, code: Array, block: int) -> bytes:
    if kind != INT4:
        return (code & 255).astype(np.uint8).tobytes()
    half = min(len(code), block // 2)
    both = np.zeros(2 * block, np.int32)
    both[: len(code)] = code & 15
    low, high = both[:half], both[block // 2 : block // 2 + half]
    return (low | high << 4).astype(np.uint8).tobytes()
