"""What the demo shows: stages as they come, a bar per rollout while they run, tables at the end."""

from __future__ import annotations

import time
from typing import Final

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gymtrio.cli.demonstration.scenario import Outcome, Progress, RolloutOutcome
from gymtrio.ids import RolloutId


class Screen:
    """Implements `gymtrio.cli.demonstration.scenario.Watcher` on a terminal or into a pipe."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.monotonic()
        self._live = Live(console=console, refresh_per_second=8, transient=True)
        self._progress: dict[RolloutId, Progress] = {}

    def __enter__(self) -> Screen:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def stage(self, text: str) -> None:
        since = time.monotonic() - self._began
        self._console.print(f"[dim]{since:6.1f} s[/dim]  {text}", highlight=False)
        self._progress = {}
        self._live.update("")

    def progress(self, rollouts: dict[RolloutId, Progress]) -> None:
        if rollouts == self._progress or not self._console.is_terminal:
            return
        self._progress = dict(rollouts)
        self._live.update(Group(*(_line(name, p) for name, p in rollouts.items())))


def _line(rollout_id: RolloutId, progress: Progress) -> Text:
    attempt = f"a{progress.attempt}" if progress.attempt else ""
    line = Text(f"          {rollout_id:<13}{attempt:<3} ")
    line.append("█" * progress.calls, style="green" if progress.finished else "cyan")
    line.append(f" {progress.calls} calls, {progress.tokens} tokens", style="dim")
    if progress.finished:
        line.append(" done", style="green")
    return line


_LEGEND: Final = """\
turns, tokens, cut: what the checkpoint held; cut is of the generation in flight
saved: model calls that were not made again after the kill
= as in the undisturbed run; calls: every request; ids: every prompt id,
generated id and log-prob; text: the transcript; tools: every tool output"""


def rollout_table(outcome: Outcome) -> Table:
    """One row per rollout: what the checkpoint held, and whether both runs are the same."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("rollout", no_wrap=True)
    for name in ("turns", "tokens", "cut", "saved"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("calls", "ids", "text", "tools", "state"):
        table.add_column(name, justify="center", no_wrap=True)
    table.add_column("reward", justify="right", no_wrap=True)
    for rollout in outcome.rollouts:
        table.add_row(*_cells(rollout))
    return table


def legend() -> str:
    """What the columns mean."""
    return _LEGEND


def _cells(rollout: RolloutOutcome) -> list[str]:
    saved, same = rollout.saved, rollout.comparison
    total = len(rollout.undisturbed.calls)
    before = (
        [
            str(saved.calls),
            str(saved.tokens),
            str(saved.continued_tokens or "-"),
            f"{saved.calls}/{total}",
        ]
        if rollout.killed
        else ["done", "-", "-", "-"]
    )
    return [
        rollout.rollout_id,
        *before,
        _mark(same.model_calls),
        _mark(same.tokens),
        _mark(same.transcript),
        _mark(same.tool_outputs),
        _mark(same.final_state),
        f"{_mark(same.reward)} {rollout.second.reward:g}",
    ]


def _mark(equal: bool) -> str:
    return "[green]=[/green]" if equal else "[bold red]≠[/bold red]"


def times_told(outcome: Outcome) -> str:
    """The times of the checkpoint and of the way back."""
    times = outcome.times
    parts = [
        f"prepare {times.prepare * 1000:.0f} ms",
        f"commit {times.commit * 1000:.0f} ms",
        f"resume {times.resume * 1000:.0f} ms",
        f"servers up again {times.start:.1f} s after the kill",
        f"restore {times.restore * 1000:.0f} ms",
    ]
    return "\n".join([", ".join(parts[:3]), ", ".join(parts[3:])])
