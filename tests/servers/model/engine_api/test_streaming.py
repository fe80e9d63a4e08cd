"""Choices and streams over the real engine, whose counters tell what is left of a call."""

from __future__ import annotations

from contextlib import aclosing
from functools import partial

import pytest
import trio

from gymtrio.errors import InvalidRequest, Refusal, Unavailable
from servers.model.embedded.engine import Engine, open_engine
from servers.model.embedded.generation import Emission, Generated, GenerationRequest
from servers.model.embedded.prompt import Turn, encode_turns
from servers.model.embedded.sampling import Sampling
from servers.model.embedded.settings import EngineSettings
from servers.model.engine_api.streaming import StreamedReply, generate_choices

SIZES = EngineSettings(
    parallel_calls=2, cached_sequences=0, context_tokens=256, waiting_calls_max=2
)


class Recorder:
    """Writes a reply as one letter per event. Implements `sse.ReplyStream`."""

    def __init__(self) -> None:
        self.failed: Refusal | None = None

    def begin(self) -> bytes:
        return b"b"

    def emit(self, choice: int, emission: Emission) -> bytes:
        return b"e"

    def finish(self, choice: int, generated: Generated) -> bytes:
        return b"f%d" % len(generated.token_ids)

    def end(self) -> bytes:
        return b"."

    def fail(self, refusal: Refusal) -> bytes:
        self.failed = refusal
        return b"!"


def story(engine: Engine, tokens: int) -> GenerationRequest:
    turns = [Turn("user", "Write a long story.")]
    ids = encode_turns(turns, engine.vocabulary, SIZES.context_tokens)
    return GenerationRequest(ids, tokens, Sampling(temperature=0))


async def idle(engine: Engine) -> None:
    """Wait until no call is left; the step under way ends first."""
    while engine.counters().active_calls or engine.counters().waiting_calls:
        await generate_choices(engine, "next", [story(engine, 1)])


async def test_streams_and_choices() -> None:
    """SRV-3: one engine for all of it, since loading one takes long."""
    async with open_engine(SIZES) as engine, trio.open_nursery() as nursery:
        for scenario in (
            choices_are_generated_together,
            the_refusal_of_one_choice_ends_all,
            a_stream_tells_everything_and_ends,
            what_is_refused_at_once_never_becomes_a_stream,
            a_caller_that_leaves_a_stream_frees_its_slot,
            a_stream_that_nobody_reads_frees_its_slot,
        ):
            await scenario(engine, nursery)
            assert engine.counters().active_calls == 0, scenario.__name__


async def test_a_stream_whose_engine_ends_says_so() -> None:
    recorder = Recorder()
    async with trio.open_nursery() as nursery:
        async with open_engine(SIZES) as engine:
            reply = StreamedReply(engine, "s", [story(engine, 200)], recorder)
            await nursery.start(reply.generate)
            chunks = reply.chunks()
            assert await anext(chunks) == b"b"
            await anext(chunks)
        rest = [chunk async for chunk in chunks]
    assert rest[-1].endswith(b"!")
    assert isinstance(recorder.failed, Unavailable)


async def choices_are_generated_together(engine: Engine, nursery: trio.Nursery) -> None:
    steps = engine.counters().steps
    results = await generate_choices(engine, "c", [story(engine, 4), story(engine, 6)])
    assert [len(result.token_ids) for result in results] == [4, 6]
    assert engine.counters().steps - steps < 10


async def the_refusal_of_one_choice_ends_all(engine: Engine, nursery: trio.Nursery) -> None:
    bad = GenerationRequest((10**6,), 5)
    with pytest.raises(InvalidRequest, match="token id"):
        await generate_choices(engine, "c", [story(engine, 100), bad])
    await idle(engine)


async def a_stream_tells_everything_and_ends(engine: Engine, nursery: trio.Nursery) -> None:
    reply = StreamedReply(engine, "s", [story(engine, 3), story(engine, 2)], Recorder())
    await nursery.start(reply.generate)
    text = b"".join([chunk async for chunk in reply.chunks()])
    assert sorted(text) == sorted(b"b" + b"e" * 5 + b"f2f3.")
    assert text.startswith(b"b")
    assert text.endswith(b".")


async def what_is_refused_at_once_never_becomes_a_stream(
    engine: Engine, nursery: trio.Nursery
) -> None:
    async with trio.open_nursery() as callers:
        for number in range(SIZES.parallel_calls):
            begun = trio.Event()
            call = partial(engine.generate, listener=lambda _, begun=begun: begun.set())
            callers.start_soon(call, f"active/{number}", story(engine, 200))
            await begun.wait()
        for number in range(SIZES.waiting_calls_max):
            await callers.start(engine.generate, f"waiting/{number}", story(engine, 200))
        reply = StreamedReply(engine, "s", [story(engine, 3)], Recorder())
        with pytest.raises(Unavailable, match="wait for a slot"):
            await nursery.start(reply.generate)
        callers.cancel_scope.cancel()
    await idle(engine)


async def a_caller_that_leaves_a_stream_frees_its_slot(
    engine: Engine, nursery: trio.Nursery
) -> None:
    reply = StreamedReply(engine, "s", [story(engine, 200)], Recorder())
    await nursery.start(reply.generate)
    async with aclosing(reply.chunks()) as chunks:
        assert await anext(chunks) == b"b"
        await anext(chunks)
    reply.stop(False)
    await idle(engine)


async def a_stream_that_nobody_reads_frees_its_slot(engine: Engine, nursery: trio.Nursery) -> None:
    reply = StreamedReply(engine, "s", [story(engine, 200)], Recorder())
    await nursery.start(reply.generate)
    reply.stop(False)
    await idle(engine)
