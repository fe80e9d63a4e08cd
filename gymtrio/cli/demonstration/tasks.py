"""What the demo's rollouts play: rows of two public kinds of tasks, alternating."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import attrs

import servers.resources
from gymtrio.ids import EpisodeId, RolloutId
from gymtrio.strict import unstructure
from gymtrio.wire.native import RunRequest, SingleTurnInput, Task, TaskId

TASKSETS: Final = ("counter", "blackjack")
_ROWS: Final = Path(servers.resources.__path__[0]) / "data"
_PARAMETERS: Final = "responses_create_params"


@attrs.frozen
class DemoTask:
    """One rollout of one row."""

    rollout_id: RolloutId
    taskset: str
    row_number: int
    """From 0, in the taskset's file."""
    row: dict[str, object]

    @property
    def task_data(self) -> dict[str, object]:
        """What seed and verify are given of the row."""
        return {key: value for key, value in self.row.items() if key != _PARAMETERS}

    def request(self, attempt: int) -> object:
        """The body of `/run` for an attempt of this rollout."""
        parameters = self.row[_PARAMETERS]
        assert isinstance(parameters, dict)
        run = RunRequest(
            episode_id=EpisodeId(self.rollout_id, attempt),
            task=Task(
                task_id=TaskId(taskset=self.taskset, task_id=str(self.row_number)),
                task_input=SingleTurnInput(
                    responses_create_params=parameters,
                    task_data=self.task_data,
                ),
            ),
        )
        return unstructure(run)


def make_tasks(rollouts: int) -> tuple[DemoTask, ...]:
    """Name `rollouts` rollouts over the rows of both tasksets; rows repeat when they run out."""
    rows = {taskset: _read_rows(taskset) for taskset in TASKSETS}
    tasks = []
    for number in range(rollouts):
        taskset = TASKSETS[number % len(TASKSETS)]
        turn = number // len(TASKSETS)
        row_number = turn % len(rows[taskset])
        rollout_id = RolloutId(f"{taskset}-{turn}")
        tasks.append(DemoTask(rollout_id, taskset, row_number, rows[taskset][row_number]))
    return tuple(tasks)


def _read_rows(taskset: str) -> Sequence[dict[str, object]]:
    text = (_ROWS / taskset / "example.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]
