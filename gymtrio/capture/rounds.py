"""A round of cuts in an inference worker: what its calls have generated becomes durable (CUT-1).

Decisions and snapshots are one synchronous stretch; then one put for all; then the receipt. What was
staged is noted only after the put: a round that fails or is cancelled leaves nothing half done, and
two rounds at once write chunks of different ranges, each under its own key.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import attrs

from gymtrio.capture.cuts import (
    NOTHING_GENERATED,
    ActivePrefix,
    CutInventory,
    CutReceipt,
    CutRefused,
    Disposition,
    PrefixAcknowledgement,
    check_inventory,
)
from gymtrio.capture.prefixes import acknowledge_failure, acknowledge_prefix
from gymtrio.capture.tokens import TokenRecord, TokenStore, TokenStoreFailed
from gymtrio.capture.worker import CapturedCall, InvalidCapture, Progress, Staged, TokenCapture
from gymtrio.errors import InvalidRequest
from gymtrio.ports import Randomness

NO_SUCH_CALL: Final = "no such call here: it has ended, or never came"
_CUT_ID_BYTES: Final = 8

LOG = logging.getLogger(__name__)


@attrs.frozen
class _Snapshot:
    """One entry of an inventory in the instant of the cut."""

    asked: ActivePrefix
    call: CapturedCall
    progress: Progress
    staged: Staged
    """Once `chunk` is durable."""
    chunk: TokenRecord | None
    """None: everything is staged already."""


class Cutter:
    """Cuts the live calls of an engine.

    Args:
        observe: gives the progress of a call that is being generated, without waiting; None: nothing
            is known of it yet.
        unknown: says why a call that an inventory names is not live.
    """

    def __init__(
        self,
        capture: TokenCapture,
        store: TokenStore,
        *,
        observe: Callable[[CapturedCall], Progress | None],
        engine_digest: str,
        randomness: Randomness,
        unknown: Callable[[ActivePrefix], str] = lambda _: NO_SUCH_CALL,
    ) -> None:
        self._capture = capture
        self._store = store
        self._observe = observe
        self._engine_digest = engine_digest
        self._randomness = randomness
        self._unknown = unknown

    async def cut(self, inventory: CutInventory) -> CutReceipt:
        """Perform one round.

        Raises:
            InvalidRequest: the inventory's digest is not that of its content.

        Cancelled: chunks may or may not be durable; the next round stages what is missing.

        Durable: every prefix that the receipt acknowledges.
        """
        try:
            check_inventory(inventory)
        except CutRefused as error:
            raise InvalidRequest(str(error)) from None
        taken = [self._take(asked) for asked in inventory.active_prefixes]
        chunks = {
            entry.chunk.staging_key: entry.chunk
            for entry in taken
            if isinstance(entry, _Snapshot) and entry.chunk is not None
        }
        failure = await self._stage(tuple(chunks.values()))
        prefixes = tuple(self._acknowledge(entry, failure) for entry in taken)
        _log_round(inventory, prefixes)
        return CutReceipt(
            checkpoint_id=inventory.checkpoint_id,
            cut_id=self._randomness.hex(_CUT_ID_BYTES),
            inventory_digest=inventory.inventory_digest,
            prefixes=prefixes,
        )

    def _take(self, asked: ActivePrefix) -> _Snapshot | PrefixAcknowledgement:
        call = self._capture.find(asked)
        if call is None:
            return acknowledge_failure(asked, self._unknown(asked))
        try:
            progress = call.completed or self._observe(call)
            if progress is None or not progress.token_ids:
                return acknowledge_failure(asked, NOTHING_GENERATED)
            chunk = self._capture.build_generation_chunk_record(call, progress)
        except InvalidCapture as error:
            LOG.warning("%s", error)
            return acknowledge_failure(asked, str(error))
        staged = call.staged
        if chunk is not None:
            keys = (*staged.keys, chunk.staging_key)
            staged = Staged(keys=keys, tokens=len(progress.token_ids))
        return _Snapshot(asked, call, progress, staged, chunk)

    async def _stage(self, chunks: tuple[TokenRecord, ...]) -> str | None:
        """Make chunks durable; gives the reason if they are not."""
        if not chunks:
            return None
        try:
            await self._store.put(chunks)
        except TokenStoreFailed as error:
            LOG.warning("%d prefixes could not be staged: %s", len(chunks), error)
            return str(error)
        return None

    def _acknowledge(
        self, entry: _Snapshot | PrefixAcknowledgement, failure: str | None
    ) -> PrefixAcknowledgement:
        if isinstance(entry, PrefixAcknowledgement):
            return entry
        if entry.chunk is not None:
            if failure is not None:
                return acknowledge_failure(entry.asked, failure)
            entry.call.note_staged(entry.staged)
        progress = entry.progress
        return acknowledge_prefix(
            entry.asked,
            token_ids=progress.token_ids,
            staging_keys=entry.staged.keys,
            effective_output_limit=progress.effective_output_limit,
            policy_version=entry.call.policy_version(progress),
            engine_digest=self._engine_digest,
            finish_reason=progress.finish_reason,
            stop_reason=progress.stop_reason,
        )


def _log_round(inventory: CutInventory, prefixes: tuple[PrefixAcknowledgement, ...]) -> None:
    durable = [p for p in prefixes if p.disposition is Disposition.DURABLE_PREFIX]
    LOG.info(
        "checkpoint %s: %d of %d calls cut, %d tokens",
        inventory.checkpoint_id,
        len(durable),
        len(prefixes),
        sum(p.prefix_token_count or 0 for p in durable),
    )
