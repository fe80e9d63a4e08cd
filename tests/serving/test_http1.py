"""HTTP/1.1 without I/O: what is read does not depend on the cut, what is written is what h11 reads."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymtrio.serving.http1 import (
    HEAD_BYTES_MAX,
    HEADERS_MAX,
    LAST_CHUNK,
    BadAnswer,
    Head,
    Malformed,
    RequestReader,
    encode_chunk,
    encode_head,
    framing_of,
)

POST = b"POST /x?y HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n\r\nhello"
CHUNKED = (
    b"PUT /c HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\ntrailer: t\r\n\r\n"
)
GET = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"


def read(pieces: list[bytes]) -> list[tuple[str, bytes, bytes]]:
    """Method, target and body of every request that is whole."""
    reader = RequestReader()
    found: list[tuple[str, bytes, bytes]] = []
    head: Head | None = None
    body = b""
    for piece in pieces:
        reader.feed(piece)
        while True:
            if head is None:
                head = reader.head()
                if head is None:
                    break
            while (data := reader.body()) is not None:
                body += data
            if not reader.whole:
                break
            found.append((head.method, head.target, body))
            head, body = None, b""
    return found


@given(
    st.lists(st.sampled_from([POST, CHUNKED, GET, b"\r\n" + GET]), max_size=4),
    st.lists(st.integers(0, 700), max_size=12),
)
def test_requests_do_not_depend_on_how_their_bytes_were_cut(
    requests: list[bytes], cuts: list[int]
) -> None:
    data = b"".join(requests)
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    pieces = [data[a:b] for a, b in pairwise(edges)]
    expected = {
        POST: ("POST", b"/x?y", b"hello"),
        CHUNKED: ("PUT", b"/c", b"abcde"),
        GET: ("GET", b"/", b""),
    }
    assert read(pieces) == [expected[request.lstrip()] for request in requests]


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01", 400),
        (b"GET / HTTP/1.1\nhost: a\n\n", 400),
        (b"GET / HTTP/1.1\r\nhost: a\nx", 400),
        (b"GET / HTTP/1.1\r\nhost: a\r\nx: y\r\n z\r\n\r\n", 400),
        (
            b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\ntransfer-encoding: chunked\r\n\r\n",
            400,
        ),
        (b"GET / HTTP/1.1\r\nhost: a\r\nauthorization: x\r\nauthorization: x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: a\r\n" + b"a: b\r\n" * HEADERS_MAX + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * HEAD_BYTES_MAX, 431),
        (b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip\r\n\r\n", 501),
    ],
)
def test_what_is_no_request_is_refused_at_once(data: bytes, status: int) -> None:
    """SRV-1, SRV-5: what two readers could read differently, and what is over a limit."""
    with pytest.raises(Malformed) as caught:
        read([data])
    assert caught.value.status == status


def test_a_bad_chunk_is_refused() -> None:
    with pytest.raises(Malformed):
        read([CHUNKED[:-30] + b"zz\r\n"])


@pytest.mark.parametrize(
    ("request_", "keeps"),
    [
        (GET, True),
        (GET.replace(b"host", b"connection: Keep-Alive, CLOSE\r\nhost"), False),
        (GET.replace(b"1.1", b"1.0"), False),
    ],
)
def test_whether_another_request_may_follow(request_: bytes, keeps: bool) -> None:
    reader = RequestReader()
    reader.feed(request_)
    head = reader.head()
    assert head is not None
    assert head.keeps_alive is keeps


def heard(method: str, data: bytes) -> tuple[int, dict[bytes, bytes], bytes, Any]:
    """An answer as a client of h11 takes it."""
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method=method, target="/", headers=[("host", "a")]))
    client.send(h11.EndOfMessage())
    client.receive_data(data)
    response = client.next_event()
    assert isinstance(response, h11.Response)
    body = b""
    while isinstance(event := client.next_event(), h11.Data):
        body += event.data
    return response.status_code, dict(response.headers), body, event


def head_of(method: str, version: bytes = b"1.1") -> Head:
    reader = RequestReader()
    reader.feed(b"%s / HTTP/%s\r\nhost: a\r\n\r\n" % (method.encode(), version))
    head = reader.head()
    assert head is not None
    return head


@pytest.mark.parametrize("status", [200, 404, 299, 304, 204])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_answers_are_what_a_client_reads(method: str, status: int) -> None:
    bodiless = method == "HEAD" or status in {204, 304}
    framing = framing_of(head_of(method), status, 2, closes=False)
    assert framing.bodiless is bodiless
    data = encode_head(status, ((b"x-y", b"z"),), framing, b"date: now\r\n")
    told = heard(method, data + (b"" if bodiless else b"ok"))
    assert told[0] == status
    assert told[1][b"x-y"] == b"z"
    assert told[1][b"date"] == b"now"
    assert told[2] == (b"" if bodiless else b"ok")
    assert isinstance(told[3], h11.EndOfMessage)


def test_a_body_of_unknown_length_goes_in_chunks_or_until_the_end() -> None:
    framing = framing_of(head_of("GET"), 200, None, closes=False)
    assert framing.chunked
    data = (
        encode_head(200, (), framing, b"") + encode_chunk(b"ab") + encode_chunk(b"c") + LAST_CHUNK
    )
    assert heard("GET", data)[2] == b"abc"
    framing = framing_of(head_of("GET", b"1.0"), 200, None, closes=False)
    assert framing.closes
    assert not framing.chunked
    assert b"connection: close" in encode_head(200, (), framing, b"")


@pytest.mark.parametrize(
    ("status", "header"),
    [
        (200, (b"a", b"b\r\nset-cookie: x")),
        (200, (b"a\r\n", b"b")),
        (200, (b"a", b"\x00")),
        (200, (b"a b", b"c")),
        (100, (b"a", b"b")),
        (1000, (b"a", b"b")),
    ],
)
def test_what_cannot_be_written_is_not_written(status: int, header: tuple[bytes, bytes]) -> None:
    """I36: nothing that a handler passes on can make a header, or an answer, of its own."""
    framing = framing_of(head_of("GET"), status, 0, closes=False)
    with pytest.raises(BadAnswer):
        encode_head(status, (header,), framing, b"")
