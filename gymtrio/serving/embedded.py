"""A whole deployment inside the caller's nursery: no processes, no sockets (SET-3).

The servers are the same applications as anywhere else; their calls to each other go through an
`InProcessNetwork` on which each is a host of its own name. A crash of one of them ends the block.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

import attrs

from gymtrio.errors import SettingsError
from gymtrio.serving.app import ServerApp, open_asgi
from gymtrio.serving.client import ServerClient
from gymtrio.serving.deployment import Bind, Deployment, DeploymentDirectory
from gymtrio.serving.host import HostPorts
from gymtrio.serving.inprocess import InProcessNetwork, open_network
from gymtrio.serving.launch import load_app

_PORT: Final = 80


@attrs.frozen
class EmbeddedDeployment:
    """Servers that run in this process."""

    deployment: Deployment
    """With the addresses under which the servers find each other."""
    client: ServerClient
    """Calls them by name."""
    network: InProcessNetwork


@asynccontextmanager
async def open_embedded(
    deployment: Deployment,
    *,
    apps: Mapping[str, ServerApp[Any]] | None = None,
    ports: HostPorts | None = None,
) -> AsyncIterator[EmbeddedDeployment]:
    """Open every server of a deployment here, in the order of the file.

    Args:
        apps: by server name; what is missing is imported, as `ServerEntry.app` says.
        ports: for all of them; its transport is replaced by the network between them. Servers with a
            `url` of their own cannot be reached over it.

    Raises:
        SettingsError: an application is none of ours, or its settings do not fit.
        ExceptionGroup: a background task of a server failed; the block was cancelled for it.
    """
    here = [name for name, entry in deployment.servers.items() if entry.url is None]
    resolved = deployment.resolved({name: Bind(name, _PORT) for name in here})
    async with AsyncExitStack() as stack:
        network = await stack.enter_async_context(open_network())
        ports = attrs.evolve(ports or HostPorts(), transport=network)
        for name in here:
            app = (apps or {}).get(name) or load_app(str(resolved.entry(name).app))
            if not isinstance(app, ServerApp):
                raise SettingsError(f"servers.{name}.app: cannot be embedded: not a ServerApp")
            asgi = await stack.enter_async_context(
                open_asgi(app, deployment=resolved, name=name, ports=ports)
            )
            stack.enter_context(network.serving(name, asgi))
        client = ServerClient(DeploymentDirectory(resolved), network, resolved.client)
        yield EmbeddedDeployment(resolved, client, network)
