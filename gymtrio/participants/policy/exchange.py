"""One exchange with a backend: a call out, its reply read and judged."""

from __future__ import annotations

import logging

import attrs

from gymtrio.capture.cuts import (
    EXTENSION_KEY,
    CallExtension,
    ContinuationRefused,
    ReplyExtension,
    digest_tokens,
)
from gymtrio.capture.replies import (
    TOKEN_FIELDS,
    CallTokens,
    MalformedReply,
    Route,
    read_tokens,
    take_extension,
    token_carrier,
)
from gymtrio.errors import BackendFailed, TransportError
from gymtrio.participants.policy.calls import Backend, PolicyCall
from gymtrio.strict import unstructure

LOG = logging.getLogger(__name__)

_COME_AGAIN = frozenset({408, 429, 503})
"""Statuses that tell the caller to come again, with the same request."""
_PASSED_ON = _COME_AGAIN | {400, 404, 413, 415, 422}
"""And those that tell it about its own request. Another one is between this server and its backend."""
_DETAIL_CHARACTERS_MAX = 500


@attrs.frozen(kw_only=True)
class Exchanged:
    """What came of a call."""

    status: int
    body: dict[str, object]
    """Of the caller's reply: without extension."""
    tokens: CallTokens | None = None
    extension: ReplyExtension | None = None
    """Of a native backend's success."""

    @property
    def succeeded(self) -> bool:
        return self.status == 200


async def exchange(
    backend: Backend,
    call: PolicyCall,
    *,
    extension: CallExtension | None,
    wants_tokens: bool,
) -> Exchanged:
    """Make one call; one that goes on from a cut and fails is made again without it.

    Whether the cut or the backend is at fault cannot be told from one failure, and a cut that always
    fails must not fail its episode (CUT-7). A backend that is down fails the second time as well.

    Args:
        extension: None: an ordinary call, or a backend that is not native.
        wants_tokens: read those that a backend gives by itself.

    Raises:
        BackendFailed: no reply came, or one that breaks the contract.

    Cancelled: the backend stops generating.
    """
    if extension is None or extension.continuation is None:
        return await _send(backend, call, extension, wants_tokens)
    try:
        exchanged = await _send(backend, call, extension, wants_tokens)
    except (BackendFailed, ContinuationRefused) as refusal:
        why = refusal.detail
    else:
        if exchanged.succeeded or exchanged.status in _COME_AGAIN:
            return exchanged
        why = f"the backend answered {exchanged.status}: {_detail_of(exchanged.body)}"
    LOG.warning(
        "%s, call %s: the cut is not continued, the call is generated anew: %s",
        extension.capture_key,
        extension.model_call_id,
        why,
    )
    return await _send(backend, call, attrs.evolve(extension, continuation=None), wants_tokens)


async def _send(
    backend: Backend, call: PolicyCall, extension: CallExtension | None, wants_tokens: bool
) -> Exchanged:
    sent = dict(call.body)
    sent.pop(EXTENSION_KEY, None)
    if extension is not None:
        sent[EXTENSION_KEY] = unstructure(extension)
    try:
        reply = await backend.generate(
            call.route, sent, call_id=None if extension is None else extension.model_call_id
        )
    except TransportError as error:
        raise BackendFailed(str(error)) from error
    if reply.status != 200:
        return _judge_failure(reply.status, reply.body, extension)
    try:
        body = dict(reply.body)
        if extension is not None and reply.evidence:
            return _read_native(call.route, body, extension)
        tokens = _offered_tokens(call.route, body) if wants_tokens else None
        return Exchanged(status=200, body=body, tokens=tokens)
    except MalformedReply as error:
        raise BackendFailed(f"the backend's reply: {error}") from error


def _judge_failure(
    status: int, body: dict[str, object], extension: CallExtension | None
) -> Exchanged:
    error = body.get("error")
    code = error.get("code") if isinstance(error, dict) else None
    continues = extension is not None and extension.continuation is not None
    if continues and code == ContinuationRefused.code:
        raise ContinuationRefused(_detail_of(body))
    if status not in _PASSED_ON:
        raise BackendFailed(f"the backend answered {status} {code or ''}: {_detail_of(body)}")
    return Exchanged(status=status, body=body)


def _detail_of(body: dict[str, object]) -> str:
    """What an error body says, in our dialect or OpenAI's."""
    error = body.get("error")
    detail = error.get("detail", error.get("message")) if isinstance(error, dict) else None
    return str(detail)[:_DETAIL_CHARACTERS_MAX]


def _read_native(route: Route, body: dict[str, object], asked: CallExtension) -> Exchanged:
    said = take_extension(body)
    tokens = read_tokens(route, body)
    if said.model_call_id != asked.model_call_id:
        raise MalformedReply(f"it is of call {said.model_call_id}, not {asked.model_call_id}")
    _check_continued(asked, said, tokens)
    return Exchanged(status=200, body=body, tokens=tokens, extension=said)


def _check_continued(asked: CallExtension, said: ReplyExtension, tokens: CallTokens) -> None:
    """The reply begins with the very tokens that were cut, or with none of them (I25)."""
    cut = asked.continuation
    wanted = 0 if cut is None else cut.prefix_token_count
    if said.continued_token_count != wanted:
        raise MalformedReply(f"{said.continued_token_count} tokens continued, {wanted} were cut")
    if cut is not None:
        if digest_tokens(tokens.token_ids[:wanted]) != cut.prefix_digest:
            raise MalformedReply("it does not begin with the tokens that were cut")
        if said.policy_version > cut.policy_version:
            raise MalformedReply(f"stamped {said.policy_version}, cut at {cut.policy_version}")


def _offered_tokens(route: Route, body: dict[str, object]) -> CallTokens | None:
    """Tokens of a backend that gives them by itself; None: it does not."""
    carrier = token_carrier(route, body)
    return read_tokens(route, body) if any(name in carrier for name in TOKEN_FIELDS) else None
