"""What a server makes of its peers' answers."""

from __future__ import annotations

import pytest

from gymtrio.errors import (
    BackendFailed,
    InvalidRequest,
    PeerRefused,
    Refusal,
    RolloutIdRequired,
    SettingsError,
    StaleAttempt,
    TransportError,
)
from gymtrio.serving.http import Response, json_response
from gymtrio.serving.relayed import checkpoint_refusal, delivering, relaying


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (PeerRefused("x", 409, "stale_attempt", "r"), StaleAttempt),
        (PeerRefused("x", 400, "rollout_id_required", "r"), RolloutIdRequired),
        (PeerRefused("x", 400, "invalid_request", "r"), InvalidRequest),
        (PeerRefused("x", 404, None, "r"), InvalidRequest),
        (PeerRefused("x", 429, None, "r"), BackendFailed),
        (PeerRefused("x", 500, None, "r"), BackendFailed),
        (TransportError("gone"), BackendFailed),
        (SettingsError("no such server"), BackendFailed),
    ],
)
def test_a_peers_failure_is_told_to_our_caller(error: Exception, told: type[Refusal]) -> None:
    """CTL-17: refusals of the checkpoint protocol as they are; the rest by who is at fault."""
    with pytest.raises(told), relaying("the model"):
        raise error


def test_other_codes_are_no_refusals_of_the_protocol() -> None:
    """CTL-17."""
    assert checkpoint_refusal("not_found", "x") is None
    assert checkpoint_refusal(None, "x") is None
    assert checkpoint_refusal("checkpoint_conflict", "x") is not None


async def test_a_reply_carries_what_tells_that_it_is_out() -> None:
    """I2: a result and a refusal alike; a fault of ours is not delivered."""
    told: list[bool] = []

    async def result() -> Response:
        return json_response({})

    async def refused() -> Response:
        raise StaleAttempt("r")

    async def broken() -> Response:
        raise ZeroDivisionError

    for work, status in ((result, 200), (refused, 409)):
        response = await delivering(work, lambda: told.append)
        assert response.status == status
        assert told == []
        assert response.on_done is not None
        response.on_done(True)
        assert told == [True]
        told.clear()
    with pytest.raises(ZeroDivisionError):
        await delivering(broken, lambda: told.append)
    assert told == [False]
