"""A game of counting that several servers play, and what stays when all of them crash.

    model: what is the count?  tools: n  model: one more  tools: done  ...  model: that is all

What is asked depends on what was answered, and every token on all before it: whatever a crash lost,
doubled or changed shows in all that follows. The engine behind the policy server and the judge behind
the verification are a test's own; the servers between them are processes (`crashing.py`).
"""

from __future__ import annotations

import json
from typing import Any, Final

import attrs
import trio

from gymtrio.capture.replies import PROMPT_IDS, Route
from gymtrio.capture.tokens import TokenStore
from gymtrio.participants.policy.calls import BackendReply
from gymtrio.serving.http import Request, Response, json_response
from tests.helpers.memory_archive import Door
from tests.helpers.scripted_backend import LiveCall, ScriptedBackend, openai_reply

MOVES: Final = 2
CALLS: Final = 2 * MOVES + 1
"""Model calls of a game."""
TASK: Final[dict[str, object]] = {
    "responses_create_params": {
        "input": "count",
        "tools": [
            {"type": "function", "name": name}
            for name in ("get_counter_value", "increment_counter")
        ],
    },
    "initial_count": 0,
    "expected_count": MOVES,
}


def outputs_of(call: LiveCall) -> list[Any]:
    """What the tools have answered in the conversation so far."""
    conversation = call.body["input"]
    return [
        json.loads(item["output"])
        for item in conversation
        if item.get("type") == "function_call_output"
    ]


class GameEngine(ScriptedBackend):
    """Makes the moves; stops before one of them until it is let go on. Survives every crash."""

    def __init__(self, store: TokenStore) -> None:
        super().__init__(store)
        self.stops_at: int | None = None
        """Calls after so many tool outputs, or more, do not finish by themselves."""

    async def generate(
        self, route: Route, body: dict[str, object], *, call_id: str | None
    ) -> BackendReply:
        items = body["input"]
        assert isinstance(items, list)
        # An item tells the prompt that it answered; prompts would hold all earlier ones, five times.
        items = [{k: v for k, v in item.items() if k != PROMPT_IDS} for item in items]
        return await super().generate(route, body | {"input": items}, call_id=call_id)

    def goes_on(self, call: LiveCall) -> bool:
        return self.stops_at is None or len(outputs_of(call)) < self.stops_at

    async def held(self, count: int = 1) -> list[LiveCall]:
        """Wait until so many calls stop here."""
        while len(held := [call for call in self.live if not call.finish.is_set()]) < count:
            await self.arrived.wait()
        return held

    def asked(self) -> list[int]:
        """How many outputs each call had seen that ever came here, in order."""
        return [len(outputs_of(call)) for call in self.calls]

    def body_of(self, call: LiveCall) -> dict[str, Any]:
        outputs = outputs_of(call)
        moves, is_told = divmod(len(outputs), 2)
        body = openai_reply(call.route, call.token_ids)
        if is_told:
            assert outputs[-1] == {"count": moves}, "the tools know another moment than the agent"
            body["output"] = [_move("increment_counter", {"count": 1}, len(outputs))]
        elif moves < MOVES:
            body["output"] = [_move("get_counter_value", {}, len(outputs))]
        return body


def _move(name: str, arguments: dict[str, int], number: int) -> dict[str, Any]:
    return {
        "type": "function_call",
        "id": f"fc_{number}",
        "status": "completed",
        "name": name,
        "call_id": f"c{number}",
        "arguments": json.dumps(arguments),
    }


@attrs.define(eq=False)
class Judge:
    """Keeps every case, and answers when its door is open. Survives every crash."""

    door: Door = attrs.Factory(Door)
    cases: list[Any] = attrs.Factory(list)
    left: int = 0
    """Cases whose server left before the answer."""

    async def serve(self, request: Request) -> Response:
        self.cases.append(request.json())
        try:
            await self.door.pass_through()
        except trio.Cancelled:
            self.left += 1
            raise
        return json_response({"judged": True})
