"""Elastic launches: decides how many ranks may run, and which of them form the next world.

The slot of a rank that fails is not used again, unless the rank is restarted. The other ranks ask
for a new world, which is smaller if no slot is free. A host discovery script reports the number of
slots: if it falls, the launch ends ranks, and if it grows, the launch starts ranks. Running ranks
take part in a change when their program next asks for a world. While there are fewer slots than the
least number of ranks, the ranks wait for more, for ``patience_s`` at most.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pycoll.bootstrap.rendezvous.frames import list_ranks
from pycoll.errors import InvalidArgumentError
from pycoll.launch.elastic_rendezvous import ElasticRendezvous
from pycoll.launch.host_slots import HostSlots, command_of

#: The default limit, in seconds, of the wait for enough ranks.
PATIENCE_S = 600.0


@dataclass(frozen=True)
class ElasticOptions:
    """Limits of an elastic launch.

    ``ranks_min`` is the least number of ranks of a world; None: the number at the start.
    ``ranks_max`` is the largest number; None: the number at the start or, with a script, the number
    of slots. ``discovery`` is the command line of the host discovery script. ``patience_s`` limits,
    in seconds, how long ranks wait until there are enough of them, and how long they wait for each
    other after one of them has left their world.
    """

    ranks_min: int | None = None
    ranks_max: int | None = None
    discovery: str | None = None
    patience_s: float = PATIENCE_S

    def check(self, ranks: int) -> None:
        """Raise InvalidArgumentError for limits that do not fit ``ranks`` ranks at the start."""
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
    """Decides which ranks run; the owner starts and stops them.

    The object uses the owner's selector and thread. A member number identifies a process for its
    whole life, while its rank may change from world to world. ``failure`` is the reason why the
    launch cannot go on; empty as long as it can.
    """

    def __init__(
        self,
        options: ElasticOptions,
        ranks: int,
        selector: selectors.BaseSelector,
        environment: Mapping[str, str],
        say: Callable[[str], None],
    ) -> None:
        self.failure = ""
        self._least = options.ranks_min or ranks
        self._most = options.ranks_max
        self._patience_s = options.patience_s
        self._slots: int | None = None
        self._capacity = 0
        self._finishing = False
        self._since: float | None = None
        self._script: HostSlots | None = None
        self._elastic = ElasticRendezvous(
            selector, environment["PYCOLL_SECRET"], environment["PYCOLL_JOB_ID"]
        )
        if options.discovery is not None:
            self._script = HostSlots(options.discovery, selector, self._found, say)
        else:
            self._capacity, self._most = ranks, self._most or ranks

    @property
    def name(self) -> str:
        """The name of the elastic rendezvous, for PYCOLL_ROSTER."""
        return self._elastic.name

    def wanted(self, living: Sequence[int]) -> int:
        """Return how many more ranks to start, given the living members."""
        too_few = not self._elastic.ranks and self._limit < self._least
        if self._finishing or too_few:
            return 0
        return max(0, self._limit - len(living))

    def ended(self, member: int, well: bool) -> None:
        """Note that a rank has ended. After one with status 0 (``well``) the job is about to end,
        so no more ranks are started."""
        self._elastic.forget(member)
        self._finishing = self._finishing or well

    def lost(self, living: Sequence[int]) -> bool:
        """Note that a rank has failed and give up its slot. Returns whether the launch can go
        on."""
        self._capacity -= 1
        if not living:
            return False
        if self._finishing:
            self._elastic.refuse("a rank failed while the job was about to end")
            return False
        if self._limit < self._least and self._script is None:
            self._elastic.refuse(
                f"a rank failed, and {len(living)} are left, fewer than --min-np {self._least}"
            )
            return False
        return True

    def advance(self, living: Sequence[int]) -> list[int]:
        """Do all steps that are due. Returns the members that have to end because the world has no
        place for them."""
        if self._script is not None:
            self._script.advance()
        asking, placed = self._elastic.asking, [m for m in living if m in self._elastic.ranks]
        fresh = [member for member in living if member not in self._elastic.ranks]
        if self._finishing and fresh:
            return fresh
        if placed and (len(living) > self._limit or any(one in asking for one in fresh)):
            self._elastic.ask_anew()
        enough = min(self._limit, len(living)) >= self._least
        if enough and all(member in asking for member in living):
            order = self._elastic.in_order(living)
            self._since = None
            self._elastic.form(order[: self._limit])
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
        """Return times in seconds after which ``advance`` has to be called again; empty if only an
        event makes that necessary."""
        found = [] if self._script is None else [self._script.patience()]
        if self._since is not None:
            found.append(max(0.0, self._since + self._patience_s - time.monotonic()))
        return found

    def close(self) -> None:
        """End the script and close the rendezvous."""
        if self._script is not None:
            self._script.close()
        self._elastic.close()

    @property
    def _limit(self) -> int:
        """The largest number of ranks that a world may have now."""
        return self._capacity if self._most is None else min(self._capacity, self._most)

    def _found(self, slots: int) -> None:
        """Take the script's number of slots. A slot whose rank failed counts again only after the
        number has fallen and risen again."""
        if self._slots is None or slots < self._slots:
            self._capacity = slots if self._slots is None else min(self._capacity, slots)
        else:
            self._capacity += slots - self._slots
        self._slots = slots

    def _give_up(self, living: Sequence[int], enough: bool) -> None:
        if enough:
            missing = [member for member in living if member not in self._elastic.asking]
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
        self._elastic.refuse(self.failure)
