"""One generation of a stock engine: pieces gathered, stop strings found, also across a cut."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from gymtrio.capture.cuts import ContinuationRefused, TerminalReason
from gymtrio.capture.worker import Progress
from gymtrio.serving.stock.engines import EngineBroke, Piece, StockEngine, Wanted


@attrs.frozen(kw_only=True)
class Generated:
    """A generation that has ended."""

    progress: Progress
    text: str
    """Without the stop string, and without the token that ended it."""


class Generating:
    """A generation under way.

    Args:
        prefix_log_probs: of the tokens that it goes on from.
        policy_version: of the engine's weights.
        ended: how what it goes on from had ended; then nothing is generated.
        stop_reason: the stop string that ended it, if one did.
    """

    def __init__(
        self,
        engine: StockEngine,
        wanted: Wanted,
        *,
        prefix_log_probs: Sequence[float],
        stop: Sequence[str],
        policy_version: int,
        ended: TerminalReason | None = None,
        stop_reason: str | None = None,
    ) -> None:
        self._engine = engine
        self._wanted = wanted
        self._stop = tuple(stop)
        self._policy_version = policy_version
        self._token_ids = wanted.prefix_token_ids
        self._log_probs = tuple(prefix_log_probs)
        self._finish = ended
        self._stop_reason = stop_reason

    def progress(self) -> Progress:
        """What there is at this instant; never a token behind a stop string that was noticed."""
        return Progress(
            token_ids=self._token_ids,
            log_probs=self._log_probs,
            effective_output_limit=self._wanted.output_tokens_max,
            policy_version=self._policy_version,
            finish_reason=self._finish,
            stop_reason=self._stop_reason,
        )

    async def run(self) -> Generated:
        """Generate to the end.

        Raises:
            TransportError, EngineRefused: see `StockEngine.generate`.
            EngineBroke: as there; or its stream ended before the generation had.
            ContinuationRefused: the engine does not go on from the prefix.

        Cancelled: the engine is told.
        """
        before = ""
        if self._token_ids and self._stop:
            before = await self._engine.detokenize(self._token_ids)
        last: Piece | None = None
        if self._finish is None and len(self._token_ids) < self._wanted.output_tokens_max:
            last = await self._generate(before)
        generated = await self._end(last)
        if len(generated.progress.token_ids) < len(self._wanted.prefix_token_ids):
            raise ContinuationRefused("the prefix goes on beyond a stop string")
        return generated

    async def _generate(self, text: str) -> Piece | None:
        """Generate. The piece that completes a stop string is not taken: a part of it is too much."""
        longest = max(map(len, self._stop), default=0)
        async with self._engine.generate(self._wanted) as pieces:
            async for piece in pieces:
                text += piece.text
                if any(stop in text for stop in self._stop):
                    return piece
                self._token_ids += piece.token_ids
                self._log_probs += piece.log_probs
                self._finish = piece.finish
                # What is dropped cannot begin a stop string that ends later.
                text = text[-longest:] if longest else ""
                if piece.finish is not None:
                    break
        return None

    async def _end(self, last: Piece | None) -> Generated:
        """Look at the whole text: pieces may have damaged a character that lies in two of them."""
        ids, log_probs, finish = self._token_ids, self._log_probs, self._finish
        if last is not None:
            ids, log_probs, finish = ids + last.token_ids, log_probs + last.log_probs, last.finish
        by_token = finish is TerminalReason.STOP and self._stop_reason is None
        text, stop = await self._text_of(ids[:-1] if by_token else ids)
        if stop is not None:
            count = await self._tokens_until_stop(ids)
            ids, log_probs, finish = ids[:count], log_probs[:count], TerminalReason.STOP
            # Of two stop strings that begin alike the shorter one was complete first.
            text, stop = await self._text_of(ids)
        elif finish is None and len(ids) < self._wanted.output_tokens_max:
            raise EngineBroke(f"the generation broke off after {len(ids)} tokens")
        self._token_ids, self._log_probs = ids, log_probs
        self._finish, self._stop_reason = finish or TerminalReason.LENGTH, stop
        return Generated(progress=self.progress(), text=text)

    async def _tokens_until_stop(self, ids: tuple[int, ...]) -> int:
        """How many tokens there are up to the one that completes a stop string."""
        low, high = 1, len(ids)
        while low < high:
            middle = (low + high) // 2
            _, stop = await self._text_of(ids[:middle])
            low, high = (low, middle) if stop is not None else (middle + 1, high)
        return low

    async def _text_of(self, ids: tuple[int, ...]) -> tuple[str, str | None]:
        """The text of tokens up to a stop string, and that string."""
        text = await self._engine.detokenize(ids) if ids else ""
        found = [
            (place, rank) for rank, stop in enumerate(self._stop) if (place := text.find(stop)) >= 0
        ]
        if not found:
            return text, None
        place, rank = min(found)
        return text[:place], self._stop[rank]
