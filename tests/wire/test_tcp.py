from __future__ import annotations

import socket

import pytest
import trio

from gymtrio.errors import HostError
from gymtrio.settings import Secret
from gymtrio.wire.bounds import ChannelLimits
from gymtrio.wire.calls_in import IncomingCall
from gymtrio.wire.channel import open_channel
from gymtrio.wire.errors import ChannelLost
from gymtrio.wire.listening import serve_channels
from gymtrio.wire.messages import Type, encode
from gymtrio.wire.tcp import connect_tcp, listener_port, open_tcp_listener
from tests.helpers.dialogues import ACCEPTOR, OPENER

TOKEN = Secret("0123456789abcdef")
HOST = "127.0.0.1"


async def echo(call: IncomingCall) -> None:
    call.reply(b"", await call.read(2**30))


async def serve(stream: trio.SocketStream) -> None:
    async with open_channel(
        stream, role="acceptor", me=ACCEPTOR, handler=echo, token=TOKEN
    ) as channel:
        await channel.closed.wait()


async def test_calls_between_hosts_and_no_call_without_the_token() -> None:
    """I35"""
    async with open_tcp_listener(HOST, 0) as listener, trio.open_nursery() as nursery:
        port = listener_port(listener)
        await nursery.start(serve_channels, listener, serve)
        stream = await connect_tcp(HOST, port)
        assert stream.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        async with open_channel(stream, role="opener", me=OPENER, token=TOKEN) as channel:
            assert channel.peer.uid is None
            for token in (None, Secret("wrong" * 4)):
                with pytest.raises(ChannelLost, match="unauthorized"):
                    async with open_channel(
                        await connect_tcp(HOST, port), role="opener", me=OPENER, token=token
                    ):
                        pytest.fail("let in")
            body = b"x" * 2_000_000
            assert (await channel.request("echo", body)).body == body
        nursery.cancel_scope.cancel()


async def test_who_sends_garbage_ends_its_own_connection_and_no_other() -> None:
    """SRV-1, I36"""
    async with open_tcp_listener(HOST, 0) as listener, trio.open_nursery() as nursery:
        port = listener_port(listener)
        await nursery.start(serve_channels, listener, serve)
        async with open_channel(
            await connect_tcp(HOST, port), role="opener", me=OPENER, token=TOKEN
        ) as channel:
            for garbage in (
                b"GET / HTTP/1.1\r\n\r\n",
                b"gy\x01\x01\xff\xff\xff\xff\0\0\0\0",
                encode(Type.CALL, (0, "echo", b"", b"", None)),
                bytes(100_000),
            ):
                stream = await connect_tcp(HOST, port)
                await stream.send_all(garbage)
                with trio.fail_after(5):
                    try:
                        while await stream.receive_some():
                            pass
                    except trio.BrokenResourceError:
                        pass
                await stream.aclose()
                assert (await channel.request("echo", b"still")).body == b"still"
            leaver = await connect_tcp(HOST, port)
            await leaver.aclose()
        nursery.cancel_scope.cancel()


async def test_connections_over_the_limit_are_closed_at_once() -> None:
    """SRV-5"""
    async with open_tcp_listener(HOST, 0) as listener, trio.open_nursery() as nursery:
        port = listener_port(listener)

        async def serve_one(listener: trio.SocketListener) -> None:
            await serve_channels(listener, serve, connections_max=1)

        nursery.start_soon(serve_one, listener)
        async with open_channel(
            await connect_tcp(HOST, port), role="opener", me=OPENER, token=TOKEN
        ) as channel:
            stream = await connect_tcp(HOST, port)
            with trio.fail_after(ChannelLimits().handshake_timeout_s / 2):
                assert await stream.receive_some() == b""
            await stream.aclose()
            assert (await channel.request("echo", b"x")).body == b"x"
        nursery.cancel_scope.cancel()


async def test_an_address_that_is_taken_says_so() -> None:
    async with open_tcp_listener(HOST, 0) as listener:
        with pytest.raises(HostError, match="cannot listen on 127.0.0.1"):
            async with open_tcp_listener(HOST, listener_port(listener)):
                pytest.fail("bound twice")
