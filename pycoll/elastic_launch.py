"""What makes a launch elastic: how many ranks may run, and which of them form the next world.

A rank that fails takes its slot with it, unless it is started again or there are slots to spare;
the others ask for a new world, smaller by one. A host discovery script tells how many slots there
are: fewer of them take ranks away, more let ranks be started, each time when the program next says
that it may begin anew. Below the least number the ranks wait, for so long, for more slots.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pycoll.bootstrap.frames import list_ranks
from pycoll.errors import InvalidArgumentError
from pycoll.host_slots import HostSlots, command_of
from pycoll.roster import Roster

#: The longest wait for enough ranks, where nothing else is said.
PATIENCE_S = 600.0


@dataclass(frozen=True)
class ElasticOptions:
    """The least and most ranks of a world; without the least, as many as are started at first;
    without the most, these too, or, with a script, as many as it tells of slots.

    ``discovery`` is the script's command line. ``patience_s``: how long ranks wait until there are
    enough of them, and for each other once one of them has left their world.
    """

    ranks_min: int | None = None
    ranks_max: int | None = None
    discovery: str | None = None
    patience_s: float = PATIENCE_S

    def check(self, ranks: int) -> None:
        """InvalidArgumentError for what cannot be with so many ranks at first."""
        if self.ranks_min is not None and not 1 <= self.ranks_min <= ranks:
            raise InvalidArgumentError(
                f"min_np={self.ranks_min}: expected 1 to {ranks}, the number of ranks"
            )
        if self.ranks_max is not None and self.ranks_max < ranks:
            raise InvalidArgumentError(
                f"max_np={self.ranks_max}: expected at least {ranks}, the number of ranks"
            )
        if not 0 < self.patience_s < float("inf"):
            raise InvalidArgumentError(
                f"elastic_timeout={self.patience_s}: expected seconds, a finite number above 0"
            )
        if self.discovery is not None:
            command_of(self.discovery)


class ElasticLaunch:
    """Decides; the owner, in whose selector and thread it lives, starts and stops the ranks.

    Ranks are known here by their members' numbers, which stay while a process lives. ``failure``
    says why the launch cannot go on; empty as long as it can.
    """

    def __init__(
        self,
        wishes: ElasticOptions,
        ranks: int,
        selector: selectors.BaseSelector,
        environment: Mapping[str, str],
        say: Callable[[str], None],
    ) -> None:
        self.failure = ""
        self._least = wishes.ranks_min or ranks
        self._most = wishes.ranks_max
        self._patience_s = wishes.patience_s
        self._slots: int | None = None
        self._capacity = 0
        self._finishing = False
        self._since: float | None = None
        self._script: HostSlots | None = None
        self._roster = Roster(selector, environment["PYCOLL_SECRET"], environment["PYCOLL_JOB_ID"])
        if wishes.discovery is not None:
            self._script = HostSlots(wishes.discovery, selector, self._found, say)
        else:
            self._capacity, self._most = ranks, self._most or ranks

    @property
    def name(self) -> str:
        """For PYCOLL_ROSTER."""
        return self._roster.name

    def wanted(self, living: Sequence[int]) -> int:
        """How many more ranks to start."""
        too_few = not self._roster.ranks and self._limit < self._least
        if self._finishing or too_few:
            return 0
        return max(0, self._limit - len(living))

    def ended(self, member: int, well: bool) -> None:
        """A rank has ended. Where it has done so well, the job is about to, and grows no more."""
        self._roster.forget(member)
        self._finishing = self._finishing or well

    def lost(self, living: Sequence[int]) -> bool:
        """A rank has failed, and its slot is not used again; whether the launch can go on."""
        self._capacity -= 1
        if not living:
            return False
        if self._finishing:
            self._roster.refuse("a rank failed while the job was about to end")
            return False
        if self._limit < self._least and self._script is None:
            self._roster.refuse(
                f"a rank failed, and {len(living)} are left, fewer than --min-np {self._least}"
            )
            return False
        return True

    def turn(self, living: Sequence[int]) -> list[int]:
        """Do what is due; the ranks that have to end, since there is no place for them."""
        if self._script is not None:
            self._script.turn()
        asking, placed = self._roster.asking, [m for m in living if m in self._roster.ranks]
        fresh = [member for member in living if member not in self._roster.ranks]
        if self._finishing and fresh:
            return fresh
        if placed and (len(living) > self._limit or any(one in asking for one in fresh)):
            self._roster.ask_anew()
        enough = min(self._limit, len(living)) >= self._least
        if enough and all(member in asking for member in living):
            order = self._roster.in_order(living)
            self._since = None
            self._roster.form(order[: self._limit])
            return order[self._limit :]
        asked = any(one in asking for one in placed or living)
        if not asked and (enough or self._finishing):
            self._since = None
        elif self._since is None:
            self._since = time.monotonic()
        elif time.monotonic() >= self._since + self._patience_s:
            self._give_up(living, enough)
        return []

    def waits(self) -> list[float]:
        """Seconds until ``turn`` has to be called; none: only when something has happened."""
        found = [] if self._script is None else [self._script.patience()]
        if self._since is not None:
            found.append(max(0.0, self._since + self._patience_s - time.monotonic()))
        return found

    def close(self) -> None:
        """Leave nothing behind."""
        if self._script is not None:
            self._script.close()
        self._roster.close()

    @property
    def _limit(self) -> int:
        """How many ranks a world may have now."""
        return self._capacity if self._most is None else min(self._capacity, self._most)

    def _found(self, slots: int) -> None:
        """The script tells of so many slots. One whose rank failed counts again after it was gone
        and has come back."""
        if self._slots is None or slots < self._slots:
            self._capacity = slots if self._slots is None else min(self._capacity, slots)
        else:
            self._capacity += slots - self._slots
        self._slots = slots

    def _give_up(self, living: Sequence[int], enough: bool) -> None:
        if enough:
            missing = [member for member in living if member not in self._roster.asking]
            self.failure = (
                f"the other ranks have waited {self._patience_s:g} s for {list_ranks(missing)} to "
                "form a new world with them (--elastic-timeout sets the limit)"
            )
        else:
            count = min(self._limit, len(living)) if living else self._limit
            self.failure = (
                f"for {self._patience_s:g} s no more than {count} ranks could run, and --min-np is "
                f"{self._least} (--elastic-timeout sets the limit)"
            )
        self._roster.refuse(self.failure)
