"""The deployment file: which servers there are, where they listen, and what they are told.

    checkpoint: {enabled: true, control_auth_token_file: token, root: checkpoints}
    servers:
      counter:
        app: servers.resources.counter:app
        bind: 127.0.0.1:0
        settings: {checkpoint_verify: replay}
      engine:
        url: http://gpu-1:8000          # runs elsewhere
        kind: model

Relative paths in it are relative to the file. Port 0 is replaced before any server starts: the
supervisor binds every socket first and hands each server the *resolved* deployment.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

import attrs
import yaml

from gymtrio.errors import SettingsError
from gymtrio.ids import is_safe_id
from gymtrio.serving.client import ClientSettings, Origin, Peer, peer_of_url
from gymtrio.settings import CheckpointSettings, Secret, load_settings
from gymtrio.strict import nearest_name
from gymtrio.wire.control import Kind

DEPLOYMENT_VARIABLE: Final = "GYMTRIO_DEPLOYMENT"
"""Path of the deployment file that a server reads when it starts."""

SERVER_VARIABLE: Final = "GYMTRIO_SERVER"
"""Which server of the file it is."""

START_TIMEOUT_S_DEFAULT: Final = 5.0
FILE_BYTES_MAX: Final = 4 * 2**20
TOKEN_FILE: Final = "control-token"
SESSION_FILE: Final = "session-secret"
TCP_SCHEME: Final = "tcp://"
SOCKET_NAME_CHARACTERS_MAX: Final = 32
"""A socket's path has at most 107 bytes; the directory needs most of them."""
RESOLVED_FILE: Final = "deployment.json"


@attrs.frozen
class Bind:
    """An address to listen on."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """How a server on this machine calls it."""
        reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://{Bind(reachable, self.port)}"


def parse_bind(text: str) -> Bind:
    """Read `host:port`, `[v6]:port` or `:port`.

    Raises:
        ValueError: it is none of these.
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{text!r} is not host:port")
    return Bind(host or "127.0.0.1", int(port))


def _is_frames_address(
    instance: object, attribute: attrs.Attribute[str | None], value: str | None
) -> None:
    if value is not None and (
        not value.startswith(TCP_SCHEME) or not parse_bind(value.removeprefix(TCP_SCHEME)).port
    ):
        raise ValueError(f"{value!r} is not tcp://host:port")


def _is_bind(instance: object, attribute: attrs.Attribute[str], value: str) -> None:
    parse_bind(value)


def _is_positive(instance: object, attribute: attrs.Attribute[float], value: float) -> None:
    if not value > 0:
        raise ValueError(f"{attribute.name} must be more than 0 seconds, got {value}")


@attrs.frozen(kw_only=True)
class ServerEntry:
    """One server of a deployment."""

    app: str | None = None
    """`module:attribute` of its ASGI application; None: it runs elsewhere, under `url`."""
    url: str | None = None
    bind: str = attrs.field(default="127.0.0.1:0", validator=_is_bind)
    """Port 0: any free one."""
    frames: str | None = attrs.field(default=None, validator=_is_frames_address)
    """`tcp://host:port` for frames from other hosts, whose callers present the control token. On one
    host servers find each other's socket files, see `Deployment.socket_dir`."""
    kind: Kind | None = None
    """Needed only where the module does not tell, as `servers.<kind>.name` does."""
    settings: dict[str, object] = attrs.field(factory=dict)
    """For the server's own settings class, which checks them when it starts."""
    env: dict[str, str] = attrs.field(factory=dict)
    """Added to the process's environment."""
    start_timeout_s: float = attrs.field(default=START_TIMEOUT_S_DEFAULT, validator=_is_positive)
    """How long it may take from start to ready, such as to load a model."""

    def __attrs_post_init__(self) -> None:
        if (self.app is None) == (self.url is None):
            raise ValueError("give either app (it is started here) or url (it runs elsewhere)")
        if self.app is not None and ":" not in self.app:
            raise ValueError(f"app {self.app!r} is not module:attribute")

    @property
    def process_count(self) -> int:
        """How many are to serve it; a setting that is not valid is told by the server itself."""
        count = self.settings.get("num_workers", 1)
        return count if type(count) is int and count > 1 and self.known_kind is Kind.MODEL else 1

    @property
    def is_unbound(self) -> bool:
        """Its port is not known yet."""
        return self.url is None and parse_bind(self.bind).port == 0

    @property
    def known_kind(self) -> Kind | None:
        """What sort of server it is, as far as this entry tells."""
        if self.kind is not None or self.app is None:
            return self.kind
        for segment in self.app.partition(":")[0].split("."):
            for kind in Kind:
                if segment == kind.value:
                    return kind
        return None


@attrs.frozen(kw_only=True)
class Deployment:
    """The servers of one training run, and what they share."""

    checkpoint: CheckpointSettings = attrs.field(factory=CheckpointSettings)
    client: ClientSettings = attrs.field(factory=ClientSettings)
    session_secret: Secret | None = None
    """Signs session cookies; the control token does, where this is not given (RES-6)."""
    session_secret_file: str | None = None
    state_dir: str | None = None
    """Where servers keep what outlives their process; each gets a directory of its own in it, which one
    process at a time has (HARD-10). Of a file that names none: `.gymtrio/<name of the file>/state`
    beside it, however its servers are started."""
    transport: Literal["frames", "http"] = "frames"
    """How servers call each other where both can: frames cost several times less than HTTP, and
    thousands of waiting calls share one connection. HTTP is served besides in any case."""
    socket_dir: str | None = None
    """Where servers of this host have the socket files for frames: a short path, of a directory that is
    private to its user, or not there yet. `gymtrio up` has one for each run directory."""
    metrics: bool = True
    """Serve `/metrics` on every server's port, without a token: nothing in it is secret."""
    log_format: Literal["text", "json"] = "text"
    """Of every server's log."""
    servers: dict[str, ServerEntry] = attrs.field(factory=dict)

    def entry(self, name: str) -> ServerEntry:
        """
        Raises:
            SettingsError: there is no such server.
        """
        entry = self.servers.get(name)
        if entry is None:
            raise SettingsError(
                f"no server {name!r} in the deployment" + nearest_name(name, list(self.servers))
                if self.servers
                else f"server {name!r} cannot be found: there is no deployment; "
                f"set {DEPLOYMENT_VARIABLE}"
            )
        return entry

    def url(self, name: str) -> str:
        """Where a server is called.

        Raises:
            SettingsError: there is no such server, or its port is not known yet.
        """
        entry = self.entry(name)
        if entry.url is not None:
            return entry.url
        if entry.is_unbound:
            raise SettingsError(f"server {name!r} is bound to port 0, which nobody replaced yet")
        return parse_bind(entry.bind).url

    def socket_paths(self, name: str) -> tuple[Path, ...]:
        """Where a server of this host takes frames: a path for each of its processes, or none."""
        entry = self.servers.get(name)
        if self.transport != "frames" or self.socket_dir is None:
            return ()
        if entry is None or entry.app is None:
            return ()
        short = name
        if len(name) > SOCKET_NAME_CHARACTERS_MAX:
            short = hashlib.sha256(name.encode("ascii")).hexdigest()[:SOCKET_NAME_CHARACTERS_MAX]
        directory = Path(self.socket_dir)
        if entry.process_count == 1:
            return (directory / short,)
        return tuple(directory / f"{short}.{worker}" for worker in range(entry.process_count))

    def socket_path(self, name: str, worker: str | None = None) -> Path | None:
        """Where one process of a server takes frames; None: it does not.

        Args:
            worker: its number, if the server has several.
        """
        paths = self.socket_paths(name)
        if worker is None:
            return paths[0] if len(paths) == 1 else None
        number = int(worker) if worker.isdecimal() else len(paths)
        return paths[number] if number < len(paths) else None

    def frames_addresses(self, name: str) -> tuple[str, ...]:
        """How a server is called over frames: paths of sockets, `tcp://host:port`, or not at all."""
        paths = self.socket_paths(name)
        entry = self.servers.get(name)
        if paths or entry is None or entry.frames is None or self.transport != "frames":
            return tuple(map(str, paths))
        return (entry.frames,)

    def resolved(self, binds: Mapping[str, Bind]) -> Deployment:
        """The same deployment with the addresses that were really bound."""
        servers = {
            name: attrs.evolve(entry, bind=str(binds[name])) if name in binds else entry
            for name, entry in self.servers.items()
        }
        return attrs.evolve(self, servers=servers)


class DeploymentDirectory:
    """Finds the servers of a deployment (`gymtrio.serving.client.Directory`)."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._peers: dict[str, Peer] = {}

    def find(self, server: str) -> Peer:
        if "://" in server:
            peer = peer_of_url(server)
            # A resources server is one under its URL as well: agents are given tools by URL.
            return attrs.evolve(peer, carries_context=peer.origin in self._resources_origins)
        known = self._peers.get(server)
        if known is None:
            url = self._deployment.url(server)
            kind = self._deployment.entry(server).known_kind
            known = peer_of_url(url, name=server, carries_context=kind is Kind.RESOURCES)
            self._peers[server] = known
        return known

    @cached_property
    def _resources_origins(self) -> frozenset[Origin]:
        return frozenset(
            self.find(name).origin
            for name, entry in self._deployment.servers.items()
            if entry.known_kind is Kind.RESOURCES and not entry.is_unbound
        )


def load_deployment(path: str | Path, environment: Mapping[str, str] | None = None) -> Deployment:
    """Read a deployment file (YAML, of which JSON is a part).

    Raises:
        SettingsError: with the file, the path of the key, and what is wrong.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            text = file.read(FILE_BYTES_MAX + 1)
        if len(text) > FILE_BYTES_MAX:
            raise SettingsError(f"{path}: over {FILE_BYTES_MAX} bytes")
        value = yaml.load(text, _StrictLoader)  # noqa: S506 - a SafeLoader
    except OSError as error:
        raise SettingsError(f"deployment file {path}: {error.strerror}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise SettingsError(f"{path}: not YAML: {error}") from None
    deployment = parse_deployment(
        value, where=str(path), folder=path.parent, environment=environment or os.environ
    )
    if deployment.state_dir is not None:
        return deployment
    # Of the file itself, not of a link to it or of who starts a server.
    real = path.resolve()
    return attrs.evolve(deployment, state_dir=str(real.parent / ".gymtrio" / real.stem / "state"))


def parse_deployment(
    value: object,
    *,
    where: str = "deployment",
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Deployment:
    """Make a deployment of plain data and check it as a whole.

    Args:
        folder: what relative paths are relative to; None: the working directory.
        environment: where the control token may stand.

    Raises:
        SettingsError: see `load_deployment`.
    """
    base = (folder or Path()).absolute()
    deployment = load_settings(Deployment, {} if value is None else value, where)
    for name, entry in deployment.servers.items():
        if not is_safe_id(name):
            raise SettingsError(f"{where}: servers: {name!r} cannot name a server")
        if entry.known_kind is None:
            raise SettingsError(
                f"{where}: servers.{name}: give its kind, one of "
                + ", ".join(kind.value for kind in Kind)
            )

    def read(file: str) -> str:
        return (base / file).read_text(encoding="utf-8")

    checkpoint = deployment.checkpoint.with_token(environment or {}, read, f"{where}: checkpoint")
    if checkpoint.root is not None:
        checkpoint = attrs.evolve(checkpoint, root=str(base / checkpoint.root))
    secret = deployment.session_secret
    if deployment.session_secret_file is not None:
        try:
            secret = Secret(read(deployment.session_secret_file).strip())
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"{where}: session_secret_file: {error}") from None
    state_dir = deployment.state_dir
    return attrs.evolve(
        deployment,
        checkpoint=checkpoint,
        session_secret=secret,
        session_secret_file=None,
        state_dir=None if state_dir is None else str(base / state_dir),
        socket_dir=None if deployment.socket_dir is None else str(base / deployment.socket_dir),
    )


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key given twice, of which YAML would silently drop the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = key_node.value
            if key_node.tag != "tag:yaml.org,2002:merge" and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} given twice", key_node.start_mark
                )
            seen.add(key)
        made: dict[Any, Any] = super().construct_mapping(node, deep)
        return made
