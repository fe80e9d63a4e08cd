"""A round of cuts: what calls in flight have generated becomes durable while they go on (CUT-1).

Decisions and snapshots are one synchronous stretch; then one put for all; then the receipt. What was
staged is noted only after the put: a round that fails or is cancelled leaves nothing half done, and
two rounds at once write chunks of different ranges, each under its own key.
"""

from __future__ import annotations

import logging
from typing import Final, Protocol

import attrs

from gymtrio.capture.cuts import (
    NOTHING_GENERATED,
    ActivePrefix,
    CutInventory,
    CutReceipt,
    CutRefused,
    Disposition,
    EngineDescription,
    PrefixAcknowledgement,
    TerminalReason,
    check_inventory,
)
from gymtrio.capture.prefixes import acknowledge_failure, acknowledge_prefix, make_chunk
from gymtrio.capture.tokens import TokenRecord, TokenStore, TokenStoreFailed
from gymtrio.errors import InvalidRequest
from gymtrio.ports import Randomness
from servers.model.embedded.generation import Generated
from servers.model.engine_native.live_calls import LiveCall, LiveCalls, Staged

NO_SUCH_CALL: Final = "no such call here: it has ended, or never came"
_CUT_ID_BYTES: Final = 8

_log = logging.getLogger(__name__)


class Snapshots(Protocol):
    """Knows what calls under way have generated; `embedded.engine.Engine` does."""

    def snapshot(self, call_id: str) -> Generated | None:
        """None: no call of this id is being generated."""
        ...


@attrs.frozen
class _Snapshot:
    """One entry of an inventory in the instant of the cut."""

    asked: ActivePrefix
    call: LiveCall
    generated: Generated
    staged: Staged
    """Once `chunk` is durable."""
    chunk: TokenRecord | None
    """None: everything is staged already."""


class Cutter:
    """Cuts the live calls of an engine."""

    def __init__(
        self,
        engine: Snapshots,
        calls: LiveCalls,
        store: TokenStore,
        *,
        description: EngineDescription,
        randomness: Randomness,
    ) -> None:
        self._engine = engine
        self._calls = calls
        self._store = store
        self._description = description
        self._randomness = randomness

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
        call = self._calls.find(asked)
        if call is None:
            return acknowledge_failure(asked, NO_SUCH_CALL)
        generated = call.result or self._engine.snapshot(call.engine_id)
        if generated is None or not generated.token_ids:
            return acknowledge_failure(asked, NOTHING_GENERATED)
        start = call.staged.tokens
        if len(generated.token_ids) == start:
            return _Snapshot(asked, call, generated, call.staged, None)
        chunk = make_chunk(
            call.extension,
            start_token=start,
            prompt_token_ids=call.prompt_ids,
            token_ids=generated.token_ids[start:],
            log_probs=generated.logprobs[start:],
            policy_version=self._description.policy_version,
        )
        staged = Staged(
            keys=(*call.staged.keys, chunk.staging_key), tokens=len(generated.token_ids)
        )
        return _Snapshot(asked, call, generated, staged, chunk)

    async def _stage(self, chunks: tuple[TokenRecord, ...]) -> str | None:
        """Make chunks durable; gives the reason if they are not."""
        if not chunks:
            return None
        try:
            await self._store.put(chunks)
        except TokenStoreFailed as error:
            _log.warning("%d prefixes could not be staged: %s", len(chunks), error)
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
        generated = entry.generated
        reason = generated.finish_reason
        return acknowledge_prefix(
            entry.asked,
            token_ids=generated.token_ids,
            staging_keys=entry.staged.keys,
            effective_output_limit=generated.output_limit_tokens,
            policy_version=entry.call.policy_version,
            engine_digest=self._description.digest,
            finish_reason=None if reason is None else TerminalReason(reason),
            stop_reason=generated.stop,
        )


def _log_round(inventory: CutInventory, prefixes: tuple[PrefixAcknowledgement, ...]) -> None:
    durable = [p for p in prefixes if p.disposition is Disposition.DURABLE_PREFIX]
    _log.info(
        "checkpoint %s: %d of %d calls cut, %d tokens",
        inventory.checkpoint_id,
        len(durable),
        len(prefixes),
        sum(p.prefix_token_count or 0 for p in durable),
    )
