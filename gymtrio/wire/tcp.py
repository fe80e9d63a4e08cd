"""Connections between hosts: the handshake carries the token, without which nothing is accepted.

The token and all that follows travel in the clear, as they do over HTTP: the network between hosts of a
deployment is its own, or a tunnel.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import trio

from gymtrio.errors import HostError

BACKLOG: Final = 4096
CONNECT_TIMEOUT_S: Final = 10.0
"""A host that does not answer is given up sooner than the system would."""
KEEP_ALIVE_IDLE_S: Final = 5


@asynccontextmanager
async def open_tcp_listener(host: str, port: int) -> AsyncIterator[trio.SocketListener]:
    """Listen on one address.

    Args:
        port: 0 for a free one.

    Raises:
        HostError: the address is taken or not of this host.

    Cancelled: nothing of it is left.
    """
    try:
        listeners = await trio.open_tcp_listeners(port, host=host, backlog=BACKLOG)
    except OSError as error:
        raise HostError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    first, *others = listeners
    try:
        for other in others:
            other.socket.close()
        yield first
    finally:
        await trio.aclose_forcefully(first)


def listener_port(listener: trio.SocketListener) -> int:
    """The port that is bound."""
    address = listener.socket.getsockname()
    return int(address[1])


async def connect_tcp(host: str, port: int) -> trio.SocketStream:
    """Connect to a listener of another host.

    Raises:
        OSError: nobody answers there.

    Cancelled: no stream is left open.
    """
    with trio.move_on_after(CONNECT_TIMEOUT_S):
        stream = await trio.open_tcp_stream(host, port)
        tune(stream)
        return stream
    raise TimeoutError(f"{host}:{port} does not answer within {CONNECT_TIMEOUT_S:g} s")


def tune(stream: trio.SocketStream) -> None:
    """Notice a host that is gone. That it sends at once, trio has seen to."""
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEP_ALIVE_IDLE_S)
