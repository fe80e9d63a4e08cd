"""Lines of a log: what they belong to, and what a peer cannot do to them."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from gymtrio.context import CheckpointWork, RolloutContext, checkpoint_context, rollout_context
from gymtrio.ids import parse_capture_key
from gymtrio.serving.logs import FORMATTERS, _Fields


def line(log_format: str, message: str, *arguments: object, **more: Any) -> str:
    """One record, as it is written."""
    record = logging.LogRecord("a.b", logging.INFO, __file__, 1, message, arguments, None)
    for name, value in more.items():
        setattr(record, name, value)
    assert _Fields("env").filter(record)
    return FORMATTERS[log_format]().format(record)


def in_a_checkpoint(phase: str = "preparing") -> Any:
    return checkpoint_context(CheckpointWork("c7", lambda: phase))


def test_a_line_says_what_it_belongs_to() -> None:
    """SRV-6: rollout, attempt, checkpoint and phase, where there are any."""
    assert line("text", "hello").endswith(" INFO env a.b: hello")
    with rollout_context(RolloutContext(parse_capture_key("r-a3"))), in_a_checkpoint():
        written = line("text", "%s", "hello")
        assert written.endswith(
            " INFO env a.b rollout=r attempt=3 checkpoint=c7 phase=preparing: hello"
        )
        found = json.loads(line("json", "%s", "hello"))
    assert found["message"] == "hello"
    assert (found["rollout"], found["attempt"]) == ("r", 3)
    assert (found["checkpoint"], found["phase"], found["server"]) == ("c7", "preparing", "env")
    assert {"time", "time_s", "level", "logger"} <= found.keys()
    assert "rollout" not in json.loads(line("json", "hello"))


def test_what_a_record_says_itself_goes_first() -> None:
    with in_a_checkpoint("idle"):
        found = json.loads(line("json", "expired", checkpoint="c8", phase="prepared"))
    assert (found["checkpoint"], found["phase"]) == ("c8", "prepared")


@pytest.mark.parametrize("log_format", FORMATTERS)
def test_what_a_peer_has_chosen_begins_no_line(log_format: str) -> None:
    """SRV-6: line ends and escape sequences in a path or an id are written out."""
    chosen = "/x\n2026 INFO env a.b: all is well\r\x1b[2J\x85\u2028"
    written = line(log_format, "%s failed", chosen)
    assert written.isprintable()
    assert "all is well" in written
    try:
        raise ValueError(chosen)
    except ValueError as error:
        information = (ValueError, error, error.__traceback__)
    lines = line(log_format, "failed", exc_info=information).split("\n")
    assert all(part.isprintable() for part in lines)
    assert all(part.startswith("  ") for part in lines[1:])
