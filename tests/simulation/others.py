"""Others that disturb a run: controllers that believe the job is theirs, and callers of the past."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, Final

import attrs
import trio

from gymtrio.checkpoint.coordination import open_coordination
from gymtrio.checkpoint.members import CoordinationError
from gymtrio.errors import GymtrioError, TransportError
from gymtrio.ids import CheckpointId, parse_capture_key
from gymtrio.serving.client import Lane, ServerClient, peer_of_url
from gymtrio.serving.controlchannel import HttpControlChannel
from gymtrio.serving.deployment import DeploymentDirectory
from gymtrio.settings import Secret
from gymtrio.wire.control import PrepareRequest, ResumeRequest
from tests.simulation.history import History
from tests.simulation.network import DEAD, Exchange
from tests.simulation.processes import Process
from tests.simulation.servers import CONTROL_TOKEN, PARTICIPANTS, Surroundings, make_deployment
from tests.simulation.trainer import CHECKPOINT_TIMEOUT_S, Journal

EAGER_FOR_S: Final = 3.0
EAGER_REACTIONS_MAX: Final = 10
EAGER_AT_ONCE: Final = 36
"""In as many passes of the loop as it takes a resume to have its effect, and some more."""
EAGER_HOLDS_S: Final = 0.05


@attrs.frozen(kw_only=True)
class Others:
    around: Surroundings
    journal: Journal
    history: History
    is_dead: Callable[[Exchange], bool]
    """Whether the execution that a call belonged to ended in a crash of everything."""

    def _channel(self, process: Process) -> HttpControlChannel:
        deployment = make_deployment(recover=False)
        client = ServerClient(
            DeploymentDirectory(deployment), self.around.network.port(process), deployment.client
        )
        return HttpControlChannel(client, Secret(CONTROL_TOKEN))

    @contextmanager
    def _refused(self, who: str) -> Iterator[None]:
        try:
            yield
        except (CoordinationError, GymtrioError) as error:
            self.history.note(who, error)
            self.history.sometimes[f"{who} was refused"] += 1

    async def second_controller(self, process: Process) -> None:
        """One that believes the job is its own: the same ids, the same directories."""
        rng = random.Random(f"second {self.around.seed} {process}")
        channel = self._channel(process)
        for turn in range(3):
            name = f"c{max(1, self.journal.checkpoints_begun - rng.randrange(2))}"
            if rng.random() < 0.3:
                name = f"other-{turn}"
            with self._refused("a second controller"):
                async with open_coordination(
                    list(PARTICIPANTS),
                    channel,
                    wall_clock=self.around.wall_clock,
                    randomness=self.around.randomness(process),
                ) as controller:
                    async with controller.checkpoint(
                        CheckpointId(name), name, timeout_s=CHECKPOINT_TIMEOUT_S
                    ):
                        self.history.sometimes["a second controller held"] += 1
            await trio.sleep(rng.randrange(8) * 0.05)

    async def eager_controller(self, process: Process) -> None:
        """One that tries to close every server again in the very instant in which it opens."""
        channel = self._channel(process)
        until = trio.current_time() + EAGER_FOR_S
        names = (f"eager-{n}" for n in count(1))
        reactions = count(1)

        def notice(event: str) -> None:
            operation, _, server = event.partition(" at ")
            if operation != "resume" or not process.alive or trio.current_time() > until:
                return
            if next(reactions) > EAGER_REACTIONS_MAX:
                return
            for number in range(EAGER_AT_ONCE):
                name = next(names)
                process.spawn(self._close_once, channel, server, name, number // 2, name=name)

        self.history.listen(notice)
        await trio.sleep_until(until + 2 * EAGER_HOLDS_S)

    async def _close_once(
        self, channel: HttpControlChannel, server: str, name: str, passes: int
    ) -> None:
        for _ in range(passes):
            await trio.lowlevel.checkpoint()
        wall_s = self.around.wall_clock.now_s
        fields: dict[str, Any] = {"checkpoint_id": CheckpointId(name), "controller_nonce": "eager"}
        with self._refused("an eager controller"):
            prepare = PrepareRequest(deadline_ts=wall_s() + 2 * EAGER_HOLDS_S, **fields)
            by = trio.current_time() + EAGER_FOR_S
            await channel.call(server, "prepare", prepare, by)
            self.history.sometimes["an eager controller held"] += 1
            await trio.sleep(EAGER_HOLDS_S)
            resume = ResumeRequest(deadline_ts=wall_s() + 2.0, **fields)
            await channel.call(server, "resume", resume, by)

    async def stale_client(self, process: Process) -> None:
        """One that outlived a crash and sends again what superseded attempts had sent."""
        rng = random.Random(f"stale {self.around.seed} {process}")
        port = self.around.network.port(process)
        for _ in range(10):
            await trio.sleep(rng.randrange(12) * 0.05)
            old = [e for e in self.around.network.exchanges if self._is_superseded(e)]
            if not old:
                continue
            again = rng.choice(old[-40:])
            outgoing = again.outgoing
            if self.is_dead(again) and not again.dead:
                outgoing = outgoing._replace(headers=(*outgoing.headers, DEAD))
            self.history.sometimes["a stale request"] += 1
            if again.epoch is not None and self._is_current(again):
                self.history.sometimes["a stale request of an earlier restore"] += 1
            try:
                with trio.move_on_after(3):
                    origin = peer_of_url(f"http://{again.target.name}").origin
                    async with port.exchange(origin, outgoing, Lane.DATA):
                        pass
            except TransportError:
                pass

    def _is_superseded(self, exchange: Exchange) -> bool:
        if exchange.key is None or exchange.operation is not None or exchange.duplicate:
            return False
        if exchange.target.name not in PARTICIPANTS or exchange.path.startswith("/run"):
            # A `/run` of the present attempt is what anybody may ask for.
            return exchange.path == "/run" and self._is_older(exchange)
        return self._is_older(exchange) or self.is_dead(exchange)

    def _is_older(self, exchange: Exchange) -> bool:
        episode_id = parse_capture_key(str(exchange.key))
        return episode_id.attempt < self.journal.attempts.get(episode_id.rollout_id, 0)

    def _is_current(self, exchange: Exchange) -> bool:
        episode_id = parse_capture_key(str(exchange.key))
        return episode_id.attempt == self.journal.attempts.get(episode_id.rollout_id)
