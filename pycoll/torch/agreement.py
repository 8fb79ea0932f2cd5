"""Which tensors all ranks have, and the order in which they run.

Ranks reach tensors in different orders, but collectives must have one. So every rank tells what it
has, by name and terms, in rounds that all ranks take part in, and runs only what a round has
settled, in the round's order:

    rank 0 adds a, b      round: told by all: -      settled: -
    rank 1 adds b         round: told by all: b      settled: b
    rank 1 adds a         round: told by all: a      settled: a

The first time, names and terms travel as text. What was settled once has a number from then on,
alike on all ranks, and a round of known tensors is one all_reduce of a few words of bits. A name
that comes back with other terms loses its number. Where a round settles all that this rank has, as
in the steps of a program that changes no more, nothing is noted of single names: what is fresh is
put on the lists of those that wait only when a round has left something over.

A round has two halves, so that whoever began it need not stay until the last rank has come:
``begin`` tells this rank's bits, and ``end`` waits for those of the others, for a while or for
good.

A settled entry carries a problem instead where the ranks' terms differ, or where a rank was waited
for too long; all ranks get the same one, and everything else goes on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from pycoll.communicator import Communicator
from pycoll.errors import TimeoutError as TimedOut
from pycoll.work import Work

#: Names beyond these are told as text every time.
KNOWN_MAX = 8192
#: So many different rounds are remembered; who waits for each tensor by itself has one for each.
AGAIN_MAX = 256
_WORD_BITS = 64


class Settled(NamedTuple):
    """One name that all ranks have: what to do with it, or why it cannot be done."""

    key: str
    terms: str
    problem: str


class Stalled(NamedTuple):
    """A name that the ranks ``had`` have been waiting with for long; ``text`` says for whom."""

    key: str
    had: list[int]
    text: str


class Round(NamedTuple):
    """What a round has settled, in order. ``last_joined`` is set when all ranks had joined: the
    rank that was last. ``stalled``: what waits for long, told once."""

    settled: list[Settled]
    last_joined: int | None
    stalled: list[Stalled]


class _Mine(NamedTuple):
    """What this rank has and waits for. ``passing`` names are used once and never numbered."""

    terms: str
    passing: bool
    until: float


class Agreement:
    """One rank's side of the agreement between the ranks of a communicator.

    Methods are called by one thread at a time, not always the same, and rounds equally often on all
    ranks; nothing else may use ``comm`` during one. ``ranks`` are the names of the ranks in texts.
    Terms are JSON objects as text; "joinable" among them says that joined ranks may stand aside. At
    most ``known_max`` names have numbers, alike on all ranks. After ``warn_after_s`` a name that
    waits is told as stalled. Raises what ``comm`` raises.
    """

    def __init__(
        self,
        comm: Communicator,
        ranks: Sequence[int],
        known_max: int = KNOWN_MAX,
        warn_after_s: float | None = None,
    ) -> None:
        self._comm, self._rank = comm, comm.rank
        self._known_max, self._warn_after_s = known_max, warn_after_s
        #: When to tell of names that wait, in order; those that were told are gone.
        self._calm: dict[str, float] = {}
        self._ranks = tuple(ranks)
        self._known: list[Settled | None] = []
        self._numbers: dict[str, int] = {}
        self._free: list[int] = []
        self._mine: dict[str, _Mine] = {}
        #: What was added since the last round began, and when the first of it was.
        self._fresh: dict[str, str] = {}
        self._fresh_s = self._patience_s = 0.0
        #: The round under way: the exchange of bits, and what this rank says if words follow.
        self._work: Work | None = None
        self._words: tuple[list[str], list[str]] = ([], [])
        self._bytes = bytearray()
        self._line = np.frombuffer(self._bytes, np.uint64)
        #: Bits of rounds before, and what they settled: steps repeat, and barriers take turns.
        self._again: dict[int, list[Settled]] = {}
        #: Bits of known entries: those this rank has, and all there are.
        self._have = 0
        self._all = 0
        self._news: list[tuple[str, str, bool]] = []
        self._told: dict[str, dict[int, str]] = {}
        self._passing: set[str] = set()
        self._joined: set[int] = set()
        self._joining = False

    @property
    def waits(self) -> bool:
        """Whether something of this rank is not settled yet, or a round is under way."""
        mine = self._fresh or self._mine or self._joining or self._rank in self._joined
        return bool(mine) or self._work is not None

    @property
    def under_way(self) -> bool:
        """Whether a round has begun and not ended."""
        return self._work is not None

    def add(self, key: str, terms: str, passing: bool) -> None:
        """This rank has ``key``, which must not wait already; not while a round is under way."""
        if not self._fresh:
            self._fresh_s, self._patience_s = time.monotonic(), self._comm.timeout_s
        self._fresh[key] = terms
        number = self._numbers.get(key)
        known = None if number is None else self._known[number]
        if number is not None and known is not None and known.terms == terms:
            self._have |= 1 << number
        else:
            self._news.append((key, terms, passing))

    def join(self) -> None:
        """This rank has nothing more of its own until all have joined."""
        self._joining = True

    def round(self) -> Round:
        """Tell and hear; returns what is settled now. Waits for all ranks to come here."""
        self.begin()
        found = self.end(None)
        assert found is not None, "without a limit a round ends, or raises"
        return found

    def begin(self) -> None:
        """Tell the other ranks what this one has; ``end`` has to follow."""
        late, slow = self._words = (self._late(), self._slow()) if self._mine else ([], [])
        quiet = not (self._news or self._joining or late or slow)
        mine = self._all if self._rank in self._joined else self._have
        words = 1 + -(-len(self._known) // _WORD_BITS)
        if self._line.size != words:
            self._bytes = bytearray(8 * words)
            self._line = np.frombuffer(self._bytes, np.uint64)
        self._bytes[:] = (int(quiet) | mine << _WORD_BITS).to_bytes(8 * words, "little")
        self._work = self._comm.all_reduce(self._line, "band", out=self._line, async_op=True)

    def end(self, limit_s: float | None) -> Round | None:
        """What the round has settled; None if not all ranks have come within ``limit_s``.

        After None, and after an exception that the caller's own signals raised, it is still under
        way, and anybody may call this again. None as limit: the communicator's alone.
        """
        assert self._work is not None, "a round ends that nobody began"
        try:
            self._work.wait(limit_s)
        except TimedOut:
            if limit_s is None:
                raise
            if not self._work.done():
                return None
            self._work.wait()  # it ended just now, well or by the communicator's own deadline
        self._work = None
        common = int.from_bytes(self._bytes, "little")
        bits, all_quiet = common >> _WORD_BITS, bool(common & 1)
        if all_quiet and bits == self._have and not (self._mine or self._joined):
            self._fresh.clear()
            self._have = 0
            return Round(self._settled_by(bits), None, [])
        self._note_fresh()
        settled = self._settled_by(bits)
        for one in settled:
            self._drop(one.key)
        settled = [self._standing_aside(one) for one in settled]
        if all_quiet:
            return Round(settled, None, [])
        told = self._share_news(*self._words)
        return told._replace(settled=settled + told.settled)

    def _settled_by(self, bits: int) -> list[Settled]:
        """Known entries by their bits, in the order of their numbers. The list must not change."""
        found = self._again.get(bits)
        if found is None:
            known = (self._known[number] for number in _numbers_of(bits))
            found = [one for one in known if one is not None]
            assert len(found) == bits.bit_count(), "a bit that nobody gave out was set"
            self._again = {} if len(self._again) >= AGAIN_MAX else self._again
            self._again[bits] = found
        return found

    def _note_fresh(self) -> None:
        """A round has left something over: from here on each name has its own time."""
        until = self._fresh_s + self._patience_s
        passing = {key for key, _, passing in self._news if passing}
        for key, terms in self._fresh.items():
            self._mine[key] = _Mine(terms, key in passing, until)
            if self._warn_after_s is not None:
                self._calm[key] = self._fresh_s + self._warn_after_s
        self._fresh.clear()

    def _late(self) -> list[str]:
        """Keys whose time is over; in order of arrival, so the first tells whether to look."""
        first = next(iter(self._mine.values()), None)
        if first is None or first.until > (now := time.monotonic()):
            return []
        return [key for key, one in self._mine.items() if one.until <= now]

    def _slow(self) -> list[str]:
        """Keys that wait for so long that it is to be told."""
        first = next(iter(self._calm.values()), None)
        if first is None or first > (now := time.monotonic()):
            return []
        return [key for key, at in self._calm.items() if at <= now]

    def _share_news(self, late: list[str], slow: list[str]) -> Round:
        message = {"have": self._news, "join": self._joining, "late": late, "slow": slow}
        self._news = []
        joined_now = []
        messages = _every_message(self._comm, message)
        for rank, told in enumerate(messages):
            for key, terms, passing in told["have"]:
                self._forget(key)
                self._told.setdefault(key, {})[rank] = terms
                if passing:
                    self._passing.add(key)
            if told["join"]:
                joined_now.append(rank)
        self._joined.update(joined_now)
        if self._rank in self._joined:
            self._joining = False
        settled = [self._settle(key) for key in list(self._told) if self._complete(key)]
        for key in dict.fromkeys(key for told in messages for key in told["late"]):
            settled += self._give_up(key)
        stalled = []
        for key in dict.fromkeys(key for told in messages for key in told["slow"]):
            stalled += self._stalled(key)
        last = None
        if len(self._joined) == self._comm.size:
            last = self._ranks[joined_now[-1]]
            self._joined.clear()
        return Round(settled, last, stalled)

    def _complete(self, key: str) -> bool:
        return len(self._told[key].keys() | self._joined) == self._comm.size

    def _settle(self, key: str) -> Settled:
        """All have told ``key``: compare the terms."""
        told = self._told.pop(key)
        passing = key in self._passing
        self._passing.discard(key)
        self._drop(key)
        terms = told[min(told)]
        if any(other != terms for other in told.values()):
            return Settled(key, terms, self._difference(key, told))
        settled = Settled(key, terms, "")
        if not passing:
            self._learn(settled)
        return self._standing_aside(settled)

    def _standing_aside(self, settled: Settled) -> Settled:
        """What joined ranks mean for an entry: they give zeros, or it cannot be done."""
        if not self._joined or json.loads(settled.terms).get("joinable"):
            return settled
        who = self._list(sorted(self._joined))
        return settled._replace(
            problem=f"{settled.key} cannot run since {who} has joined: joined ranks give zeros to "
            "allreduce by Sum or Average, and take part in nothing else"
        )

    def _give_up(self, key: str) -> list[Settled]:
        """Some rank has waited too long for ``key``; the missing ranks are named.

        Who holds a known entry is only told as text, so that happens first, in the next round.
        """
        if key in self._numbers:
            self._forget(key)
            return []
        told = self._told.pop(key, None)
        if told is None:
            return []
        self._passing.discard(key)
        self._drop(key)
        text = (
            f"{key} waited {self._comm.timeout_s:g} s for {self._list(self._missing(told))}, while "
            f"{self._list(sorted(told))} had it: do all ranks call it, under the same name?"
        )
        return [Settled(key, told[min(told)], text)]

    def _stalled(self, key: str) -> list[Stalled]:
        """Some rank waits for long; who has a known entry is told in the next round, as above."""
        if key in self._numbers:
            self._forget(key)
            return []
        told = self._told.get(key)
        self._calm.pop(key, None)
        if told is None:
            return []
        text = (
            f"{key} has been waiting {self._warn_after_s:g} s for "
            f"{self._list(self._missing(told))}, while {self._list(sorted(told))} had it"
        )
        return [Stalled(key, sorted(told), text)]

    def _missing(self, told: Iterable[int]) -> list[int]:
        return [r for r in range(self._comm.size) if r not in told and r not in self._joined]

    def _learn(self, settled: Settled) -> None:
        if self._free:
            number = self._free.pop()
            self._known[number] = settled
        elif len(self._known) < self._known_max:
            number = len(self._known)
            self._known.append(settled)
        else:
            return
        self._numbers[settled.key] = number
        self._all |= 1 << number
        self._again.clear()

    def _forget(self, key: str) -> None:
        """The key has no number any more; if this rank waits for it, it will tell so in words."""
        number = self._numbers.pop(key, None)
        if number is None:
            return
        self._known[number] = None
        self._again.clear()
        self._free.append(number)
        bit = 1 << number
        self._all &= ~bit
        if self._have & bit:
            self._have &= ~bit
            mine = self._mine[key]
            self._news.append((key, mine.terms, mine.passing))

    def _drop(self, key: str) -> None:
        """This rank waits for ``key`` no longer."""
        self._calm.pop(key, None)
        self._mine.pop(key, None)
        number = self._numbers.get(key)
        if number is not None:
            self._have &= ~(1 << number)

    def _difference(self, key: str, told: dict[int, str]) -> str:
        every = {rank: json.loads(terms) for rank, terms in sorted(told.items())}
        fields = dict.fromkeys(field for terms in every.values() for field in terms)
        parts = []
        for field in fields:
            values: dict[str, list[int]] = {}
            for rank, terms in every.items():
                values.setdefault(json.dumps(terms.get(field)), []).append(rank)
            if len(values) > 1:
                words = ", ".join(f"{v} on {self._list(ranks)}" for v, ranks in values.items())
                parts.append(f"{field} is {words}")
        return f"the ranks disagree about {key}: {'; '.join(parts)}"

    def _list(self, ranks: Iterable[int]) -> str:
        names = [str(self._ranks[rank]) for rank in ranks]
        return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names)}"


def _numbers_of(bits: int) -> Iterable[int]:
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low


def _every_message(comm: Communicator, message: dict[str, Any]) -> list[dict[str, Any]]:
    """All ranks' messages, in rank order; each travels behind its length."""
    text = json.dumps(message).encode()
    blob = np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8)
    data = comm.all_gather(blob).tobytes()
    found, at = [], 0
    while at < len(data):
        end = at + 8 + int.from_bytes(data[at : at + 8], "little")
        found.append(json.loads(data[at + 8 : end]))
        at = end
    return found
