"""The ranks of one host of an elastic job: follows the orders of node 0 and reports to it."""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pycoll.bootstrap.discovery.torch_variables import TorchPlaces
from pycoll.launch.elastic_meeting import ElasticSeat
from pycoll.launch.elastic_rendezvous import ElasticRendezvous
from pycoll.launch.node_meeting import Verdict, to_verdict
from pycoll.launch.rank_crew import KILL_S, VERDICT_S, Crew, LaunchOptions, exit_status
from pycoll.launch.rank_process import RankProcess


class ElasticCrew(Crew):
    """A crew whose ranks come and go. A rank keeps its number in the job in all worlds. Its place
    in ``_ranks`` is its local number, which later ranks use again."""

    def __init__(
        self,
        options: LaunchOptions,
        command: Sequence[str],
        environment: Mapping[str, str],
        torch: TorchPlaces,
        seat: ElasticSeat,
    ) -> None:
        super().__init__(options, command, environment, torch)
        self._seat = seat
        self._host = seat.host
        self._numbers: dict[int, int] = {}
        self._leaving: list[tuple[float, RankProcess]] = []
        self._over = False
        self._ending: Verdict | None = None

    def _begin(self) -> None:
        name = f"{self._seat.job_id}-elastic-{self._seat.node}"
        self._rendezvous = ElasticRendezvous(self._selector, name, self._seat.send)
        self._undo.callback(self._rendezvous.close)
        self._selector.register(self._seat, selectors.EVENT_READ, self._seat.read)
        self._adapt()

    @property
    def _verdict(self) -> Verdict | None:
        return self._ending

    def _label(self, number: int) -> int:
        return self._numbers[number]

    def _place_of(self, number: int) -> dict[str, str]:
        worker = str(self._label(number))
        return {"PYCOLL_ELASTIC": self._rendezvous.name, "PYCOLL_ELASTIC_WORKER": worker}

    def _is_going(self) -> bool:
        if any(rank.status is None for rank in self._ranks):
            return True
        if not self._over and not self._passed_on:
            return True
        if self._verdict_by is None:
            self._verdict_by = time.monotonic() + VERDICT_S
        done = self._over and not self._seat.has_others()
        return not done and not self._is_verdict_late()

    def _waits(self) -> list[float]:
        leaving = [max(0.0, due - time.monotonic()) for due, _ in self._leaving]
        return [*self._seat.waits(), *leaving]

    def _adapt(self) -> None:
        """Follow all orders, also those that answer messages caused by earlier ones."""
        self._seat.advance()
        while self._seat.orders:
            self._follow(self._seat.orders.popleft())
            self._seat.advance()
        while self._leaving and self._leaving[0][0] <= time.monotonic():
            self._leaving.pop(0)[1].kill()

    def _follow(self, order: Mapping[str, Any]) -> None:
        rendezvous = self._rendezvous
        match order:
            case {"start": numbers}:
                for number in numbers if self._is_adapting() else ():
                    self._start(number)
            case {"stop": numbers}:
                self._stop(numbers)
            case {"form": world, "places": places}:
                rendezvous.form(world, places, self._seat.node, self._seat.reach)
            case {"ask_anew": _}:
                rendezvous.ask_anew()
            case {"refuse": str(reason)}:
                rendezvous.refuse(reason)
            case {"over": verdict}:
                self._over = True
                self._ending = None if verdict is None else to_verdict(verdict)
                self._heed_verdict()
            case _:
                # Hosts of another version have been refused, so an unknown order is an error of
                # this code.
                raise AssertionError(f"an unknown order with {', '.join(order)}")

    def _start(self, number: int) -> None:
        ended = (rank.number for rank in self._ranks if rank.status is not None)
        local = next(ended, len(self._ranks))
        self._numbers[local] = number
        rank = self._start_rank(local)
        if local < len(self._ranks):
            self._ranks[local].release()
            self._ranks[local] = rank
        else:
            self._ranks.append(rank)

    def _stop(self, numbers: Sequence[int]) -> None:
        for rank in self._ranks:
            if rank.status is None and self._label(rank.number) in numbers:
                rank.stopped = True
                rank.send_signal(signal.SIGTERM)
                self._leaving.append((time.monotonic() + KILL_S, rank))

    def _replace(self, rank: RankProcess) -> None:
        number = self._label(rank.number)
        self._rendezvous.forget(number)
        self._seat.send({"rank": number, "restarted": True})
        super()._replace(rank)

    def _note_end(self, rank: RankProcess, failed: bool) -> None:
        number = self._label(rank.number)
        self._rendezvous.forget(number)
        if failed:
            self._lost.append(rank)
        end = {
            "ended": exit_status(rank.status),
            "text": self._failure_of(rank),
            "stopped": rank.stopped or (rank.status != 0 and not failed),
        }
        self._seat.send({"rank": number, **end})

    def _tell(self, verdict: Verdict) -> None:
        self._seat.send({"failed": verdict._asdict()})

    def _set_slots(self, slots: int) -> None:
        self._seat.send({"slots": slots})
