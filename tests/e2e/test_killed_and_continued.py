"""The demo's story as a test: real processes, a real model, SIGKILL of every process group.

The undisturbed run is shared; each test kills a deployment of its own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
import trio

from gymtrio.checkpoint.coordination import Controller
from gymtrio.cli.demonstration.evidence import Evidence
from gymtrio.cli.demonstration.scenario import CHECKPOINT, TIMEOUT_S, Life, Progress, Scenario
from gymtrio.cli.demonstration.tasks import make_tasks
from gymtrio.context import RolloutContext
from gymtrio.ids import EpisodeId, RolloutId
from gymtrio.participants.resources.record import ResourcesRecord
from gymtrio.storage.disk import ThreadDisk
from gymtrio.storage.reader import read_checkpoint
from gymtrio.storage.root import Place
from gymtrio.strict import unstructure
from gymtrio.wire.codec import unpack
from gymtrio.wire.control import Kind
from gymtrio.wire.native import SeedSessionRequest, TaskId

ROLLOUTS = 4
SEED = 11

pytestmark = pytest.mark.timeout(600)


class Quiet:
    """Implements `gymtrio.cli.demonstration.scenario.Watcher`."""

    def stage(self, text: str) -> None:
        """Nothing to show."""

    def progress(self, rollouts: dict[RolloutId, Progress]) -> None:
        """Nothing to show."""


@attrs.frozen
class Undisturbed:
    scenario: Scenario
    evidence: dict[RolloutId, Evidence]


def scenario_in(directory: Path) -> Scenario:
    return Scenario(
        directory=directory, rollouts=ROLLOUTS, seed=SEED, kill_at=None, watcher=Quiet()
    )


@pytest.fixture(scope="module")
def undisturbed() -> Iterator[Undisturbed]:
    with tempfile.TemporaryDirectory(prefix="gymtrio-e2e-") as made:
        scenario = scenario_in(Path(made))
        yield Undisturbed(scenario, trio.run(scenario.run_undisturbed))


def test_the_undisturbed_run_is_worth_comparing(undisturbed: Undisturbed) -> None:
    """Rollouts have several turns, call tools that answer, and keep the tokens of every call."""
    for evidence in undisturbed.evidence.values():
        assert len(evidence.calls) >= 2
        assert len(evidence.tool_outputs) >= 1
        assert all(ids and len(ids) == len(logs) for _, ids, logs in evidence.tokens)
    transcripts = [evidence.transcript for evidence in undisturbed.evidence.values()]
    assert any(transcript != transcripts[0] for transcript in transcripts)


@pytest.mark.parametrize("policy_workers", [1, 2])
def test_killed_rollouts_end_as_if_nothing_had_happened(
    undisturbed: Undisturbed, tmp_path: Path, policy_workers: int
) -> None:
    """E2E-1, SET-2, WRK-1, ENV-3, AGT-1, RES-6, CUT-4, ID-3: calls, tokens, tool outputs and state;
    with one and with two policy workers."""
    scenario = attrs.evolve(scenario_in(tmp_path), policy_workers=policy_workers)
    outcome = trio.run(scenario.run_killed, undisturbed.evidence)
    assert outcome.equal
    killed = [rollout for rollout in outcome.rollouts if rollout.killed]
    assert killed
    assert sum(rollout.saved.calls for rollout in killed) >= 1
    for rollout in killed:
        # Not one call before the boundary was made again, and not one is missing (I5).
        assert len(rollout.second.calls) == len(rollout.undisturbed.calls)
        before = [row for row in rollout.second.calls if "-a" not in row.staged_under]
        assert rollout.second.calls[: len(before)] == tuple(before)


def test_without_the_resources_state_the_comparison_fails(
    undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """E2E-1: the negative control. Sessions begin anew where their state is not restored."""
    control = attrs.evolve(scenario_in(tmp_path), restore=restore_with_fresh_sessions)
    outcome = trio.run(control.run_killed, undisturbed.evidence)
    killed = [rollout for rollout in outcome.rollouts if rollout.killed]
    assert not outcome.equal
    assert not all(
        rollout.comparison.tool_outputs and rollout.comparison.final_state for rollout in killed
    )


async def restore_with_fresh_sessions(life: Life, where: str, episodes: list[EpisodeId]) -> None:
    """Restore everything but the resources servers; there, seed the same sessions anew."""
    everyone = life.controller
    tasks = {task.rollout_id: task for task in make_tasks(ROLLOUTS)}
    afresh = _only(everyone, resources=True)
    await afresh.start_afresh(episodes, timeout_s=TIMEOUT_S)
    for member in afresh.members:
        loaded = await read_checkpoint(
            ThreadDisk(),
            Place("/", tuple(where.strip("/").split("/"))),
            kind=member.kind.value,
            instance=member.instance,
            scope=None,
        )
        for record in loaded.records.values():
            task = tasks[record.episode_id.rollout_id]
            replacement = record.episode_id.next_attempt()
            for session in unpack(ResourcesRecord, record.payload).sessions:
                seeded = await life.running.client.request(
                    member.server,
                    "POST",
                    "/seed_session",
                    json=unstructure(
                        SeedSessionRequest(
                            resources_session_id=session.session_id,
                            episode_id=replacement,
                            task_id=TaskId(taskset=task.taskset, task_id=str(task.row_number)),
                            task_data=task.task_data,
                        )
                    ),
                    context=RolloutContext(replacement),
                )
                seeded.raise_for_status()
    restored = _only(everyone, resources=False)
    await restored.restore(CHECKPOINT, where, episodes, timeout_s=TIMEOUT_S)


def _only(everyone: Controller, *, resources: bool) -> Controller:
    members = tuple(m for m in everyone.members if (m.kind is Kind.RESOURCES) is resources)
    return everyone.restricted_to(members)
