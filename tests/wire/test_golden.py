"""Every message of every released version is read for ever, and written as it was (WIRE-1).

A version that was released is never written again: its files under `tests/golden/wire` only ever get
company. The files of the current version are also what is sent today.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import pytest

from gymtrio.wire.bounds import ChannelLimits
from gymtrio.wire.dialogue import Dialogue
from gymtrio.wire.frames import encode_frame
from gymtrio.wire.messages import (
    DECODERS,
    Call,
    Cancel,
    Capacity,
    Credit,
    Data,
    Error,
    Goodbye,
    Hello,
    HelloMessage,
    Ping,
    Post,
    Reply,
    Type,
    WelcomeMessage,
    encode,
    encode_hello,
    encode_welcome,
)
from gymtrio.wire.tables import Role
from tests.helpers.dialogues import frames_of

GOLDEN: Final = Path(__file__).parents[1] / "golden" / "wire"
DESIGN: Final = Path(__file__).parents[2] / "gymtrio" / "wire" / "DESIGN.md"

WORKER: Final = Hello(role="worker", name="w0", instance="5eed")
COORDINATOR: Final = Hello(role="coordinator", name="policy", instance="c0de")
CAPACITY: Final = Capacity(
    frame_bytes_max=2**20, head_bytes_max=2**18, window_bytes=2**20, calls_open_max=65_536
)

V1: Final[dict[str, tuple[Type, Any]]] = {
    "hello": (
        Type.HELLO,
        HelloMessage(versions=(1,), hello=WORKER, capacity=CAPACITY, token="0123456789abcdef"),
    ),
    "hello-without-token": (
        Type.HELLO,
        HelloMessage(versions=(1,), hello=WORKER, capacity=CAPACITY),
    ),
    "welcome": (Type.WELCOME, WelcomeMessage(version=1, hello=COORDINATOR, capacity=CAPACITY)),
    "goodbye": (Type.GOODBYE, Goodbye("unauthorized", "a valid token is required")),
    "ping": (Type.PING, Ping(7)),
    "pong": (Type.PONG, Ping(7)),
    "call": (Type.CALL, Call(0, "claim", b"head", b"body", 1500)),
    "call-with-body-to-come": (Type.CALL, Call(6, "control/commit", b"", None, None)),
    "reply": (Type.REPLY, Reply(0, b"head", b"body")),
    "reply-with-body-to-come": (Type.REPLY, Reply(6, b"", None)),
    "error": (Type.ERROR, Error(4, 409, "invalid_phase", "prepare while committed")),
    "data": (Type.DATA, Data(6, False, bytes(range(8)))),
    "data-last": (Type.DATA, Data(6, True, b"")),
    "credit": (Type.CREDIT, Credit(6, 524_288)),
    "cancel": (Type.CANCEL, Cancel(4)),
    "post": (Type.POST, Post("report", b"\x00\xff")),
    "control-post": (Type.CONTROL_POST, Post("close", b"")),
}


def encoded(frame_type: Type, message: Any) -> bytes:
    if isinstance(message, HelloMessage):
        return encode_hello(message)
    if isinstance(message, WelcomeMessage):
        return encode_welcome(message)
    return encode(frame_type, message)


def test_every_message_has_a_file() -> None:
    assert {path.stem for path in (GOLDEN / "v1").iterdir()} == V1.keys()
    assert {frame_type for frame_type, _ in V1.values()} == set(Type)


@pytest.mark.parametrize("name", V1)
def test_a_released_frame_is_read_and_written_as_it_was(name: str) -> None:
    frame_type, message = V1[name]
    kept = (GOLDEN / "v1" / f"{name}.frame").read_bytes()
    (frame,) = frames_of(kept)
    assert frame.type == frame_type
    assert DECODERS[frame.type](frame.payload) == message
    assert encoded(frame_type, message) == kept
    assert encode_frame(frame.type, frame.payload) == kept


def test_the_worked_example_of_the_design_note_is_what_is_sent() -> None:
    """Each line of the example: who sends it, and the bytes in hexadecimal."""
    text = DESIGN.read_text()
    example = text[text.index("## A worked example") :]
    shown: dict[str, bytes] = {}
    for who, what, digits in re.findall(
        r"^(opener|acceptor): ([A-Z]+).*\n((?: {4}[0-9a-f ]+\n)+)", example, re.MULTILINE
    ):
        shown[f"{who} {what}"] = bytes.fromhex("".join(digits.split()))
    limits = ChannelLimits()
    opener = Dialogue(Role.OPENER, WORKER, limits)
    acceptor = Dialogue(Role.ACCEPTOR, COORDINATOR, limits)
    sent = {"opener HELLO": opener.data_to_send().data}
    acceptor.receive_data(sent["opener HELLO"])
    sent["acceptor WELCOME"] = acceptor.data_to_send().data
    opener.receive_data(sent["acceptor WELCOME"])
    call_id = opener.open_call("claim", b"", b"r-7", timeout_ms=1500, control=True)
    sent["opener CALL"] = opener.data_to_send().data
    acceptor.receive_data(sent["opener CALL"])
    acceptor.reply(call_id, b"", b"\xc0")
    sent["acceptor REPLY"] = acceptor.data_to_send().data
    assert shown == sent
