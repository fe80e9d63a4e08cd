from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest
import trio

from gymtrio.errors import HostError
from gymtrio.wire.calls_in import IncomingCall
from gymtrio.wire.channel import open_channel
from gymtrio.wire.listening import serve_channels
from gymtrio.wire.messages import Hello
from gymtrio.wire.unix import (
    connect_unix,
    open_unix_listener,
    peer_uid,
    runtime_directory,
)

ME = Hello(role="r", name="n", instance="i")


async def echo(call: IncomingCall) -> None:
    call.reply(body=await call.read(2**30))


async def serve(stream: trio.SocketStream) -> None:
    async with open_channel(
        stream, role="acceptor", me=ME, handler=echo, uid=peer_uid(stream)
    ) as channel:
        await channel.closed.wait()


async def test_calls_over_a_socket_file() -> None:
    """WRK-2"""
    with runtime_directory() as directory:
        async with open_unix_listener(directory / "s") as listener:
            async with trio.open_nursery() as nursery:
                await nursery.start(serve_channels, listener, serve)
                stream = await connect_unix(directory / "s")
                async with open_channel(stream, role="opener", me=ME) as channel:
                    body = b"x" * 3_000_000
                    assert (await channel.request("echo", body)).body == body
                nursery.cancel_scope.cancel()
        assert os.listdir(directory) == ["s.lock"]


async def test_the_socket_is_private_and_goes_with_its_listener(tmp_path: Path) -> None:
    """WRK-2"""
    path = tmp_path / "run" / "s"
    async with open_unix_listener(path):
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert sorted(os.listdir(path.parent)) == ["s", "s.lock"]
    assert not path.exists()


async def test_a_socket_that_a_dead_process_left_is_replaced_and_a_live_one_is_not(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run" / "s"
    path.parent.mkdir(mode=0o700)
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()
    async with open_unix_listener(path) as listener:
        with pytest.raises(HostError, match="held by another process"):
            async with open_unix_listener(path):
                pass
        stream = await connect_unix(path)
        await (await listener.accept()).aclose()
        await stream.aclose()


async def test_a_directory_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir(mode=0o755)
    link = tmp_path / "link"
    link.symlink_to(open_to_all)
    for directory, why in [(open_to_all, "closed to others"), (link, "not a directory")]:
        with pytest.raises(HostError, match=why):
            async with open_unix_listener(directory / "s"):
                pass


async def test_a_path_that_is_too_long_says_so(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 100) / "s"
    with pytest.raises(HostError, match="at most 100 bytes"):
        async with open_unix_listener(path):
            pass
    with pytest.raises(HostError, match="at most 100 bytes"):
        await connect_unix(path)
    with pytest.raises(HostError, match="at most 100 bytes"):
        long = tmp_path / ("x" * 60)
        long.mkdir()
        with runtime_directory(long):
            pass


async def test_a_peer_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """WRK-2"""
    path = tmp_path / "run" / "s"
    async with open_unix_listener(path) as listener, trio.open_nursery() as nursery:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        nursery.start_soon(listener.accept)
        stream = await trio.open_unix_socket(str(path))
        assert await stream.receive_some() == b""
        assert listener.refused == 1
        await stream.aclose()
        with pytest.raises(HostError, match="another user"):
            await connect_unix(path)
        nursery.cancel_scope.cancel()
