"""Control calls over HTTP: what the controller's library sends its messages through."""

from __future__ import annotations

from typing import Final

import trio

from gymtrio.errors import PeerRefused
from gymtrio.serving.client import Reply, ServerClient
from gymtrio.serving.garbage import note_message
from gymtrio.serving.http import HeadersLike
from gymtrio.settings import Secret
from gymtrio.wire.codec import to_json
from gymtrio.wire.control import CONTROL_PREFIX, STATUS, ControlRequest

UNAUTHORIZED: Final = 401
LARGE_BYTES: Final = 65_536
"""A scope of thousands takes milliseconds to encode, and as long to send in process: not in one stretch
of the loop."""


class HttpControlChannel:
    """Carries control calls over the client's reserved connections (COORD-5).

    Args:
        token: presented to participants only: a server is first asked its status without it, and who
            answers 404, such as a foreign engine of the deployment, never sees it.
    """

    def __init__(self, client: ServerClient, token: Secret) -> None:
        self._client = client
        self._authorization = (b"authorization", f"Bearer {token.reveal()}".encode("latin-1"))
        self._participants: set[str] = set()
        self._encoded_last: tuple[ControlRequest, bytes] | None = None
        """The same request goes to every participant, and its scope may name thousands."""

    async def call(
        self, server: str, operation: str, request: ControlRequest | None, deadline: float
    ) -> object:
        """Send a request (None: `status`) and give the reply as plain data.

        Raises:
            PeerRefused: the server answered with an error.
            TransportError: it could not be reached, or did not answer by the deadline.
        """
        if server not in self._participants:
            asked = await self._send(server, "GET", STATUS, None, (), deadline)
            if asked.status != UNAUTHORIZED:
                asked.raise_for_status()
                raise PeerRefused(server, asked.status, None, "it asks for no control token")
            self._participants.add(server)
        method = "GET" if request is None else "POST"
        body = None if request is None else self._encoded(request)
        if body is not None and len(body) > LARGE_BYTES:
            await trio.lowlevel.checkpoint()
        headers = (self._authorization, (b"content-type", b"application/json"))
        reply = await self._send(server, method, operation, body, headers, deadline)
        return reply.raise_for_status().json()

    async def _send(
        self,
        server: str,
        method: str,
        operation: str,
        body: bytes | None,
        headers: HeadersLike,
        deadline: float,
    ) -> Reply:
        return await self._client.request(
            server,
            method,
            f"{CONTROL_PREFIX}/{operation}",
            body=body,
            headers=headers,
            context=None,
            control=True,
            deadline=deadline,
        )

    def _encoded(self, request: ControlRequest) -> bytes:
        if self._encoded_last is None or self._encoded_last[0] is not request:
            note_message()
            self._encoded_last = (request, to_json(request))
        return self._encoded_last[1]
