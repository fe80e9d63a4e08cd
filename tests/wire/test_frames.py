from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymtrio.wire.frames import HEADER_BYTES, Frame, FrameDecoder, FrameError, encode_frame

FRAMES = st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=300)), max_size=6)
LIMIT = 1000


def decode(chunks: list[bytes]) -> list[Frame]:
    decoder = FrameDecoder(payload_bytes_max=LIMIT)
    frames = []
    for chunk in chunks:
        decoder.receive_data(chunk)
        while (frame := decoder.next_frame()) is not None:
            frames.append(frame)
    assert decoder.pending_bytes == 0
    return frames


@given(FRAMES, st.data())
def test_the_result_does_not_depend_on_how_the_bytes_were_cut(
    content: list[tuple[int, bytes]], data: st.DataObject
) -> None:
    stream = b"".join(encode_frame(kind, payload) for kind, payload in content)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    chunks = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    expected = [Frame(kind, payload) for kind, payload in content]
    assert decode(chunks) == expected
    assert decode([stream[i : i + 1] for i in range(len(stream))]) == expected


def test_a_golden_frame() -> None:
    """The layout of version 1, byte for byte: it is on disks and must be read for ever."""
    assert encode_frame(7, b"abc").hex() == "677901070000000323673eca616263"


@given(st.binary(max_size=64), st.data())
def test_a_flipped_bit_is_found(payload: bytes, data: st.DataObject) -> None:
    frame = bytearray(encode_frame(1, payload))
    bit = data.draw(st.integers(0, len(frame) * 8 - 1))
    frame[bit // 8] ^= 1 << bit % 8
    decoder = FrameDecoder(payload_bytes_max=LIMIT)
    decoder.receive_data(bytes(frame))
    try:
        assert decoder.next_frame() is None  # A longer length: more bytes are awaited.
    except FrameError:
        with pytest.raises(FrameError):
            decoder.next_frame()
    else:
        assert decoder.pending_bytes == len(frame)


@given(st.binary(min_size=1, max_size=64), st.data())
def test_truncation_leaves_bytes_pending(payload: bytes, data: st.DataObject) -> None:
    frame = encode_frame(1, payload)
    decoder = FrameDecoder()
    decoder.receive_data(frame[: data.draw(st.integers(1, len(frame) - 1))])
    assert decoder.next_frame() is None
    assert decoder.pending_bytes > 0


@given(st.binary(max_size=64))
def test_garbage_is_refused_or_awaited_and_never_crashes(garbage: bytes) -> None:
    decoder = FrameDecoder(payload_bytes_max=LIMIT)
    decoder.receive_data(garbage)
    try:
        decoder.next_frame()
    except FrameError:
        assert not garbage.startswith(encode_frame(0, b""))


def test_a_length_over_the_limit_is_refused_on_the_header_alone() -> None:
    whole = encode_frame(1, b"x" * (LIMIT + 1))
    decoder = FrameDecoder(payload_bytes_max=LIMIT)
    decoder.receive_data(whole[:HEADER_BYTES])
    with pytest.raises(FrameError, match="1001 bytes announced, limit 1000"):
        decoder.next_frame()
    with pytest.raises(FrameError, match="limit 2"):
        encode_frame(1, b"xxx", payload_bytes_max=2)


def test_a_wrong_version_names_both() -> None:
    frame = bytearray(encode_frame(1, b""))
    frame[2] = 9
    decoder = FrameDecoder()
    decoder.receive_data(bytes(frame))
    with pytest.raises(FrameError, match="version 9, this side speaks 1"):
        decoder.next_frame()
