"""The agreement of the survivors, as a state machine without sockets, threads or clocks.

The ranks of a communicator decide once which of them form the next one. The protocol is Paxos for a
single value: the *roll*, which lists the members and where they meet. Each rank votes. A rank leads
if every lower rank is gone, or silent for ``LEAD_SHARE`` of the patience. A leader collects a
promise from every rank that is not gone, and waits for the silent ones until its patience ends.
Then it proposes the ranks that promised, or the roll of the highest ballot that one of them has
accepted already.

A set of ranks is a quorum, and may promise or accept for all, if one of these holds:

* it has more than half of the ranks;
* it has half of them, the lowest rank among these;
* all others are gone.

"Gone" is a proof: the rank's process has ended, or it has left the communicator, so it takes part
in no decision any more. Two quorums share a rank, or one of them consists of ranks that are gone.
So all ranks that learn of a roll learn of the same one, whatever messages are lost, late or doubled
and however many ranks lead at a time. Only the end depends on time: a rank without a decision gives
up when its ``limit`` has passed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

#: Seconds between two attempts to reach a rank that has not answered.
REPEAT_S = 0.1
#: The share of the patience after which a rank no longer waits for a silent lower rank to lead.
LEAD_SHARE = 0.25
#: The share of the patience for which a leader waits for members that have promised and not yet
#: accepted, if a quorum has.
ACCEPT_SHARE = 0.25

#: A ballot: its number, and the rank that leads it. Ballots are compared.
Ballot = tuple[int, int]
NONE: Ballot = (0, -1)


class Roll(NamedTuple):
    """The ranks that form the next communicator, in ascending order, and the place where they
    meet: an offer of the first of them."""

    members: tuple[int, ...]
    offer: str


def is_quorum(some: Collection[int], gone: Collection[int], base: tuple[int, ...]) -> bool:
    """Return whether the ranks ``some`` may decide for all ranks of ``base``, which ascend."""
    if 2 * len(some) == len(base):
        return base[0] in some or set(base) <= set(some) | set(gone)
    return 2 * len(some) > len(base) or set(base) <= set(some) | set(gone)


class Council:
    """One rank's part in one decision.

    ``base``: the ranks that decide, ascending; ``me`` is one of them. ``offer``: where the others
    would meet this rank. ``patience_s``: how long a leader waits for ranks that run and do not
    answer. ``limit``: the time at which this rank gives up.

    The owner calls ``hear`` for each message, ``lose`` for each rank that is gone, and ``tick``
    every ``REPEAT_S``. After each call it sends the messages of ``out`` (rank, message) and clears
    the list. All times are of one clock, in seconds. ``roll`` is the decision, and ``failed`` the
    reason why there is none; one of them is set in the end.
    """

    def __init__(
        self, me: int, base: tuple[int, ...], offer: str, patience_s: float, limit: float
    ) -> None:
        self.out: list[tuple[int, dict[str, Any]]] = []
        self.roll: Roll | None = None
        self.failed = ""
        self.gone: set[int] = set()
        self._me = me
        self._base = base
        self._offer = offer
        self._patience_s = patience_s
        self._limit = limit
        #: The vote of this rank: the ballot that it has promised, and the last that it accepted.
        self._promised: Ballot = NONE
        self._accepted: tuple[Ballot, Roll] | None = None
        #: When a lower rank gave its last sign; for ranks without one, when the wait for it began.
        self._heard: dict[int, float] = {}
        #: The ballot that this rank leads, or NONE; when it began, and its answers.
        self._ballot: Ballot = NONE
        self._began = 0.0
        self._promises: dict[int, tuple[str, tuple[Ballot, Roll] | None]] = {}
        self._proposed: Roll | None = None
        self._proposed_at = 0.0
        self._acceptors: set[int] = set()

    def hear(self, now: float, sender: int, message: Mapping[str, Any]) -> None:
        """Take a message of ``sender``. Raises ValueError or TypeError for one that is malformed
        or of a rank outside of the council."""
        if sender not in self._base or sender == self._me:
            raise ValueError(f"a message of rank {sender}")
        self._heard[sender] = now
        kind = message["kind"]
        if kind == "decided":
            self._learn(_roll(message))
        elif self.roll is not None:
            if kind in ("ask", "prepare", "accept"):
                self._say(sender, "decided", roll=self.roll)
        elif kind == "ask":
            self._say(sender, "here")
        elif kind == "prepare":
            self._promise(sender, _ballot(message["ballot"]))
        elif kind == "promise":
            self._count_promise(now, sender, message)
        elif kind == "accept":
            self._accept(sender, _ballot(message["ballot"]), _roll(message))
        elif kind == "accepted" and _ballot(message["ballot"]) == self._ballot:
            self._acceptors.add(sender)
            self._conclude(now)
        elif kind == "refuse" and _ballot(message["ballot"]) > self._ballot:
            self._yield_to(_ballot(message["ballot"]))

    def lose(self, now: float, rank: int) -> None:
        """Note that ``rank`` is gone."""
        if rank in self.gone or rank == self._me:
            return
        self.gone.add(rank)
        self.tick(now)

    def tick(self, now: float) -> None:
        """Repeat what has no answer, lead if it is this rank's turn, and give up at the limit."""
        if self.roll is not None or self.failed:
            return
        if now >= self._limit:
            self._give_up(now)
            return
        candidate = self._candidate(now)
        if candidate != self._me:
            self._say(candidate, "ask")
            return
        if self._ballot == NONE:
            self._lead(now)
        elif self._proposed is None:
            for rank in self._missing(self._promises):
                self._say(rank, "prepare", ballot=self._ballot)
        else:
            for rank in self._missing(self._acceptors, self._promises):
                self._say(rank, "accept", ballot=self._ballot, roll=self._proposed)
        self._conclude(now)

    # The leader

    def _candidate(self, now: float) -> int:
        """Return the lowest rank that is neither gone nor silent for long."""
        for rank in self._base:
            if rank == self._me:
                break
            if rank in self.gone:
                continue
            since = self._heard.setdefault(rank, now)
            if now - since < LEAD_SHARE * self._patience_s:
                return rank
        return self._me

    def _missing(
        self, answered: Collection[int], among: Collection[int] | None = None
    ) -> list[int]:
        asked = self._base if among is None else among
        return [r for r in asked if r not in answered and r not in self.gone and r != self._me]

    def _lead(self, now: float) -> None:
        self._ballot = (self._promised[0] + 1, self._me)
        self._promised = self._ballot
        self._began = now
        self._promises = {self._me: (self._offer, self._accepted)}
        self._proposed = None
        self._acceptors = set()
        for rank in self._missing(()):
            self._say(rank, "prepare", ballot=self._ballot)

    def _yield_to(self, ballot: Ballot) -> None:
        """End the ballot of this rank, since another rank has seen a higher one. If it is still
        this rank's turn to lead, its next ballot is higher."""
        self._promised = max(self._promised, ballot)
        self._ballot = NONE

    def _count_promise(self, now: float, sender: int, message: Mapping[str, Any]) -> None:
        if _ballot(message["ballot"]) != self._ballot or self._proposed is not None:
            return
        accepted = None
        if message["accepted"] is not None:
            accepted = (_ballot(message["accepted"]), _roll(message))
        self._promises[sender] = (str(message["offer"]), accepted)
        self._conclude(now)

    def _conclude(self, now: float) -> None:
        """Go on to the next phase of this rank's ballot if nothing is left to wait for."""
        if self._ballot == NONE or self.roll is not None:
            return
        if self._proposed is None:
            waits = bool(self._missing(self._promises)) and now < self._began + self._patience_s
            if not waits and is_quorum(self._promises, self.gone, self._base):
                self._propose(now)
            elif not waits:
                self._give_up(now)
            return
        late = now >= self._proposed_at + ACCEPT_SHARE * self._patience_s
        waits = bool(self._missing(self._acceptors, self._promises)) and not late
        if not waits and is_quorum(self._acceptors, self.gone, self._base):
            self._learn(self._proposed)
            for rank in self._missing(()):
                self._say(rank, "decided", roll=self._proposed)

    def _propose(self, now: float) -> None:
        voted = [accepted for _, accepted in self._promises.values() if accepted is not None]
        members = tuple(sorted(rank for rank in self._promises if rank not in self.gone))
        own = Roll(members, self._promises[members[0]][0])
        self._proposed = max(voted)[1] if voted else own
        self._proposed_at = now
        self._accepted = (self._ballot, self._proposed)
        self._acceptors = {self._me}
        for rank in self._missing(self._acceptors, self._promises):
            self._say(rank, "accept", ballot=self._ballot, roll=self._proposed)
        self._conclude(now)

    # The voter

    def _promise(self, leader: int, ballot: Ballot) -> None:
        if ballot < self._promised:
            self._say(leader, "refuse", ballot=self._promised)
            return
        self._follow(ballot)
        accepted, roll = self._accepted or (None, None)
        self._say(leader, "promise", ballot=ballot, offer=self._offer, accepted=accepted, roll=roll)

    def _accept(self, leader: int, ballot: Ballot, roll: Roll) -> None:
        if ballot < self._promised:
            self._say(leader, "refuse", ballot=self._promised)
            return
        self._follow(ballot)
        self._accepted = (ballot, roll)
        self._say(leader, "accepted", ballot=ballot)

    def _follow(self, ballot: Ballot) -> None:
        if ballot > self._promised:
            self._promised = ballot
            self._ballot = NONE

    # The end

    def _learn(self, roll: Roll) -> None:
        self.roll = roll
        self._ballot = NONE

    def _give_up(self, now: float) -> None:
        silent = [r for r in self._base if r not in self.gone and r != self._me]
        silent = [r for r in silent if now - self._heard.get(r, -1e9) > self._patience_s / 2]
        self.failed = f"no answer of {_list_ranks(silent)}" if silent else "no decision in time"
        self._ballot = NONE

    def _say(self, rank: int, kind: str, **facts: Any) -> None:
        self.out.append((rank, {"kind": kind, **facts}))


def _ballot(value: Any) -> Ballot:
    number, leader = value
    if not isinstance(number, int) or not isinstance(leader, int):
        raise ValueError(f"a ballot {value!r}")
    return number, leader


def _roll(message: Mapping[str, Any]) -> Roll:
    members, offer = message["roll"]
    found = tuple(members)
    if not found or not all(isinstance(rank, int) for rank in found):
        raise ValueError("a roll without members")
    return Roll(found, str(offer))


def _list_ranks(ranks: list[int]) -> str:
    from pycoll.bootstrap.rendezvous.frames import list_ranks

    return list_ranks(ranks)


class Succession:
    """One rank's part in a row of decisions: the members of each roll decide about the next one.

    ``number`` counts the rolls, and ``base`` are the ranks of the newest one. Communicators of one
    row share the object. So a rank that already uses a new communicator, and a rank that failed to
    connect to it, shrink the same one. A message names its decision, and a rank that comes late
    gets the roll of the decision that it asks about.
    """

    def __init__(self, me: int, base: tuple[int, ...]) -> None:
        self.me = me
        self.base = base
        self.number = 0
        self.gone: set[int] = set()
        self.council: Council | None = None
        self._past: dict[int, Roll] = {}
        self._answers: list[tuple[int, dict[str, Any]]] = []

    def call(self, offer: str, patience_s: float, limit: float) -> Council:
        """Begin this rank's part in the next decision; the arguments are those of ``Council``."""
        self.council = Council(self.me, self.base, offer, patience_s, limit)
        self.council.gone |= self.gone
        return self.council

    def hear(self, now: float, sender: int, message: Mapping[str, Any]) -> None:
        """Take a message; see ``Council.hear``."""
        number = message["number"]
        if number in self._past:
            if message["kind"] != "decided":
                facts = {"kind": "decided", "roll": self._past[number], "number": number}
                self._answers.append((sender, facts))
        elif number == self.number and self.council is not None:
            self.council.hear(now, sender, message)

    def lose(self, now: float, rank: int) -> None:
        """Note that ``rank`` is gone."""
        self.gone.add(rank)
        if self.council is not None and rank in self.base:
            self.council.lose(now, rank)

    def messages(self) -> list[tuple[int, dict[str, Any]]]:
        """Return the messages to send, and forget them."""
        found, self._answers = self._answers, []
        if self.council is not None:
            found += [(to, {**message, "number": self.number}) for to, message in self.council.out]
            self.council.out.clear()
        return found

    def succeed(self) -> bool:
        """Go on to the decision after the council's roll. Return whether this rank is in it."""
        council = self.council
        assert council is not None
        assert council.roll is not None
        roll = council.roll
        self._past[self.number] = roll
        self.council = None
        if self.me not in roll.members:
            return False
        self.number += 1
        self.base = roll.members
        return True
