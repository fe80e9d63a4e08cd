"""Token capture in an inference worker: what begins, is staged, and counts as complete (CUT-8)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import attrs
import pytest

from gymtrio.capture.cuts import (
    ActivePrefix,
    CallExtension,
    Continuation,
    ContinuationRefused,
    TerminalReason,
    digest_tokens,
)
from gymtrio.capture.log_store import open_log_store
from gymtrio.capture.memory_store import MemoryTokenStore
from gymtrio.capture.tokens import StagingKey, TokenRecord
from gymtrio.capture.worker import (
    CallConflict,
    CapturedCall,
    InvalidCapture,
    Progress,
    Staged,
    TokenCapture,
)
from gymtrio.ids import CaptureKey
from gymtrio.ports import HostRandomness

PROMPT = (7, 8)


def extension(call_id: str = "a", rollout_id: str = "r", attempt: int = 0) -> CallExtension:
    return CallExtension(model_call_id=call_id, rollout_id=rollout_id, attempt=attempt)


def asked(call_id: str = "a", rollout_id: str = "r", attempt: int = 0) -> ActivePrefix:
    return ActivePrefix(
        ticket_id="1",
        rollout_id=rollout_id,
        attempt=attempt,
        model_call_id=call_id,
        admitted_at=1.0,
    )


def progress(count: int, **changed: Any) -> Progress:
    values: dict[str, Any] = {
        "token_ids": tuple(range(count)),
        "log_probs": (-0.5,) * count,
        "effective_output_limit": 20,
        "policy_version": 4,
    }
    return Progress(**values | changed)


class Worker:
    """A capture over a store, at policy version 4."""

    def __init__(self) -> None:
        self.store = MemoryTokenStore()
        self.version = 4
        self.capture = TokenCapture(
            self.store, engine_digest="build", policy_version=lambda: self.version, records_max=3
        )

    async def begin(self, wanted: CallExtension, **given: Any) -> CapturedCall:
        return await self.capture.begin_call(wanted, prompt_token_ids=PROMPT, **given)

    async def staged(self, call: CapturedCall, reached: Progress) -> TokenRecord:
        """Stage what is new of a call."""
        chunk = self.capture.build_generation_chunk_record(call, reached)
        assert chunk is not None
        await self.store.put((chunk,))
        keys = (*call.staged.keys, chunk.staging_key)
        call.note_staged(Staged(keys=keys, tokens=len(reached.token_ids)))
        return chunk

    async def cut_of(self, count: int, **changed: Any) -> Continuation:
        """What a call that reached so far can be continued from."""
        call = await self.begin(extension("first"))
        reached = progress(count, **changed)
        await self.staged(call, reached)
        self.capture.end_call(call)
        return Continuation(
            source_capture_key=CaptureKey("r"),
            source_model_call_id="first",
            staging_keys=call.staged.keys,
            prefix_token_count=count,
            prefix_digest=digest_tokens(reached.token_ids),
            effective_output_limit=20,
            policy_version=reached.policy_version,
            engine_digest="build",
        )


async def test_a_call_is_found_by_its_id_and_episode_while_it_is_live() -> None:
    worker = Worker()
    call = await worker.begin(extension())
    assert worker.capture.find(asked()) is call
    assert worker.capture.find(asked("b")) is None
    assert worker.capture.find(asked(rollout_id="other")) is None
    assert worker.capture.find(asked(attempt=1)) is None
    with pytest.raises(CallConflict, match="here already"):
        await worker.begin(extension(attempt=1))
    assert worker.capture.find(asked()) is call
    worker.capture.end_call(call)
    assert worker.capture.find(asked()) is None
    assert len(worker.capture) == 0
    await worker.begin(extension())


async def test_what_is_staged_only_grows() -> None:
    call = await Worker().begin(extension())
    longer, shorter = Staged(tokens=5), Staged(tokens=3)
    call.note_staged(longer)
    call.note_staged(shorter)
    assert call.staged is longer


async def test_a_continued_call_stages_its_tail_only_and_snapshots_everything() -> None:
    """CUT-8, I25: old prefix and new tail, stamped with the oldest version that contributed."""
    worker = Worker()
    cut = await worker.cut_of(3, policy_version=2)
    call = await worker.begin(
        extension("second", attempt=1),
        generation_cut=cut,
        generation_cut_staging_keys=cut.staging_keys,
    )
    assert call.first_call_id == "first"
    reached = progress(5)
    chunk = worker.capture.build_generation_chunk_record(call, reached)
    assert chunk is not None
    assert (chunk.token_ids, chunk.policy_version) == ((3, 4), 4)
    assert chunk.prompt_token_ids == ()
    whole = worker.capture.build_prefix_record(call, reached)
    assert (whole.token_ids, whole.policy_version) == ((0, 1, 2, 3, 4), 2)
    assert whole.mask == (1,) * 5
    assert whole.prompt_token_ids == PROMPT
    nothing_new = progress(3)
    assert worker.capture.build_generation_chunk_record(call, nothing_new) is None
    assert worker.capture.build_prefix_record(call, nothing_new).policy_version == 2


async def test_the_mask_of_a_prefix_is_kept() -> None:
    """I25"""
    worker = Worker()
    cut = await worker.cut_of(2)
    (key,) = cut.staging_keys
    masked = attrs.evolve(
        await worker.store.get(key), staging_key=StagingKey("masked"), mask=(0, 1)
    )
    await worker.store.put((masked,))
    cut = attrs.evolve(cut, staging_keys=(masked.staging_key,))
    call = await worker.begin(extension("second"), generation_cut=cut)
    assert worker.capture.build_prefix_record(call, progress(4)).mask == (0, 1, 1, 1)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"staging_keys": (StagingKey("nobody"),)}, "nobody"),
        ({"staging_keys": ()}, "another prompt"),
        ({"prefix_digest": "0" * 64}, "not those that were cut"),
        ({"prefix_token_count": 2}, "3 tokens are staged, 2 were cut"),
        ({"source_capture_key": CaptureKey("other")}, "another rollout"),
        ({"source_capture_key": CaptureKey("-")}, "rollout"),
        ({"source_model_call_id": "other"}, "another call than its source"),
        ({"policy_version": 3}, "another policy version"),
        ({"policy_version": 5}, "newer than 4"),
        ({"engine_digest": "other"}, "another engine"),
        ({"staging_keys": tuple(map(StagingKey, "abcd"))}, "beyond any call"),
        ({"staging_keys": (StagingKey("a"), StagingKey("a"))}, "each once"),
    ],
)
async def test_a_cut_that_does_not_hold_together_is_refused(
    changed: dict[str, Any], why: str
) -> None:
    """CUT-8: keys, source call, digest, lineage, count and policy version; and the call is not live."""
    worker = Worker()
    cut = attrs.evolve(await worker.cut_of(3), **changed)
    with pytest.raises(ContinuationRefused, match=why):
        await worker.begin(extension("second"), generation_cut=cut)
    assert len(worker.capture) == 0


async def test_keys_that_are_not_those_of_the_cut_are_refused() -> None:
    """CUT-8"""
    worker = Worker()
    cut = await worker.cut_of(3)
    with pytest.raises(ContinuationRefused, match="staging keys"):
        await worker.begin(
            extension("second"),
            generation_cut=cut,
            generation_cut_staging_keys=(StagingKey("other"),),
        )


async def test_another_prompt_is_refused() -> None:
    worker = Worker()
    cut = await worker.cut_of(3)
    with pytest.raises(ContinuationRefused, match="another prompt"):
        await worker.capture.begin_call(
            extension("second"), prompt_token_ids=(1,), generation_cut=cut
        )


async def test_a_worker_without_a_store_continues_nothing() -> None:
    cut = await Worker().cut_of(3)
    capture = TokenCapture(None, engine_digest="build", policy_version=lambda: 4, records_max=3)
    with pytest.raises(ContinuationRefused, match="no token store"):
        await capture.begin_call(extension(), prompt_token_ids=PROMPT, generation_cut=cut)


async def test_a_store_that_is_down_refuses_the_continuation_and_not_the_call(
    tmp_path: Path,
) -> None:
    """CUT-7, CUT-8: the same call without it begins."""
    cut = await Worker().cut_of(3)
    async with open_log_store(tmp_path, randomness=HostRandomness()) as store:
        pass
    capture = TokenCapture(store, engine_digest="build", policy_version=lambda: 4, records_max=3)
    with pytest.raises(ContinuationRefused, match="the token store is closed"):
        await capture.begin_call(extension(), prompt_token_ids=PROMPT, generation_cut=cut)
    assert len(capture) == 0
    await capture.begin_call(extension(), prompt_token_ids=PROMPT)


async def test_completion_is_claimed_for_a_valid_record_only() -> None:
    """CUT-8: until then the call is cut as one that goes on."""
    worker = Worker()
    cut = await worker.cut_of(3)
    call = await worker.begin(extension("second"), generation_cut=cut)
    ended = {"finish_reason": TerminalReason.STOP, "stop_reason": "END"}
    with pytest.raises(InvalidCapture, match="has not ended"):
        worker.capture.complete_call(call, progress(5))
    with pytest.raises(InvalidCapture, match="does not begin with the prefix"):
        worker.capture.complete_call(call, progress(5, token_ids=(9, 1, 2, 3, 4), **ended))
    with pytest.raises(InvalidCapture, match="its limit is 4"):
        worker.capture.complete_call(call, progress(5, effective_output_limit=4, **ended))
    await worker.staged(call, progress(6))
    with pytest.raises(InvalidCapture, match="6 are staged"):
        worker.capture.complete_call(call, progress(5, **ended))
    assert worker.capture.find(asked("second")) is call
    assert not call.completed
    said = worker.capture.complete_call(call, progress(7, **ended))
    assert call.completed == progress(7, **ended)
    assert (said.continued_token_count, said.finish_reason, said.stop_reason) == (
        3,
        TerminalReason.STOP,
        "END",
    )


@pytest.mark.parametrize("log_probs", [(-0.5,), (-0.5, math.nan), (-0.5, -math.inf)])
def test_progress_needs_one_finite_number_per_token(log_probs: tuple[float, ...]) -> None:
    """I25: an engine that drops an entry is not zipped."""
    with pytest.raises(InvalidCapture, match="log-prob"):
        progress(2, log_probs=log_probs)
