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
from gymtrio.checkpoint.routes import ServeControl
from gymtrio.errors import InvalidRequest, Unauthorized
from gymtrio.json_text import dump_finite_json, load_json
from gymtrio.limits import CONTROL_BODY_BYTES_MAX
from gymtrio.serving.garbage import note_message
from gymtrio.strict import MalformedValue
from gymtrio.wire.calls_in import IncomingCall
from gymtrio.wire.channel import PeerInfo
from gymtrio.wire.codec import pack, unpack_plain
from gymtrio.wire.control import STATUS, reply_to_plain

CONTROL_FAMILY: Final = "control"
KIND_PREFIX: Final = f"{CONTROL_FAMILY}/"


def control_handler(
    control: Control | None, elsewhere: ServeControl | None = None
) -> Callable[[IncomingCall], Awaitable[None]]:
    """Make the handler of every kind of the family `control`.

    Args:
        control: None: it is not in this process.
        elsewhere: passes calls on to the process that has it; None as well: this server takes no
            part in checkpoints.
    """
    return partial(_serve, control, elsewhere)


def may_control(peer: PeerInfo) -> bool:
    """Whether a peer presented the token, and the kernel says that it is of this user."""
    return peer.authenticated and peer.uid is not None


async def _serve(
    control: Control | None, elsewhere: ServeControl | None, call: IncomingCall
) -> None:
    # Before anything else is looked at, as over HTTP (I35).
    if not may_control(call.channel.peer):
        raise Unauthorized
    operation = call.kind.removeprefix(KIND_PREFIX)
    if control is None:
        if elsewhere is None:
            call.fail(404, "unknown_kind", "this server takes no part in checkpoints")
            return
        reply = load_json(await elsewhere(operation, await _as_json(operation, call)))
    elif operation == STATUS:
        reply = reply_to_plain(control.status())
    else:
        body = await call.read(CONTROL_BODY_BYTES_MAX)
        note_message()
        request = await read_request(operation, body, unpack_plain)
        reply = reply_to_plain(await perform(control, operation, request))
    call.reply(b"", pack(reply))


async def _as_json(operation: str, call: IncomingCall) -> bytes:
    """
    Raises:
        InvalidRequest: the body is no map of the protocol.
    """
    if operation == STATUS:
        return b""
    try:
        return dump_finite_json(unpack_plain(await call.read(CONTROL_BODY_BYTES_MAX)))
    except (MalformedValue, TypeError) as error:
        raise InvalidRequest(str(error)) from None
