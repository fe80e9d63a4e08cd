"""The Quart application of a server: health, and whatever routes its author adds.

Everything that Quart would answer in HTML is answered in JSON, and key order is kept (SRV-5).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Final

import attrs
import trio
from quart import Response as QuartResponse
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException
from werkzeug.exceptions import MethodNotAllowed as WrongMethod
from werkzeug.exceptions import NotFound as NoSuchRoute
from werkzeug.routing import RequestRedirect

from gymtrio.errors import GymtrioError, Refusal
from gymtrio.limits import CONTROL_BODY_BYTES_MAX
from gymtrio.serving.http import Response, json_response, refusal_response
from gymtrio.serving.metrics import (
    CONTENT_TYPE,
    HEALTH_PATH,
    METRICS_PATH,
    OWN_PATHS,
    READY_PATH,
    ServerMetrics,
)

BODY_TIMEOUT_S: Final = 60
MORE_METRICS_S: Final = 2.0
RESERVED_PREFIXES: Final = ("/ng-control/",)
"""Never a tool's name: a server without checkpointing answers 404 here."""

_CODES: Final = {
    400: "bad_request",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "too_large",
    415: "unsupported_media_type",
    500: "internal_error",
}

_log = logging.getLogger(__name__)


@attrs.frozen(kw_only=True)
class Identity:
    """Who answers."""

    kind: str
    instance: str


def to_quart(response: Response) -> QuartResponse:
    """The framework's form of an answer of ours."""
    made = QuartResponse(response.body, response.status, content_type=response.content_type)
    for name, value in response.headers:
        made.headers.add(name.decode("latin-1"), value.decode("latin-1"))
    return made


def build_framework(
    identity: Identity,
    not_ready: Callable[[], str | None],
    metrics: ServerMetrics | None = None,
    more_metrics: Callable[[], Awaitable[bytes]] | None = None,
) -> QuartTrio:
    """Make the application with its health routes and JSON errors.

    Args:
        not_ready: why the server does not accept work now; None: it does.
        metrics: shown to whoever asks; None: to nobody.
        more_metrics: shown after them (`gymtrio.serving.host.Service`).
    """
    app = QuartTrio(__name__, static_folder=None)
    app.json.sort_keys = False  # type: ignore[attr-defined]
    app.config["MAX_CONTENT_LENGTH"] = CONTROL_BODY_BYTES_MAX
    app.config["BODY_TIMEOUT"] = BODY_TIMEOUT_S
    # Quart would cut a stream short, without an error, after this time.
    app.config["RESPONSE_TIMEOUT"] = None
    _answer_errors_in_json(app)
    who = {"kind": identity.kind, "instance": identity.instance}

    @app.get(HEALTH_PATH)
    async def health() -> QuartResponse:
        return to_quart(json_response({"status": "alive", **who}))

    @app.get(READY_PATH)
    async def ready() -> QuartResponse:
        reason = not_ready()
        if reason is None:
            return to_quart(json_response({"status": "ready", **who}))
        return to_quart(json_response({"status": "not_ready", "reason": reason, **who}, 503))

    if metrics is not None:

        @app.get(METRICS_PATH)
        async def show_metrics() -> QuartResponse:
            text = metrics.render()
            if more_metrics is not None:
                text += await _or_nothing(more_metrics)
            return QuartResponse(text, content_type=CONTENT_TYPE)

    return app


async def _or_nothing(more_metrics: Callable[[], Awaitable[bytes]]) -> bytes:
    """What another process tells; a scraper gives up after some seconds, and half is better."""
    try:
        with trio.fail_after(MORE_METRICS_S):
            return await more_metrics()
    except GymtrioError as error:
        _log.warning("metrics of another process are missing: %s", error)
    except trio.TooSlowError:
        _log.warning("metrics of another process are missing: not within %g s", MORE_METRICS_S)
    return b""


def _answer_errors_in_json(app: QuartTrio) -> None:
    async def on_refusal(error: Refusal) -> QuartResponse:
        return to_quart(refusal_response(error))

    async def on_http_error(error: HTTPException) -> QuartResponse:
        status = error.code or 500
        code = _CODES.get(status, "http_error")
        # What stands in a description of an error 500 may come from the fault itself.
        detail = "see the server's log" if status >= 500 else error.description or ""
        headers = [(n, v) for n, v in error.get_headers() if n.lower() in {"allow", "location"}]
        return to_quart(json_response({"error": {"code": code, "detail": detail}}, status, headers))

    app.register_error_handler(Refusal, on_refusal)
    app.register_error_handler(HTTPException, on_http_error)


def framework_takes(app: QuartTrio, has_author_routes: bool) -> Callable[[str, str], bool]:
    """Say for a method and path whether the framework has a route (of whatever method) for it."""
    urls = app.url_map.bind("localhost")

    def takes(method: str, path: str) -> bool:
        if path in OWN_PATHS or path.startswith(RESERVED_PREFIXES):
            return True
        if not has_author_routes:
            return False
        try:
            urls.match(path, method)
        except NoSuchRoute:
            return False
        except (WrongMethod, RequestRedirect):
            return True
        return True

    return takes
