"""A deployment without processes and sockets."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import MockClock

from gymtrio.context import RolloutContext
from gymtrio.errors import SettingsError
from gymtrio.ids import EpisodeId, RolloutId
from gymtrio.serving.deployment import Deployment, parse_deployment
from gymtrio.serving.embedded import open_embedded
from gymtrio.serving.http import Request, Response, json_response
from tests.helpers.serving import make_app

EXAMPLE = "tests.helpers.example_server:app"


def two(**settings: Any) -> Deployment:
    entry = {"app": EXAMPLE, "kind": "resources"}
    return parse_deployment({"servers": {"one": entry, "two": {**entry, "settings": settings}}})


async def test_servers_call_each_other_by_name(autojump_clock: MockClock) -> None:
    """SET-3: everything also embeds, inside the caller's trio program."""
    async with open_embedded(two(greeting="hi")) as embedded:
        reply: Any = (await embedded.client.request("one", "POST", "/ask?two")).json()
        assert (reply["instance"], reply["greeting"]) == ("two", "hi")
        assert embedded.client.url_of("two") == "http://two"


async def test_what_belongs_to_an_episode_says_so() -> None:
    """ID-5: also when it is called under its URL."""

    async def whose(request: Request) -> Response:
        return json_response(str(request.context.episode_id) if request.context else None)

    apps = {"one": make_app({}, fallback=whose, name="one")}
    context = RolloutContext(EpisodeId(RolloutId("r"), 1))
    async with open_embedded(two(), apps=apps) as embedded:
        for server in ("one", embedded.client.url_of("one")):
            reply = await embedded.client.request(server, "POST", "/x", context=context)
            assert reply.json() == "r-a1"


async def test_settings_are_checked_for_each() -> None:
    with pytest.raises(SettingsError, match=r"servers.two.settings.greting: unknown key"):
        async with open_embedded(two(greting="x")):
            pytest.fail("it opened")


async def test_a_failure_in_one_server_ends_the_block() -> None:
    with pytest.RaisesGroup(pytest.RaisesExc(RuntimeError, match="a background task failed")):
        async with open_embedded(two()) as embedded:
            await embedded.client.request("one", "POST", "/break-down")
            await trio.sleep_forever()
