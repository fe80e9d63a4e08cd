"""From a control message to the operation that serves it: one table for HTTP and for frames."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import attrs
import trio

from gymtrio.checkpoint.control import Control
from gymtrio.context import CheckpointWork, checkpoint_context
from gymtrio.errors import InvalidRequest, NotFound
from gymtrio.ids import EpisodeId, RolloutId
from gymtrio.storage.slices import ITEMS_AT_ONCE, LoopSlice
from gymtrio.strict import MalformedValue, structure
from gymtrio.wire.codec import from_json, json_to_plain
from gymtrio.wire.control import REQUESTS, ControlRequest, Reply

_OPERATIONS: Final[Mapping[str, Callable[[Control, Any], Awaitable[Reply]]]] = {
    "prepare": Control.prepare,
    "renew": Control.renew,
    "commit": Control.commit,
    "restore": Control.restore,
    "resume": Control.resume,
    "retire": Control.retire,
    "forget": Control.forget,
}
assert _OPERATIONS.keys() == REQUESTS.keys()

_SCOPE: Final = "episode_ids"


def parse_request(operation: str, body: bytes) -> ControlRequest:
    """Read a control body strictly.

    Raises:
        NotFound: no such operation.
        InvalidRequest: not JSON, an unknown or missing field, a wrong type; the detail has the
        path. InvalidRolloutId: an episode id outside the grammar.
    """
    cls = _class_of(operation)
    try:
        return from_json(cls, body)
    except MalformedValue as error:
        raise InvalidRequest(str(error)) from None


async def read_request(
    operation: str, body: bytes, to_plain: Callable[[bytes], object] = json_to_plain
) -> ControlRequest:
    """As `parse_request`, with a scope of thousands read in slices of the loop (STO-5).

    Args:
        to_plain: of the body's encoding; raises `MalformedValue`.
    """
    cls = _class_of(operation)
    try:
        plain = to_plain(body)
        scope = plain.get(_SCOPE) if isinstance(plain, dict) else None
        if not isinstance(plain, dict) or not isinstance(scope, list):
            return structure(cls, plain)
        await trio.lowlevel.checkpoint()
        # With the first, since some operations want one at least.
        head = structure(cls, {**plain, _SCOPE: scope[:1]})
        named: list[EpisodeId] = []
        slice_ = LoopSlice()
        for value in scope:
            named.append(_named(value, len(named)))
            if not len(named) % ITEMS_AT_ONCE:
                await slice_.turn()
        changes: dict[str, Any] = {_SCOPE: tuple(named)}
        return attrs.evolve(head, **changes)
    except MalformedValue as error:
        raise InvalidRequest(str(error)) from None


def _class_of(operation: str) -> type[ControlRequest]:
    cls = REQUESTS.get(operation)
    if cls is None:
        raise NotFound(f"no control operation {operation[:80]!r}")
    return cls


def _named(value: object, index: int) -> EpisodeId:
    if type(value) is dict and len(value) == 2:
        # What nearly all of thousands are; the strict way takes three times as long.
        rollout_id, attempt = value.get("rollout_id"), value.get("attempt")
        if type(rollout_id) is str and type(attempt) is int:
            return EpisodeId(RolloutId(rollout_id), attempt)
    try:
        return structure(EpisodeId, value)
    except MalformedValue as error:
        path = f"{_SCOPE}[{index}]" + (f".{error.path}" if error.path else "")
        raise MalformedValue(path, error.why) from None


async def perform(control: Control, operation: str, request: ControlRequest) -> Reply:
    """Serve one operation.

    Raises:
        Refusal: what the operation raises.

    Cancelled: what outlives the call is owned by the participant, see each operation.
    """
    work = CheckpointWork(request.checkpoint_id, lambda: control.phase.value)
    with checkpoint_context(work):
        return await _OPERATIONS[operation](control, request)
