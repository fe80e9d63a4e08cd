"""Control calls over HTTP: what the controller's library sends its messages through."""

from __future__ import annotations

from typing import Final

from gymtrio.serving.client import ServerClient
from gymtrio.settings import Secret
from gymtrio.strict import unstructure
from gymtrio.wire.control import CONTROL_PREFIX, ControlRequest

STATUS: Final = "status"


class HttpControlChannel:
    """Carries control calls over the client's reserved connections (COORD-5).

    Args:
        token: presented with every call.
    """

    def __init__(self, client: ServerClient, token: Secret) -> None:
        self._client = client
        self._authorization = (b"authorization", f"Bearer {token.reveal()}".encode("latin-1"))

    async def call(
        self, server: str, operation: str, request: ControlRequest | None, deadline: float
    ) -> object:
        """Send a request (None: `status`) and give the reply as plain data.

        Raises:
            PeerRefused: the server answered with an error.
            TransportError: it could not be reached, or did not answer by the deadline.
        """
        reply = await self._client.request(
            server,
            "GET" if request is None else "POST",
            f"{CONTROL_PREFIX}/{STATUS if request is None else operation}",
            json=None if request is None else unstructure(request),
            headers=[self._authorization],
            context=None,
            control=True,
            deadline=deadline,
        )
        return reply.raise_for_status().json()
