"""The deployment file."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from gymtrio.errors import SettingsError
from gymtrio.serving.client import Origin
from gymtrio.serving.deployment import (
    Bind,
    DeploymentDirectory,
    ServerEntry,
    load_deployment,
    parse_bind,
    parse_deployment,
)
from gymtrio.serving.supervisor import write_resolved
from gymtrio.wire.control import Kind

TOKEN = "0123456789abcdef-token"

TEXT = f"""
checkpoint:
  enabled: true
  control_auth_token_file: secrets/token
  root: checkpoints
client: {{data_connections_max: 0}}
state_dir: state
servers:
  counter:
    app: servers.resources.counter:app
    bind: 127.0.0.1:0
    settings: {{checkpoint_verify: replay, nested: {{a: [1, 2.5, null]}}}}
    env: {{A: b}}
    start_timeout_s: 30
  policy:
    app: my.package.policy:app
    kind: model
    bind: 127.0.0.1:8001
  engine:
    url: http://gpu-1:8000/v1/
    kind: model
# {TOKEN}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets/token").write_text(f"{TOKEN}\n")
    path = tmp_path / "deployment.yaml"
    path.write_text(TEXT)
    return path


def test_a_file_is_read_with_paths_relative_to_it(file: Path) -> None:
    """SET-1, SET-2: one deployment file."""
    deployment = load_deployment(file, {})
    assert deployment.checkpoint.control_auth_token is not None
    assert deployment.checkpoint.control_auth_token.reveal() == TOKEN
    assert deployment.checkpoint.root == str(file.parent / "checkpoints")
    assert deployment.state_dir == str(file.parent / "state")
    counter = deployment.entry("counter")
    assert counter.known_kind is Kind.RESOURCES
    assert counter.settings == {"checkpoint_verify": "replay", "nested": {"a": [1, 2.5, None]}}
    assert deployment.entry("policy").known_kind is Kind.MODEL
    assert TOKEN not in repr(deployment)


def test_state_stands_beside_the_file_however_a_server_is_started(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HARD-10, SET-2: else a server could be started twice, by `gymtrio up` and by plain Hypercorn."""
    text = TEXT.replace("state_dir: state", "")
    file.write_text(
        text.replace("control_auth_token_file: secrets/token", f"control_auth_token: {TOKEN}")
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "linked.yaml").symlink_to(file)
    expected = str(tmp_path.resolve() / ".gymtrio/deployment/state")
    assert load_deployment(file, {}).state_dir == expected
    assert load_deployment(elsewhere / "linked.yaml", {}).state_dir == expected
    monkeypatch.chdir(elsewhere)
    assert load_deployment("../deployment.yaml", {}).state_dir == expected
    with (tmp_path / "other.yaml").open("w") as other:
        other.write(file.read_text())
    assert load_deployment(other.name, {}).state_dir != expected


def test_names_become_urls_once_ports_are_known(file: Path) -> None:
    """SET-2: port 0 support."""
    deployment = load_deployment(file, {})
    assert deployment.url("engine") == "http://gpu-1:8000/v1/"
    assert deployment.url("policy") == "http://127.0.0.1:8001"
    with pytest.raises(SettingsError, match="'counter' is bound to port 0"):
        deployment.url("counter")
    resolved = deployment.resolved({"counter": Bind("127.0.0.1", 4711)})
    assert resolved.url("counter") == "http://127.0.0.1:4711"
    with pytest.raises(SettingsError, match=r"no server 'polcy' .*did you mean 'policy'"):
        deployment.url("polcy")


def test_the_directory_knows_what_carries_the_episode(file: Path) -> None:
    """ID-5: resources servers do, under their name and their URL."""
    resolved = load_deployment(file, {}).resolved({"counter": Bind("127.0.0.1", 4711)})
    directory = DeploymentDirectory(resolved)
    assert directory.find("counter").carries_context
    assert directory.find("http://127.0.0.1:4711/").carries_context
    assert not directory.find("policy").carries_context
    assert not directory.find("http://127.0.0.1:8001").carries_context
    engine = directory.find("engine")
    assert engine.origin == Origin("gpu-1", 8000)
    assert engine.base_path == "/v1"


def test_an_unknown_port_of_one_server_does_not_hinder_calls_to_others(file: Path) -> None:
    directory = DeploymentDirectory(load_deployment(file, {}))
    assert directory.find("http://elsewhere:1").origin == Origin("elsewhere", 1)


def test_where_a_server_takes_frames(file: Path) -> None:
    """Between servers of one host a socket file, for other hosts an address, or HTTP alone."""
    given = load_deployment(file, {})
    long = "x" * 128
    servers = {
        "here": ServerEntry(app="x:app", kind=Kind.AGENT),
        long: ServerEntry(app="x:app", kind=Kind.AGENT),
        "several": ServerEntry(app="x:app", kind=Kind.MODEL, settings={"num_workers": 2}),
        "both": ServerEntry(app="x:app", kind=Kind.AGENT, frames="tcp://0.0.0.0:9000"),
        "there": ServerEntry(url="http://gpu-1:8000", kind=Kind.MODEL, frames="tcp://gpu-1:9000"),
        "foreign": ServerEntry(url="http://gpu-1:8001", kind=Kind.MODEL),
    }
    deployment = attrs.evolve(given, servers=servers, socket_dir="/run/s")
    found = {name: deployment.frames_addresses(name) for name in servers}
    (path,) = found.pop(long)
    assert len(path) < 60
    assert found == {
        "here": ("/run/s/here",),
        "several": ("/run/s/several.0", "/run/s/several.1"),
        "both": ("/run/s/both",),
        "there": ("tcp://gpu-1:9000",),
        "foreign": (),
    }
    http = attrs.evolve(deployment, transport="http")
    assert {http.frames_addresses(name) for name in servers} == {()}
    alone = attrs.evolve(deployment, socket_dir=None)
    assert alone.frames_addresses("here") == ()
    assert deployment.socket_path("several", "1") == Path("/run/s/several.1")
    for worker in (None, "2", "pid-7"):
        assert deployment.socket_path("several", worker) is None


def test_without_a_deployment_no_server_is_known() -> None:
    with pytest.raises(SettingsError, match="there is no deployment; set GYMTRIO_DEPLOYMENT"):
        DeploymentDirectory(parse_deployment({})).find("policy")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("servers: [", "not YAML"),
        ("[1, 2]", "expected an object, got list"),
        ("servrs: {}", "servrs: unknown key; did you mean 'servers'?"),
        (
            "servers: {a: {app: 'x:app', bnd: 1}}",
            "servers.a.bnd: unknown key; did you mean 'bind'?",
        ),
        ("servers: {a: {app: 'x:app'}}", "servers.a: give its kind, one of environment, model"),
        ("servers: {a: {app: 'x:app', kind: judge}}", "servers.a.kind: expected one of"),
        ("servers: {a: {kind: model}}", "servers.a: give either app"),
        ("servers: {a: {app: x, kind: model}}", "servers.a: app 'x' is not module:attribute"),
        ("servers: {a: {app: 'x:a', kind: model, bind: x}}", "servers.a: 'x' is not host:port"),
        ("servers: {a: {url: 'http://a', frames: 'b:1'}}", "is not tcp://host:port"),
        ("transport: smoke", "transport: expected one of 'frames', 'http', got str"),
        ("servers: {a: {url: 'http://a', kind: model, frames: 'tcp://a'}}", "not host:port"),
        ("servers: {'a/b': {app: 'x:a', kind: model}}", "servers: 'a/b' cannot name a server"),
        ("servers: {a: {}, a: {}}", "key 'a' given twice"),
        ("checkpoint: {enabled: true}", "checkpoint: enabled without a token"),
        ("client: {connect_timeout_s: 0}", "client: connect_timeout_s must be more than 0"),
        ("session_secret_file: gone", "session_secret_file"),
        ("x: !!python/object/apply:os.system ['true']", "not YAML"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, text: str, message: str) -> None:
    """SET-1: with file, path of the key, and what was meant."""
    path = tmp_path / "d.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError) as caught:
        load_deployment(path, {})
    assert message in str(caught.value)
    assert "d.yaml" in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"gone\.yaml: No such file"):
        load_deployment(tmp_path / "gone.yaml", {})


@pytest.mark.parametrize(
    ("text", "bind", "url"),
    [
        ("127.0.0.1:80", Bind("127.0.0.1", 80), "http://127.0.0.1:80"),
        (":8080", Bind("127.0.0.1", 8080), "http://127.0.0.1:8080"),
        ("[::1]:5", Bind("::1", 5), "http://[::1]:5"),
        ("0.0.0.0:5", Bind("0.0.0.0", 5), "http://127.0.0.1:5"),
        ("[::]:5", Bind("::", 5), "http://[::1]:5"),
        ("host:0", Bind("host", 0), "http://host:0"),
    ],
)
def test_addresses(text: str, bind: Bind, url: str) -> None:
    assert parse_bind(text) == bind
    assert bind.url == url


def test_everything_survives_being_written_for_the_servers(file: Path, tmp_path: Path) -> None:
    """SET-1: what a server reads is what was configured, and the token is in a file of its own."""
    resolved = load_deployment(file, {}).resolved({"counter": Bind("127.0.0.1", 4711)})
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    written = write_resolved(resolved, run_dir)
    assert load_deployment(written, {}) == resolved
    assert TOKEN not in written.read_text()
    for path in run_dir.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600
    with_secret = attrs.evolve(resolved, session_secret=resolved.checkpoint.control_auth_token)
    assert load_deployment(write_resolved(with_secret, run_dir), {}) == with_secret
