"""From bodies to messages, and what thousands of ids do to the loop meanwhile."""

from __future__ import annotations

import pytest
import trio

from gymtrio.checkpoint.dispatch import parse_request, read_request
from gymtrio.ids import CheckpointId, EpisodeId, RolloutId
from gymtrio.storage import slices
from gymtrio.wire.codec import to_json
from gymtrio.wire.control import CommitRequest, ControlRequest, PrepareRequest, RestoreRequest
from tests.helpers.passes import Passes

IDS = tuple(EpisodeId(RolloutId(f"r{number}"), number % 3) for number in range(50))
BASE = {"checkpoint_id": CheckpointId("c"), "deadline_ts": 1.0}


@pytest.mark.parametrize(
    ("operation", "request_"),
    [
        ("prepare", PrepareRequest(**BASE)),
        ("commit", CommitRequest(**BASE, checkpoint_dir="d")),
        ("commit", CommitRequest(**BASE, checkpoint_dir="d", episode_ids=(), stop=True)),
        ("restore", RestoreRequest(**BASE, checkpoint_dir="d", episode_ids=IDS)),
    ],
)
async def test_reading_in_slices_is_parsing(operation: str, request_: ControlRequest) -> None:
    """CTL-1."""
    body = to_json(request_)
    assert await read_request(operation, body) == request_ == parse_request(operation, body)


async def test_a_scope_is_read_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """STO-5: others run meanwhile."""
    monkeypatch.setattr(slices, "LOOP_SLICE_S", 0.0)
    passes = Passes()

    named = IDS * 20
    body = to_json(CommitRequest(**BASE, checkpoint_dir="d", episode_ids=named))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(passes.run)
        await read_request("commit", body)
        nursery.cancel_scope.cancel()
    # One slice per handful; the first and the last may share a pass with the start and the end.
    assert passes.count >= len(named) // slices.ITEMS_AT_ONCE - 2
