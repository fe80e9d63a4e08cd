"""What every token store must do, as checks that whoever plugs one in can run.

    @pytest.mark.parametrize("check", TOKEN_STORE_CHECKS, ids=lambda check: check.__name__)
    async def test_my_store(check: TokenStoreCheck, tmp_path: Path) -> None:
        await check(lambda: open_my_store(tmp_path))

A check opens the store as often as it likes, several times at once too, as several processes do; it
needs one that holds nothing of other checks. It raises `NotConforming`, or what the store raised.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Final, TypeAlias

import attrs
import trio

from gymtrio.capture.tokens import (
    StagingKey,
    TokenRecord,
    TokensMissing,
    TokenStore,
    TokenStoreFailed,
)
from gymtrio.ids import CaptureKey

OpenStore: TypeAlias = Callable[[], AbstractAsyncContextManager[TokenStore]]
TokenStoreCheck: TypeAlias = Callable[[OpenStore], Awaitable[None]]


class NotConforming(AssertionError):
    """The store does not do what `gymtrio.capture.tokens.TokenStore` promises."""


def make_record(name: str, *token_ids: int) -> TokenRecord:
    """A record under the staging key `name`."""
    ids = token_ids or (1, 2, 3)
    return TokenRecord(
        staging_key=StagingKey(name),
        capture_key=CaptureKey("r-a1"),
        model_call_id="m1",
        prompt_token_ids=(7, 8),
        token_ids=ids,
        log_probs=tuple(-0.1 * (i + 1) / 3 for i in ids),
        mask=(1,) * len(ids),
        policy_version=3,
    )


async def what_was_put_comes_back_equal(open_store: OpenStore) -> None:
    """Ids, log-probs, mask and version, to the last bit (I17, I25)."""
    async with open_store() as store:
        await _put_and_expect(store, make_record("r-a1/m1/all", 0, 49151, 2**31 - 1))


async def a_record_without_tokens_is_a_record(open_store: OpenStore) -> None:
    empty = attrs.evolve(make_record("e"), token_ids=(), log_probs=(), mask=())
    async with open_store() as store:
        await _put_and_expect(store, empty)


async def an_unknown_key_is_missing(open_store: OpenStore) -> None:
    async with open_store() as store:
        await store.put((make_record("a"),))
        await _expect_missing(store, "nobody")


async def putting_nothing_is_success(open_store: OpenStore) -> None:
    async with open_store() as store:
        await store.put(())


async def the_same_record_again_is_success(open_store: OpenStore) -> None:
    async with open_store() as store:
        await store.put((make_record("a"), make_record("a")))
        await store.put((make_record("b"), make_record("a")))
        await _expect(store, make_record("a"))


async def another_record_under_a_taken_key_is_refused(open_store: OpenStore) -> None:
    """The whole put is refused, and what is there stays."""
    async with open_store() as store:
        await store.put((make_record("a", 1),))
        await _expect_refused(store, make_record("b"), make_record("a", 2))
        await _expect_missing(store, "b")
        await _expect_refused(store, make_record("c", 1), make_record("c", 2))
        await _expect(store, make_record("a", 1))


async def many_puts_at_once_all_become_readable(open_store: OpenStore) -> None:
    async with open_store() as store:
        async with trio.open_nursery() as nursery:
            for number in range(100):
                nursery.start_soon(store.put, (make_record(f"k{number}", number),))
        for number in range(100):
            await _expect(store, make_record(f"k{number}", number))


async def a_refused_put_does_not_hurt_those_beside_it(open_store: OpenStore) -> None:
    outcomes: list[str] = []

    async def put(store: TokenStore, name: str, token_id: int) -> None:
        try:
            await store.put((make_record(name, token_id),))
        except TokenStoreFailed:
            outcomes.append("refused")
        else:
            outcomes.append("stored")

    async with open_store() as store:
        async with trio.open_nursery() as nursery:
            for name, token_id in [("x", 1), ("y", 1), ("x", 2), ("z", 1)]:
                nursery.start_soon(put, store, name, token_id)
        if sorted(outcomes) != ["refused", "stored", "stored", "stored"]:
            raise NotConforming(f"two records under one key, two others: {outcomes}")
        for name in "xyz":
            await store.get(StagingKey(name))


async def a_reader_in_another_process_sees_it(open_store: OpenStore) -> None:
    """Policy server and engine share the store, each puts and gets (I17)."""
    async with open_store() as engine, open_store() as policy:
        await engine.put((make_record("of the engine"),))
        await _expect(policy, make_record("of the engine"))
        await policy.put((make_record("of the policy"),))
        await engine.put((make_record("later"),))
        await _expect(engine, make_record("of the policy"))
        await _expect(policy, make_record("later"))


async def a_key_that_another_process_took_is_taken(open_store: OpenStore) -> None:
    async with open_store() as engine, open_store() as policy:
        await engine.put((make_record("a", 1),))
        await policy.put((make_record("a", 1),))
        await _expect_refused(policy, make_record("a", 2))


async def it_survives_being_closed_and_opened(open_store: OpenStore) -> None:
    for number in range(3):
        async with open_store() as store:
            await store.put((make_record(f"k{number}"),))
    async with open_store() as store:
        for number in range(3):
            await _expect(store, make_record(f"k{number}"))


async def a_cancelled_put_may_be_put_again(open_store: OpenStore) -> None:
    async with open_store() as store:
        with trio.CancelScope() as scope:
            scope.cancel()
            await store.put((make_record("a"),))
        await _put_and_expect(store, make_record("a"))


TOKEN_STORE_CHECKS: Final[tuple[TokenStoreCheck, ...]] = (
    what_was_put_comes_back_equal,
    a_record_without_tokens_is_a_record,
    an_unknown_key_is_missing,
    putting_nothing_is_success,
    the_same_record_again_is_success,
    another_record_under_a_taken_key_is_refused,
    many_puts_at_once_all_become_readable,
    a_refused_put_does_not_hurt_those_beside_it,
    a_reader_in_another_process_sees_it,
    a_key_that_another_process_took_is_taken,
    it_survives_being_closed_and_opened,
    a_cancelled_put_may_be_put_again,
)


async def _put_and_expect(store: TokenStore, record: TokenRecord) -> None:
    await store.put((record,))
    await _expect(store, record)


async def _expect(store: TokenStore, record: TokenRecord) -> None:
    found = await store.get(record.staging_key)
    if found != record:
        raise NotConforming(f"{record.staging_key}: put {record}, got {found}")


async def _expect_missing(store: TokenStore, name: str) -> None:
    try:
        found = await store.get(StagingKey(name))
    except TokensMissing:
        return
    raise NotConforming(f"{name}: nobody put it, got {found}")


async def _expect_refused(store: TokenStore, *records: TokenRecord) -> None:
    try:
        await store.put(records)
    except TokenStoreFailed:
        return
    raise NotConforming(f"{records[-1].staging_key} is taken, and another record was put under it")
