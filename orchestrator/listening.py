"""Sockets that listen, and connections that notice when the other side is gone."""

import asyncio
import errno
import socket
import time

from overstory.workers.silence import break_when_silent

_TAKEN_S = 10.0  # a process that was killed may hold the port for a moment
_POLL_S = 0.2
_BACKLOG = 2048

_SILENT_S, _UNACKNOWLEDGED_S = 20, 10


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
    not (`break_when_silent`). A firewall that has forgotten a connection drops what is sent."""
    break_when_silent(transport.get_extra_info("socket"), _SILENT_S, _UNACKNOWLEDGED_S)
