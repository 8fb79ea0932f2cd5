"""The codecs of a command line, by words such as int8, bf16 and topk:0.01."""

from __future__ import annotations

from collections.abc import Callable

from pycoll.compress import BF16, FP8, Block, Codec, RandomK, Sign, TopK
from pycoll.errors import InvalidArgumentError

_DENSE: dict[str, Callable[[], Codec]] = {
    "bf16": BF16,
    "fp8": FP8,
    "int8": lambda: Block("int8"),
    "int4": lambda: Block("int4"),
    "sign": Sign,
}
_SPARSE: dict[str, Callable[[float], Codec]] = {
    "topk": TopK,
    "randomk": lambda density: RandomK(density, 0),
}


def codec_of(word: str) -> Codec:
    """The codec of a word: one of _DENSE, or one of _SPARSE, a colon and a density.

    Raises InvalidArgumentError for other words and densities.
    """
    name, _, figure = word.partition(":")
    if word in _DENSE:
        return _DENSE[word]()
    if name in _SPARSE and figure:
        try:
            return _SPARSE[name](float(figure))
        except ValueError as error:
            raise InvalidArgumentError(f"--compress is {word!r}: {error}") from None
    sparse = ", ".join(f"{one}:0.01" for one in _SPARSE)
    raise InvalidArgumentError(
        f"--compress is {word!r}: expected one of {', '.join(_DENSE)}, or a share of the values "
        f"such as {sparse}"
    )
