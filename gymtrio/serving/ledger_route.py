"""Which calls an episode made, for whoever has the control token.

    GET /ng-control/v1/ledger/<capture key>  ->  {"rows": [LedgerRow, ...]}

A trainer finds the tokens of an episode by the staging keys of its rows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from quart import Response as QuartResponse
from quart import request
from quart_trio import QuartTrio

from gymtrio.capture.ledger import LedgerRow
from gymtrio.checkpoint.access import presents_token
from gymtrio.errors import Refusal, Unauthorized
from gymtrio.ids import EpisodeId, parse_capture_key
from gymtrio.serving.framework import to_quart
from gymtrio.serving.http import json_response, refusal_response
from gymtrio.strict import unstructure

LEDGER_ROUTE: Final = "/ng-control/v1/ledger"


def add_ledger_route(
    app: QuartTrio,
    rows_of: Callable[[EpisodeId], Awaitable[Sequence[LedgerRow]]],
    is_token: Callable[[str], bool],
) -> None:
    """Serve the ledger of a policy server; an episode that is not known has no rows.

    Args:
        rows_of: gives the rows of an episode, or raises a `Refusal`.
    """

    @app.get(f"{LEDGER_ROUTE}/<key>")
    async def ledger(key: str) -> QuartResponse:
        if not presents_token(request.headers.getlist("authorization"), is_token):
            return to_quart(refusal_response(Unauthorized()))
        try:
            rows = await rows_of(parse_capture_key(key))
        except Refusal as refusal:
            return to_quart(refusal_response(refusal))
        return to_quart(json_response({"rows": [unstructure(row) for row in rows]}))
