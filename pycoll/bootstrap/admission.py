"""Admits the connections that prove the job's key and refuses all others.

One selector loop serves all listeners. A connection that has not proven the key is a stranger. A
stranger has ``STRANGER_S`` seconds and ``ANSWER_BYTES`` bytes for its proof. When ``STRANGERS_MAX``
strangers wait, the loop drops the oldest one: an honest handshake takes one round trip, so it is
never the oldest of many for long. No bytes of one stranger delay another connection.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pycoll.bootstrap.forks import end_with_process
from pycoll.bootstrap.handshake import ANSWER_BYTES, STRANGER_S, Claim, Gate, Purpose, Verdict

STRANGERS_MAX = 64
#: Most refusals that are kept for error texts.
REFUSALS_MAX = 8

#: Decides about a proven claim: ADMITTED, DUPLICATE or UNWANTED; None closes the connection without
#: a verdict, after which the client tries again.
Decide = Callable[[Claim], "Verdict | None"]
#: Takes over an admitted connection, non-blocking.
Admit = Callable[[Claim, socket.socket], None]
#: Checks a connection before the handshake; False refuses it.
Trust = Callable[[socket.socket], bool]


class _Stranger(NamedTuple):
    sock: socket.socket
    gate: Gate
    origin: str
    until: float
    data: bytearray


class Admission:
    """The handshakes of all listeners of one selector. While the selector's loop runs, only its
    thread uses the object; before and afterwards its owner does."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        key: bytes,
        scope: bytes,
        decide: Decide,
        admit: Admit,
        trust: Trust = lambda sock: True,
    ) -> None:
        self._selector = selector
        self._key = key
        self._scope = scope
        self._decide = decide
        self._admit = admit
        self._trust = trust
        self._listeners: list[socket.socket] = []
        self._strangers: dict[int, _Stranger] = {}
        #: The first ``REFUSALS_MAX`` different refusals, as texts.
        self.refusals: list[str] = []

    def listen(self, listener: socket.socket, purpose: Purpose) -> None:
        """Serve ``listener`` from now on. ``close`` closes it."""
        listener.setblocking(False)
        self._listeners.append(listener)
        self._selector.register(
            listener, selectors.EVENT_READ, lambda mask: self._accept(listener, purpose)
        )

    def expire(self) -> None:
        """Refuse strangers whose time is over. The owner calls it about every half second."""
        now = time.monotonic()
        for stranger in [s for s in self._strangers.values() if s.until <= now]:
            self._refuse(stranger, "gave no proof in time")

    def stop_listening(self) -> None:
        """Close the listeners; admitted connections stay open."""
        for listener in self._listeners:
            self._selector.unregister(listener)
            listener.close()
        self._listeners.clear()

    def close(self) -> None:
        """Close the listeners and the strangers' connections."""
        self.stop_listening()
        for stranger in list(self._strangers.values()):
            self._drop(stranger)

    def _accept(self, listener: socket.socket, purpose: Purpose) -> None:
        try:
            sock, origin = listener.accept()
        except OSError as error:
            # This process has no free descriptor, or the client has left. Dropping a stranger
            # frees a descriptor, and the pause keeps the loop from spinning.
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._remember("a connection, for lack of file descriptors (ulimit -n)")
            if self._strangers:
                self._refuse(next(iter(self._strangers.values())), "too many connections")
            time.sleep(0.01)
            return
        end_with_process(sock).setblocking(False)
        if len(self._strangers) >= STRANGERS_MAX:
            self._refuse(next(iter(self._strangers.values())), "too many connections")
        stranger = _Stranger(
            sock,
            Gate(self._key, self._scope, purpose),
            describe_origin(origin),
            time.monotonic() + STRANGER_S,
            bytearray(),
        )
        if not self._trust(sock):
            self._note(stranger, "is another user's process")
            sock.close()
            return
        try:
            sock.send(stranger.gate.challenge())
        except OSError:
            sock.close()
            return
        self._strangers[sock.fileno()] = stranger
        self._selector.register(sock, selectors.EVENT_READ, lambda mask: self._read(stranger))

    def _read(self, stranger: _Stranger) -> None:
        # Read no byte past the answer: later bytes belong to the owner of an admitted connection.
        try:
            piece = stranger.sock.recv(ANSWER_BYTES - len(stranger.data))
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        if not piece and not stranger.data:
            self._drop(stranger)  # a probe (dial.probe) sends nothing and is no refusal
            return
        if not piece:
            self._refuse(stranger, "left before its proof")
            return
        stranger.data.extend(piece)
        if len(stranger.data) == ANSWER_BYTES:
            self._conclude(stranger)

    def _conclude(self, stranger: _Stranger) -> None:
        answer = bytes(stranger.data)
        claim, refusal = stranger.gate.check(answer)
        verdict = refusal if claim is None else self._decide(claim)
        if verdict is None:
            self._drop(stranger)
            return
        with contextlib.suppress(OSError):
            stranger.sock.send(stranger.gate.verdict(answer, verdict))
        if claim is None or verdict is not Verdict.ADMITTED:
            claimed = "" if claim is None else f", rank {claim.rank},"
            self._refuse(stranger, f"{claimed} was refused ({verdict.name})".lstrip())
            return
        self._forget(stranger)
        self._admit(claim, stranger.sock)

    def _note(self, stranger: _Stranger, why: str) -> None:
        self._remember(f"{stranger.origin} {why}")

    def _remember(self, text: str) -> None:
        if len(self.refusals) < REFUSALS_MAX and text not in self.refusals:
            self.refusals.append(text)

    def _refuse(self, stranger: _Stranger, why: str) -> None:
        self._note(stranger, why)
        self._drop(stranger)

    def _drop(self, stranger: _Stranger) -> None:
        self._forget(stranger)
        stranger.sock.close()

    def _forget(self, stranger: _Stranger) -> None:
        self._selector.unregister(stranger.sock)
        del self._strangers[stranger.sock.fileno()]


class Loop:
    """A selector loop in its own thread, which has ended when ``close`` returns.

    Callbacks registered in ``selector`` take the event mask and run on the loop's thread. The loop
    calls the functions of ``every`` after each batch of events, at least every 0.25 s.
    """

    def __init__(self, name: str, every: Sequence[Callable[[], None]] = ()) -> None:
        self.selector = selectors.DefaultSelector()
        self.every = list(every)
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self.selector.register(self._woken, selectors.EVENT_READ, self._drain)
        self._ending = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread. The owner calls it once."""
        self._thread.start()

    def wake(self) -> None:
        """Make the loop run the ``every`` callbacks soon. Any thread may call it."""
        with contextlib.suppress(OSError):
            self._wake.send(b"w")

    def end(self) -> None:
        """Ask the thread to end. Any thread may call it."""
        self._ending = True
        self.wake()

    def join(self) -> None:
        """Wait for the end of the thread. Afterwards only the caller uses the selector."""
        if self._thread.ident is not None:
            self._thread.join()

    def close(self) -> None:
        """End the thread, wait for it, close the descriptors. A second call does nothing."""
        if self._wake.fileno() < 0:
            return
        self.end()
        self.join()
        self.selector.close()
        self._wake.close()
        self._woken.close()

    def _drain(self, mask: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(64):
                pass

    def _run(self) -> None:
        while not self._ending:
            for key, mask in self.selector.select(0.25):
                # A callback may have closed another ready connection of this batch.
                if self.selector.get_map().get(key.fd) is key:
                    key.data(mask)
            for action in self.every:
                action()


def describe_origin(origin: object) -> str:
    """Format a peer address: "10.0.0.2:4711", or "a local process" for unix sockets."""
    if isinstance(origin, tuple) and len(origin) >= 2:
        # A dual-stack socket reports an IPv4 peer as ::ffff:10.0.0.2.
        host, port = str(origin[0]).removeprefix("::ffff:"), origin[1]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return "a local process"
