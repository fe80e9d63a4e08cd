"""Gymnasium environments as a resources server: a model plays by tools (RES-8).

Every action is a tool of its own (`hit`, `stick`, `left`, ...), since that is what a small model can
do; `step` takes the number of any action and `observe` looks without acting. A session is exported
with its random generator, so that after a restore the same cards come.

    settings: {environments: {Blackjack-v1: {}, FrozenLake-v1: {is_slippery: false}}}
    row:      {responses_create_params: ..., env_id: Blackjack-v1, seed: 7, rounds: 3, score: mean}

A step takes microseconds and making an environment at most a few milliseconds, so both are done on
the loop.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial

import attrs

from gymtrio.errors import InvalidRequest, SettingsError
from gymtrio.serving.app import ServerApp
from gymtrio.serving.host import Service, ServiceHost
from gymtrio.serving.resources_server import (
    SessionId,
    SessionServer,
    Tool,
    Verdict,
    read_task,
    tool,
)
from gymtrio.serving.resources_service import resources_service
from gymtrio.strict import nearest_name
from servers.resources.gymnasium_codec import check_env
from servers.resources.gymnasium_games import Game, GameTask, game_kind


def _default_environments() -> dict[str, dict[str, object]]:
    return {"Blackjack-v1": {}, "FrozenLake-v1": {}}


@attrs.frozen(kw_only=True)
class GymnasiumSettings:
    environments: dict[str, dict[str, object]] = attrs.field(factory=_default_environments)
    """What tasks may play, each with arguments of its constructor; a task may set them, too."""


@attrs.frozen
class Step:
    action: int


class GymnasiumServer(SessionServer[Game]):
    """
    Raises:
        SettingsError: an environment that is not known, not installed or cannot be exported.
    """

    checkpoint_verify = "replay"
    """It only adds up."""

    def __init__(self, settings: GymnasiumSettings) -> None:
        super().__init__()
        self._kwargs: dict[str, dict[str, object]] = {}
        for env_id, kwargs in settings.environments.items():
            kind = game_kind(env_id)
            try:
                self._kwargs[env_id] = kind.checked(kwargs)
            except InvalidRequest as refusal:
                raise SettingsError(f"environments: {refusal.detail}") from None
            check_env(kind.make(kwargs))

    async def begin(self, task_data: Mapping[str, object]) -> Game:
        task = read_task(GameTask, task_data)
        if task.env_id not in self._kwargs:
            near = nearest_name(task.env_id, list(self._kwargs))
            raise InvalidRequest(f"env_id {task.env_id!r} is not offered here{near}")
        kind = game_kind(task.env_id)
        kwargs = {**self._kwargs[task.env_id], **kind.checked(task.kwargs)}
        return Game.start(kind, task, kwargs)

    def tools(self) -> Sequence[Tool]:
        names = {name for env_id in self._kwargs for name in game_kind(env_id).actions}
        return [*super().tools(), *(Tool(name, partial(self._act, name)) for name in sorted(names))]

    async def _act(self, name: str, session_id: SessionId) -> object:
        game = self.states[session_id]
        actions = game.kind.actions
        if name not in actions:
            raise InvalidRequest(
                f"{name} is no action of {game.kind.env_id}: it has {', '.join(actions)}"
            )
        return game.act(actions.index(name))

    @tool
    async def step(self, session_id: SessionId, arguments: Step) -> object:
        return self.states[session_id].act(arguments.action)

    @tool
    async def observe(self, session_id: SessionId) -> object:
        return self.states[session_id].look()

    async def verify(self, session_id: SessionId, task_data: Mapping[str, object]) -> Verdict:
        game = self.states[session_id]
        return {
            "reward": game.total(),
            "rounds_played": len(game.rewards),
            "round_rewards": list(game.rewards),
            "final_state": game.look(),
        }

    def dump_state(self, state: Game) -> object:
        return state.dump()

    def load_state(self, dumped: object) -> Game:
        return Game.load(dumped)


@asynccontextmanager
async def open_gymnasium(host: ServiceHost[GymnasiumSettings]) -> AsyncIterator[Service]:
    yield resources_service(GymnasiumServer(host.settings), host)


app = ServerApp(
    kind="resources",
    default_instance="gymnasium",
    settings_class=GymnasiumSettings,
    open_service=open_gymnasium,
)
