"""Parameter types of the command line: bytes, times and rates, each with its unit."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    IntegerType = click.ParamType[int]
    NumberType = click.ParamType[float]
else:  # older releases have no type argument
    IntegerType = NumberType = click.ParamType

_BINARY = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
#: Rates in bytes per second. A lower-case b is a bit.
_RATES = {
    f"{prefix}{word}/s": scale / bits
    for prefix, scale in (("M", 1e6), ("G", 1e9), ("T", 1e12))
    for word, bits in (("B", 1), ("b", 8), ("bit", 8))
}
#: Longest message that is accepted: 1024T.
BYTES_MAX = 1 << 50
#: Longest latency that is accepted.
SECONDS_MAX = 10.0
_NUMBER = r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?|\.\d+)"


def _amount(value: Any, units: Mapping[str, float]) -> float | None:
    """Parse a number with one of the units; None for another text."""
    match = re.fullmatch(rf"{_NUMBER}\s*(\S+)", str(value).strip())
    return None if match is None or match[2] not in units else float(match[1]) * units[match[2]]


class Bytes(IntegerType):
    """A number of bytes up to `BYTES_MAX`: 8, 64K, 1M, 2GiB."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse ``value``; fail with what would be accepted."""
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", str(value).strip(), re.I)
        if match is None:
            self.fail(
                f"{value!r} is not a number of bytes such as 8, 64K, 1M or 2G, up to 1024T",
                param,
                ctx,
            )
        nbytes = float(match[1]) * _BINARY[match[2].upper()]
        if nbytes > BYTES_MAX:
            self.fail(f"{value!r} is more than {BYTES_MAX >> 40}T", param, ctx)
        return int(nbytes)


class Seconds(NumberType):
    """A time with its unit, in seconds: 300ns, 2.5us, 1ms."""

    name = "time"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Parse ``value``; fail with what would be accepted."""
        if isinstance(value, float):
            return value
        seconds = _amount(value, _SECONDS)
        if seconds is None:
            self.fail(f"{value!r} is not a time such as 300ns, 2.5us or 1ms", param, ctx)
        if seconds > SECONDS_MAX:
            self.fail(f"{value!r} is more than {SECONDS_MAX:g} s", param, ctx)
        return seconds


class SecondsPerByte(NumberType):
    """A rate with its unit, as seconds per byte: 25GB/s, 200Gb/s (bits), 40MB/s."""

    name = "rate"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Parse ``value``; fail with what would be accepted."""
        if isinstance(value, float):
            return value
        rate = _amount(value, _RATES)
        if rate is None:
            self.fail(
                f"{value!r} is not a rate such as 25GB/s (bytes) or 200Gb/s (bits)", param, ctx
            )
        if not (rate > 0 and math.isfinite(rate)):
            self.fail(f"{value!r} is not a finite rate above zero", param, ctx)
        return 1 / rate
