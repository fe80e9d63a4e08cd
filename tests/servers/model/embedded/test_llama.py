"""What the engine relies on in the native library, without the engine (invariant L1)."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servers.model.embedded.llama import Runtime, open_runtime
from servers.model.embedded.prompt import Turn, encode_turns
from servers.model.embedded.sampling import Sampled, Sampling
from servers.model.embedded.settings import EngineSettings
from servers.model.embedded.steps import Chunk, Copy, Move, Step, Trim

TEXT = 'The fox counted: 1, 2, 3, 漢字, 🙂 and then {"name": "add"}. ' * 4
GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    settings = EngineSettings(
        parallel_calls=3, cached_sequences=1, context_tokens=256, step_tokens=128
    )
    opened = open_runtime(settings)
    yield opened
    opened.close()


def run(runtime: Runtime, chunks: list[Chunk], *moves: Move) -> tuple[Sampled, ...]:
    return runtime.run(Step(moves, tuple(chunks)))


def clear(runtime: Runtime) -> tuple[Move, ...]:
    return tuple(Trim(sequence, 0) for sequence in range(4))


@pytest.fixture(scope="module")
def ids(runtime: Runtime) -> tuple[int, ...]:
    return tuple(runtime.vocabulary.encode(TEXT, 120)[:70])


@pytest.fixture(scope="module")
def expected(runtime: Runtime, ids: tuple[int, ...]) -> Sampled:
    (sampled,) = run(runtime, [Chunk(0, 0, ids, GREEDY)], *clear(runtime))
    return sampled


@pytest.mark.parametrize("size", [1, 13, 32, 45])
def test_how_a_prompt_is_split_does_not_matter(
    runtime: Runtime, ids: tuple[int, ...], expected: Sampled, size: int
) -> None:
    moves = clear(runtime)
    sampled: tuple[Sampled, ...] = ()
    for start in range(0, len(ids), size):
        part = ids[start : start + size]
        wanted = GREEDY if start + size >= len(ids) else None
        sampled = run(runtime, [Chunk(1, start, part, wanted)], *moves)
        moves = ()
    assert sampled == (expected,)


def test_what_else_is_in_a_decode_does_not_matter(
    runtime: Runtime, ids: tuple[int, ...], expected: Sampled
) -> None:
    run(runtime, [Chunk(0, 0, ids[:7], None), Chunk(1, 0, ids[:50], None)], *clear(runtime))
    run(runtime, [Chunk(0, 7, ids[:1], None), Chunk(1, 50, ids[50:-1], None)])
    sampled = run(
        runtime,
        [
            Chunk(0, 8, ids[8:9], GREEDY),
            Chunk(1, len(ids) - 1, ids[-1:], GREEDY),
            Chunk(2, 0, ids[:20], GREEDY),
        ],
    )
    assert sampled[1] == expected


def test_a_copied_and_shortened_sequence_is_as_good_as_a_computed_one(
    runtime: Runtime, ids: tuple[int, ...], expected: Sampled
) -> None:
    run(runtime, [Chunk(0, 0, ids[:60] + ids[:20], None)], *clear(runtime))
    moves = (Copy(0, 3), Trim(0, 0), Copy(3, 2), Trim(2, 60))
    sampled = run(runtime, [Chunk(0, 0, ids[:9], None), Chunk(2, 60, ids[60:], GREEDY)], *moves)
    assert sampled == (expected,)


@given(st.text(max_size=80))
def test_tokens_give_back_the_bytes_of_the_text(runtime: Runtime, text: str) -> None:
    """But for the few bytes that this vocabulary has no token for."""
    vocabulary = runtime.vocabulary
    known = bytes(byte for byte in range(256) if bytes([byte]) in vocabulary.pieces)
    assert {*range(0x20, 0x7F), *b"\n\t", 0xF0} <= set(known)
    kept = bytes(byte for byte in text.encode() if byte in known)
    assert vocabulary.decode(vocabulary.encode(text, 1000)) == kept


def test_names_of_control_tokens_in_a_text_are_text(runtime: Runtime) -> None:
    vocabulary = runtime.vocabulary
    for name in vocabulary.control_ids:
        ids = vocabulary.encode(f"a{name}b", 100)
        assert not set(ids) & set(vocabulary.control_ids.values())
        assert vocabulary.decode(ids) == f"a{name}b".encode()
    assert vocabulary.control_ids["<|im_end|>"] in vocabulary.end_ids


def test_a_rendered_conversation_has_the_tokens_of_the_template(runtime: Runtime) -> None:
    turns = [Turn("system", "Be brief."), Turn("user", " Add  4\n\n"), Turn("assistant", "é{1}")]
    text = "".join(f"<|im_start|>{turn.role}\n{turn.text}<|im_end|>\n" for turn in turns)
    whole = runtime._model.get_vocab().tokenize(f"{text}<|im_start|>assistant\n", False, True)
    assert encode_turns(turns, runtime.vocabulary, 200) == tuple(whole)


def test_the_fingerprint_goes_into_a_manifest(runtime: Runtime) -> None:
    told = dict(runtime.fingerprint)
    assert json.loads(json.dumps(told)) == told
    assert {"llama_cpp", "cpu_sha256", "weights_sha256", "n_ubatch"} <= told.keys()
