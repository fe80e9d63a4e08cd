"""The command line."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gymtrio.cli.command import Command
from gymtrio.cli.main import build_parser, find_commands, main

EXAMPLE = "tests.helpers.example_server:app"


def gymtrio(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "gymtrio.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def test_commands_are_found_in_their_modules() -> None:
    names = [command.name for command in find_commands()]
    assert {"up", "serve"} <= set(names)
    assert names == sorted(names)


def test_a_command_may_belong_to_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    ran: list[str] = []

    def command(name: str) -> Command:
        def run(given: argparse.Namespace) -> int:
            ran.append(name)
            return 0

        return Command(name=name, help=f"help of {name}", run=run)

    parser = build_parser([command("checkpoint list"), command("checkpoint show"), command("up")])
    given = parser.parse_args(["checkpoint", "show"])
    assert given.run(given) == 0
    assert ran == ["checkpoint show"]
    with pytest.raises(SystemExit):
        parser.parse_args(["checkpoint"])
    with pytest.raises(SystemExit):
        parser.parse_args(["--help"])
    assert "help of up" in capsys.readouterr().out


def test_a_wrong_setting_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SET-1: with file, key and the nearest known name."""
    file = tmp_path / "d.yaml"
    file.write_text("checkpoint: {enabeld: true}")
    assert main(["up", str(file)]) == 1
    expected = f"gymtrio: {file}.checkpoint.enabeld: unknown key; did you mean 'enabled'?\n"
    assert capsys.readouterr().err == expected


def test_recovering_needs_checkpointing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "d.yaml"
    file.write_text("servers: {}")
    assert main(["up", str(file), "--recover"]) == 1
    assert "--recover needs checkpoint.enabled" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_prints_where_servers_are_and_runs_until_a_signal(
    tmp_path: Path, number: signal.Signals
) -> None:
    """SET-2: `gymtrio up deployment.yaml`."""
    file = tmp_path / "d.yaml"
    servers = {"one": {"app": EXAMPLE, "kind": "resources", "start_timeout_s": 60}}
    file.write_text(json.dumps({"servers": servers}))
    process = gymtrio("up", str(file), "--run-dir", str(tmp_path / "run"))
    assert process.stdout is not None
    first = process.stdout.readline()
    assert first.split()[:2] == ["one", "resources"]
    assert first.split()[2].startswith("http://127.0.0.1:")
    assert process.stdout.readline().startswith("ready after ")
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, ""), err


def test_up_tells_why_a_server_does_not_start(tmp_path: Path) -> None:
    """SET-2: within 5 s, with the log tail, and without a traceback of the supervisor."""
    file = tmp_path / "d.yaml"
    bad = {
        "app": EXAMPLE,
        "kind": "resources",
        "start_timeout_s": 60,
        "settings": {"mood": "sad"},
    }
    file.write_text(json.dumps({"servers": {"bad": bad}}))
    process = gymtrio("up", str(file), "--run-dir", str(tmp_path / "run"))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "server 'bad' ended with status 1; end of its log:" in err
    assert "servers.bad.settings.mood: expected one of 'calm', 'loud'" in err
    assert "Traceback" not in err


def test_serve_runs_one_server(tmp_path: Path) -> None:
    process = gymtrio("serve", EXAMPLE, "--bind", "127.0.0.1:0", "--name", "mine")
    assert process.stdout is not None
    name, url = process.stdout.readline().split()
    assert name == "mine"
    got = subprocess.run(
        [sys.executable, "-c", FETCH, f"{url}/health"], capture_output=True, text=True, check=True
    )
    assert json.loads(got.stdout) == {"status": "alive", "kind": "resources", "instance": "mine"}
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 0


FETCH = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1]).read().decode())"


def test_serve_tells_what_it_cannot_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "nonsense"]) == 1
    assert main(["serve", "tests.helpers.gone:app"]) == 1
    assert main(["serve", "tests.helpers.example_server:nothing"]) == 1
    assert main(["serve", EXAMPLE, "--bind", "nowhere"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("gymtrio: ")] == [
        "gymtrio: 'nonsense' is not module:attribute",
        "gymtrio: tests.helpers.gone:app: no module named 'tests.helpers.gone'",
        "gymtrio: tests.helpers.example_server:nothing: "
        "module tests.helpers.example_server has no 'nothing'",
        "gymtrio: --bind: 'nowhere' is not host:port",
    ]


def test_plain_hypercorn_serves_a_server_module(tmp_path: Path) -> None:
    """SET-2: `hypercorn -k trio module:app`, without a deployment."""
    with_fd = (
        "import os, socket, sys; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen();"
        "print(s.getsockname()[1], flush=True); s.set_inheritable(True);"
        "os.execv(sys.executable, [sys.executable, '-m', 'hypercorn', '-k', 'trio', '-w', '0',"
        f" '--bind', f'fd://{{s.fileno()}}', '{EXAMPLE}'])"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GYMTRIO")}
    process = subprocess.Popen(
        [sys.executable, "-c", with_fd],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{process.stdout.readline().strip()}"
        for path, expected in (("/ready", "ready"), ("/health", "alive")):
            got = subprocess.run(
                [sys.executable, "-c", FETCH, url + path],
                capture_output=True,
                text=True,
                check=True,
                timeout=60,
            )
            assert json.loads(got.stdout)["status"] == expected
        code = (
            "import sys, urllib.request as r;"
            "print(r.urlopen(r.Request(sys.argv[1], data=b'x', method='POST')).read().decode())"
        )
        got = subprocess.run(
            [sys.executable, "-c", code, url + "/greet"], capture_output=True, text=True, check=True
        )
        assert json.loads(got.stdout)["instance"] == "example"
        # A background failure must end plain Hypercorn too, and say so by its exit status.
        subprocess.run(
            [sys.executable, "-c", code, url + "/break-down"], capture_output=True, check=False
        )
        _, err = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "a background task failed" in err
    finally:
        process.kill()
        process.communicate()
