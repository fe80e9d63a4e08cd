"""`gymtrio serve module:app`: run one server in this process."""

from __future__ import annotations

import argparse
import os
import sys

from gymtrio.cli.command import Command
from gymtrio.errors import SettingsError
from gymtrio.serving.deployment import DEPLOYMENT_VARIABLE, SERVER_VARIABLE, parse_bind
from gymtrio.serving.launch import bind_socket, bound_to, load_app, run_server
from gymtrio.serving.logs import configure_logging


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("app", help="module:attribute of an ASGI application")
    parser.add_argument("--bind", default="127.0.0.1:0", help="host:port; port 0: any free one")
    parser.add_argument("--deployment", help=f"deployment file (or {DEPLOYMENT_VARIABLE})")
    parser.add_argument("--name", help=f"which server of it this is (or {SERVER_VARIABLE})")


def _run(arguments: argparse.Namespace) -> int:
    if arguments.deployment is not None:
        os.environ[DEPLOYMENT_VARIABLE] = arguments.deployment
    if arguments.name is not None:
        os.environ[SERVER_VARIABLE] = arguments.name
    name = os.environ.get(SERVER_VARIABLE, arguments.app)
    configure_logging(name)
    # A console script does not look for modules in the working directory, `python -m` does.
    sys.path.insert(0, os.getcwd())
    app = load_app(arguments.app)
    try:
        bind = parse_bind(arguments.bind)
    except ValueError as error:
        raise SettingsError(f"--bind: {error}") from None
    sock = bind_socket(bind, name)
    print(f"{name}  {bound_to(sock).url}", flush=True)
    return run_server(app, sock)


COMMANDS = (
    Command(
        name="serve",
        help="run one server, without supervision",
        run=_run,
        add_arguments=_add_arguments,
    ),
)
