from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from gymtrio.cli.demonstration.display import legend, rollout_table, times_told
from gymtrio.cli.demonstration.evidence import Comparison, Evidence, Saved
from gymtrio.cli.demonstration.scenario import Outcome, RolloutOutcome, Times
from gymtrio.cli.demonstration.servers_file import demo_deployment
from gymtrio.cli.demonstration.tasks import make_tasks
from gymtrio.cli.main import main
from gymtrio.ids import RolloutId
from gymtrio.strict import structure
from gymtrio.wire.native import RunRequest


def outcome(*, same: bool) -> Outcome:
    left = Evidence(
        transcript=(), tool_outputs=(), final_state={}, reward=-1.0, tokens=(), calls=()
    )
    comparison = Comparison(
        transcript=True,
        tool_outputs=True,
        final_state=same,
        reward=True,
        tokens=True,
        model_calls=True,
    )
    rollout = RolloutOutcome(
        rollout_id=RolloutId("blackjack-63"),
        killed=True,
        saved=Saved(calls=12, tokens=345, continued_tokens=28),
        undisturbed=left,
        second=left,
        comparison=comparison,
    )
    times = Times(prepare=0.1, commit=0.08, resume=0.03, start=4.5, restore=0.06)
    return Outcome(rollouts=(rollout,), times=times, cut=3)


def shown(same: bool) -> list[str]:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(rollout_table(outcome(same=same)))
    console.print(legend(), highlight=False)
    console.print(times_told(outcome(same=same)), highlight=False)
    return console.export_text().splitlines()


def test_the_table_fits_eighty_columns_and_hides_nothing() -> None:
    lines = shown(same=True)
    assert not any("…" in line for line in lines)
    assert any("blackjack-63" in line and "345" in line and "28" in line for line in lines)
    assert any("prepare 100 ms, commit 80 ms, resume 30 ms" in line for line in lines)
    assert not any("≠" in line for line in lines)


def test_a_difference_is_shown() -> None:
    assert any("≠" in line for line in shown(same=False))
    assert not outcome(same=False).equal


def test_rollouts_alternate_over_both_tasksets_and_are_named_once() -> None:
    tasks = make_tasks(13)
    assert len({task.rollout_id for task in tasks}) == 13
    assert [task.taskset for task in tasks[:4]] == ["counter", "blackjack"] * 2
    for task in tasks:
        request = structure(RunRequest, json.loads(json.dumps(task.request(1))))
        assert request.episode_id.attempt == 1
        assert "input" in request.task.task_input.responses_create_params


def test_the_deployment_is_one_that_the_servers_accept(tmp_path: Path) -> None:
    """SET-2: each server with free ports, a token of its own making, and the settings it knows."""
    deployment = demo_deployment(tmp_path, tmp_path, seed=1, policy_workers=2)
    assert set(deployment.servers) == {
        "engine",
        "policy",
        "agent",
        "environment",
        "counter",
        "blackjack",
    }
    assert all(entry.is_unbound for entry in deployment.servers.values())
    again = demo_deployment(tmp_path, tmp_path, seed=1, policy_workers=2)
    token, other = (d.checkpoint.control_auth_token for d in (deployment, again))
    assert token is not None
    assert other is not None
    assert not token.matches(other.reveal())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rollouts", "0"], "--rollouts 0: expected 1..64"),
        (["--rollouts", "65"], "--rollouts 65: expected 1..64"),
        (["--kill-at", "0"], "--kill-at 0: expected 1 or more"),
        (["--keep", "/dev/null/x"], "--keep /dev/null/x: Not a directory"),
    ],
)
def test_bad_options_are_told_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *arguments]) == 1
    assert capsys.readouterr().err == f"gymtrio: {message}\n"


def test_a_directory_that_exists_is_not_written_into(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--keep", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"gymtrio: --keep {tmp_path}: File exists\n"
