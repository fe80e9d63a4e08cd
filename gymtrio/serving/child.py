"""The process of one server: `python -m gymtrio.serving.child MODULE:APP --fd N --parent PID`.

Started by `gymtrio.serving.supervisor`, which has bound the socket and written the deployment that
the environment variables name.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys

from gymtrio.errors import GymtrioError
from gymtrio.serving.deployment import SERVER_VARIABLE
from gymtrio.serving.launch import die_with_parent, load_app, run_server
from gymtrio.serving.logs import configure_logging
from gymtrio.serving.workers import WORKER_VARIABLE

_log = logging.getLogger(__name__)


def main(arguments: list[str] | None = None) -> int:
    """Run the server until it is told to stop; the exit status says whether it failed."""
    parser = argparse.ArgumentParser(prog="python -m gymtrio.serving.child")
    parser.add_argument("app")
    parser.add_argument("--fd", type=int, required=True, help="the listening socket, inherited")
    parser.add_argument("--parent", type=int, required=True, help="pid to die with")
    given = parser.parse_args(arguments)
    die_with_parent(given.parent)
    name = os.environ.get(SERVER_VARIABLE, given.app)
    worker = os.environ.get(WORKER_VARIABLE)
    # Several workers share a log.
    configure_logging(name if worker is None else f"{name}/{worker}")
    try:
        app = load_app(given.app)
    except GymtrioError as error:
        _log.critical("%s", error)
        return 1
    return run_server(app, socket.socket(fileno=given.fd))


if __name__ == "__main__":
    sys.exit(main())
