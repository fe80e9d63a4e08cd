"""How the processes of a deployment write their logs: one line per record, on standard error.

As text for people, or as JSON for programs (`log_format` of a deployment, or the variable). Rollout,
attempt, checkpoint and phase stand on every line that has them (SRV-6), and nowhere else. What a peer
has chosen cannot begin a line or move a cursor.
"""

from __future__ import annotations

import json
import logging
import os
import re
from typing import Any, Final

from gymtrio.context import current_checkpoint, current_episode

LOG_FORMAT_VARIABLE: Final = "GYMTRIO_LOG_FORMAT"
"""`text` or `json`."""

_CONTROL_CHARACTERS: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class _Fields(logging.Filter):
    """Adds what a record belongs to; what it says itself (`extra`) goes first."""

    def __init__(self, server: str) -> None:
        super().__init__()
        self._server = server

    def filter(self, record: logging.LogRecord) -> bool:
        record.server = self._server
        fields: dict[str, object] = {}
        episode = current_episode()
        if episode is not None:
            fields |= {"rollout": episode.rollout_id, "attempt": episode.attempt}
        work = current_checkpoint()
        if work is not None:
            fields |= {"checkpoint": work.checkpoint_id, "phase": work.phase()}
        for name, value in fields.items():
            if not hasattr(record, name):
                setattr(record, name, value)
        return True


def _fields(record: logging.LogRecord) -> dict[str, object]:
    names = ("rollout", "attempt", "checkpoint", "phase")
    return {name: getattr(record, name) for name in names if hasattr(record, name)}


def _escaped(text: str) -> str:
    return _CONTROL_CHARACTERS.sub(lambda found: ascii(found[0])[1:-1], text)


class TextFormatter(logging.Formatter):
    """One line for people; a traceback follows on lines of its own, each indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={value}" for name, value in _fields(record).items())
        told = f"{record.name}{fields}: {record.message}"
        server = getattr(record, "server", "-")
        return f"{self.formatTime(record)} {record.levelname} {server} {_escaped(told)}"

    def formatException(self, exc_info: Any) -> str:
        lines = super().formatException(exc_info).split("\n")
        return "\n".join(f"  {_escaped(line)}" for line in lines)


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03d"

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": self.formatTime(record),
            "time_s": record.created,
            "level": record.levelname.lower(),
            "server": getattr(record, "server", None),
            "logger": record.name,
            **_fields(record),
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, separators=(",", ":"), default=str)


FORMATTERS: Final[dict[str, type[logging.Formatter]]] = {
    "text": TextFormatter,
    "json": JsonFormatter,
}


def configure_logging(
    server: str, level: int = logging.INFO, log_format: str | None = None
) -> None:
    """Send every record of this process to standard error, unless an embedding program logs already.

    Args:
        server: written on every line.
        log_format: a key of `FORMATTERS`; None: as the environment says, else text.
    """
    chosen = log_format or os.environ.get(LOG_FORMAT_VARIABLE, "text")
    handler = logging.StreamHandler()
    handler.setFormatter(FORMATTERS.get(chosen, TextFormatter)())
    handler.addFilter(_Fields(server))
    logging.basicConfig(level=level, handlers=[handler])
