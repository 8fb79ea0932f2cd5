"""Sockets that tell peers by their end that this process has ended, and that no child must hold.

Those of transports are native and look after themselves (base/life_signs.h); these are of Python:
what ranks meet over while they join, and an elastic rank's connection to the launcher.
"""

from __future__ import annotations

import os
import socket
import weakref

_held: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def end_with_process(sock: socket.socket) -> socket.socket:
    """``sock`` itself, which is closed in children that os.fork() makes from now on."""
    _held.add(sock)
    return sock


def _close_in_child() -> None:
    for sock in list(_held):
        sock.close()
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)
