"""The rates of codecs: bytes of float32 that a core encodes, or decodes and adds, per second.

``pycoll tune`` measures them and stores them in the tuning file, under ``codecs``. A codec that
this entry does not name was not measured and has its built-in rates. All ranks use the rates of
rank 0's file, like the costs of links.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple


class CodecRate(NamedTuple):
    """The rates of a codec on one core, in bytes of float32 per second.

    ``name``: the word for the codec in tuning files. ``encode``: values that are encoded, with
    feedback. ``decode_add``: values that are decoded and added.
    """

    name: str
    encode: float
    decode_add: float

    def seconds(self, encoded: float, decoded: float) -> float:
        """The time of so many bytes of values, in s."""
        return encoded / self.encode + decoded / self.decode_add


#: Values that are right in their order of magnitude. Sparse codecs are those of one value in 100.
BUILT_IN = (
    CodecRate("bf16", 5e9, 7e9),
    CodecRate("fp8", 2e9, 5e9),
    CodecRate("int4", 4e9, 6e9),
    CodecRate("int8", 3e9, 5e9),
    CodecRate("randomk", 2e9, 3e9),
    CodecRate("sign", 6e9, 10e9),
    CodecRate("topk", 0.5e9, 2e9),
)
#: The lowest and highest accepted value, in bytes per second.
_LEAST, _MOST = 1e3, 1e15


def origin_of(one: CodecRate) -> str:
    """The source of a rate, as text."""
    return "built in" if one in BUILT_IN else "measured"


def as_json(rates: tuple[CodecRate, ...]) -> dict[str, Any]:
    """The JSON value that ``parse_rates`` reads: bytes of float32 per second by codec."""
    return {
        one.name: {"encode": one.encode, "decode_add": one.decode_add}
        for one in rates
        if one not in BUILT_IN
    }


def parse_rates(data: Any) -> tuple[CodecRate, ...]:
    """The rates of a JSON value; a codec that it does not name has its built-in rates.

    Raises ValueError that names the entry that is unknown or out of range.
    """
    known = {one.name: one for one in BUILT_IN}
    if not isinstance(data, dict) or not set(data) <= set(known):
        raise ValueError(f"codecs must have some of {', '.join(known)}, and nothing else")
    found = dict(known)
    for name, figures in data.items():
        if not isinstance(figures, dict) or set(figures) != {"encode", "decode_add"}:
            raise ValueError(f"codecs.{name} must have encode and decode_add")
        for word, value in figures.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not (math.isfinite(value) and _LEAST <= value <= _MOST):
                raise ValueError(
                    f"codecs.{name}.{word} is {value!r}: expected bytes per second from "
                    f"{_LEAST:g} to {_MOST:g}"
                )
        found[name] = CodecRate(name, float(figures["encode"]), float(figures["decode_add"]))
    return tuple(found.values())
