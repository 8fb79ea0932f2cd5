"""Data types: the gradients of a step, the messages that reduce them, and the cost of messages.

Gradients are numbered in the order in which the backward pass produces them. So the last ones
belong to the layers that the next forward pass needs first. Times are seconds from the start of the
backward pass and assume a backward pass that sends no messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

#: Architectures: how a message is reduced. "a2a": by an all_reduce among the workers. "ps": every
#: worker pushes its values to parameter servers and pulls the sums from them.
A2A, PS = "a2a", "ps"
ARCHITECTURES = (A2A, PS)
#: Between the architecture and the codec of a message that travels as codes: "a2a+int8". Such words
#: may stand wherever an architecture does.
PLUS = "+"
#: The only dtype of messages that travel as codes.
CODED_KIND = "float32"

#: Resources that messages occupy. OUT and IN: a leg, which is the link of a worker in one direction
#: together with the links of the servers in that direction. SERVER: the cores of the servers. HOST:
#: the links inside a host.
OUT, IN, SERVER, HOST = "out", "in", "server", "host"


class Gradient(NamedTuple):
    """A gradient: its size, the time at which it is ready, and its dtype.

    All values of one message have the same dtype.

    Arguments: ``nbytes``, the size in bytes; ``ready_s``, the seconds from the start of the
    backward pass; ``kind``, the name of the dtype.

    Errors and cost: none.

    >>> pycoll.optim.Gradient(nbytes=4 << 20, ready_s=0.01)
    Gradient(nbytes=4194304, ready_s=0.01, kind='float32')
    """

    nbytes: int
    ready_s: float
    kind: str = "float32"


class Piece(NamedTuple):
    """The bytes ``start`` to ``stop`` of a gradient."""

    gradient: int
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Its length in bytes."""
        return self.stop - self.start


def coded_way(label: str) -> str:
    """The architecture of messages that travel as codes of the codec with this label."""
    return f"{A2A}{PLUS}{label}"


def label_of(architecture: str) -> str:
    """The label of the codec of an architecture; "" without one."""
    return architecture.partition(PLUS)[2]


class GradientBucket(NamedTuple):
    """Pieces that one message reduces: of consecutive gradients of one dtype, in order."""

    pieces: tuple[Piece, ...]
    architecture: str = A2A

    @property
    def nbytes(self) -> int:
        """The length of the message in bytes."""
        return sum(piece.nbytes for piece in self.pieces)

    def ready_s(self, gradients: Sequence[Gradient]) -> float:
        """The time at which the last gradient of the message is ready."""
        return max(gradients[piece.gradient].ready_s for piece in self.pieces)


class CommunicationPlan(NamedTuple):
    """The messages of a step, in the order in which all ranks send them.

    ``gathers``: the order of the all_gathers, where every message is reduced by a reduce_scatter
    and, after all of these, an all_gather. None where every message is reduced by an all_reduce.
    """

    policy: str
    messages: tuple[GradientBucket, ...]
    gathers: tuple[int, ...] | None = None


class Rate(NamedTuple):
    """The cost of a message: ``alpha`` seconds plus ``beta`` seconds per byte.

    Arguments: ``alpha``, in seconds; ``beta``, in seconds per byte.

    Errors and cost: none.

    >>> pycoll.optim.Rate(alpha=1e-5, beta=1e-9).seconds(1_000_000)
    0.00101
    """

    alpha: float
    beta: float

    def seconds(self, nbytes: float) -> float:
        """The seconds that a message of ``nbytes`` takes."""
        return self.alpha + self.beta * nbytes


class Stage(NamedTuple):
    """A task of a message: it occupies ``resources``, one message at a time, for ``rate``.

    A message passes its stages in order, and a stage takes messages in order. A stage of a message
    begins when the earlier messages have left its resources, and when the message's previous stage
    permits it:

    * ``behind_s`` is None: the previous stage must have ended. It passes on the message as a whole.
    * ``behind_s`` is a number: the previous stage passes on segments as they come. This stage
      begins at least ``behind_s`` seconds after the previous one begins, and ends at least
      ``behind_s`` seconds after it ends. That is the time of a segment in the previous stage.
    """

    rate: Rate
    resources: tuple[str, ...] = (OUT, IN)
    behind_s: float | None = None


class Rates(NamedTuple):
    """The rates of the operations of communication plans, and what these cost the computing thread.

    The three rates hold for operations that run while the computing thread (the thread that
    computes gradients) is busy.

    ``host_s``: the seconds that each message of any length takes from the computing thread, to
    start the operation and to ask for its end.

    ``slowed``: the share of a message's transfer time that the computing thread loses. 0 means that
    messages use cores and memory of their own, 1 that the computing thread makes no progress.

    ``await_s``: the seconds per gradient that the forward pass loses where it waits for each
    gradient alone and steps its parameter alone. It loses 0 where it waits for all at once.

    ``push_pull``: the stages of a message of the architecture "ps"; () if there are no servers.

    ``push_pull_by``: the algorithm of all_reduce that does so, where the rates were measured.

    ``optimizer``: the time of an optimizer's step, from the bytes of the gradients.

    ``coded``: the architectures of messages that travel as codes, with the cost of an all_reduce by
    bytes of the values. ``holding``: those of them whose messages stop the computing thread until
    they end, since it encodes and decodes itself.
    """

    all_reduce: Rate
    reduce_scatter: Rate
    all_gather: Rate
    host_s: float = 0.0
    slowed: float = 0.0
    await_s: float = 0.0
    push_pull: tuple[Stage, ...] = ()
    optimizer: Rate = Rate(0.0, 0.0)
    push_pull_by: str = ""
    coded: tuple[tuple[str, Rate], ...] = ()
    holding: tuple[str, ...] = ()

    @property
    def architectures(self) -> tuple[str, ...]:
        """The architectures that messages can use, those with codecs last."""
        plain = ARCHITECTURES if self.push_pull else (A2A,)
        return (*plain, *(name for name, _ in self.coded))

    def stages(self, architecture: str) -> tuple[Stage, ...]:
        """The stages of a message that is reduced as a whole."""
        if architecture == PS:
            return self.push_pull
        return (Stage(self.all_reduce if architecture == A2A else dict(self.coded)[architecture]),)

    def alone_s(self, architecture: str, nbytes: int) -> float:
        """The time of one message alone, from its begin to the end of its last stage."""
        begin_s = end_s = 0.0
        for number, (rate, _, behind_s) in enumerate(self.stages(architecture)):
            if number == 0 or behind_s is None:
                begin_s, end_s = end_s, end_s + rate.seconds(nbytes)
            else:
                begin_s += behind_s
                end_s = max(begin_s + rate.seconds(nbytes), end_s + behind_s)
        return end_s

    def busy(self, architecture: str) -> Rate:
        """The time of the longest stage: the distance of the ends of many such messages."""
        rates = [stage.rate for stage in self.stages(architecture)]
        return Rate(*map(max, zip(*rates, strict=True)))


def check(comm_plan: CommunicationPlan, gradients: Sequence[Gradient]) -> None:
    """Raise AssertionError unless each byte of each gradient is in exactly one message, in order.

    Also checks that every message is contiguous in a memory that holds the gradients of each dtype
    in their order. ``gathers`` must list every message once.
    """
    covered: dict[int, list[tuple[int, int]]] = {n: [] for n in range(len(gradients))}
    for message in comm_plan.messages:
        assert message.pieces, "a message is empty"
        architecture, plus, _ = message.architecture.partition(PLUS)
        assert architecture in ARCHITECTURES[: 1 if plus else 2], message.architecture
        numbers = [piece.gradient for piece in message.pieces]
        assert numbers == sorted(set(numbers)), f"pieces of gradients {numbers}"
        kinds = {gradients[number].kind for number in numbers}
        assert len(kinds) == 1, f"kinds {sorted(kinds)} in one message"
        assert not plus or kinds == {CODED_KIND}, f"codes of {kinds}"
        inside, had = range(numbers[0], numbers[-1] + 1), set(numbers)
        left_out = [n for n in inside if gradients[n].kind in kinds and n not in had]
        assert not left_out, f"gradients {left_out} lie between those of a message"
        for place, (number, start, stop) in enumerate(message.pieces):
            covered[number].append((start, stop))
            assert place == 0 or start == 0, "a piece begins inside a gradient, and the message not"
            whole = stop == gradients[number].nbytes
            assert place == len(numbers) - 1 or whole, "a gradient ends inside the message"
    for number, spans in covered.items():
        edges = sorted(spans)
        ends = [0, *(stop for _, stop in edges)]
        assert [start for start, _ in edges] == ends[:-1], f"gradient {number}: {edges}"
        assert edges and ends[-1] == gradients[number].nbytes, f"gradient {number}: {edges}"
    if comm_plan.gathers is not None:
        assert all(message.architecture == A2A for message in comm_plan.messages)
        assert sorted(comm_plan.gathers) == list(range(len(comm_plan.messages))), comm_plan.gathers
