from __future__ import annotations

import pytest
import trio

from gymtrio.context import (
    RolloutContext,
    current_episode,
    rollout_context,
    rollout_of_scope,
    split_rollout_path,
)
from gymtrio.errors import InvalidRolloutId
from gymtrio.ids import EpisodeId, RolloutId

EPISODE = EpisodeId(RolloutId("task-1.r0"), 2)


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("path", ["/v1/responses", "/", "/a/b%20c", "/training-token-capture"])
def test_the_prefix_comes_off_as_it_went_on(path: str, capture: bool) -> None:
    """ID-4: with and without the token capture segment."""
    context = RolloutContext(EPISODE, capture)
    assert split_rollout_path(context.path(path)) == (context, path)


def test_a_path_without_prefix_is_left_alone() -> None:
    """ID-4."""
    assert split_rollout_path("/v1/responses") == (None, "/v1/responses")
    assert split_rollout_path("/ng-rollouts/x/y") == (None, "/ng-rollouts/x/y")


@pytest.mark.parametrize("key", ["", "a%2Fb", "-x", "r-a" + "1" * 30])
def test_a_prefix_that_names_no_episode_is_refused(key: str) -> None:
    """ID-4, ID-1."""
    with pytest.raises(InvalidRolloutId):
        split_rollout_path(f"/ng-rollout/{key}/v1/responses")


@pytest.mark.parametrize("capture", [False, True])
def test_the_raw_path_keeps_its_encoding(capture: bool) -> None:
    """ID-4: an application behind the prefix sees the bytes that were sent to it."""
    context = RolloutContext(EPISODE, capture)
    scope = {
        "type": "http",
        "path": context.path("/a b/c"),
        "raw_path": context.path("/a%20b/c").encode(),
    }
    found, inner = rollout_of_scope(scope)
    assert found == context
    assert inner["path"] == "/a b/c"
    assert inner["raw_path"] == b"/a%20b/c"


async def test_tasks_inherit_the_episode_they_were_started_for() -> None:
    """ID-4, ID-5: calls made by a task that a request started carry its context."""
    seen: list[EpisodeId | None] = []

    async def child() -> None:
        seen.append(current_episode())

    async with trio.open_nursery() as nursery:
        with rollout_context(RolloutContext(EPISODE)):
            nursery.start_soon(child)
        nursery.start_soon(child)
    assert sorted(seen, key=repr) == [EPISODE, None]
    assert current_episode() is None
