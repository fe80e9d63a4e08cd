"""Session cookies."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymtrio.serving.cookies import SESSION_COOKIE, SessionCookies
from gymtrio.serving.http import Request, set_cookie
from gymtrio.settings import Secret

SECRET = Secret("the secret of a deployment")


@given(st.text(max_size=128))
def test_a_cookie_of_an_earlier_process_is_taken(session_id: str) -> None:
    """RES-6: an old cookie works after crash and restore."""
    before = SessionCookies(SECRET, "counter")
    after = SessionCookies(Secret("the secret of a deployment"), "counter")
    assert after.read(before.issue(session_id)) == session_id
    assert after.issue(session_id) == before.issue(session_id)


def test_a_cookie_travels_through_headers() -> None:
    cookie = SessionCookies(SECRET, "counter").issue("s-1")
    name, value = set_cookie(SESSION_COOKIE, cookie)
    assert name == b"set-cookie"
    request = Request("POST", "/x", headers=((b"cookie", value.partition(b";")[0]),))
    assert request.cookies() == {SESSION_COOKIE: cookie}


@pytest.mark.parametrize("cookie", ["", ".", "a.b", "ü", "\ud800", "x" * 10_000, "IngiOQ.AAAA"])
def test_what_we_did_not_issue_is_not_taken(cookie: str) -> None:
    assert SessionCookies(SECRET, "counter").read(cookie) is None


@given(st.data())
def test_a_cookie_that_was_changed_is_not_taken(data: st.DataObject) -> None:
    """RES-6: sessions are found by a signed cookie."""
    cookies = SessionCookies(SECRET, "counter")
    issued = cookies.issue("session-1")
    # Not the last base64 digit: it holds bits that nobody reads.
    where = data.draw(st.integers(0, len(issued) - 2))
    kept = st.characters(min_codepoint=33, max_codepoint=126)
    other = data.draw(kept.filter(lambda character: character != issued[where]))
    assert cookies.read(issued[:where] + other + issued[where + 1 :]) is None


def test_no_server_takes_the_cookie_of_another() -> None:
    issued = SessionCookies(SECRET, "counter").issue("s-1")
    assert SessionCookies(SECRET, "other").read(issued) is None
    assert SessionCookies(Secret("another secret"), "counter").read(issued) is None
