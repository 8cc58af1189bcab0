"""TCP connections whose other side is gone without a word. Pure standard library."""

from __future__ import annotations

import socket


def break_when_silent(connection: socket.socket, silent_s: int, unacknowledged_s: int) -> None:
    """Has the system break a connection whose other side answers no keep-alive for `silent_s`, or
    has acknowledged nothing of what was sent for `unacknowledged_s`; by itself TCP would try for a
    quarter of an hour. Probes also keep a firewall from forgetting it."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, silent_s // 2),
        (socket.TCP_KEEPINTVL, silent_s // 4),
        (socket.TCP_KEEPCNT, 2),
        (socket.TCP_USER_TIMEOUT, 1000 * unacknowledged_s),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
