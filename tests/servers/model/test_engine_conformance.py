"""The embedded engine runs the checks that every native engine is to run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import count
from typing import Any, Final

import attrs
import pytest

from gymtrio.capture.conformance import NotConforming
from gymtrio.capture.cuts import EXTENSION_KEY
from gymtrio.capture.log_store import open_log_store
from gymtrio.capture.replies import Route
from gymtrio.ports import HostRandomness
from gymtrio.serving.client import Reply, ServerClient
from gymtrio.serving.engine_conformance import (
    ENGINE_CHECKS,
    EngineCheck,
    EngineUnderTest,
    a_continued_call_is_the_uncut_one,
)
from tests.helpers.served_engine import TOKEN, ServedEngine, open_engine_client

CALL: Final[dict[str, Any]] = {
    "messages": [{"role": "user", "content": "Write a long story about a fox and a cat."}],
    "max_tokens": 24,
    "temperature": 0,
}
NUMBERS: Final = count()


@pytest.fixture
async def engine(served: ServedEngine) -> AsyncIterator[EngineUnderTest]:
    async with (
        open_engine_client(served.url) as client,
        open_log_store(served.state_dir / "tokens", randomness=HostRandomness()) as store,
    ):
        yield EngineUnderTest(
            client.client,
            served.url,
            TOKEN,
            store,
            CALL,
            ids=lambda: f"conforming-{next(NUMBERS)}",
        )


@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
async def test_it_conforms(check: EngineCheck, engine: EngineUnderTest) -> None:
    """CUT-1, CUT-4, CUT-8"""
    await check(engine)


class _Forgetful(ServerClient):
    """Loses the continuation of every call on its way."""

    def __init__(self, client: ServerClient) -> None:
        self._client = client

    async def request(self, server: str, method: str, path: str, **given: Any) -> Reply:
        body = given.get("json")
        if path == Route.CHAT.value and isinstance(body, dict):
            extension = body[EXTENSION_KEY] | {"continuation": None}
            given["json"] = body | {EXTENSION_KEY: extension}
        return await self._client.request(server, method, path, **given)


async def test_the_checks_find_an_engine_that_starts_over(engine: EngineUnderTest) -> None:
    """The oracle is tested, too: the tokens are equal, and yet nothing was continued."""
    forgetful = attrs.evolve(engine, client=_Forgetful(engine.client))
    with pytest.raises(NotConforming, match="a wrong count of continued"):
        await a_continued_call_is_the_uncut_one(forgetful)
