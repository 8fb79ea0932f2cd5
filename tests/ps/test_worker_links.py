"""Where a worker receives answers, of which a change of the view may bring two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pycoll import PeerLostError
from pycoll.ps.client_machine import ClientMachine
from pycoll.ps.messages import Kind, Message
from pycoll.ps.views import View
from pycoll.ps.worker_links import WorkerLinks


class TornLink:
    """A server's connection. ``between``: called when half of an answer has come."""

    def __init__(self, value: int) -> None:
        self.value = value
        self.sent: list[Message] = []
        self.between: Callable[[], Any] = lambda: None
        self.is_lost = False

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def receive(self, timeout_s: float, place: Any) -> Message:
        answer = self.sent[-1]._replace(kind=Kind.VALUE, after=1)
        memory = place(answer, 8)
        target = np.empty(8, np.uint8) if memory is None else memory
        target[:4] = self.value
        self.between()
        if self.is_lost:
            raise PeerLostError("the server is gone")
        target[4:] = self.value
        return answer._replace(payload=target)


@pytest.mark.parametrize("is_lost", [False, True])
def test_one_server_at_a_time_writes_an_answer_to_the_memory_of_the_caller(is_lost: bool) -> None:
    view = View(1, ((3, 4),), (-1,), (3, 4), (), 2, 5)
    machine = ClientMachine(0, view)
    links: Any = {3: TornLink(3), 4: TornLink(4)}
    worker = WorkerLinks(machine, links, None)  # type: ignore[arg-type]
    target = np.zeros(8, np.uint8)
    request = worker.begin(Message(Kind.PULL), target=target)

    def answer_elsewhere() -> None:
        machine.adopt(view._replace(number=2, chains=((4, 3),)))
        worker._send()
        assert worker._receive(3, links[3], 0.0)
        assert not request.ended and set(target) == {0, 4}

    links[4].between, links[4].is_lost = answer_elsewhere, is_lost
    assert worker._receive(4, links[4], 0.0)
    if is_lost:
        assert not request.ended and len(links[3].sent) == 2, "it is asked for again"
        assert worker._receive(3, links[3], 0.0)
    assert request.answer is not None and set(target) == {3 if is_lost else 4}
