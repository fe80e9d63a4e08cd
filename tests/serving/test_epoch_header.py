"""The header that tells executions of one attempt apart, between client and handler (HARD-11)."""

from __future__ import annotations

from typing import Any

import pytest

from gymtrio.context import RolloutContext, current_context, rollout_context
from gymtrio.errors import InvalidRequest
from gymtrio.ids import EpisodeId, RolloutId
from gymtrio.serving.http import Request, Response, json_response
from gymtrio.wire.control import Kind
from tests.helpers.serving import TRANSPORTS, Transported, make_app

R1 = EpisodeId(RolloutId("r"), 1)


async def tell(request: Request) -> Response:
    context, current = request.context, current_context()
    assert context == current
    return json_response(
        {"context": None if context is None else context.epoch, "header": request.epoch}
    )


@pytest.fixture(params=TRANSPORTS.values(), ids=TRANSPORTS.keys())
def open_client(request: pytest.FixtureRequest) -> Transported:
    transported: Transported = request.param
    return transported


async def test_every_call_on_behalf_of_an_execution_carries_its_epoch(
    open_client: Transported,
) -> None:
    """HARD-11: in the context where the path has the prefix, on the request in any case."""
    context = RolloutContext(R1, epoch="e1")
    for kind, path, within in (
        (Kind.RESOURCES, "/tool", "e1"),
        (Kind.MODEL, "/v1/responses", "e1"),
        (Kind.AGENT, "/v1/agent_sessions", None),
    ):
        async with open_client(make_app({}, fallback=tell, kind=kind)) as client:
            with rollout_context(context):
                told: Any = (await client.request("peer", "POST", path)).json()
                assert told == {"context": within, "header": "e1"}
                told = (await client.request("peer", "POST", path, context=None)).json()
                assert told == {"context": None, "header": None}
            with rollout_context(RolloutContext(R1)):
                told = (await client.request("peer", "POST", path)).json()
                assert told == {"context": None, "header": None}


async def test_what_is_no_epoch_is_refused(open_client: Transported) -> None:
    """HARD-11, I36."""
    async with open_client(make_app({}, fallback=tell)) as client:
        for context in (None, RolloutContext(R1)):
            reply = await client.request(
                "peer", "POST", "/x", headers=[("x-ng-epoch", "../x")], context=context
            )
            refused: Any = reply.json()
            assert reply.status == InvalidRequest.status
            assert "x-ng-epoch" in refused["error"]["detail"]
