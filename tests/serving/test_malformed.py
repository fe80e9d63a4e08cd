"""Every kind of server against every kind of peer: malformed, mutated, hostile, gone."""

from __future__ import annotations

import json
import os
import random
import socket
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import h11
import pytest
import trio
from hypothesis import settings

from gymtrio.serving.client import Reply, ServerClient
from gymtrio.serving.deployment import Bind
from gymtrio.serving.launch import bind_socket, bound_to
from gymtrio.serving.pool import open_pool
from tests.helpers.every_kind import SORTS, Sort, control, open_waiting
from tests.helpers.malformed import (
    ATTACKS,
    CHUNKED,
    HEALTH,
    POST,
    TO_THE_APPLICATION,
    Attack,
    Ending,
    Valid,
    mutant,
)
from tests.helpers.serving import LOOPBACK, client_of, serve_on_sockets
from tests.serving.raw_peers import everything, one_answer

AT_ONCE: Final = 32
STOPS_WITHIN_S: Final = 30
PATIENCE_S: Final = 40
MUTANTS: Final = min(4 * settings().max_examples, 5_000)
"""Of each kind of server: hundreds in an ordinary run, thousands in a nightly one."""

FD: Final = Path("/proc/self/fd")


def descriptors() -> int:
    return len(os.listdir(FD))


async def send(stream: trio.SocketStream, attack: Iterable[bytes], ending: Ending) -> None:
    try:
        for segment in attack:
            await stream.send_all(segment)
        if ending is Ending.HALF_CLOSE:
            await stream.send_eof()
    except trio.BrokenResourceError:
        # It was told already; what it was told can still be read.
        pass
    if ending is Ending.RESET:
        linger = struct.pack("ii", 1, 0)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)


async def attack_with(bind: Bind, segments: Iterable[bytes], ending: Ending) -> bytes:
    """Be that peer; what it was told."""
    stream = await trio.open_tcp_stream(bind.host, bind.port)
    async with stream:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send, stream, segments, ending)
            if ending is Ending.ASK:
                return await one_answer(stream)
            if ending in (Ending.HALF_CLOSE, Ending.STAY):
                return await everything(stream)
    return b""


def answers(data: bytes) -> list[int]:
    """The statuses of what was answered, every byte of which must make sense."""
    statuses: list[int] = []
    while data:
        reader = h11.Connection(h11.CLIENT, max_incomplete_event_size=2**20)
        reader.send(h11.Request(method="POST", target="/", headers=[("host", "a")]))
        reader.send(h11.EndOfMessage())
        reader.receive_data(data)
        reader.receive_data(b"")
        status, headers, body = 0, {}, b""
        while reader.their_state not in (h11.DONE, h11.MUST_CLOSE, h11.CLOSED):
            try:
                event = reader.next_event()
            except h11.RemoteProtocolError:
                # It was told to go on with its body, and left.
                assert status == 0, data[:400]
                return statuses
            if isinstance(event, h11.Response):
                status = event.status_code
                headers = {bytes(name): bytes(value) for name, value in event.headers}
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
        statuses.append(status)
        if status >= 400:
            assert headers[b"content-type"] == b"application/json", data[:400]
            assert json.loads(body)["error"].keys() >= {"code", "detail"}
        data = reader.trailing_data[0]
    return statuses


async def check(bind: Bind, attack: Attack, valid: Valid) -> None:
    """Attack, and look at what is answered."""
    segments = [valid.bytes_of(segment) for segment in attack.segments]
    with trio.move_on_after(PATIENCE_S) as patience:
        told = await attack_with(bind, segments, attack.ending)
    assert not patience.cancelled_caught, f"{attack.name}: not answered"
    statuses = answers(told)
    assert len(statuses) <= attack.answers_max, f"{attack.name}: {statuses}"
    if attack.statuses:
        assert statuses, f"{attack.name}: no answer"
        assert statuses[-1] in attack.statuses, f"{attack.name}: {statuses}"


class Company:
    """The other peers: one whose request waits at the gate, one who asks all the time."""

    def __init__(self, client: ServerClient) -> None:
        self.client = client
        self.asked = 0
        self.parked: list[int] = []

    async def ask(self) -> None:
        while True:
            reply = await self.client.request("peer", "GET", "/health", context=None)
            assert reply.status == 200
            self.asked += 1

    async def park(self, wait: Callable[[], Awaitable[Reply]]) -> None:
        self.parked.append((await wait()).status)


@asynccontextmanager
async def in_company(sort: Sort, directory: Path, patch: Any) -> AsyncIterator[tuple[Bind, Any]]:
    """Serve; all others must have been served, nothing be left over, and the server end in time."""
    app = sort.make_app(directory, patch)
    before = descriptors()
    with trio.CancelScope() as stopping:
        async with serve_on_sockets(app) as bind:
            served = descriptors()
            async with open_pool() as pool, trio.open_nursery() as nursery:
                client = client_of(pool, bind, sort.kind)
                company = Company(client)
                nursery.start_soon(company.ask)
                yield bind, company
                assert company.asked > 0
                nursery.cancel_scope.cancel()
            with trio.fail_after(STOPS_WITHIN_S):
                while descriptors() > served:  # noqa: ASYNC110 - the kernel tells nobody
                    await trio.sleep(0.01)
            stopping.deadline = trio.current_time() + STOPS_WITHIN_S
    assert not stopping.cancelled_caught, "it did not stop in time"
    assert descriptors() <= before


async def every(attack: Callable[[Any], Any], data: Iterable[Any]) -> None:
    """Some at a time; all that went wrong is told."""
    limiter = trio.CapacityLimiter(AT_ONCE)
    wrong: list[str] = []

    async def one(item: Any) -> None:
        async with limiter:
            try:
                await attack(item)
            except AssertionError as error:
                wrong.append(str(error).partition("\nassert")[0])

    async with trio.open_nursery() as nursery:
        for item in data:
            nursery.start_soon(one, item)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("kind", SORTS)
async def test_a_malformed_peer_disturbs_nobody(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SRV-1, SRV-5: whatever it sends; neither who is parked, nor who asks, nor descriptors."""
    sort = SORTS[kind]
    valid = sort.valid
    async with in_company(sort, tmp_path, monkeypatch) as (bind, company):
        wait = await open_waiting(company.client, sort)
        await control(company.client, "prepare")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(company.park, wait)
            await every(lambda attack: check(bind, attack, valid), ATTACKS)
            assert company.parked == []
            await control(company.client, "resume")
        assert company.parked in ([200], [502])
        await every(lambda attack: check(bind, attack, valid), ATTACKS)


@pytest.mark.hypothesis
@pytest.mark.parametrize("kind", SORTS)
async def test_mutants_of_requests_disturb_nobody(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """SRV-1: requests with a few bytes changed, cut anywhere, at a closed gate and at an open one."""
    sort = SORTS[kind]
    rnd = random.Random(f"{os.environ.get('GYMTRIO_TEST_SEED')} {request.node.nodeid}")
    mutants = [(mutant(rnd, sort.valid), rnd.choice(list(Ending))) for _ in range(MUTANTS)]

    async def attack(of: tuple[tuple[bytes, ...], Ending]) -> None:
        segments, ending = of
        # One that stays is owed nothing: what it sent may be half a request.
        ending = Ending.HALF_CLOSE if ending in (Ending.STAY, Ending.ASK) else ending
        with trio.move_on_after(PATIENCE_S) as patience:
            answers(await attack_with(bind, segments, ending))
        assert not patience.cancelled_caught, segments

    async with in_company(sort, tmp_path, monkeypatch) as (bind, company):
        wait = await open_waiting(company.client, sort)
        await control(company.client, "prepare")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(company.park, wait)
            await every(attack, mutants[::2])
            assert company.parked == []
            await control(company.client, "resume")
        assert company.parked in ([200], [409], [502])
        await every(attack, mutants[1::2])


@pytest.mark.parametrize("kind", SORTS)
async def test_an_application_says_what_is_wrong_under_plain_hypercorn(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SRV-5, SET-2: errors are JSON there too; what its HTTP itself cannot stand is not ours."""
    sort = SORTS[kind]
    sort.make_app(tmp_path, monkeypatch)
    with bind_socket(LOOPBACK, "peer") as sock:
        bind, descriptor = bound_to(sock), sock.fileno()
        command = [sys.executable, "-m", "hypercorn", "-k", "trio", sort.app]
        command += ["--bind", f"fd://{descriptor}", "--log-level", "WARNING"]
        process = await trio.lowlevel.open_process(command, pass_fds=[descriptor])
    try:
        await every(lambda attack: check(bind, attack, sort.valid), TO_THE_APPLICATION)
        async with open_pool() as pool:
            reply = await client_of(pool, bind, sort.kind).request("peer", "GET", "/ready")
            assert reply.status == 200
        assert process.poll() is None
        process.terminate()
        with trio.fail_after(STOPS_WITHIN_S):
            assert await process.wait() == 0
    finally:
        process.kill()
        await process.wait()


ENDLESS: Final[dict[str, tuple[bytes, bytes]]] = {
    "line ends": (b"", b"\r\n" * 8_192),
    "a method": (b"", b"X" * 16_384),
    "a target": (b"GET /", b"x" * 16_384),
    "a header": (b"GET / HTTP/1.1\r\nhost: a\r\nx: ", b"y" * 16_384),
    "headers": (b"GET / HTTP/1.1\r\nhost: a\r\n", b"x: y\r\n" * 2_048),
    "a chunk's size": (CHUNKED, b"0" * 16_384),
    "a chunk's extension": (CHUNKED + b"4;", b"x" * 16_384),
    "chunks of one byte": (CHUNKED, b"1\r\nx\r\n" * 2_048),
    "trailers": (CHUNKED + b"0\r\n", b"x: y\r\n" * 2_048),
    "requests": (b"", HEALTH * 512),
    "requests behind one that is served": (POST, HEALTH * 512),
    "bytes behind one that is served": (POST, b"\x00" * 16_384),
}
"""How it begins, and what comes then without an end."""

ENDLESS_BYTES: Final = 2 * 2**20
ENDLESS_PEERS: Final = 16
SLOW_TO_READ: Final = frozenset({"chunks of one byte"})
"""Fewer of these are enough: each byte that was kept by itself would cost a hundred."""


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("what", ENDLESS)
async def test_what_does_not_end_is_not_kept(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SRV-1, SRV-5: many peers at once that send without end, at a closed gate; memory is bounded."""
    sort = SORTS["environment"]
    begin, then = ENDLESS[what]
    sent_bytes = ENDLESS_BYTES // (8 if what in SLOW_TO_READ else 1)
    segments = [sort.valid.bytes_of(begin), *[then] * (sent_bytes // len(then))]
    highest = 0

    async def look() -> None:
        nonlocal highest
        while True:
            highest = max(highest, resident_bytes())
            await trio.sleep(0.01)

    async def attack(number: int) -> None:
        with trio.move_on_after(PATIENCE_S):
            await attack_with(bind, segments, Ending.HALF_CLOSE)

    async with in_company(sort, tmp_path, monkeypatch) as (bind, company):
        await control(company.client, "prepare")
        await every(attack, [0])
        before = resident_bytes()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(look)
            await every(attack, range(ENDLESS_PEERS))
            nursery.cancel_scope.cancel()
    assert highest - before < ENDLESS_PEERS * ENDLESS_BYTES
