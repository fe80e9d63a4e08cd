"""What a server must provide, and what becomes of its faults."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from gymtrio.errors import InvalidCheckpointState, InvalidRequest, SettingsError
from gymtrio.participants.resources import Mode, ResourcesParticipant, SessionId
from gymtrio.participants.resources.hooks import Hooks
from tests.participants.resources.harness import Counters

IDS = [SessionId("s1"), SessionId("s2")]


class Nothing:
    pass


class HalfOfThem:
    async def export_session_states(self, session_ids: Any) -> Any: ...

    def restore_session_states(self, states: Any) -> Any: ...


class OfAMixin(Nothing, Counters):
    pass


@pytest.mark.parametrize("server", [Nothing(), HalfOfThem(), None])
def test_an_exported_server_without_async_hooks_fails_at_start(server: Any) -> None:
    """RES-1 (scenario 26): the error names what is missing."""
    with pytest.raises(SettingsError, match="lacks .*async restore_session_states"):
        ResourcesParticipant("counter", mode=Mode.EXPORTED, server=server)


def test_hooks_of_a_mixin_count_and_the_other_modes_need_none() -> None:
    """RES-1 (scenario 26)."""
    ResourcesParticipant("counter", mode=Mode.EXPORTED, server=OfAMixin())
    ResourcesParticipant("counter", mode=Mode.STATELESS)
    ResourcesParticipant("counter", mode=Mode.RESTART_ONLY)


def test_a_server_fails_closed_unless_it_says_otherwise() -> None:
    """RES-1: the default of the base class is checked in tests/serving/test_resources_server.py."""
    assert Mode("restart_only") is Mode.RESTART_ONLY
    assert {mode.value for mode in Mode} == {"restart_only", "stateless", "exported"}


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (KeyError("boom"), "KeyError: 'boom'"),
        (InvalidRequest("not now"), "not now"),
        (ExceptionGroup("two", [OSError("disk"), OSError("full")]), "ExceptionGroup: two"),
    ],
)
async def test_whatever_a_hook_raises_becomes_one_error_that_names_the_sessions(
    failure: Exception, told: str
) -> None:
    """RES-1, CTL-17."""
    server = Counters()
    server.failure = failure
    hooks = Hooks("counter", Mode.EXPORTED, server)
    for call in (
        lambda: hooks.export(IDS, "session 's1' of r"),
        lambda: hooks.restore({IDS[0]: 1}, "session 's1' of r"),
        lambda: hooks.retire(IDS[0], "session 's1' of r"),
    ):
        with pytest.raises(InvalidCheckpointState) as raised:
            await call()
        assert "session 's1' of r" in raised.value.detail
        assert told in raised.value.detail


async def test_an_export_of_something_else_is_refused() -> None:
    """RES-1: not a mapping, or a session nobody asked for."""

    class Wrong(Counters):
        answer: Any = None

        async def export_session_states(self, session_ids: Any) -> Any:
            return self.answer

    server = Wrong()
    hooks = Hooks("counter", Mode.EXPORTED, server)
    for answer, why in ((None, "NoneType is not a mapping"), ({"s3": 1}, "'s3', which was not")):
        server.answer = answer
        with pytest.raises(InvalidCheckpointState, match=why):
            await hooks.export(IDS, "2 sessions")


async def test_a_cancelled_hook_is_no_fault_of_the_server() -> None:
    server = Counters()
    server.exporting.shut()
    hooks = Hooks("counter", Mode.EXPORTED, server)
    with trio.CancelScope() as scope:
        scope.cancel()
        await hooks.export(IDS, "2 sessions")
    assert scope.cancelled_caught


async def test_a_server_without_anything_to_free_is_not_asked_to() -> None:
    await Hooks("weather", Mode.STATELESS, Nothing()).retire(IDS[0], "x")
