"""Sockets that listen, and connections that notice when the other side is gone."""

import asyncio
import errno
import socket
import time

_TAKEN_S = 10.0  # a process that was killed may hold the port for a moment
_POLL_S = 0.2
_BACKLOG = 2048

_IDLE_S, _PROBE_S, _PROBES = 10, 5, 2
_UNACKNOWLEDGED_MS = 10_000


class CannotListen(RuntimeError):
    """An address cannot be had."""


def listening(host: str, port: int, setting: str) -> socket.socket:
    """A socket that listens there; port 0 draws a free one. Waits a while for a port that is taken.

    Raises:
        CannotListen: another process has the port, or the address is not this machine's; names the
            `setting`.
    """
    deadline = time.monotonic() + _TAKEN_S
    while True:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            family, _, _, _, address = found[0]
            return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise CannotListen(
                    f"{setting}: {host}:{port} cannot be used on the head node "
                    f"({error.strerror or error}); choose another or end what listens there"
                ) from error
            time.sleep(_POLL_S)


def notice_silence(transport: asyncio.BaseTransport) -> None:
    """Has the system break a connection whose other side has acknowledged nothing for 10 s, idle or
    not. A firewall that has forgotten a connection drops what is sent on it; by itself TCP would
    try for a quarter of an hour. Probes also keep a firewall from forgetting."""
    connection = transport.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, _IDLE_S),
        (socket.TCP_KEEPINTVL, _PROBE_S),
        (socket.TCP_KEEPCNT, _PROBES),
        (socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
