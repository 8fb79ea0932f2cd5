"""A server at work: a thread for each connection hands messages to the machine and sends answers.

The threads wait in native code, without the interpreter's lock. One lock guards the machine; it is
also held while its messages are given to the connections, so that these keep the machine's order.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from typing import Any

from pycoll.errors import InvalidArgumentError, PeerLostError, PycollError, TimeoutError
from pycoll.ps.membership.entrance import Entrance
from pycoll.ps.membership.new_links import Home
from pycoll.ps.membership.newcomers import Newcomer
from pycoll.ps.membership.signs_of_life import SignsOfLife
from pycoll.ps.messages import Kind, Message
from pycoll.ps.server_links import Link, has_ended
from pycoll.ps.server_machine import ServerMachine
from pycoll.ps.status import CommandSocket, StatusSocket
from pycoll.ps.views import is_done, refusal_to_add, refusal_to_drain

#: Seconds after which an idle thread looks whether the server has ended.
_LOOK_S = 0.25
#: Seconds after which a wish is told again to the view manager, which may be gone.
_AGAIN_S = 0.2
#: Seconds within which the end of an earlier process of a worker is noticed, and within which the
#: view manager lets a newcomer in while others come.
_GONE_S, _ADMIT_S = 2.0, 20.0
#: Seconds between two looks at the view while a newcomer waits.
_GLANCE_S = 0.02


class ServerThreads:
    """Runs a server. ``links``: its connections by the rank of the peer. ``home``: its store.

    ``is_new``: whether it joins a running store.
    """

    def __init__(
        self, machine: ServerMachine, links: dict[int, Link], home: Home, is_new: bool = False
    ) -> None:
        self._machine = machine
        self._links = links
        self._home = home
        self._timeout_s = home.timeout_s
        self._name = home.name
        self._is_new = is_new
        self._threads: list[threading.Thread] = []
        self._entrance: Entrance | None = None
        self._silence_s = home.circle.config.server_silence_s
        self._signs = SignsOfLife(self._silence_s)
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._closed = False
        self._failure: BaseException | None = None

    def run(self) -> None:
        """Serve until all workers have left. Raises the error that ends the server earlier.

        It is a PeerLostError where the store goes on without this server.
        """
        with self._lock:
            for link in self._links.values():
                self._start(link)
        status = StatusSocket(self._status)
        commands = CommandSocket(
            self._name,
            {
                "drain": functools.partial(self._wish, Kind.DRAIN),
                "add": functools.partial(self._wish, Kind.ADD),
                "ticket": self._ticket,
            },
        )
        try:
            with self._ended:
                if self._is_new:
                    self._wait_until_counted()
                while self._is_serving():
                    self._ended.wait(_LOOK_S)
                    self._look_for_silence()
                self._closed = True
        finally:
            self._closed = True
            status.close()
            commands.close()
            if self._entrance is not None:
                self._entrance.close()
            for thread in self._threads:
                thread.join()
            for link in self._links.values():
                link.close()
        if self._failure is not None:
            raise self._failure

    def _is_serving(self) -> bool:
        """Return whether workers are left, and no error has ended this server."""
        machine = self._machine
        if machine.workers and machine.has_stopped and self._failure is None:
            self._failure = PeerLostError(
                f"server rank {machine.me} takes part in store {self._name} no more: "
                f"{machine.voter.why}",
                rank=machine.me,
                ranks=(machine.me,),
                operation="ps",
            )
        return bool(machine.workers) and self._failure is None

    def _look_for_silence(self) -> None:
        """Notice a stop of this process, and servers that are silent. The caller holds the lock,
        and calls it ahead of whatever the machine hears."""
        machine, signs = self._machine, self._signs
        if signs.was_stopped():
            machine.pause()
            self._send()
        elif signs.is_due():
            silent = signs.count(machine.voter.running)
            machine.give_up([one for one, seconds in silent.items() if seconds > self._silence_s])
            # A server that reads nothing gets no more, so that nothing piles up.
            told = [one for one, seconds in silent.items() if seconds < self._silence_s / 2]
            machine.out += [(one, Message(Kind.ALIVE)) for one in told]
            self._send()

    def _start(self, link: Link) -> None:
        """Begin to serve a connection. The caller holds the lock."""
        thread = threading.Thread(
            target=self._serve, args=(link,), name="pycoll-store", daemon=True
        )
        self._threads = [*(one for one in self._threads if one.is_alive()), thread]
        thread.start()

    def _status(self) -> dict[str, Any]:
        with self._lock:
            facts = {"store": self._name, "pid": os.getpid(), "consistency": self._home.terms[2]}
            return {**facts, **self._machine.stats()}

    def _serve(self, link: Link) -> None:
        try:
            while not self._closed:
                try:
                    message = link.receive(_LOOK_S, _no_place)
                except PycollError as error:
                    # The peer is gone, or sent what no peer sends: for the store that is the same.
                    self._lose(link, has_ended(error))
                    return
                if message is not None:
                    self._take(link, message)
        except BaseException as error:
            with self._ended:
                self._failure = error
                self._ended.notify_all()

    def _take(self, link: Link, message: Message) -> None:
        with self._ended:
            self._look_for_silence()
            self._signs.hear(link.peer)
            # Answers that have been sent release their bytes, so that pushes change them in place.
            with contextlib.suppress(PycollError):
                link.tidy()
            if self._links.get(link.peer) is not link:
                # The end of a connection to an earlier process of a worker.
                return
            if message.kind is Kind.INVITE:
                self._invite(link, message)
                return
            self._machine.hear(link.peer, message)
            self._send()
            if message.kind is Kind.BYE or self._machine.has_stopped:
                self._ended.notify_all()

    def _lose(self, link: Link, is_over: bool) -> None:
        with self._ended:
            self._look_for_silence()
            is_known = self._links.get(link.peer) is link
            if is_known:
                self._machine.lose(link.peer, is_over)
                self._send()
                if link.peer in self._machine.gone:
                    # A worker that comes back brings another connection.
                    del self._links[link.peer]
                self._ended.notify_all()
            is_kept = self._links.get(link.peer) is link
        if not is_kept:
            link.close()

    # Newcomers

    def _invite(self, link: Link, request: Message) -> None:
        """Answer a worker that asks for a ticket by the place where newcomers meet this server."""
        try:
            answer, text = Kind.TEXT, self._place()
        except (PycollError, OSError) as error:
            answer, text = Kind.FAILED, str(error)
        told = request._replace(kind=answer, after=1, flags=0, payload=text.encode())
        with contextlib.suppress(PycollError):
            link.send(told)

    def _place(self) -> str:
        """Return the place where newcomers meet this server, which exists from the first call on.
        The caller holds the lock."""
        if self._entrance is None:
            self._entrance = Entrance(self._home, self._admit)
        return self._entrance.place

    def _ticket(self, _: int) -> str:
        """Return a ticket, for the command line."""
        with self._lock:
            place = self._place()
        return self._home.ticket(place.encode())

    def _admit(self, asked: Newcomer) -> dict[str, Any]:
        """Have the view manager let a process in, and return what it must know."""
        with self._ended:
            machine = self._machine
            if asked.rank >= 0:
                self._check_is_gone(asked.rank)
            until = time.monotonic() + _ADMIT_S
            joining = machine.view.joining
            if joining is None or joining.meeting != asked.meeting:
                machine.wish(asked)
                self._send()
            while (joining := machine.view.joining) is None or joining.meeting != asked.meeting:
                if self._closed or time.monotonic() > until:
                    machine.withdraw()
                    raise TimeoutError(
                        f"no view has let the process in within {_ADMIT_S:g} s: the store has "
                        "ended, or others join; try again",
                        operation="ps",
                    )
                self._ended.wait(_GLANCE_S)
            return {
                "newcomer": joining.to_bytes().decode(),
                "view": machine.view.to_bytes().decode(),
                "servers": sorted({machine.me, *machine.voter.running}),
                "workers": sorted(machine.workers - {joining.rank}),
                "gone": sorted(machine.gone - {joining.rank}),
                "terms": self._home.terms,
                "tuning": self._home.circle.tuning,
                "oversubscription": float(self._home.circle.oversubscription),
                "silence_s": self._silence_s,
            }

    def _check_is_gone(self, rank: int) -> None:
        """Raise InvalidArgumentError unless a worker was here, and is gone. The caller holds the
        lock."""
        machine = self._machine
        known = machine.workers | machine.gone
        if rank not in known:
            raise InvalidArgumentError(
                f"worker is {rank}: expected a rank that has worked in this store, one of "
                f"{sorted(known)}, or None for a new worker"
            )
        until = time.monotonic() + _GONE_S
        while rank in machine.workers:
            if time.monotonic() > until:
                raise InvalidArgumentError(
                    f"worker is {rank}, which takes part already: two processes cannot be one "
                    "worker; end the other one, or pass None for a new worker"
                )
            self._ended.wait(_GLANCE_S)

    def _meet_newcomers(self) -> None:
        found, self._machine.newcomers[:] = list(self._machine.newcomers), []
        for newcomer in found:
            self._home.connect(newcomer, self._arrived)
        ends, self._machine.ended[:] = list(self._machine.ended), []
        for newcomer, rank in ends:
            is_over = functools.partial(self._has_come, newcomer)
            self._home.tell_end(newcomer, rank, is_over)

    def _has_come(self, newcomer: Newcomer) -> bool:
        joining = self._machine.view.joining
        return self._closed or joining is None or joining.serial != newcomer.serial

    def _arrived(self, newcomer: Newcomer, link: Link | None) -> None:
        with self._ended:
            if self._closed:
                if link is not None:
                    link.close()
                return
            if link is None:
                self._machine.miss(newcomer)
            else:
                self._links[link.peer] = link
                self._machine.arrive(newcomer)
                self._start(link)
            self._send()

    def _wait_until_counted(self) -> None:
        """On a newcomer: wait until a view counts this server. The caller holds the lock."""
        machine = self._machine
        limit_s = self._home.circle.config.init_timeout_s
        until = time.monotonic() + limit_s
        while self._is_serving() and machine.me not in machine.view.servers:
            if time.monotonic() > until:
                self._failure = TimeoutError(
                    f"no view counts this server, rank {machine.me}, within {limit_s:g} s: ranks "
                    f"{sorted(machine.expected)} have not connected with it, or the store has "
                    "ended",
                    ranks=sorted(machine.expected),
                    operation="ps",
                )
            self._ended.wait(_GLANCE_S)

    # Wishes and messages

    def _wish(self, kind: Kind, server: int) -> str:
        """Ask the view manager about a server, until a view says that it is done."""
        word = kind.name.lower()
        refusal_to = refusal_to_drain if kind is Kind.DRAIN else refusal_to_add
        with self._ended:
            if refusal := refusal_to(self._machine.view, server):
                raise InvalidArgumentError(refusal)
            until = time.monotonic() + self._timeout_s
            while not is_done(kind, server, self._machine.view):
                if self._closed or time.monotonic() > until:
                    raise TimeoutError(
                        f"{word} of server rank {server} has not ended within "
                        f"{self._timeout_s:g} s, or the store has ended",
                        rank=server,
                        operation="ps",
                    )
                self._machine.hear(self._machine.me, Message(kind, key=server))
                self._send()
                self._ended.wait(_AGAIN_S)
        return ""

    def _send(self) -> None:
        out = self._machine.out.copy()
        self._machine.out.clear()
        for peer, message in out:
            link = self._links.get(peer)
            try:
                if link is not None:
                    link.send(message)
            except PycollError:
                # The thread of that connection finds the same error.
                continue
        self._meet_newcomers()


def _no_place(message: Message, nbytes: int) -> None:
    return None
