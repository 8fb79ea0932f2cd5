"""Connections begin with a congestion control that does not pace."""

from __future__ import annotations

import socket

from pycoll.bootstrap.discovery.network import listen_tcp, tcp_socket

CONGESTION = (socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)


def kind(sock: socket.socket) -> str:
    return sock.getsockopt(*CONGESTION).rstrip(b"\0").decode()


def test_both_ends_are_unpaced_from_their_first_packet() -> None:
    with listen_tcp("127.0.0.1") as listener, tcp_socket("127.0.0.1") as near:
        assert kind(listener) in ("cubic", "dctcp")
        assert kind(near) in ("cubic", "dctcp")
        near.connect(listener.getsockname())
        far, _ = listener.accept()
        with far:
            assert kind(far) in ("cubic", "dctcp")


def test_also_with_ipv6() -> None:
    with listen_tcp("::1") as listener, tcp_socket("::1") as near:
        near.connect(listener.getsockname())
        assert listener.family == near.family == socket.AF_INET6
        assert kind(near) in ("cubic", "dctcp")
