"""Games that a model plays by name: gymnasium environments, their actions and views in words.

A *game* is one session: an environment played for a number of rounds. Rounds share one random
generator: the cards of the second round depend on how many the first one took.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Final, TypeVar

import attrs
import gymnasium
from gymnasium.envs.toy_text.blackjack import sum_hand

from gymtrio.errors import InvalidCheckpointState, InvalidRequest, SettingsError
from gymtrio.strict import MalformedValue, nearest_name, structure, unstructure
from servers.resources.gymnasium_codec import (
    Env,
    SavedEnv,
    check_env,
    decode,
    encode,
    load_env,
    save_env,
)

T = TypeVar("T")

ROUNDS_MAX: Final = 100
"""Each is a handful of tool calls of one rollout."""
SEED_MAX: Final = 2**63 - 1


class Score(Enum):
    """How the rewards of the rounds become that of the game."""

    MEAN = "mean"
    SUM = "sum"


@attrs.frozen(kw_only=True)
class BlackjackArguments:
    natural: bool | None = None
    """A natural pays 1.5."""
    sab: bool | None = None
    """The rules of Sutton and Barto."""


@attrs.frozen(kw_only=True)
class LakeArguments:
    map_name: str | None = attrs.field(
        default=None, validator=attrs.validators.in_((None, "4x4", "8x8"))
    )
    is_slippery: bool | None = None


@attrs.frozen(kw_only=True)
class TaxiArguments:
    is_rainy: bool | None = None
    fickle_passenger: bool | None = None


@attrs.frozen(kw_only=True)
class CliffArguments:
    is_slippery: bool | None = None


View = Callable[[Any, Any], dict[str, object]]
"""From the innermost environment and its observation to what a model reads."""


@attrs.frozen(kw_only=True)
class GameKind:
    """One environment that is offered."""

    env_id: str
    arguments: type[Any]
    """Which of the environment's arguments a task may set."""
    fields: tuple[str, ...]
    """By which an environment in play differs from a new one."""
    actions: tuple[str, ...]
    """By number."""
    view: View
    final: View = lambda env, observation: {}
    """What is added to the view when a round is over."""

    def make(self, arguments: Mapping[str, object]) -> Env:
        """
        Raises:
            SettingsError: the installed gymnasium does not have it.
        """
        make: Any = gymnasium.make
        try:
            env: Env = make(self.env_id, disable_env_checker=True, **arguments)
            return env
        except gymnasium.error.UnregisteredEnv as error:
            raise SettingsError(f"{self.env_id}: {error}") from None

    def checked(self, arguments: Mapping[str, object]) -> dict[str, object]:
        """
        Raises:
            InvalidRequest: an argument that may not be set, or not so.
        """
        try:
            structure(self.arguments, dict(arguments))
        except (MalformedValue, ValueError) as error:
            raise InvalidRequest(f"{self.env_id}: kwargs: {error}") from None
        # An argument that is null is one that is not given.
        return {name: value for name, value in arguments.items() if value is not None}


def _blackjack_view(env: Any, observation: Any) -> dict[str, object]:
    total, dealer, ace = observation
    return {"your_sum": int(total), "usable_ace": bool(ace), "dealer_shows": int(dealer)}


def _blackjack_end(env: Any, observation: Any) -> dict[str, object]:
    hand: Any = sum_hand
    return {"dealer_sum": int(hand(env.dealer))}


def _grid_view(env: Any, observation: Any) -> dict[str, object]:
    row, column = divmod(int(observation), env.ncol)
    names = {b"S": "start", b"F": "ice", b"H": "hole", b"G": "goal"}
    return {"row": row, "column": column, "you_stand_on": names[bytes(env.desc[row, column])]}


_TAXI_PLACES: Final = ("red", "green", "yellow", "blue", "in the taxi")


def _taxi_view(env: Any, observation: Any) -> dict[str, object]:
    row, column, passenger, destination = env.decode(int(observation))
    return {
        "row": int(row),
        "column": int(column),
        "passenger": _TAXI_PLACES[passenger],
        "destination": _TAXI_PLACES[destination],
    }


def _cliff_view(env: Any, observation: Any) -> dict[str, object]:
    row, column = divmod(int(observation), env.shape[1])
    return {"row": row, "column": column}


_LAKE: Final = GameKind(
    env_id="FrozenLake-v1",
    arguments=LakeArguments,
    fields=("s", "lastaction"),
    actions=("left", "down", "right", "up"),
    view=_grid_view,
)
_TAXI: Final = GameKind(
    env_id="Taxi-v4",
    arguments=TaxiArguments,
    fields=("s", "lastaction", "taxi_orientation", "fickle_step"),
    actions=("south", "north", "east", "west", "pickup", "dropoff"),
    view=_taxi_view,
)

GAMES: Final[dict[str, GameKind]] = {
    kind.env_id: kind
    for kind in (
        GameKind(
            env_id="Blackjack-v1",
            arguments=BlackjackArguments,
            fields=("dealer", "player", "dealer_top_card_suit", "dealer_top_card_value_str"),
            actions=("stick", "hit"),
            view=_blackjack_view,
            final=_blackjack_end,
        ),
        _LAKE,
        attrs.evolve(_LAKE, env_id="FrozenLake8x8-v1"),
        _TAXI,
        GameKind(
            env_id="CliffWalking-v1",
            arguments=CliffArguments,
            fields=("s", "lastaction"),
            actions=("up", "right", "down", "left"),
            view=_cliff_view,
        ),
    )
}


def game_kind(env_id: str) -> GameKind:
    """
    Raises:
        SettingsError: no such game is known here.
    """
    if env_id not in GAMES:
        raise SettingsError(f"environment {env_id!r}{nearest_name(env_id, list(GAMES))}")
    return GAMES[env_id]


def _between(low: int, high: int) -> Callable[[object, attrs.Attribute[int], int], None]:
    def check(instance: object, attribute: attrs.Attribute[int], value: int) -> None:
        if not low <= value <= high:
            raise ValueError(f"{attribute.name}: {low}..{high}, got {value}")

    return check


@attrs.frozen(kw_only=True)
class GameTask:
    """What a row says about its game."""

    env_id: str
    seed: int = attrs.field(validator=_between(0, SEED_MAX))
    kwargs: dict[str, object] = attrs.field(factory=dict)
    rounds: int = attrs.field(default=1, validator=_between(1, ROUNDS_MAX))
    score: Score = Score.MEAN


@attrs.frozen(kw_only=True)
class SavedGame:
    env_id: str
    kwargs: dict[str, object]
    rounds: int
    score: Score
    rewards: list[float]
    reward: float
    observation: object
    env: SavedEnv


class Game:
    """One session; made by `start` or `load`."""

    def __init__(
        self, kind: GameKind, kwargs: dict[str, object], rounds: int, score: Score, env: Env
    ) -> None:
        self.kind = kind
        self.rewards: list[float] = []
        """Of the rounds that are over."""
        self._kwargs = kwargs
        self._rounds = rounds
        self._score = score
        self._env = env
        self._reward = 0.0
        """Of the round in play."""
        self._observation: object = None

    @classmethod
    def start(cls, kind: GameKind, task: GameTask, kwargs: dict[str, object]) -> Game:
        """Begin the first round.

        Args:
            kwargs: checked; those of the deployment and the task together.
        """
        env = kind.make(kwargs)
        check_env(env)
        game = cls(kind, kwargs, task.rounds, task.score, env)
        game._observation, _ = env.reset(seed=task.seed)
        return game

    def is_over(self) -> bool:
        return len(self.rewards) >= self._rounds

    def look(self) -> dict[str, object]:
        """What a model can see now."""
        seen = self.kind.view(self._env.unwrapped, self._observation)
        if self.is_over():
            return {**seen, "game_over": True}
        if self._rounds == 1:
            return seen
        return {"round": len(self.rewards) + 1, "of_rounds": self._rounds, **seen}

    def act(self, action: int) -> dict[str, object]:
        """Play one action, and begin the next round when that ends one.

        Raises:
            InvalidRequest: there is no such action, or the game is over.
        """
        if self.is_over():
            raise InvalidRequest("the game is over: no action is possible, give your answer")
        if not 0 <= action < len(self.kind.actions):
            named = ", ".join(f"{number} {name}" for number, name in enumerate(self.kind.actions))
            raise InvalidRequest(f"action {action} is not one of: {named}")
        self._observation, reward, terminated, truncated, _ = self._env.step(action)
        self._reward += float(reward)
        if not (terminated or truncated):
            return self.look()
        inner = self._env.unwrapped
        seen = {
            **self.kind.view(inner, self._observation),
            **self.kind.final(inner, self._observation),
        }
        ended = {**seen, "round_over": True, "reward": self._reward}
        self.rewards.append(self._reward)
        self._reward = 0.0
        if self.is_over():
            return {**ended, "game_over": True}
        # No seed: the generator goes on where this round left it.
        self._observation, _ = self._env.reset()
        return {**ended, "next": self.look()}

    def total(self) -> float:
        """The reward of the game as it stands; a round that was not played counts nothing."""
        total = sum(self.rewards) + self._reward
        return total / self._rounds if self._score is Score.MEAN else total

    def dump(self) -> object:
        """
        Raises:
            InvalidCheckpointState: the environment holds what cannot be kept.
        """
        saved: object = unstructure(
            SavedGame(
                env_id=self.kind.env_id,
                kwargs=self._kwargs,
                rounds=self._rounds,
                score=self._score,
                rewards=self.rewards,
                reward=self._reward,
                observation=encode(self._observation, "observation"),
                env=save_env(self._env, self.kind.fields),
            )
        )
        return saved

    @classmethod
    def load(cls, dumped: object) -> Game:
        """Invert `dump`.

        Raises:
            InvalidCheckpointState: it is not a game.
        """
        try:
            saved = structure(SavedGame, dumped)
            kind = game_kind(saved.env_id)
            kwargs = kind.checked(saved.kwargs)
        except (MalformedValue, SettingsError) as error:
            raise InvalidCheckpointState(str(error)) from None
        except InvalidRequest as refusal:
            raise InvalidCheckpointState(refusal.detail) from None
        env = kind.make(kwargs)
        load_env(env, kind.fields, saved.env)
        game = cls(kind, kwargs, saved.rounds, saved.score, env)
        game.rewards = saved.rewards
        game._reward = saved.reward
        game._observation = decode(saved.observation, "observation")
        return game
