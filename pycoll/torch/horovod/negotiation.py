"""Negotiate which tensors all ranks have submitted, and the order in which they run.

Ranks submit tensors in different orders, but collectives need one order on all ranks. So the ranks
take part in rounds. In a round every rank announces its waiting tensors, by name and terms. A name
that all ranks have announced is ready. Ranks run only ready names, in the order of the round:

    rank 0 adds a, b      round: announced by all: -      ready: -
    rank 1 adds b         round: announced by all: b      ready: b
    rank 1 adds a         round: announced by all: a      ready: a

The terms of a name are the facts that must be equal on all ranks (shape, dtype, op and so on). The
first time, names and terms are sent as text. A name that was ready once gets a number, which is
equal on all ranks. A round of known names is one all_reduce of a few words of bits, one bit per
number. A name that returns with other terms loses its number.

New names move to the lists of waiting names only when a round leaves some of them over. In the
steady state of a program each round makes all names of this rank ready, so these lists stay empty.

A round has two halves, so that the thread that began it need not wait for the last rank. ``begin``
sends the bits of this rank. ``end`` waits for those of the other ranks, with or without a limit.

A ready entry carries a problem instead where the terms of the ranks differ, or where ranks waited
too long for others. All ranks get the same problem, and all other names go on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from pycoll.comm.communicator import Communicator
from pycoll.comm.work import Work
from pycoll.errors import TimeoutError as TimedOut

#: The number of names that get numbers; further names are sent as text every time.
KNOWN_MAX = 8192
#: The number of different rounds that are remembered. A program that waits for each tensor alone
#: has one round per tensor.
AGAIN_MAX = 256
_WORD_BITS = 64


class Ready(NamedTuple):
    """A name that all ranks have: its terms, and if it cannot run, the problem (else "")."""

    key: str
    terms: str
    problem: str


class Stalled(NamedTuple):
    """A name that has been waiting for long: the ranks that ``had`` it, and a ``text`` to warn.

    The text names the ranks that lack it.
    """

    key: str
    had: list[int]
    text: str


class Round(NamedTuple):
    """The result of a round, equal on all ranks.

    ``ready``: the ready names, in the order in which they run. ``last_joined``: once all ranks have
    joined, the rank that joined last; else None. ``stalled``: names that wait for long; each name
    is reported once.
    """

    ready: list[Ready]
    last_joined: int | None
    stalled: list[Stalled]


class _Mine(NamedTuple):
    """A name that this rank has and waits for, until the time ``until``.

    ``passing``: the name is used once and gets no number.
    """

    terms: str
    passing: bool
    until: float


class Negotiation:
    """One rank's side of the negotiation between the ranks of a communicator.

    One thread at a time may call methods, not always the same thread. All ranks must run equally
    many rounds, and nothing else may use ``comm`` during a round.

    ``ranks``: the numbers of the ranks in texts. ``known_max``: the limit on numbered names, equal
    on all ranks. ``warn_after_s``: the seconds after which a waiting name is reported as stalled.

    Terms are JSON objects as text; "joinable" in them means that joined ranks may give zeros.
    Raises what ``comm`` raises.
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
        #: The times at which to report waiting names, in order of arrival. A reported name is gone.
        self._warn_at: dict[str, float] = {}
        self._ranks = tuple(ranks)
        self._known: list[Ready | None] = []
        self._numbers: dict[str, int] = {}
        self._free: list[int] = []
        self._mine: dict[str, _Mine] = {}
        #: The terms of names added since the last round began, the time of the first of them, and
        #: the timeout of the communicator at that time.
        self._fresh: dict[str, str] = {}
        self._fresh_s = self._patience_s = 0.0
        #: The round under way: the exchange of bits, and this rank's late and slow names, which it
        #: sends if text follows.
        self._work: Work | None = None
        self._words: tuple[list[str], list[str]] = ([], [])
        self._bytes = bytearray()
        self._line = np.frombuffer(self._bytes, np.uint64)
        #: The ready names of earlier rounds by their bits: steps repeat, and barriers alternate
        #: between a few names.
        self._again: dict[int, list[Ready]] = {}
        #: Bits of known names: those that this rank has, and all.
        self._have = 0
        self._all = 0
        self._news: list[tuple[str, str, bool]] = []
        self._announced: dict[str, dict[int, str]] = {}
        self._passing: set[str] = set()
        self._joined: set[int] = set()
        self._joining = False

    @property
    def waits(self) -> bool:
        """Whether a name of this rank is not ready yet, or a round is under way."""
        mine = self._fresh or self._mine or self._joining or self._rank in self._joined
        return bool(mine) or self._work is not None

    @property
    def under_way(self) -> bool:
        """Whether a round has begun and not ended."""
        return self._work is not None

    def add(self, key: str, terms: str, passing: bool) -> None:
        """Add a name of this rank that is not waiting already; not while a round is under way."""
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
        """Declare that this rank adds nothing until all ranks have joined."""
        self._joining = True

    def round(self) -> Round:
        """Run a whole round and return its result. Waits until all ranks run the round."""
        self.begin()
        found = self.end(None)
        assert found is not None, "without a limit a round ends, or raises"
        return found

    def begin(self) -> None:
        """Begin a round by sending the bits of this rank; ``end`` must follow."""
        late, slow = self._words = (self._late(), self._slow()) if self._mine else ([], [])
        quiet = not (self._news or self._joining or late or slow)
        mine = self._all if self._rank in self._joined else self._have
        words = 1 + -(-len(self._known) // _WORD_BITS)
        if self._line.size != words:
            self._bytes = bytearray(8 * words)
            self._line = np.frombuffer(self._bytes, np.uint64)
        # Bit 0: this rank has no text to send. Behind the first word, a bit for each known name.
        self._bytes[:] = (int(quiet) | mine << _WORD_BITS).to_bytes(8 * words, "little")
        self._work = self._comm.all_reduce(self._line, "band", out=self._line, async_op=True)

    def end(self, limit_s: float | None) -> Round | None:
        """End the round and return its result; None if ranks are missing after ``limit_s`` seconds.

        After None, and after an exception of a signal handler, the round is still under way, and
        any thread may call this again. Without a limit only the deadline of the communicator
        applies.
        """
        assert self._work is not None, "a round ends that has not begun"
        try:
            self._work.wait(limit_s)
        except TimedOut:
            if limit_s is None:
                raise
            if not self._work.done():
                return None
            self._work.wait()  # it has just ended, maybe by the deadline of the communicator
        self._work = None
        common = int.from_bytes(self._bytes, "little")
        bits, all_quiet = common >> _WORD_BITS, bool(common & 1)
        if all_quiet and bits == self._have and not (self._mine or self._joined):
            self._fresh.clear()
            self._have = 0
            return Round(self._ready_by(bits), None, [])
        self._note_fresh()
        ready = self._ready_by(bits)
        for one in ready:
            self._drop(one.key)
        ready = [self._with_join_problem(one) for one in ready]
        if all_quiet:
            return Round(ready, None, [])
        by_text = self._share_news(*self._words)
        return by_text._replace(ready=ready + by_text.ready)

    def _ready_by(self, bits: int) -> list[Ready]:
        """The known names of these bits, in the order of their numbers. Do not modify the list."""
        found = self._again.get(bits)
        if found is None:
            known = (self._known[number] for number in _numbers_of(bits))
            found = [one for one in known if one is not None]
            assert len(found) == bits.bit_count(), "a bit without a known name was set"
            self._again = {} if len(self._again) >= AGAIN_MAX else self._again
            self._again[bits] = found
        return found

    def _note_fresh(self) -> None:
        """Move the new names to the lists of waiting names, after a round that left some over."""
        until = self._fresh_s + self._patience_s
        passing = {key for key, _, passing in self._news if passing}
        for key, terms in self._fresh.items():
            self._mine[key] = _Mine(terms, key in passing, until)
            if self._warn_after_s is not None:
                self._warn_at[key] = self._fresh_s + self._warn_after_s
        self._fresh.clear()

    def _late(self) -> list[str]:
        """The names whose time is over.

        Names wait in order of arrival, so the first one decides whether to search.
        """
        first = next(iter(self._mine.values()), None)
        if first is None or first.until > (now := time.monotonic()):
            return []
        return [key for key, one in self._mine.items() if one.until <= now]

    def _slow(self) -> list[str]:
        """The names that have waited long enough to be reported as stalled."""
        first = next(iter(self._warn_at.values()), None)
        if first is None or first > (now := time.monotonic()):
            return []
        return [key for key, at in self._warn_at.items() if at <= now]

    def _share_news(self, late: list[str], slow: list[str]) -> Round:
        """Exchange new, late and slow names and joins as text; return what these make ready."""
        message = {"have": self._news, "join": self._joining, "late": late, "slow": slow}
        self._news = []
        joined_now = []
        messages = _every_message(self._comm, message)
        for rank, each in enumerate(messages):
            for key, terms, passing in each["have"]:
                self._forget(key)
                self._announced.setdefault(key, {})[rank] = terms
                if passing:
                    self._passing.add(key)
            if each["join"]:
                joined_now.append(rank)
        self._joined.update(joined_now)
        if self._rank in self._joined:
            self._joining = False
        ready = [self._compare(key) for key in list(self._announced) if self._complete(key)]
        for key in dict.fromkeys(key for each in messages for key in each["late"]):
            ready += self._give_up(key)
        stalled = []
        for key in dict.fromkeys(key for each in messages for key in each["slow"]):
            stalled += self._report_stalled(key)
        last = None
        if len(self._joined) == self._comm.size:
            last = self._ranks[joined_now[-1]]
            self._joined.clear()
        return Round(ready, last, stalled)

    def _complete(self, key: str) -> bool:
        return len(self._announced[key].keys() | self._joined) == self._comm.size

    def _compare(self, key: str) -> Ready:
        """Compare the terms of a name that all ranks have announced."""
        announced = self._announced.pop(key)
        passing = key in self._passing
        self._passing.discard(key)
        self._drop(key)
        terms = announced[min(announced)]
        if any(other != terms for other in announced.values()):
            return Ready(key, terms, self._difference(key, announced))
        ready = Ready(key, terms, "")
        if not passing:
            self._learn(ready)
        return self._with_join_problem(ready)

    def _with_join_problem(self, ready: Ready) -> Ready:
        """The entry, with a problem if ranks have joined and its operation cannot take zeros."""
        if not self._joined or json.loads(ready.terms).get("joinable"):
            return ready
        joined = self._list(sorted(self._joined))
        return ready._replace(
            problem=f"{ready.key} cannot run since {joined} has joined: joined ranks give zeros to "
            "allreduce by Sum or Average, and take part in nothing else"
        )

    def _give_up(self, key: str) -> list[Ready]:
        """End a name that some rank has waited for too long; the text names the missing ranks.

        The bits of a round do not say which ranks hold a known name. So a known name first loses
        its number: the ranks that hold it announce it as text in the next round.
        """
        if key in self._numbers:
            self._forget(key)
            return []
        announced = self._announced.pop(key, None)
        if announced is None:
            return []
        self._passing.discard(key)
        self._drop(key)
        text = (
            f"{key} waited {self._comm.timeout_s:g} s for {self._list(self._missing(announced))}, "
            f"while {self._list(sorted(announced))} had it: do all ranks call it, under the same "
            "name?"
        )
        return [Ready(key, announced[min(announced)], text)]

    def _report_stalled(self, key: str) -> list[Stalled]:
        """Report a name for which some rank has waited for long. As in ``_give_up``, a known name
        first loses its number."""
        if key in self._numbers:
            self._forget(key)
            return []
        announced = self._announced.get(key)
        self._warn_at.pop(key, None)
        if announced is None:
            return []
        text = (
            f"{key} has been waiting {self._warn_after_s:g} s for "
            f"{self._list(self._missing(announced))}, while {self._list(sorted(announced))} had it"
        )
        return [Stalled(key, sorted(announced), text)]

    def _missing(self, announced: Iterable[int]) -> list[int]:
        return [r for r in range(self._comm.size) if r not in announced and r not in self._joined]

    def _learn(self, ready: Ready) -> None:
        if self._free:
            number = self._free.pop()
            self._known[number] = ready
        elif len(self._known) < self._known_max:
            number = len(self._known)
            self._known.append(ready)
        else:
            return
        self._numbers[ready.key] = number
        self._all |= 1 << number
        self._again.clear()

    def _forget(self, key: str) -> None:
        """Take the number from a name. If this rank waits for it, announce it as text next."""
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
        """Remove a name from the names that this rank waits for."""
        self._warn_at.pop(key, None)
        self._mine.pop(key, None)
        number = self._numbers.get(key)
        if number is not None:
            self._have &= ~(1 << number)

    def _difference(self, key: str, announced: dict[int, str]) -> str:
        every = {rank: json.loads(terms) for rank, terms in sorted(announced.items())}
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
    """The messages of all ranks, in rank order; on the wire each follows its length."""
    text = json.dumps(message).encode()
    blob = np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8)
    data = comm.all_gather(blob).tobytes()
    found, at = [], 0
    while at < len(data):
        end = at + 8 + int.from_bytes(data[at : at + 8], "little")
        found.append(json.loads(data[at + 8 : end]))
        at = end
    return found
