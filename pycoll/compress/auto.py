"""Auto: codecs among which a scheduler of gradients picks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pycoll.compress.codec import Codec
from pycoll.compress.dense import BF16, Block
from pycoll.errors import InvalidArgumentError
from pycoll.types import whole


@dataclass(frozen=True)
class Auto:
    """Let a scheduler pick a codec for each message, among some codecs and none.

    ``pycoll.optim.Scheduler(compress=)`` and ``DistributedOptimizer(policy=, compression=)`` take
    it. They measure the codecs on the communicator and agree on the figures. Then they search for
    the messages and codecs with the least communication that computation does not hide. Small
    layers are often sent without a codec. Residuals are added to the gradients of the next step,
    also where the choice has changed. ``explain()`` says for each gradient which codec was picked,
    and why.

    Arguments:
        ``codecs``: the codecs that are allowed, for float32; other types take no codec.
        ``every``: after so many steps the scheduler measures and picks anew; 0: never.

    Errors: InvalidArgumentError for an empty list, equal codecs, and values that are no codecs.

    Cost: measuring takes seconds, once in ``every`` steps.

    >>> pycoll.compress.Auto([pycoll.compress.Sign(), pycoll.compress.BF16()]).codecs
    (Sign(block=256), BF16())
    """

    codecs: Sequence[Codec] = (BF16(), Block("int8"))
    every: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.codecs, list | tuple) or not self.codecs:
            raise InvalidArgumentError(
                f"codecs is {self.codecs!r}: expected a list of at least one codec"
            )
        for number, codec in enumerate(self.codecs):
            if not isinstance(codec, Codec):
                raise InvalidArgumentError(
                    f"codecs[{number}] is {codec!r}: expected a codec such as "
                    "pycoll.compress.Block('int8')"
                )
            if codec in self.codecs[:number]:
                raise InvalidArgumentError(f"codecs has {codec!r} twice")
        object.__setattr__(self, "codecs", tuple(self.codecs))
        object.__setattr__(self, "every", whole("every", self.every, 0))
