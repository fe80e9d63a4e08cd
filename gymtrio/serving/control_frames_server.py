"""The control plane over frames: a call of kind `control/<operation>` is one control call (WIRE-1).

Head: empty. Body: the request of `gymtrio.wire.control` as msgpack, for `status` nothing; the reply's
body: its reply, with what the participant's kind adds beside the common fields, as over HTTP. Errors
are the same refusals.

Served to processes of this user on this host which presented the token when they connected, and to
nobody else: over TCP the control plane is spoken in HTTP.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from gymtrio.checkpoint.control import Control
from gymtrio.checkpoint.dispatch import perform, read_request
from gymtrio.errors import Unauthorized
from gymtrio.limits import CONTROL_BODY_BYTES_MAX
from gymtrio.wire.calls_in import IncomingCall
from gymtrio.wire.channel import PeerInfo
from gymtrio.wire.codec import pack, unpack_plain
from gymtrio.wire.control import STATUS, reply_to_plain

CONTROL_FAMILY: Final = "control"
KIND_PREFIX: Final = f"{CONTROL_FAMILY}/"


def control_handler(control: Control | None) -> Callable[[IncomingCall], Awaitable[None]]:
    """Make the handler of every kind of the family `control`.

    Args:
        control: None: this server takes no part in checkpoints.
    """
    return partial(_serve, control)


def may_control(peer: PeerInfo) -> bool:
    """Whether a peer presented the token, and the kernel says that it is of this user."""
    return peer.authenticated and peer.uid is not None


async def _serve(control: Control | None, call: IncomingCall) -> None:
    # Before anything else is looked at, as over HTTP (I35).
    if not may_control(call.channel.peer):
        raise Unauthorized
    if control is None:
        call.fail(404, "unknown_kind", "this server takes no part in checkpoints")
        return
    operation = call.kind.removeprefix(KIND_PREFIX)
    if operation == STATUS:
        reply = reply_to_plain(control.status())
    else:
        body = await call.read(CONTROL_BODY_BYTES_MAX)
        request = await read_request(operation, body, unpack_plain)
        reply = reply_to_plain(await perform(control, operation, request))
    call.reply(b"", pack(reply))
