"""Parts: what is read is what was written, however the bytes are cut, and nothing else."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymtrio.errors import InvalidCheckpointState
from gymtrio.ids import CaptureKey, EpisodeId
from gymtrio.storage import records
from gymtrio.storage.records import (
    Identity,
    PartDecoder,
    PartEnd,
    PartHead,
    Record,
    encode_end,
    encode_head,
    encode_record,
)
from gymtrio.wire.codec import pack
from gymtrio.wire.frames import encode_frame
from tests.helpers.checkpoints import IDENTITY, NONCE, episode, keyed, some_records


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "RECORD_CHUNK_BYTES", 64)
    monkeypatch.setattr(records, "RECORD_BYTES_MAX", 1000)


def encode(given_records: list[Record], identity: Identity = IDENTITY) -> bytes:
    pieces = [encode_head(identity)]
    for record in given_records:
        pieces += encode_record(record)
    return b"".join([*pieces, encode_end(len(given_records), NONCE)])


def decode(
    data: bytes, *, scope: frozenset[CaptureKey] | None = None, cut_bytes: int = 50
) -> dict[CaptureKey, Record]:
    decoder = PartDecoder(IDENTITY, scope=scope, where="f.part")
    for begin in range(0, len(data), cut_bytes):
        decoder.receive_data(data[begin : begin + cut_bytes])
        while decoder.advance():
            pass
    decoder.finish()
    large = [Record(episode_id, b"".join(chunks)) for episode_id, chunks in decoder.large.items()]
    return keyed([*decoder.records, *large])


PAYLOADS = st.lists(st.binary(max_size=200), max_size=6)


@given(PAYLOADS, st.integers(1, 300))
def test_records_come_back_whatever_the_cuts(payloads: list[bytes], cut_bytes: int) -> None:
    written = [Record(episode(f"r{n}", n), payload) for n, payload in enumerate(payloads)]
    assert decode(encode(written), cut_bytes=cut_bytes) == keyed(written)


def test_a_payload_over_a_chunk_is_cut_into_frames() -> None:
    """STO-5: neither side ever handles more than a chunk at once."""
    pieces = list(encode_record(Record(episode("r"), b"x" * 200)))
    assert len(pieces) == 4
    assert max(map(len, pieces)) < 64 + 64


def test_only_the_scope_is_kept() -> None:
    """STO-4: the others are counted and their keys seen, no more."""
    written = some_records(4, 100)
    scope = frozenset({CaptureKey("r1-a1"), CaptureKey("never-there")})
    assert decode(encode(written), scope=scope) == {CaptureKey("r1-a1"): written[1]}


def _raw_record(key: bytes, announced: int, payload: bytes) -> bytes:
    return encode_frame(2, bytes([len(key)]) + announced.to_bytes(4, "big") + key + payload)


HEAD = encode_head(IDENTITY)


def test_a_record_that_no_episode_has_does_harm_only_in_the_scope() -> None:
    """STO-4."""
    data = HEAD + _raw_record(b"../x\xff", 1, b"y") + encode_end(1, NONCE)
    assert decode(data, scope=frozenset()) == {}
    with pytest.raises(InvalidCheckpointState, match="rollout id"):
        decode(data)


def test_a_payload_over_the_limit_is_refused_with_its_episode() -> None:
    with pytest.raises(InvalidCheckpointState, match=r"^episode r-a2: a record of 1001 bytes"):
        list(encode_record(Record(episode("r", 2), b"x" * 1001)))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "truncated"),
        (HEAD, "truncated"),
        (HEAD[:-1], "truncated"),
        (encode([]) + b"g", "truncated"),
        (encode([]) + encode_end(0, NONCE), "something follows its end"),
        (encode([]) + HEAD, "something follows its end"),
        (HEAD + HEAD, "frame type 1 where a record"),
        (HEAD + encode_frame(9, b""), "frame type 9 where a record"),
        (encode_end(0, NONCE), "frame type 4 where the head"),
        (encode_frame(1, b"\xc1"), "not a message"),
        (encode_frame(1, pack(PartEnd(record_count=0, nonce=""))), "unknown key"),
        (HEAD + encode_frame(2, b"\x01\0\0"), "shorter than its head"),
        (HEAD + encode_frame(2, b"\x09\0\0\0\0r"), "shorter than its key"),
        (HEAD + _raw_record(b"r", 1, b"xy"), "episode r: longer than announced"),
        (HEAD + _raw_record(b"r", 3, b"xy") + encode_end(1, NONCE), "episode r: 1 bytes missing"),
        (HEAD + _raw_record(b"r", 3, b"xy") + encode_frame(3, b""), "episode r: 1 bytes missing"),
        (HEAD + _raw_record(b"r", 3, b"xy") + encode_frame(3, b"zz"), "longer than announced"),
        (HEAD + _raw_record(b"r", 1001, b""), "1001 bytes announced, limit 1000"),
        (HEAD + _raw_record(b"r", 1, b"x") * 2, "episode r is in it twice"),
        (HEAD + encode_end(1, NONCE), "0 records where its end says 1"),
        (b"xy" + HEAD, "bad magic"),
        (HEAD + encode_frame(2, bytes(2**21)), "2097152 bytes announced"),
    ],
    ids=range(22),
)
def test_what_is_no_part_is_refused(data: bytes, why: str) -> None:
    """STO-4, I23."""
    with pytest.raises(InvalidCheckpointState, match="^f.part, frame at byte [0-9]+: .*" + why):
        decode(data)


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("schema_version", 2, "schema version 2; this side reads 1"),
        ("kind", "agent", "kind 'agent' where the manifest has 'resources'"),
        ("instance", "other", "instance 'other' where"),
        ("checkpoint_id", "step-6", "checkpoint_id 'step-6' where"),
    ],
)
def test_a_part_of_another_checkpoint_is_refused(field: str, value: object, why: str) -> None:
    """STO-4."""
    head = PartHead(schema_version=1, **attrs.asdict(IDENTITY))
    data = encode_frame(1, pack(attrs.evolve(head, **{field: value})))
    with pytest.raises(InvalidCheckpointState, match=why):
        decode(data)


def test_every_flipped_bit_and_every_cut_is_refused() -> None:
    """STO-4, I23: by the frames alone, before any digest of the file is compared."""
    data = encode(some_records(3, 90))
    assert len(decode(data)) == 3
    for position in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            with pytest.raises(InvalidCheckpointState):
                decode(bytes(damaged))
        with pytest.raises(InvalidCheckpointState):
            decode(data[:position])


@given(st.binary(max_size=300))
def test_any_bytes_are_a_refusal(data: bytes) -> None:
    """STO-4."""
    with pytest.raises(InvalidCheckpointState):
        decode(data)
    with pytest.raises(InvalidCheckpointState):
        decode(HEAD + data)


def test_an_episode_in_two_parts_is_refused() -> None:
    """I18: each episode once."""
    seen: set[str] = set()
    data = encode([Record(EpisodeId(episode("r").rollout_id), b"x")])
    for refused in (False, True):
        decoder = PartDecoder(IDENTITY, scope=frozenset(), where="f", seen=seen)
        decoder.receive_data(data)
        assert decoder.advance(1)
        if refused:
            with pytest.raises(InvalidCheckpointState, match="episode r is in it twice"):
                decoder.advance(1)
        else:
            assert decoder.advance(1)
