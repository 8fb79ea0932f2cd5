"""The listener of a server for processes that join a running store with a ticket."""

from __future__ import annotations

import json
import select
import threading
from collections.abc import Callable
from typing import Any

from pycoll import __version__
from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.discovery.network import listen_in_range
from pycoll.bootstrap.rendezvous.meeting import offer
from pycoll.bootstrap.rendezvous.store import serve_store
from pycoll.errors import PycollError
from pycoll.ps.membership.newcomer_links import StoreContext
from pycoll.ps.membership.newcomers import VERSION, Newcomer
from pycoll.untrusted import json_object, read_json

#: The members of a newcomer's request. ``replicas`` and ``consistency``: the terms that it expects,
#: -1 and empty for any.
JOIN_REQUEST = {
    **{"version": int, "package": str, "newcomer": str},
    **{"replicas": int, "consistency": str},
}
#: Seconds after which the thread checks whether the server has ended.
_POLL_S = 0.25
#: The most seconds of one newcomer, while others wait.
_TIMEOUT_S = 30.0


class JoinListener:
    """Receives newcomers, one after another, in a thread of its own. The owner closes it.

    ``admit``: admits a process, and returns the members of the answer; it raises the errors that
    refuse the process. The thread of this object calls it.
    """

    def __init__(self, context: StoreContext, admit: Callable[[Newcomer], dict[str, Any]]) -> None:
        self._context = context
        self._admit = admit
        self._closed = False
        config = context.connector.config
        self._listener = listen_in_range(None, config.port_range)
        try:
            meeting = offer(config, self._listener, b"")
        except BaseException:
            self._listener.close()
            raise
        #: The text of the listener's address. Each process of the store makes a ticket from it and
        #: the key that it knows, so the key never travels.
        self.address = meeting.to_bytes().decode()
        self._thread = threading.Thread(target=self._run, name="pycoll-join", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        # poll() takes descriptors of any number; select() refuses those above 1023.
        poller = select.poll()
        poller.register(self._listener, select.POLLIN)
        while not self._closed:
            ready = poller.poll(1000 * _POLL_S)
            try:
                if ready and not self._closed:
                    self._receive()
            except (PycollError, OSError, ValueError):
                # The other process has the same error, or has no ticket of this store.
                continue
        self._listener.close()

    def _receive(self) -> None:
        limit = Deadline(_TIMEOUT_S)
        job = rendezvous_name(self._context.name)
        key = self._context.connector.key
        exchange = serve_store(self._listener.dup(), job, key, job, 2, limit)
        try:
            text = exchange.all_gather(b"{}")[1]
            exchange.all_gather(json.dumps(self._answer(text)).encode())
        except BaseException:
            exchange.abandon()
            raise
        exchange.close()

    def _answer(self, text: bytes) -> dict[str, Any]:
        try:
            request = json_object(read_json(text), JOIN_REQUEST)
            if refusal := self._refusal(request):
                return {"refused": refusal}
            return {"refused": "", **self._admit(Newcomer.from_bytes(request["newcomer"].encode()))}
        except (PycollError, ValueError) as error:
            return {"refused": str(error) or type(error).__name__}

    def _refusal(self, request: dict[str, Any]) -> str:
        if request["version"] != VERSION:
            return (
                f"the store speaks version {VERSION} (pycoll {__version__}), this process "
                f"version {request['version']} (pycoll {request['package'][:64]}): install the "
                "same pycoll everywhere"
            )
        _, replicas, consistency, _ = self._context.terms
        wanted = (request["replicas"], request["consistency"])
        if wanted[0] not in (-1, replicas) or wanted[1] not in ("", consistency):
            given = "" if wanted[0] < 0 else f"replicas={wanted[0]} "
            return (
                f"the store has replicas={replicas} and consistency {consistency}, this process "
                f"expects {given}{wanted[1][:64]}".rstrip()
                + ": leave them out, or pass the store's"
            )
        return ""

    def close(self) -> None:
        """End the thread, which closes the listener within ``_POLL_S`` seconds."""
        self._closed = True


def rendezvous_name(name: str) -> str:
    """Return the name of the rendezvous of a store's newcomers and servers."""
    # The text is part of the protocol: by it, processes of other versions learn of their refusal.
    return f"entrance of store {name}"
