"""The server's side of the lifespan protocol, and applications of which some do not keep to it."""

from __future__ import annotations

from typing import Final

import pytest
import trio
import trio.testing

from gymtrio.context import AsgiApp, Receive, Scope, Send
from gymtrio.serving.lifespan import StartFailed, open_lifespan


async def ends_at_once(scope: Scope, receive: Receive, send: Send) -> None:
    """As one without a lifespan does that does not raise."""
    await trio.lowlevel.checkpoint()


async def ends_unasked(scope: Scope, receive: Receive, send: Send) -> None:
    await receive()
    await send({"type": "lifespan.startup.complete"})


async def never_asks(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "lifespan.startup.complete"})


async def asks_late(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "lifespan.startup.complete"})
    while (await receive())["type"] != "lifespan.shutdown":
        pass
    await send({"type": "lifespan.shutdown.complete"})


LOOSE: Final[dict[str, AsgiApp]] = {
    "at once": ends_at_once,
    "before it is asked to stop": ends_unasked,
    "without having asked anything": never_asks,
    "but answers before it has asked": asks_late,
}


@pytest.mark.parametrize("when", LOOSE)
@pytest.mark.parametrize("late", [False, True])
async def test_an_application_that_is_loose_about_it_is_served(when: str, late: bool) -> None:
    """SRV-1: the protocol is the application's to leave; the block ends as any other."""
    served = False
    async with open_lifespan(LOOSE[when]):
        if late:
            await trio.testing.wait_all_tasks_blocked()
        served = True
    assert served


def conversation(told: list[str], failing: str | None = None) -> AsgiApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while True:
            asked: str = (await receive())["type"]
            told.append(asked)
            end = "failed" if failing is not None and asked.endswith(failing) else "complete"
            await send({"type": f"{asked}.{end}", "message": "no reason"})
            if asked == "lifespan.shutdown":
                return

    return app


async def test_an_application_is_told_once_of_either_end() -> None:
    told: list[str] = []
    async with open_lifespan(conversation(told)):
        assert told == ["lifespan.startup"]
    assert told == ["lifespan.startup", "lifespan.shutdown"]


async def test_an_application_that_cannot_start_is_not_served() -> None:
    with pytest.raises(StartFailed, match="startup: no reason"):
        async with open_lifespan(conversation([], failing="startup")):
            pytest.fail("served")


@pytest.mark.parametrize("when", [0, 1])
async def test_an_application_that_raises_cancels_what_is_served(when: int) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if when:
            await receive()
            await send({"type": "lifespan.startup.complete"})
        raise RuntimeError("gone")

    with pytest.RaisesGroup(RuntimeError):
        async with open_lifespan(app):
            await trio.sleep_forever()
