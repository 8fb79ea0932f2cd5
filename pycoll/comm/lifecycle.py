"""How communicators begin, come from others, and end: split, dup, shrink, grow, abort."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from pycoll import _core
from pycoll.bootstrap import Joined, Parent, Successor, can_share, join_group, join_part, sit_out
from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.discovery.identity import cores_shared_by, domains_of, transport_across
from pycoll.comm.cpu_balancing import can_balance
from pycoll.comm.data_movement import DataMovement
from pycoll.comm.exchanges import Exchanges
from pycoll.comm.fused_batches import FusedMemory
from pycoll.comm.objects import ObjectExchange
from pycoll.comm.operations import (
    CallCompiler,
    CallRunner,
    DeviceSide,
    Internals,
    ModelValues,
    finish_imports_at_exit,
)
from pycoll.comm.point_to_point import PointToPoint
from pycoll.comm.reductions import Reductions
from pycoll.config import RANKS_MAX, Config
from pycoll.cost.slot_stores import slot_stores_of
from pycoll.errors import ClosedError, InvalidArgumentError, PycollError
from pycoll.schedule.topology import topology_of, with_domains
from pycoll.types import check_int64, check_timeout

if TYPE_CHECKING:
    from pycoll.comm.served import Served
    from pycoll.device.device_operations import Devices

#: Longest time that ``shrink`` may take, in seconds.
_SHRINK_S_MAX = 3600.0


class Membership(NamedTuple):
    """The place of this rank in a communicator: the arguments of ``Communicator``.

    ``successor``: the succession to which the communicator belongs; None: it begins one.
    """

    joined: Joined
    config: Config
    name: str
    successor: Successor | None = None


def make_internals(membership: Membership, served: Served | None) -> Internals:
    """Return the objects of a new communicator. ``served``: its servers, if it has some."""
    finish_imports_at_exit()
    joined, config, name, _ = membership
    rank, names = joined.rank, joined.names
    engine = _make_engine(joined, config)
    values = ModelValues(
        joined.tuning, joined.inside, transport_across(joined.identities), joined.oversubscription
    )
    topology = with_domains(topology_of(joined.hosts), *domains_of(joined.identities))
    compiler = CallCompiler(rank, names, topology, values, config.deterministic)
    exchanges = Exchanges(engine, compiler)
    lifecycle = Lifecycle(engine, exchanges, membership)

    def make_devices() -> Devices:
        from pycoll.device.device_operations import Devices, DeviceSettings

        mine = joined.identities[rank]
        settings = DeviceSettings(
            f"{mine.machine} {mine.host_id}",
            f"{joined.identities[0].nonce} {name}",
            config.device_memory_mib << 20,
            config.device_protocol,
            config.device_rdma,
        )
        return Devices(engine, names, settings, exchanges.gather_blobs, lifecycle.connect_again)

    devices = DeviceSide(make_devices)
    runner = CallRunner(engine, names, compiler, exchanges, devices, FusedMemory())
    messages = PointToPoint(engine, devices)
    return Internals(
        engine,
        config,
        joined,
        compiler,
        exchanges,
        lifecycle,
        devices,
        runner,
        Reductions(runner, served),
        DataMovement(runner),
        messages,
        ObjectExchange(runner, messages),
    )


def _make_engine(joined: Joined, config: Config) -> _core.Communicator:
    slot_stores = slot_stores_of(joined.tuning)  # the same on all ranks
    for transport in joined.transports:
        if transport.name == "shm":
            transport.use_stores(slot_stores)
    return _core.Communicator(
        joined.rank,
        joined.size,
        joined.transports,
        config.timeout_s,
        joined.names,
        cores_shared_by(joined.identities, joined.rank),
        config.cpu_balancing and joined.oversubscription > 1 and can_balance(),
    )


class Lifecycle:
    """Connects this rank anew, for sub-communicators and for successors of the communicator.

    All ranks call each method at the same time, in the same order; the docstring of ``shrink`` in
    ``Communicator`` has its exceptions. The methods return memberships of new communicators.
    """

    def __init__(
        self, engine: _core.Communicator, exchanges: Exchanges, membership: Membership
    ) -> None:
        joined, config, name, successor = membership
        self._engine = engine
        self._exchanges = exchanges
        self._joined = joined
        self._config = config
        self._name = name
        self._splits = 0
        if joined.post is not None:
            successor = Successor(joined.post, joined.rank, joined.identities, name)
        #: None where no other rank is there.
        self._successor = successor
        self._number = 0 if successor is None else successor.hold()
        self._released = False
        #: Called with the successor of this communicator.
        self.replaced: Callable[[Any], None] | None = None

    def current_config(self) -> Config:
        """Return the present settings of this communicator, which a new one takes over."""
        return self._config._replace(timeout_s=self._engine.timeout_s)

    def number_split(self) -> int:
        """Return the number of the next split, which is the same on all ranks."""
        self._splits += 1
        return self._splits

    def subcommunicator_key(self) -> bytes:
        """Return a key for sub-communicators, which only the ranks of this communicator know."""
        import hmac

        key = b"" if self._successor is None else self._successor.post.key
        return hmac.digest(key, f"sub-communicators of {self._name}".encode(), "sha256")

    def split(self, color: int | None, key: int, tuning: str | None = None) -> Membership | None:
        """Split as ``Communicator.split`` does. None: this rank joins no new communicator.

        ``tuning``: the text of a tuning file by which the new communicators choose algorithms; that
        of their first rank counts. None: that of this communicator.
        """
        numbers = [color is not None, 0 if color is None else check_int64(color, "color")]
        numbers.append(check_int64(key, "key"))
        exchanges = self._exchanges
        choices = exchanges.all_gather_numbers(numbers, "split", exchanges.quick_algorithm)
        name = f"{self._name}/{self.number_split()}.{color}"
        joined = self.join_part(choices, color, name, tuning)
        return None if joined is None else Membership(joined, self.current_config(), name)

    def dup(self) -> Membership:
        """Return a membership of the same ranks."""
        made = self.split(0, 0)
        assert made is not None
        return made

    def name_dup(self) -> str:
        """Return the name of the next duplicate of a world with servers."""
        return f"{self._name}/{self.number_split()}.dup"

    def join_part(
        self,
        choices: Sequence[Sequence[int]],
        color: int | None,
        name: str,
        tuning: str | None = None,
    ) -> Joined | None:
        """Connect this rank with its group.

        ``choices``: per rank whether it has a color, the color, and the key.
        """
        groups: dict[int, list[int]] = {}
        for rank in sorted(range(self._joined.size), key=lambda rank: choices[rank][2]):
            if choices[rank][0]:
                groups.setdefault(choices[rank][1], []).append(rank)
        if not groups:
            return None
        members = [] if color is None else groups[color]
        return self._join(list(groups.values()), members, name, tuning)

    def _join(
        self, groups: list[list[int]], members: list[int], name: str, tuning: str | None
    ) -> Joined | None:
        """Connect this rank with its group. Return None where ``members`` is empty."""
        joined, exchanges = self._joined, self._exchanges
        text = joined.tuning if tuning is None else tuning
        if can_share(joined.identities, groups):
            algorithm = exchanges.quick_algorithm
            parent = Parent(
                joined.rank,
                joined.identities,
                next((one for one in joined.transports if one.name == "shm"), None),
                lambda numbers: exchanges.all_gather_numbers(numbers, "part", algorithm),
                exchanges.gather_blobs,
                self._splits,
                self.subcommunicator_key(),
            )
            return join_part(parent, groups, members, text)
        # Ranks outside all groups take part in the exchanges of the joining ranks.
        if not members:
            sit_out(exchanges.gather_blobs)
            return None
        place = members.index(joined.rank)
        return join_group(
            exchanges.gather_blobs, members, place, name, self._config, bring=lambda _: text
        )

    def connect_again(self) -> list[Any]:
        """Connect all ranks once more, as a split into one group would. Return the transports."""
        everyone = list(range(self._joined.size))
        name = f"{self._name}/{self.number_split()}.devices"
        joined = self._join([everyone], everyone, name, None)
        if joined is None:
            return []
        if joined.post is not None:
            joined.post.close()
        return joined.transports

    def shrink(self, timeout_s: float) -> Membership:
        """Return a membership of the ranks that are left."""
        seconds = check_timeout(timeout_s, "timeout_s")
        if seconds > _SHRINK_S_MAX:
            raise InvalidArgumentError(
                f"timeout_s is {timeout_s!r}: expected at most {_SHRINK_S_MAX:.0f} seconds"
            )
        successor = self._successor
        if successor is None:
            return self.dup()
        if not successor.post.is_open:
            raise ClosedError(
                f"{self._name} is closed, or belongs to the process from which this one was forked"
            )
        if successor.newest != self._number:
            raise InvalidArgumentError(
                f"{self._name} has been shrunk already: shrink the communicator that took its place"
            )
        self._engine.abort("it called shrink()")
        config = self.current_config()
        joined, name = successor.shrink(config, self._joined.tuning, seconds)
        return Membership(joined, config, name, successor)

    def grow(
        self, count: int, invite: Callable[[list[str]], object], timeout_s: float
    ) -> Membership:
        """Return a membership of the old ranks and ``count`` new ones."""
        rank, size = self._joined.rank, self._joined.size
        numbers = [check_int64(count, "count")]
        if not callable(invite):
            raise InvalidArgumentError(
                f"invite is a {type(invite).__name__}: expected a function of a list of tickets"
            )
        numbers.append(int(1e3 * min(check_timeout(timeout_s, "timeout_s"), 1e6)))
        if not 1 <= count <= RANKS_MAX - size:
            raise InvalidArgumentError(
                f"count is {count}: expected 1 to {RANKS_MAX - size}, since a communicator has at "
                f"most {RANKS_MAX} ranks"
            )
        exchanges = self._exchanges
        rows = exchanges.all_gather_numbers(numbers, "grow", exchanges.quick_algorithm)
        differing = [other for other, row in enumerate(rows) if row[0] != count]
        if differing:
            raise InvalidArgumentError(
                f"count is {count} on rank {rank} and {rows[differing[0]][0]} on rank "
                f"{differing[0]}: expected the same on all ranks"
            )
        return self._invite(count, invite, min(row[1] for row in rows) / 1e3)

    def _invite(
        self, count: int, invite: Callable[[list[str]], object], seconds: float
    ) -> Membership:
        from pycoll.bootstrap.recovery.growing import join_grown, open_place

        joined, config = self._joined, self.current_config()
        with ExitStack() as closing:
            place, failure, text = None, None, b""
            if joined.rank == 0:
                try:
                    place = closing.enter_context(open_place(config))
                    invite(place.tickets(joined.size, count))
                    text = b"+" + place.meeting.to_bytes()
                except Exception as error:
                    failure = error
                    text = f"-{type(error).__name__}: {error}".encode()
            told = bytes(self._exchanges.gather_blobs(text)[0])
            if failure is not None:
                raise failure
            if told[:1] != b"+":
                reason = told[1:].decode(errors="replace")
                raise PycollError(f"rank 0 could not invite new ranks: {reason}", rank=0)
            size, limit = joined.size + count, Deadline(seconds)
            grown = join_grown(place, told[1:], joined.rank, size, config, joined.tuning, limit)
        return Membership(grown, config, "world")

    def release(self) -> None:
        """Note that the communicator has been closed."""
        if self._successor is not None and not self._released:
            self._released = True
            self._successor.release()

    def abort(self, others: Sequence[_core.Communicator], reason: Any, code: Any) -> NoReturn:
        """Run ``Communicator.abort``. ``others``: the engines of this process's communicators."""
        if not isinstance(reason, str):
            reason, code = code if isinstance(code, str) else "", reason
        if isinstance(code, bool) or not isinstance(code, int) or not 1 <= code <= 255:
            raise InvalidArgumentError(f"code is {code!r}: expected an exit status from 1 to 255")
        why = f"it called abort({code})" + (f": {reason}"[:62] if reason else "")
        self._engine.abort(why)
        who = f"rank {self._joined.rank} of {self._name}"
        print(f"pycoll: {who} called abort({code}) {reason}".rstrip(), file=sys.stderr)
        for one in others:
            with suppress(PycollError):
                one.abort(why)
        # close() flushes the notices that travel over sockets.
        for one in [self._engine, *others]:
            one.close()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(code)
