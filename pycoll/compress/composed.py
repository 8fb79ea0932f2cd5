"""The base of codecs whose collectives are sequences of other collectives."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from pycoll.compress import moved_codes
from pycoll.compress.codec import Array, Codec
from pycoll.compress.coded_exchange import ComposedWork, name_errors
from pycoll.compress.feedback import Feedback
from pycoll.compress.operands import Operands
from pycoll.errors import InvalidArgumentError

#: The Work of the last exchange, and a function that turns the received bytes into the values of
#: the result. The function returns None where it has written the values to the result's memory.
Started = tuple[Any, Callable[[Any], Array]]


class ComposedCodec(Codec):
    """A codec whose collectives are sequences of other collectives."""

    #: Whether it takes float64.
    wide: ClassVar[bool] = True
    #: Whether it sends only some elements of an array. Masking clears the velocities of these.
    sends_places: ClassVar[bool] = False

    def all_reduce(
        self,
        comm: Any,
        x: Any,
        op: Any = "sum",
        *,
        out: Any = None,
        feedback: Feedback | None = None,
        algorithm: str | None = None,
        async_op: bool = False,
        deterministic: bool | None = None,
        stream: Any = None,
    ) -> Any:
        """Run ``comm.all_reduce(x, op, compress=self)``; see there.

        A Work of ``async_op`` waits for the last exchange; the call itself waits for those before.
        The next call with the same ``feedback`` raises InvalidArgumentError on all ranks until the
        Work has been waited for.
        """
        name = "all_reduce"
        with name_errors(name):
            refuse_algorithm(self, algorithm)
            if stream is not None:
                raise InvalidArgumentError(
                    f"stream is {stream!r}: compress takes arrays in host memory, which have none"
                )
            given = Operands(x, out, op, feedback, self.wide)
            self.check_feedback(feedback)
            if feedback is not None:
                feedback.check_free()
            if feedback is not None and feedback.warms:
                self.check_warm_up()
            last, values = self.start_all_reduce(comm, given, name, deterministic)

        def finish(received: Any) -> Any:
            return given.results(values(received))

        def start(finish: Callable[[Any], Any]) -> ComposedWork:
            return ComposedWork(last, finish, name)

        if feedback is None:
            work = start(finish)
        else:
            work = feedback.serve(lambda: comm.failure, finish, start)
        return work if async_op else work.wait()

    def codec_on_devices(
        self, x: Any, op: Any, algorithm: str | None, feedback: Any
    ) -> ComposedCodec | None:
        """Return the codec by which kernels run an all_reduce of arrays on devices.

        None where ``all_reduce`` of this class runs the call, or refuses it. Raises
        InvalidArgumentError for wrong arguments of a call that kernels run.
        """
        return None

    def encode_block(self, x: Any, step: int) -> Array:
        """Return the codes of a block in call number ``step`` of a Feedback.

        ``x``: float32, or float64 where the codec is ``wide``.
        """
        return self.encode(x)

    def decode_block(self, codes: Any, count: int, kind: np.dtype[Any]) -> Array:
        """Return the ``count`` values of a block of this type, on one axis."""
        return self.decode(codes, count)

    def places_of(self, codes: Any, count: int, kind: np.dtype[Any]) -> Array | None:
        """Return the places of a block that codes send, or None where these send all of it."""
        return None

    def warmed(self, feedback: Feedback) -> ComposedCodec:
        """Return the codec of the next call: with another density during the warm-up."""
        return self

    def check_feedback(self, feedback: Feedback | None) -> None:
        """Raise InvalidArgumentError where a collective needs a Feedback and has none."""

    def broadcast(self, comm: Any, x: Any, root: int, **words: Any) -> Any:
        """Run ``comm.broadcast(x, root, compress=self)``; see there."""
        return moved_codes.broadcast(self, comm, x, root, **words)

    def all_gather(self, comm: Any, x: Any, lengths: Any, **words: Any) -> Any:
        """Run ``comm.all_gather(x, lengths=lengths, compress=self)``; see there."""
        return moved_codes.all_gather(self, comm, x, lengths, **words)

    def reduce_scatter(self, comm: Any, x: Any, op: Any, splits: Any, **words: Any) -> Any:
        """Run ``comm.reduce_scatter(x, op, splits, compress=self)``; see there."""
        return moved_codes.reduce_scatter(self, comm, x, op, splits, **words)

    def check_warm_up(self) -> None:
        """Raise InvalidArgumentError unless the codec has a density."""
        raise InvalidArgumentError(
            f"feedback has a warm-up, and compress is {self!r}: expected TopK or RandomK"
        )

    @abstractmethod
    def start_all_reduce(
        self, comm: Any, given: Operands, name: str, deterministic: bool | None
    ) -> Started:
        """Run all exchanges but the last, which it starts."""


def refuse_algorithm(codec: ComposedCodec, algorithm: str | None) -> None:
    """Raise InvalidArgumentError if there is one."""
    if algorithm is not None:
        raise InvalidArgumentError(
            f"algorithm is {algorithm!r} and compress is {codec!r}, which runs several "
            "collectives: leave algorithm out"
        )
