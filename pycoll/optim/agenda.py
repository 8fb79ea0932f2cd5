"""What is to be reduced in a step, and the messages in which it travels: values, and no more.

Gradients are numbered in the order in which the backward pass gives them, so the last ones belong
to the layers that the next forward pass needs first. Seconds count from the start of the backward
pass, as it is if no message is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Gradient(NamedTuple):
    """Its size, when the backward pass has it, and its type: one message has values of one type."""

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
        """How long it is."""
        return self.stop - self.start


class Message(NamedTuple):
    """Pieces that are reduced as one: those of consecutive gradients of one kind, in order."""

    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """What travels."""
        return sum(piece.nbytes for piece in self.pieces)

    def ready_s(self, gradients: Sequence[Gradient]) -> float:
        """When the backward pass has all of it."""
        return max(gradients[piece.gradient].ready_s for piece in self.pieces)


class Agenda(NamedTuple):
    """The messages of a step, in the order in which all ranks send them.

    ``gathers``: where reductions are done by halves (a reduce_scatter of every message, then an
    all_gather of every message), the order of the second halves; None where they are done at once.
    """

    policy: str
    messages: tuple[Message, ...]
    gathers: tuple[int, ...] | None = None


class Rate(NamedTuple):
    """What a message costs: ``alpha`` seconds, and ``beta`` seconds per byte."""

    alpha: float
    beta: float

    def seconds(self, nbytes: float) -> float:
        """The time of a message of ``nbytes``."""
        return self.alpha + self.beta * nbytes


class Rates(NamedTuple):
    """The rates of the operations that agendas are made of.

    ``host_s``: what each message takes, however short, from the thread that computes gradients: to
    hand it over and to ask for its end. Rates are of what runs beside that thread. ``slowed``: what
    that thread loses of the time in which a message is on its way, from 0, where messages have
    cores and memory of their own, to 1, where it stands still. ``await_s``: what it takes from the
    forward pass to wait for one gradient by itself, and to step its parameter by itself, beyond
    what that takes if all are waited for at once.
    """

    all_reduce: Rate
    reduce_scatter: Rate
    all_gather: Rate
    host_s: float = 0.0
    slowed: float = 0.0
    await_s: float = 0.0


def check(agenda: Agenda, gradients: Sequence[Gradient]) -> None:
    """AssertionError unless each byte of each gradient is in exactly one message, in order."""
    covered: dict[int, list[tuple[int, int]]] = {n: [] for n in range(len(gradients))}
    for message in agenda.messages:
        assert message.pieces, "a message is empty"
        numbers = [piece.gradient for piece in message.pieces]
        assert numbers == sorted(set(numbers)), f"pieces of gradients {numbers}"
        kinds = {gradients[number].kind for number in numbers}
        assert len(kinds) == 1, f"kinds {sorted(kinds)} in one message"
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
    if agenda.gathers is not None:
        assert sorted(agenda.gathers) == list(range(len(agenda.messages))), agenda.gathers
