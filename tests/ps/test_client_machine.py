"""The order in which a worker sends requests that wait: by priority, and in order for each key."""

from __future__ import annotations

import random
from typing import Any

from pycoll.ps.client_machine import WINDOW, ClientMachine
from pycoll.ps.messages import UPDATES, Kind, Message
from pycoll.ps.views import first_view

SEEDS = 1000
SERVER = 1


class Worker:
    """A worker of one server. ``sent``: the payloads of its requests, in the order they left."""

    def __init__(self) -> None:
        self.machine = ClientMachine(0, first_view([SERVER], 0))
        self.sent: list[Any] = []
        self.unanswered: list[Message] = []
        self.names = 0

    def fill(self) -> None:
        """Send as many pushes as may be on their way, so that all later ones wait."""
        for number in range(WINDOW):
            self.add(1000 + number, 0)
        assert len(self.sent) == WINDOW
        self.sent.clear()

    def add(self, key: int, priority: int, kind: Kind = Kind.PUSH) -> int:
        """Begin a request, and return the number by which it is known in ``sent``."""
        self.names += 1
        self.machine.add(Message(kind, key=key, payload=self.names), priority)
        self.look()
        return self.names

    def look(self) -> None:
        for to, message in self.machine.out:
            assert to == SERVER
            self.sent.append(message.payload)
            self.unanswered.append(message)
        self.machine.out.clear()

    def answer(self) -> None:
        """Answer the oldest request that is on its way."""
        message = self.unanswered.pop(0)
        after = int(message.kind not in UPDATES)
        self.machine.handle(SERVER, Message(Kind.DONE, seq=message.seq, after=after))
        self.look()

    def answer_all(self) -> list[Any]:
        """Answer all requests one by one; return the numbers of those that left meanwhile."""
        while self.unanswered:
            self.answer()
        return self.sent


def test_a_push_of_higher_priority_leaves_first_when_the_window_is_full() -> None:
    worker = Worker()
    worker.fill()
    low = [worker.add(key, -1) for key in range(3)]
    none = [worker.add(key, 0) for key in range(3, 6)]
    high = [worker.add(key, 5) for key in range(6, 9)]
    assert worker.sent == [], "the window is full"
    worker.answer()
    assert worker.sent == high[:1], "one answer lets one push go"
    urgent = worker.add(9, 7)
    assert worker.answer_all() == [high[0], urgent, *high[1:], *none, *low]


def test_requests_of_one_key_keep_their_order_whatever_their_priorities() -> None:
    worker = Worker()
    worker.fill()
    first, other = worker.add(0, 1), worker.add(1, 3)
    second = worker.add(0, 9)
    third = worker.add(0, 2)
    pull = worker.add(0, 9, Kind.PULL)
    assert worker.sent == [], "the pull waits for the pushes of its key"
    assert worker.answer_all() == [other, first, second, third, pull]


def test_nothing_overtakes_the_end_of_a_round() -> None:
    worker = Worker()
    worker.fill()
    before = [worker.add(0, 0), worker.add(1, 0)]
    clock = worker.add(0, 0, Kind.CLOCK)
    after = [worker.add(2, 1), worker.add(3, 9)]
    assert worker.answer_all() == [*before, clock, *reversed(after)]


def test_what_waits_leaves_by_priority_in_every_seed() -> None:
    """The order is that of a list: the first request of the highest priority that no earlier one of
    its key has lowered."""
    for seed in range(SEEDS):
        draw = random.Random(seed)
        worker = Worker()
        worker.fill()
        waiting: list[tuple[int, int, int]] = []
        expected: list[int] = []
        for _ in range(60):
            if draw.random() < 0.6 or not waiting:
                key, priority = draw.randrange(5), draw.randint(-2, 2)
                earlier = [rank for rank, _, one in waiting if one == key]
                name = worker.add(key, priority)
                waiting.append((min([priority, *earlier]), -name, key))
            else:
                worker.answer()
                first = max(waiting)
                waiting.remove(first)
                expected.append(-first[1])
            assert worker.sent == expected, seed
        assert worker.answer_all() == expected + [-one for _, one, _ in sorted(waiting)[::-1]], seed
