"""Shrinks a communicator: the survivors agree on a roll, and its members connect anew."""

from __future__ import annotations

import contextlib
import hmac
import socket
import threading
import time
from collections.abc import Generator, Sequence

from pycoll import errors
from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.discovery.identity import Identity
from pycoll.bootstrap.discovery.network import listen_in_range
from pycoll.bootstrap.joining import Joined, connect_and_close
from pycoll.bootstrap.recovery.council import REPEAT_S, Council, Roll, Succession
from pycoll.bootstrap.recovery.post import Post
from pycoll.bootstrap.rendezvous.exchange import Exchange, SoloExchange
from pycoll.bootstrap.rendezvous.frames import list_ranks
from pycoll.bootstrap.rendezvous.store import StoreExchange, join_unix, serve_store
from pycoll.config import Config

#: A call makes at most this many attempts to connect; each one after a decision.
ATTEMPTS = 6
#: The share of a call's time for which it waits for ranks that run and do not answer.
_PATIENCE_SHARE = 1 / 3
_OPERATION = "shrink"


class Successor:
    """The part of one rank, in its process, in all communicators of one succession.

    The first communicator makes it, its successors share it. ``hold`` and ``release`` count them;
    after the last ``release`` this rank is gone for the others. Ranks here are those of the first
    communicator, and ``name`` is its name. ``post`` is this rank's mailbox, which the object owns.
    """

    def __init__(self, post: Post, rank: int, identities: Sequence[Identity], name: str) -> None:
        self.post = post
        self._name = name
        self.names = [identity.name for identity in identities]
        self._one_machine = len({identity.machine for identity in identities}) == 1
        self._succession = Succession(rank, tuple(range(len(identities))))
        self._holders = 0
        #: The number of the newest communicator; later decisions failed to connect.
        self.newest = 0
        self._left_out = ""
        self._busy = threading.Lock()
        self._changed = threading.Condition()

    def hold(self) -> int:
        """Note a new communicator, the newest one. Return its number."""
        self._holders += 1
        self.newest = self._succession.number
        return self.newest

    def release(self) -> None:
        """Note that a communicator has been closed."""
        self._holders -= 1
        if self._holders == 0:
            self.post.close()

    def shrink(self, config: Config, tuning: str, timeout_s: float) -> tuple[Joined, str]:
        """Agree with the other survivors and connect to them. Return the new place of this rank,
        and the name of the new communicator.

        Raises LeftOutError, and the error of connecting where every attempt failed.
        """
        if not self._busy.acquire(blocking=False):
            raise errors.InvalidArgumentError("another thread shrinks this communicator")
        if self._left_out:
            self._busy.release()
            raise errors.LeftOutError(self._left_out)
        ending = threading.Event()
        pump = threading.Thread(target=self._pump, args=(ending,), name="pycoll-shrink")
        try:
            self.post.begin()
            pump.start()
            return self._attempts(config, tuning, Deadline(timeout_s))
        finally:
            ending.set()
            if pump.ident is not None:
                pump.join()
            self.post.end()
            self._busy.release()

    def _attempts(self, config: Config, tuning: str, deadline: Deadline) -> tuple[Joined, str]:
        patience_s = _PATIENCE_SHARE * deadline.seconds
        last: errors.PycollError | None = None
        for attempt in range(ATTEMPTS):
            before = self._succession.base
            with self._listen(config) as (listener, text):
                roll = self._decide(text, patience_s, deadline, last)
                if last is not None and attempt > 1 and roll.members == before:
                    raise last
                number = self._succession.number
                try:
                    limit = deadline.within(patience_s / 2)
                    exchange = self._meet(roll, listener, config, limit)
                    return self._connect(exchange, config, f"{self._name}~{number}", tuning, limit)
                except (
                    errors.PeerLostError,
                    errors.TimeoutError,
                    errors.TransportError,
                ) as error:
                    last = error
        assert last is not None
        raise last

    def _decide(
        self, text: str, patience_s: float, deadline: Deadline, last: errors.PycollError | None
    ) -> Roll:
        """Wait for the decision, and go on to it. Raises LeftOutError if this rank is not in it."""
        with self._changed:
            council = self._succession.call(text, patience_s, deadline.at)
            council.tick(time.monotonic())
            self._changed.wait_for(
                lambda: council.roll is not None or council.failed != "",
                deadline.remaining() + patience_s,
            )
            if council.roll is None:
                if last is not None:
                    raise last
                raise self._undecided_error(council, deadline.seconds)
            base, roll = self._succession.base, council.roll
            if self._succession.succeed():
                return roll
            own = self._succession.me
            self._left_out = (
                f"rank {own} ({self.names[own]}) was left out: "
                f"{list_ranks(list(roll.members))} of {len(base)} went on without it, since it "
                "did not answer while they shrank; end this process, and let a new one join by grow"
            )
            raise errors.LeftOutError(self._left_out, rank=own, operation=_OPERATION)

    def _undecided_error(self, council: Council, seconds: float) -> errors.LeftOutError:
        own = self._succession.me
        gone = sorted(council.gone)
        ended = f"; gone: {list_ranks(gone)}" if gone else ""
        return errors.LeftOutError(
            f"rank {own} ({self.names[own]}) found too few ranks to go on within {seconds:.3g} s: "
            f"{council.failed}{ended}. The ranks that run have gone on without this one, or are "
            "stopped or out of reach; more than half of the ranks, or half with the lowest one, "
            "may go on without the others",
            rank=own,
            operation=_OPERATION,
        )

    def _pump(self, ending: threading.Event) -> None:
        """Move messages until the call ends; they include those of ranks that connect later."""
        ticked = 0.0
        while not ending.is_set():
            events = self.post.poll(REPEAT_S / 2)
            with self._changed:
                now = time.monotonic()
                for rank, message in events:
                    if message is None:
                        self._succession.lose(now, rank)
                    else:
                        # A message that makes no sense is ignored, as a lost one is.
                        with contextlib.suppress(ValueError, TypeError, KeyError):
                            self._succession.hear(now, rank, message)
                council = self._succession.council
                if council is not None and now >= ticked + REPEAT_S:
                    council.tick(now)
                    ticked = now
                self._changed.notify_all()
                letters = self._succession.messages()
            for to, letter in letters:
                self.post.send(to, letter)

    @contextlib.contextmanager
    def _listen(self, config: Config) -> Generator[tuple[socket.socket | None, str]]:
        """Give a listener where other machines can meet this rank, and its offer as text; nothing
        on one machine."""
        if self._one_machine:
            yield None, ""
            return
        from pycoll.bootstrap.rendezvous.meeting import offer

        with listen_in_range(None, config.port_range) as listener:
            yield listener, offer(config, listener, b"").to_bytes().decode()

    def _meet(
        self, roll: Roll, listener: socket.socket | None, config: Config, limit: Deadline
    ) -> Exchange:
        rank, size = roll.members.index(self._succession.me), len(roll.members)
        if size == 1:
            return SoloExchange()
        job = f"shrink {self._succession.number}"
        key = hmac.digest(self.post.key, job.encode(), "sha256")
        if listener is None:
            return join_unix(job, rank, size, limit, key)
        if rank == 0:
            # The store owns its listener, and the caller closes the other one.
            return serve_store(listener.dup(), "shrink", key, job, size, limit)
        from pycoll.bootstrap.rendezvous.meeting import Meeting, address_of

        try:
            meeting = Meeting.from_bytes(roll.offer.encode())
        except (ValueError, TypeError) as error:
            raise errors.TransportError(
                f"an unreadable meeting place: {error}", operation=_OPERATION
            ) from None
        return StoreExchange(address_of(meeting, config), key, job, rank, size, limit)

    def _connect(
        self, exchange: Exchange, config: Config, name: str, tuning: str, limit: Deadline
    ) -> tuple[Joined, str]:
        connected = connect_and_close(
            exchange, config, name, limit, bring=lambda _: tuning, mailbox=False
        )
        return Joined(exchange.rank, exchange.size, *connected, "shrink"), name
