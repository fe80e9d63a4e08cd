"""What every token store must do; a framework that plugs its own in runs this suite on it.

Subclass `TokenStoreConformance`, implement `open_store`, and let pytest collect the subclass.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path

import attrs
import pytest
import trio

from gymtrio.capture.tokens import (
    StagingKey,
    TokenRecord,
    TokensMissing,
    TokenStore,
    TokenStoreFailed,
)
from gymtrio.ids import CaptureKey


def record(name: str, *token_ids: int, policy_version: int = 3) -> TokenRecord:
    ids = token_ids or (1, 2, 3)
    return TokenRecord(
        staging_key=StagingKey(name),
        capture_key=CaptureKey("r-a1"),
        model_call_id="m1",
        prompt_token_ids=(7, 8),
        token_ids=ids,
        log_probs=tuple(-0.1 * (i + 1) / 3 for i in ids),
        mask=(1,) * len(ids),
        policy_version=policy_version,
    )


class TokenStoreConformance:
    """Requirements on `gymtrio.capture.tokens.TokenStore`."""

    def open_store(self, directory: Path) -> AbstractAsyncContextManager[TokenStore]:
        """Open the store that is kept in `directory`, as one process does; others may be open."""
        raise NotImplementedError

    async def test_what_was_put_comes_back_equal(self, tmp_path: Path) -> None:
        """I17, I25: ids, log-probs, mask and version, to the last bit."""
        async with self.open_store(tmp_path) as store:
            put = record("r-a1/m1/all", 0, 49151, 2**31 - 1)
            await store.put((put,))
            assert await store.get(put.staging_key) == put

    async def test_a_record_without_tokens_is_a_record(self, tmp_path: Path) -> None:
        empty = attrs.evolve(record("e"), token_ids=(), log_probs=(), mask=())
        async with self.open_store(tmp_path) as store:
            await store.put((empty,))
            assert await store.get(empty.staging_key) == empty

    async def test_an_unknown_key_is_missing(self, tmp_path: Path) -> None:
        async with self.open_store(tmp_path) as store:
            await store.put((record("a"),))
            with pytest.raises(TokensMissing, match="nobody"):
                await store.get(StagingKey("nobody"))

    async def test_putting_nothing_is_success(self, tmp_path: Path) -> None:
        async with self.open_store(tmp_path) as store:
            await store.put(())

    async def test_the_same_record_again_is_success(self, tmp_path: Path) -> None:
        async with self.open_store(tmp_path) as store:
            await store.put((record("a"), record("a")))
            await store.put((record("b"), record("a")))
            assert await store.get(StagingKey("a")) == record("a")

    async def test_another_record_under_a_taken_key_is_refused(self, tmp_path: Path) -> None:
        """The whole put is refused, and what is there stays."""
        async with self.open_store(tmp_path) as store:
            await store.put((record("a", 1),))
            with pytest.raises(TokenStoreFailed, match="a is taken"):
                await store.put((record("b"), record("a", 2)))
            with pytest.raises(TokensMissing):
                await store.get(StagingKey("b"))
            with pytest.raises(TokenStoreFailed, match="c is taken"):
                await store.put((record("c", 1), record("c", 2)))
            assert await store.get(StagingKey("a")) == record("a", 1)

    async def test_many_puts_at_once_all_become_readable(self, tmp_path: Path) -> None:
        async with self.open_store(tmp_path) as store:
            async with trio.open_nursery() as nursery:
                for number in range(100):
                    nursery.start_soon(store.put, (record(f"k{number}", number),))
            for number in range(100):
                assert await store.get(StagingKey(f"k{number}")) == record(f"k{number}", number)

    async def test_a_refused_put_does_not_hurt_those_beside_it(self, tmp_path: Path) -> None:
        outcomes: list[str] = []

        async def put(name: str, token_id: int) -> None:
            try:
                await store.put((record(name, token_id),))
            except TokenStoreFailed:
                outcomes.append("refused")
            else:
                outcomes.append("stored")

        async with self.open_store(tmp_path) as store:
            async with trio.open_nursery() as nursery:
                for name, token_id in [("x", 1), ("y", 1), ("x", 2), ("z", 1)]:
                    nursery.start_soon(put, name, token_id)
            assert sorted(outcomes) == ["refused", "stored", "stored", "stored"]
            for name in "xyz":
                assert (await store.get(StagingKey(name))).staging_key == name

    async def test_a_reader_in_another_process_sees_it(self, tmp_path: Path) -> None:
        """I17: policy server and engine share the store, each puts and gets."""
        async with self.open_store(tmp_path) as engine, self.open_store(tmp_path) as policy:
            await engine.put((record("of the engine"),))
            assert await policy.get(StagingKey("of the engine")) == record("of the engine")
            await policy.put((record("of the policy"),))
            await engine.put((record("later"),))
            assert await engine.get(StagingKey("of the policy")) == record("of the policy")
            assert await policy.get(StagingKey("later")) == record("later")

    async def test_a_key_that_another_process_took_is_taken(self, tmp_path: Path) -> None:
        async with self.open_store(tmp_path) as engine, self.open_store(tmp_path) as policy:
            await engine.put((record("a", 1),))
            await policy.put((record("a", 1),))
            with pytest.raises(TokenStoreFailed, match="a is taken"):
                await policy.put((record("a", 2),))

    async def test_it_survives_being_closed_and_opened(self, tmp_path: Path) -> None:
        for number in range(3):
            async with self.open_store(tmp_path) as store:
                await store.put((record(f"k{number}"),))
        async with self.open_store(tmp_path) as store:
            for number in range(3):
                assert await store.get(StagingKey(f"k{number}")) == record(f"k{number}")

    async def test_a_cancelled_put_may_be_put_again(self, tmp_path: Path) -> None:
        async with self.open_store(tmp_path) as store:
            with trio.CancelScope() as scope:
                scope.cancel()
                await store.put((record("a"),))
            await store.put((record("a"),))
            assert await store.get(StagingKey("a")) == record("a")
