"""Elastic jobs: decides how many ranks run on each host, and which of them form the next world.

The launcher of node 0 decides for all hosts; one machine is a job of one host. A number identifies
a rank's process while it lives; its rank in the world may change from world to world.

The slot of a rank that fails is not used again, unless its host restarts the rank, or reports fewer
slots and then more. The surviving ranks ask for a new world, which is smaller if no slot is free. A
host that is lost takes its slots along, and a host that comes brings some. Running ranks take part
in a change when their program next asks for a world. While there are fewer slots than the least
number of ranks, the ranks wait for more, for ``patience_s`` at most.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pycoll.bootstrap.rendezvous.frames import list_ranks
from pycoll.errors import InvalidArgumentError
from pycoll.launch.node_meeting import Verdict, to_verdict

#: The default limit, in seconds, of the wait for enough ranks.
PATIENCE_S = 600.0


@dataclass(frozen=True)
class ElasticOptions:
    """Limits of an elastic job.

    ``ranks_min`` is the least number of ranks of a world; None: the number at the start.
    ``ranks_max`` is the largest number; None: the number at the start or, with ``grows``, the
    number of slots. ``grows``: a host discovery script may bring more slots. ``patience_s``: the
    longest wait, in seconds, of ranks that are too few for a world. It also limits how long ranks
    wait for each other after one of them has left their world.
    """

    ranks_min: int | None = None
    ranks_max: int | None = None
    grows: bool = False
    patience_s: float = PATIENCE_S

    def check(self, ranks: int | None = None) -> None:
        """Raise InvalidArgumentError for limits that do not fit ``ranks`` ranks at the start; None:
        the number is not known yet."""
        if self.ranks_min is not None and ranks is not None:
            self.check_least(ranks)
        if self.ranks_max is not None and ranks is not None and self.ranks_max < ranks:
            raise InvalidArgumentError(
                f"max_np={self.ranks_max}: expected at least {ranks}, the number of ranks"
            )
        if not 0 < self.patience_s < float("inf"):
            raise InvalidArgumentError(
                f"elastic_timeout={self.patience_s}: expected seconds, a finite number above 0"
            )

    def check_least(self, ranks: int) -> None:
        """Raise InvalidArgumentError if ``ranks`` ranks are fewer than the least number."""
        if self.ranks_min is not None and not 1 <= self.ranks_min <= ranks:
            raise InvalidArgumentError(
                f"min_np={self.ranks_min}: expected 1 to {ranks}, the number of ranks"
            )


class Asked(NamedTuple):
    """A rank's request for a place: its process, and a port that its host has reserved for
    torch."""

    pid: int
    torch_port: int


@dataclass(eq=False)
class JobHost:
    """One host of an elastic job, as node 0 sees it.

    ``reach`` is the address at which other hosts reach it; empty for the host of node 0, which all
    have reached already. ``send`` passes an order on to it. ``slots`` is its number of slots and
    ``capacity`` the number that may be used. ``living`` are the ranks that were started there and
    have not ended; ``stopping`` are those of them that have to end.
    """

    node: int
    name: str
    slots: int
    reach: str
    send: Callable[[dict[str, Any]], object]
    capacity: int = 0
    living: set[int] = field(default_factory=set)
    stopping: set[int] = field(default_factory=set)

    def staying(self) -> list[int]:
        """Return the living ranks that need not end, in ascending order."""
        return sorted(self.living - self.stopping)

    def set_slots(self, slots: int) -> None:
        """Take a new number of slots. A slot whose rank failed counts again only after the number
        has fallen and risen again."""
        if slots < self.slots:
            self.capacity = min(self.capacity, slots)
        else:
            self.capacity += slots - self.slots
        self.slots = slots


#: Opens the store of a new world of so many ranks and with this job id; returns its port.
Serve = Callable[[int, str], int]
#: Tells those that join the last world that some ranks of it will not come, and why.
LoseRanks = Callable[[Sequence[int], str], object]


class ElasticJob:
    """Decides which ranks run where. One thread uses it; the owner calls ``advance`` after each
    event. ``verdict`` is the failure that ends the job, None while there is none. ``over``: the job
    has ended, well without a verdict.
    """

    def __init__(
        self,
        options: ElasticOptions,
        nodes: int,
        job_id: str,
        serve: Serve,
        lose_ranks: LoseRanks,
        say: Callable[[str], object],
    ) -> None:
        self.over = False
        self.verdict: Verdict | None = None
        self.hosts: dict[int, JobHost] = {}
        self._options, self._nodes, self._say = options, nodes, say
        self._serve, self._lose_ranks = serve, lose_ranks
        self._job_id = job_id
        self._began = False
        self._least = options.ranks_min or 0
        self._most = options.ranks_max
        self._asking: dict[int, Asked] = {}
        #: The ranks of the last world, by number; some of them may have left since.
        self._ranks: dict[int, int] = {}
        self._worlds = 0
        self._told = False
        self._refusal = ""
        self._finishing = False
        self._since: float | None = None
        self._lost_status = 0

    def add(self, host: JobHost) -> None:
        """Take a host into the job, with all its slots."""
        self.hosts[host.node] = host
        host.capacity = host.slots
        if self._refusal:
            host.send({"refuse": self._refusal})

    def missing(self) -> list[int]:
        """Return the nodes that the job waits for before its first rank starts."""
        return [] if self._began else [n for n in range(self._nodes) if n not in self.hosts]

    def lose(self, host: JobHost, text: str) -> None:
        """Note that a host and its ranks are gone."""
        del self.hosts[host.node]
        self._forget(host.living, text)
        if self.over:
            return
        if host.living:
            # The ranks of a host whose launcher is stopped may still run in the others' world.
            self._ask_anew()
            self._judge_loss(Verdict(text, 1))
        elif not self._finishing:
            self._say(text)

    def take(self, host: JobHost, message: Mapping[str, Any]) -> None:
        """Take a message of a host; see elastic_meeting.py. Raises ValueError for one that makes no
        sense."""
        number = message.get("rank", 0)
        if "rank" in message and number not in host.living:
            raise ValueError(f"a message about rank {number}, which does not run there")
        match message:
            case {"asks": int(pid), "torch_port": int(port)}:
                self._asking[number] = Asked(pid, port)
            case {"silent": True}:
                self._asking.pop(number, None)
            case {"restarted": True}:
                self._forget([number], "a rank has failed and was started again")
            case {"ended": int(status), "text": str(text), "stopped": bool(stopped)}:
                host.living.discard(number)
                host.stopping.discard(number)
                self._forget([number], text if status else "")
                self._note_end(host, Verdict(text, status, rank=number), stopped)
            case {"slots": int(slots)} if slots >= 0:
                host.set_slots(slots)
            case {"failed": dict(words)}:
                self.fail(to_verdict(words))
            case _:
                raise ValueError(f"an unknown message with {', '.join(message)}")

    def fail(self, verdict: Verdict) -> None:
        """End the job on all hosts. Only the first failure counts."""
        if not self.over:
            self.over, self.verdict = True, verdict
            self._tell_all({"over": verdict._asdict()})

    def advance(self) -> None:
        """Do all steps that are due."""
        if self.over or not self._has_begun():
            return
        self._start_ranks()
        living = self._living()
        if self._finishing and not any(host.living for host in self.hosts.values()):
            self.over = True
            self._tell_all({"over": None})
            return
        placed = [number for number in living if number in self._ranks]
        fresh = [number for number in living if number not in self._ranks]
        if self._finishing and fresh:
            self._stop(fresh)
            return
        chosen = self._choose_ranks()
        too_many = self._usable() < len(living)
        if placed and (too_many or any(number in self._asking for number in fresh)):
            self._ask_anew()
        enough = self._usable() >= self._least
        if living and enough and all(number in self._asking for number in living):
            self._since = None
            self._form(chosen)
            self._stop([number for number in living if number not in self._ranks])
            return
        self._check_patience(placed or living, enough)
        self._release_empty_hosts()

    def waits(self) -> list[float]:
        """Return times in seconds after which ``advance`` has to be called again; empty if only an
        event makes that necessary."""
        if self._since is None or self.over:
            return []
        return [max(0.0, self._since + self._options.patience_s - time.monotonic())]

    def _has_begun(self) -> bool:
        """Wait for the first hosts, and take the limits that depend on them."""
        if self._began:
            return True
        if self.missing():
            return False
        self._began = True
        total = self._capacity()
        self._least = self._least or total
        if self._most is None and not self._options.grows:
            self._most = total
        if not self._options.grows:
            try:
                self._options.check_least(total)
            except InvalidArgumentError as error:
                self.fail(Verdict(str(error), 1))
        return not self.over

    def _capacity(self) -> int:
        return sum(max(0, host.capacity) for host in self.hosts.values())

    def _limit(self) -> int:
        """The largest number of ranks that a world may have now."""
        return self._capacity() if self._most is None else min(self._capacity(), self._most)

    def _living(self) -> list[int]:
        return sorted(number for host in self.hosts.values() for number in host.staying())

    def _usable(self) -> int:
        """The number of living ranks that the slots of their hosts hold."""
        held = (min(len(h.staying()), max(0, h.capacity)) for h in self.hosts.values())
        return min(self._limit(), sum(held))

    def _start_ranks(self) -> None:
        limit = self._limit()
        if self._finishing or (not self._ranks and limit < self._least):
            return
        wanted = limit - self._usable()
        used = {number for host in self.hosts.values() for number in host.living}
        for _, host in sorted(self.hosts.items()):
            free = max(0, host.capacity - len(host.staying()))
            started: list[int] = []
            while wanted > 0 and len(started) < free:
                number = next(n for n in range(len(used) + 1) if n not in used)
                used.add(number)
                started.append(number)
                wanted -= 1
            if started:
                host.living.update(started)
                host.send({"start": started})

    def _choose_ranks(self) -> list[int]:
        """Return the ranks of the next world, in order.

        The ranks of a host stand together, and those of the last world come first on their host.
        The host with the lowest rank of the last world is the first one, since that rank has a
        state. If no rank with a state has a slot, one of them stays for this world. The other ranks
        can then take its state.
        """
        last = len(self._ranks)
        hosts = [(host, self._in_order(host)) for host in self.hosts.values() if host.staying()]
        hosts.sort(key=lambda one: (self._ranks.get(one[1][0], last), one[0].node))
        limit = self._limit()
        chosen = [n for host, numbers in hosts for n in numbers[: max(0, host.capacity)]][:limit]
        with_state = [n for _, numbers in hosts for n in numbers if n in self._ranks]
        if with_state and not any(number in self._ranks for number in chosen):
            return [with_state[0], *chosen]
        return chosen

    def _in_order(self, host: JobHost) -> list[int]:
        last = len(self._ranks)
        return sorted(host.staying(), key=lambda number: (self._ranks.get(number, last), number))

    def _form(self, chosen: Sequence[int]) -> None:
        """Form a world of ``chosen``, which all ask, and answer them. Other ranks that ask keep
        waiting."""
        self._worlds += 1
        self._told = False
        job_id = f"{self._job_id}-{self._worlds}"
        host_of = {number: host for host in self.hosts.values() for number in host.living}
        first = host_of[chosen[0]]
        world = {
            "size": len(chosen),
            "job_id": job_id,
            "port": self._serve(len(chosen), job_id) if len(chosen) > 1 else 0,
            "torch": [first.reach, self._asking[chosen[0]].torch_port],
            "processes": [f"{host_of[n].node}:{self._asking[n].pid}" for n in chosen],
        }
        self._ranks = {number: rank for rank, number in enumerate(chosen)}
        for host in self.hosts.values():
            places = [[n, rank] for n, rank in self._ranks.items() if host_of[n] is host]
            if places:
                host.send({"form": world, "places": places})
        for number in chosen:
            del self._asking[number]

    def _ask_anew(self) -> None:
        """Tell the ranks of the world to ask again when their program can. Done once per world."""
        if not self._told:
            self._told = True
            self._tell_all({"ask_anew": True})

    def _stop(self, numbers: Sequence[int]) -> None:
        for host in self.hosts.values():
            leaving = [number for number in numbers if number in host.living]
            if leaving:
                host.stopping.update(leaving)
                host.send({"stop": leaving})

    def _release_empty_hosts(self) -> None:
        """Let the launchers of hosts end that have neither slots nor ranks; node 0 stays."""
        for host in list(self.hosts.values()):
            if host.node != 0 and host.slots == 0 and not host.living:
                host.send({"over": None})
                del self.hosts[host.node]

    def _forget(self, numbers: Collection[int], failure: str) -> None:
        """Note that processes have ended. ``failure``: the error for ranks that still join their
        world; empty after an end with status 0, since such a process had joined."""
        for number in numbers:
            self._asking.pop(number, None)
        lost = sorted(self._ranks.pop(one) for one in numbers if one in self._ranks)
        if lost and failure:
            self._lose_ranks(lost, f"{failure}; {list_ranks(lost)} cannot join")

    def _note_end(self, host: JobHost, end: Verdict, stopped: bool) -> None:
        """Act on the end of a rank. After one with status 0 the job is about to end, so no more
        ranks are started."""
        if stopped or self.over:
            return
        if end.status == 0:
            self._finishing = True
            return
        host.capacity -= 1
        self._lost_status = end.status
        self._judge_loss(end)

    def _judge_loss(self, loss: Verdict) -> None:
        """Report the loss of a rank or a host, or end the job with it if the job cannot go on."""
        left = len(self._living())
        reason = ""
        if left and self._finishing:
            reason = "a rank failed while the job was about to end"
        elif left and self._limit() < self._least and not self._options.grows:
            reason = f"a rank failed, and {left} are left, fewer than --min-np {self._least}"
        if reason:
            self._refuse(reason)
        if reason or not left:
            self.fail(loss)
        else:
            self._say(loss.text)

    def _check_patience(self, waiting: Sequence[int], enough: bool) -> None:
        """End the job if its ranks have waited too long for each other or for more."""
        asked = any(number in self._asking for number in waiting)
        if not asked and (enough or self._finishing):
            self._since = None
        elif self._since is None:
            self._since = time.monotonic()
        elif time.monotonic() >= self._since + self._options.patience_s:
            self._give_up(enough)

    def _give_up(self, enough: bool) -> None:
        limit_s, living = self._options.patience_s, self._living()
        if enough:
            missing = [number for number in living if number not in self._asking]
            text = (
                f"the other ranks have waited {limit_s:g} s for {list_ranks(missing)} to "
                "form a new world with them (--elastic-timeout sets the limit)"
            )
        else:
            count = self._usable() if living else self._limit()
            text = too_few(limit_s, count, self._least)
        self._refuse(text)
        self.fail(Verdict(text, self._lost_status or 1))

    def _refuse(self, reason: str) -> None:
        """Form no further world: every rank that asks, now or later, gets ``reason``."""
        self._refusal = reason
        self._tell_all({"refuse": reason})

    def _tell_all(self, order: dict[str, Any]) -> None:
        for host in self.hosts.values():
            host.send(order)


def too_few(limit_s: float, count: int, least: int) -> str:
    """Return the text about ranks that have waited too long for more of them."""
    return (
        f"for {limit_s:g} s no more than {count} ranks could run, and --min-np is {least} "
        "(--elastic-timeout sets the limit)"
    )
