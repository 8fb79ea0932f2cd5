"""Runs a server: a thread for each connection passes messages to the machine and sends its output.

The threads wait in native code, without the interpreter's lock. One lock guards the machine. A
thread holds it also while it gives messages to the connections, which keeps the machine's order.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from typing import Any

from pycoll.errors import InvalidArgumentError, PeerLostError, PycollError, TimeoutError
from pycoll.ps.membership.heartbeats import Heartbeats
from pycoll.ps.membership.join_listener import JoinListener
from pycoll.ps.membership.newcomer_links import StoreContext
from pycoll.ps.membership.newcomers import Newcomer
from pycoll.ps.messages import Kind, Message
from pycoll.ps.server_links import Link, has_ended
from pycoll.ps.server_machine import ServerMachine
from pycoll.ps.status import CommandSocket, StatusSocket
from pycoll.ps.views import is_done, refusal_to_add, refusal_to_drain

#: Seconds after which an idle thread checks whether the server has ended.
_POLL_S = 0.25
#: Seconds after which a server repeats a request to the view manager, which may be gone.
_RETRY_S = 0.2
#: Seconds that a server waits for the end of a worker's earlier process, and for the admission of a
#: newcomer while other newcomers join.
_EXIT_GRACE_S, _ADMIT_TIMEOUT_S = 2.0, 20.0
#: Seconds between two reads of the view while a newcomer waits.
_VIEW_POLL_S = 0.02


class ServerThreads:
    """Runs a server. ``links``: its connections by the rank of the peer. ``context``: its store.

    ``is_new``: whether the server joins a running store.
    """

    def __init__(
        self,
        machine: ServerMachine,
        links: dict[int, Link],
        context: StoreContext,
        is_new: bool = False,
    ) -> None:
        self._machine = machine
        self._links = links
        self._context = context
        self._timeout_s = context.timeout_s
        self._name = context.name
        self._is_new = is_new
        self._threads: list[threading.Thread] = []
        self._join_listener: JoinListener | None = None
        self._silence_s = context.connector.config.server_silence_s
        self._heartbeats = Heartbeats(self._silence_s)
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._closed = False
        self._failure: BaseException | None = None

    def run(self) -> None:
        """Serve until all workers have left. Raises the error that ends the server earlier.

        The error is a PeerLostError if the store goes on without this server.
        """
        with self._lock:
            for link in self._links.values():
                self._start(link)
        status = StatusSocket(self._status)
        commands = CommandSocket(
            self._name,
            {
                "drain": functools.partial(self._ask_manager, Kind.DRAIN),
                "add": functools.partial(self._ask_manager, Kind.ADD),
                "ticket": self._ticket,
            },
        )
        try:
            with self._ended:
                if self._is_new:
                    self._wait_for_membership()
                while self._is_serving():
                    self._ended.wait(_POLL_S)
                    self._check_silence()
                self._closed = True
        finally:
            self._closed = True
            status.close()
            commands.close()
            if self._join_listener is not None:
                self._join_listener.close()
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
                f"{machine.voter.stop_reason}",
                rank=machine.me,
                ranks=(machine.me,),
                operation="ps",
            )
        return bool(machine.workers) and self._failure is None

    def _check_silence(self) -> None:
        """Detect a stop of this process and silent servers, and send heartbeats.

        The caller holds the lock, and calls this method ahead of each input of the machine.
        """
        machine, heartbeats = self._machine, self._heartbeats
        if heartbeats.was_stopped():
            machine.pause()
            self._send()
        elif heartbeats.is_due():
            silent = heartbeats.measure(machine.voter.running)
            machine.drop_silent(
                [one for one, seconds in silent.items() if seconds > self._silence_s]
            )
            # A server that reads nothing gets no heartbeats, so its channel does not fill up.
            peers = [one for one, seconds in silent.items() if seconds < self._silence_s / 2]
            machine.out += [(one, Message(Kind.HEARTBEAT)) for one in peers]
            self._send()

    def _start(self, link: Link) -> None:
        """Start the thread of a connection. The caller holds the lock."""
        thread = threading.Thread(
            target=self._serve, args=(link,), name="pycoll-store", daemon=True
        )
        self._threads = [*(one for one in self._threads if one.is_alive()), thread]
        thread.start()

    def _status(self) -> dict[str, Any]:
        with self._lock:
            facts = {"store": self._name, "pid": os.getpid(), "consistency": self._context.terms[2]}
            return {**facts, **self._machine.stats()}

    def _serve(self, link: Link) -> None:
        try:
            while not self._closed:
                try:
                    message = link.receive(_POLL_S, _no_destination)
                except PycollError as error:
                    # The store treats a peer that sends malformed bytes as lost.
                    self._lose(link, has_ended(error))
                    return
                if message is not None:
                    self._handle(link, message)
        except BaseException as error:
            with self._ended:
                self._failure = error
                self._ended.notify_all()

    def _handle(self, link: Link, message: Message) -> None:
        with self._ended:
            self._check_silence()
            self._heartbeats.record(link.peer)
            # Sent answers release their arrays, so that later pushes need not copy these.
            with contextlib.suppress(PycollError):
                link.release_sent()
            if self._links.get(link.peer) is not link:
                # The message came over the connection of a worker's earlier process.
                return
            if message.kind is Kind.TICKET:
                self._invite(link, message)
                return
            self._machine.handle(link.peer, message)
            self._send()
            if message.kind is Kind.BYE or self._machine.has_stopped:
                self._ended.notify_all()

    def _lose(self, link: Link, is_over: bool) -> None:
        with self._ended:
            self._check_silence()
            is_known = self._links.get(link.peer) is link
            if is_known:
                self._machine.lose(link.peer, is_over)
                self._send()
                if link.peer in self._machine.gone:
                    # A later process of this worker has another connection.
                    del self._links[link.peer]
                self._ended.notify_all()
            is_kept = self._links.get(link.peer) is link
        if not is_kept:
            link.close()

    # Newcomers

    def _invite(self, link: Link, request: Message) -> None:
        """Answer the request for a ticket with the address at which this server meets newcomers."""
        try:
            answer, text = Kind.TEXT, self._join_address()
        except (PycollError, OSError) as error:
            answer, text = Kind.FAILED, str(error)
        reply = request._replace(kind=answer, after=1, flags=0, payload=text.encode())
        with contextlib.suppress(PycollError):
            link.send(reply)

    def _join_address(self) -> str:
        """Return the address at which this server meets newcomers; the first call starts listening.

        The caller holds the lock.
        """
        if self._join_listener is None:
            self._join_listener = JoinListener(self._context, self._admit)
        return self._join_listener.address

    def _ticket(self, _: int) -> str:
        """Return a ticket, for the command line."""
        with self._lock:
            address = self._join_address()
        return self._context.ticket(address.encode())

    def _admit(self, newcomer: Newcomer) -> dict[str, Any]:
        """Have the view manager admit a process; return the members of the answer to it.

        Raises TimeoutError if no view admits the process in time.
        """
        with self._ended:
            machine = self._machine
            if newcomer.rank >= 0:
                self._check_has_left(newcomer.rank)
            deadline = time.monotonic() + _ADMIT_TIMEOUT_S
            joining = machine.view.joining
            if joining is None or joining.meeting != newcomer.meeting:
                machine.request_admission(newcomer)
                self._send()
            while (joining := machine.view.joining) is None or joining.meeting != newcomer.meeting:
                if self._closed or time.monotonic() > deadline:
                    machine.cancel_admission()
                    raise TimeoutError(
                        f"no view has let the process in within {_ADMIT_TIMEOUT_S:g} s: the store "
                        "has ended, or others join; try again",
                        operation="ps",
                    )
                self._ended.wait(_VIEW_POLL_S)
            return {
                "newcomer": joining.to_bytes().decode(),
                "view": machine.view.to_bytes().decode(),
                "servers": sorted({machine.me, *machine.voter.running}),
                "workers": sorted(machine.workers - {joining.rank}),
                "gone": sorted(machine.gone - {joining.rank}),
                "terms": self._context.terms,
                "tuning": self._context.connector.tuning,
                "oversubscription": float(self._context.connector.oversubscription),
                "silence_s": self._silence_s,
            }

    def _check_has_left(self, rank: int) -> None:
        """Raise InvalidArgumentError unless the rank is a worker that has left.

        The caller holds the lock.
        """
        machine = self._machine
        known = machine.workers | machine.gone
        if rank not in known:
            raise InvalidArgumentError(
                f"worker is {rank}: expected a rank that has worked in this store, one of "
                f"{sorted(known)}, or None for a new worker"
            )
        deadline = time.monotonic() + _EXIT_GRACE_S
        while rank in machine.workers:
            if time.monotonic() > deadline:
                raise InvalidArgumentError(
                    f"worker is {rank}, which takes part already: two processes cannot be one "
                    "worker; end the other one, or pass None for a new worker"
                )
            self._ended.wait(_VIEW_POLL_S)

    def _connect_newcomers(self) -> None:
        found, self._machine.newcomers[:] = list(self._machine.newcomers), []
        for newcomer in found:
            self._context.connect(newcomer, self._add_link)
        ends, self._machine.ended[:] = list(self._machine.ended), []
        for newcomer, rank in ends:
            has_finished = functools.partial(self._has_joined, newcomer)
            self._context.report_end(newcomer, rank, has_finished)

    def _has_joined(self, newcomer: Newcomer) -> bool:
        joining = self._machine.view.joining
        return self._closed or joining is None or joining.serial != newcomer.serial

    def _add_link(self, newcomer: Newcomer, link: Link | None) -> None:
        with self._ended:
            if self._closed:
                if link is not None:
                    link.close()
                return
            if link is None:
                self._machine.note_unreachable(newcomer)
            else:
                self._links[link.peer] = link
                self._machine.note_connected(newcomer)
                self._start(link)
            self._send()

    def _wait_for_membership(self) -> None:
        """On a newcomer: wait until a view contains this server. The caller holds the lock."""
        machine = self._machine
        limit_s = self._context.connector.config.init_timeout_s
        deadline = time.monotonic() + limit_s
        while self._is_serving() and machine.me not in machine.view.servers:
            if time.monotonic() > deadline:
                self._failure = TimeoutError(
                    f"no view counts this server, rank {machine.me}, within {limit_s:g} s: ranks "
                    f"{sorted(machine.expected)} have not connected with it, or the store has "
                    "ended",
                    ranks=sorted(machine.expected),
                    operation="ps",
                )
            self._ended.wait(_VIEW_POLL_S)

    # Requests to the view manager, and messages

    def _ask_manager(self, kind: Kind, server: int) -> str:
        """Request a change of the view manager, and wait until a view contains it."""
        word = kind.name.lower()
        refusal_to = refusal_to_drain if kind is Kind.DRAIN else refusal_to_add
        with self._ended:
            if refusal := refusal_to(self._machine.view, server):
                raise InvalidArgumentError(refusal)
            deadline = time.monotonic() + self._timeout_s
            while not is_done(kind, server, self._machine.view):
                if self._closed or time.monotonic() > deadline:
                    raise TimeoutError(
                        f"{word} of server rank {server} has not ended within "
                        f"{self._timeout_s:g} s, or the store has ended",
                        rank=server,
                        operation="ps",
                    )
                self._machine.handle(self._machine.me, Message(kind, key=server))
                self._send()
                self._ended.wait(_RETRY_S)
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
                # The thread of that connection receives the same error, and handles it.
                continue
        self._connect_newcomers()


def _no_destination(message: Message, nbytes: int) -> None:
    return None
