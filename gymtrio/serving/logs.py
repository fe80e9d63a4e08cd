"""How the processes of a deployment write their logs: one line per record, on standard error."""

from __future__ import annotations

import logging
from typing import Final

from gymtrio.context import current_episode

_FORMAT: Final = "%(asctime)s %(levelname)s %(server)s %(name)s%(episode)s: %(message)s"


class _Fields(logging.Filter):
    """Adds the server's name, and rollout and attempt where a record has them (SRV-6)."""

    def __init__(self, server: str) -> None:
        super().__init__()
        self._server = server

    def filter(self, record: logging.LogRecord) -> bool:
        episode = current_episode()
        record.server = self._server
        record.episode = (
            "" if episode is None else f" rollout={episode.rollout_id} attempt={episode.attempt}"
        )
        return True


def configure_logging(server: str, level: int = logging.INFO) -> None:
    """Send every record of this process to standard error, unless an embedding program logs already.

    Args:
        server: written on every line.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(_FORMAT))
    handler.addFilter(_Fields(server))
    logging.basicConfig(level=level, handlers=[handler])
