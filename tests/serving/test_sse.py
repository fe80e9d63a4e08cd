"""Events of a stream, from whatever pieces they come in."""

from __future__ import annotations

import pytest

from gymtrio.serving.sse import EventTooLong, SseDecoder, encode_event


def test_events_do_not_depend_on_how_their_bytes_were_cut() -> None:
    stream = b': ping\n\ndata: {"a": 1}\r\n\r\nevent: x\ndata:two\ndata: lines\n\ndata: [DONE]\n\n'
    whole = SseDecoder().receive_data(stream)
    assert whole == [b'{"a": 1}', b"two\nlines", b"[DONE]"]
    decoder = SseDecoder()
    assert [e for byte in stream for e in decoder.receive_data(bytes([byte]))] == whole


def test_an_event_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gymtrio.serving.sse.EVENT_BYTES_MAX", 100)
    decoder = SseDecoder()
    with pytest.raises(EventTooLong, match="over 100 bytes"):
        for _ in range(20):
            decoder.receive_data(b"data: 0123456789\n")


def test_what_is_encoded_is_decoded() -> None:
    decoder = SseDecoder()
    events = encode_event({"a": "line\nbreak"}, "named") + encode_event([1])
    assert decoder.receive_data(events) == [b'{"a":"line\\nbreak"}', b"[1]"]
