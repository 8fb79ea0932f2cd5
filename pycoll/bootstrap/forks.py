"""Sockets whose end tells peers that this process has ended; a forked child must not hold them.

Native code closes the sockets of transports in forked children (base/life_signs.h). This module
does the same for sockets that Python owns: those over which ranks join, and the connection of an
elastic rank to the launcher.
"""

from __future__ import annotations

import os
import socket
import weakref

_held: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def end_with_process(sock: socket.socket) -> socket.socket:
    """Return ``sock``, which children made by os.fork() from now on close at once."""
    _held.add(sock)
    return sock


def _close_in_child() -> None:
    for sock in list(_held):
        sock.close()
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)
