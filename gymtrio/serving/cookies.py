"""Session cookies that outlive the process that issued them (RES-6).

The key follows from the deployment's secret and the server's name, so that a cookie issued before a
crash is taken by the server that was restored, and no server takes another's. A signature has no time
in it: an episode may rest in a checkpoint for weeks.
"""

from __future__ import annotations

import hashlib
from typing import Final

from itsdangerous import BadSignature, URLSafeSerializer

from gymtrio.limits import ID_CHARACTERS_MAX
from gymtrio.settings import Secret

SESSION_COOKIE: Final = "session"
COOKIE_CHARACTERS_MAX: Final = 4096
"""Longer than any that we issue; it is not even looked at."""


class SessionCookies:
    """Issues and reads the cookies of one server.

    Args:
        secret: of the deployment (`ServiceHost.session_secret`).
        instance: the server's name.
    """

    def __init__(self, secret: Secret, instance: str) -> None:
        self._serializer = URLSafeSerializer(
            secret.derive(f"gymtrio session cookie of {instance}"),
            salt=b"gymtrio.session",
            signer_kwargs={"key_derivation": "hmac", "digest_method": hashlib.sha256},
        )

    def issue(self, session_id: str) -> str:
        """The cookie's value; the same for the same session, always."""
        if len(session_id) > ID_CHARACTERS_MAX:
            raise ValueError(f"session id of {len(session_id)} characters")
        return str(self._serializer.dumps(session_id))

    def read(self, cookie: str) -> str | None:
        """The session that a cookie names; None: we did not issue it."""
        if len(cookie) > COOKIE_CHARACTERS_MAX or not cookie.isascii():
            return None
        try:
            session_id: object = self._serializer.loads(cookie)
        except BadSignature:
            return None
        if not isinstance(session_id, str) or self.issue(session_id) != cookie:
            # Base64 reads more than it writes: only the very text that we issued is ours.
            return None
        return session_id
