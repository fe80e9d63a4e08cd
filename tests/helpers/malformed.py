"""What a peer may send that it should not, as data: bytes, how they are cut into segments, how it ends.

`@PATH@` is a route that takes a POST, `@BODY@` a body that it takes, `@LENGTH@` the body's length;
`bytes_of` puts them in. What is expected says only what holds for every server, whatever its kind.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from enum import Enum
from typing import Final

import attrs

ANY: Final[frozenset[int]] = frozenset()
"""Whatever is answered, if anything is, is an answer of ours: HTTP, and JSON where it is an error."""

BAD: Final = frozenset({400})
TOO_LONG: Final = frozenset({431})
NOT_TAKEN: Final = frozenset({400, 404, 405})
NO_DOCUMENT: Final = frozenset({400, 413, 422})


class Ending(Enum):
    """What the peer does when it has sent everything."""

    HALF_CLOSE = "sends no more, and reads to the end"
    STAY = "keeps its side open, and reads until it is closed"
    ASK = "keeps its side open, and reads one answer"
    LEAVE = "closes"
    RESET = "resets"


@attrs.frozen(kw_only=True)
class Attack:
    """One connection of a peer that does what it should not."""

    name: str
    segments: tuple[bytes, ...]
    """Each sent by itself."""
    ending: Ending = Ending.HALF_CLOSE
    statuses: frozenset[int] = ANY
    """Of the last answer; none may be missing."""
    answers_max: int = 1_000
    """More are a request that was smuggled in."""


@attrs.frozen(kw_only=True)
class Valid:
    """A request that a server takes: what attacks are made of."""

    path: bytes
    body: bytes

    def bytes_of(self, template: bytes) -> bytes:
        filled = template.replace(b"@PATH@", self.path).replace(b"@BODY@", self.body)
        return filled.replace(b"@LENGTH@", b"%d" % len(self.body))

    @property
    def whole(self) -> bytes:
        return self.bytes_of(POST)


POST: Final = b"POST @PATH@ HTTP/1.1\r\nhost: a\r\ncontent-length: @LENGTH@\r\n\r\n@BODY@"
HEALTH: Final = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"
CHUNKED: Final = b"POST @PATH@ HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"

_BAD_LINES: Final[dict[str, bytes]] = {
    "zeros": b"\x00" * 64 + b"\r\n\r\n",
    "high bytes": b"\xff" * 200 + b"\r\n\r\n",
    "a TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x5a" * 200 + b"\r\n\r\n",
    "only a method": b"GET\r\n\r\n",
    "HTTP/0.9": b"GET /health\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /health HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
    "a method with a space": b"GE T /health HTTP/1.1\r\nhost: a\r\n\r\n",
    "a method of non-ASCII": b"G\xc3\xa4T /health HTTP/1.1\r\nhost: a\r\n\r\n",
    "a target with a space": b"GET /hea lth HTTP/1.1\r\nhost: a\r\n\r\n",
    "a target of non-ASCII": b"GET /\xc3\xa4 HTTP/1.1\r\nhost: a\r\n\r\n",
    "a target with NUL": b"GET /\x00 HTTP/1.1\r\nhost: a\r\n\r\n",
    "a header without a colon": b"GET /health HTTP/1.1\r\nhost: a\r\nbad header\r\n\r\n",
    "a header without a name": b"GET /health HTTP/1.1\r\nhost: a\r\n: x\r\n\r\n",
    "a space before the colon": b"GET /health HTTP/1.1\r\nhost: a\r\nx : y\r\n\r\n",
    "a header name of non-ASCII": b"GET /health HTTP/1.1\r\nhost: a\r\n\xe9: y\r\n\r\n",
    "a header with NUL": b"GET /health HTTP/1.1\r\nhost: a\r\nx: \x00\r\n\r\n",
    "a header with a bare CR": b"GET /health HTTP/1.1\r\nhost: a\r\nx: a\rb: c\r\n\r\n",
    "a length below zero": b"POST @PATH@ HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\n",
    "a length with a sign": b"POST @PATH@ HTTP/1.1\r\nhost: a\r\ncontent-length: +4\r\n\r\nabcd",
    "a length in hex": b"POST @PATH@ HTTP/1.1\r\nhost: a\r\ncontent-length: 0x4\r\n\r\nabcd",
    "a length of words": b"POST @PATH@ HTTP/1.1\r\nhost: a\r\ncontent-length: 4 4\r\n\r\nabcd",
    "two lengths": b"POST @PATH@ HTTP/1.1\r\nhost: a\r\ncontent-length: 4\r\n"
    b"content-length: 5\r\n\r\nabcde",
    "two lengths in one": b"POST @PATH@ HTTP/1.1\r\nhost: a\r\ncontent-length: 4, 5\r\n\r\nabcde",
    "a length without end": b"POST @PATH@ HTTP/1.1\r\nhost: a\r\ncontent-length: "
    + b"9" * 30
    + b"\r\n\r\nabcd",
}
"""Refused before a route is looked for."""

_SMUGGLED: Final[dict[str, bytes]] = {
    "length and chunks": b"POST @PATH@ HTTP/1.1\r\nhost: a\r\ncontent-length: 4\r\n"
    b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and length": b"POST @PATH@ HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n"
    b"content-length: 0\r\n\r\n",
    "a folded header": b"GET /health HTTP/1.1\r\nhost: a\r\nx: y\r\n z\r\n\r\n",
    "a folded length": b"POST @PATH@ HTTP/1.1\r\nhost: a\r\ncontent-length:\r\n 0\r\n\r\n",
    "line feeds alone": b"GET /health HTTP/1.1\nhost: a\n\n",
    "one line feed alone": b"GET /health HTTP/1.1\r\nhost: a\nx: y\r\n\r\n",
    "two authorizations": b"GET /health HTTP/1.1\r\nhost: a\r\nauthorization: Bearer x\r\n"
    b"authorization: Bearer y\r\n\r\n",
}
"""What two parsers read differently: a request hidden behind it must not be served."""

_CODINGS: Final[dict[str, bytes]] = {
    "gzip": b"gzip",
    "gzip before chunked": b"gzip, chunked",
    "chunked twice": b"chunked, chunked",
    "nearly chunked": b"xchunked",
    "quoted": b'"chunked"',
    "non-ASCII": b"chunked\xa0",
}

_BAD_CHUNKS: Final[dict[str, bytes]] = {
    "no number": b"zz\r\n",
    "below zero": b"-1\r\n",
    "a size in 0x": b"0x4\r\nabcd\r\n0\r\n\r\n",
    "a size without end": b"f" * 40 + b"\r\n",
    "no line end after a chunk": b"4\r\nabcdX0\r\n\r\n",
    "a trailer without a colon": b"0\r\nbad trailer\r\n\r\n",
}

_TARGETS: Final[dict[str, bytes]] = {
    "the asterisk": b"*",
    "nothing but a query": b"?x",
    "an authority": b"a:80",
    "an absolute form": b"http://a/health",
    "an absolute form without a path": b"http://a",
    "two slashes": b"//health",
    "dots": b"/../../etc/passwd",
    "encoded dots": b"/%2e%2e/%2e%2e/etc/passwd",
    "an encoded NUL": b"/%00",
    "no UTF-8": b"/%ff%fe",
    "a lone percent": b"/%",
    "no hex": b"/%zz",
    "a surrogate": b"/%ed%a0%80",
    "a fragment": b"/health#x",
    "60 kB of query": b"/nothing?" + b"q" * 60_000,
    "no episode": b"/ng-rollout/",
    "an empty episode": b"/ng-rollout//x",
    "an episode without a path": b"/ng-rollout/r-a1",
    "no attempt": b"/ng-rollout/r/x",
    "dots for an episode": b"/ng-rollout/..-a1/x",
    "encoded dots for an episode": b"/ng-rollout/%2e%2e-a1/x",
    "an encoded slash in an episode": b"/ng-rollout/r%2fs-a1/x",
    "an encoded slash after it": b"/ng-rollout/r-a1%2fx",
    "an encoded prefix": b"/%6eg-rollout/r-a1/x",
    "an encoded prefix's slash": b"/ng-rollout%2fr-a1/x",
    "a prefix in a prefix": b"/ng-rollout/r-a1/ng-rollout/s-a1/x",
    "an attempt beyond numbers": b"/ng-rollout/r-a" + b"9" * 5_000 + b"/x",
    "an attempt below zero": b"/ng-rollout/r-a-1/x",
    "an attempt in other digits": b"/ng-rollout/r-a%d9%a1/x",
    "an attempt twice encoded": b"/ng-rollout/r-a%2531/x",
    "an episode of 10 kB": b"/ng-rollout/" + b"r" * 10_000 + b"-a1/x",
    "an episode with a line end": b"/ng-rollout/r%0d%0aset-cookie:x-a1/x",
    "a control route": b"/ng-control/v1/checkpoint/status",
    "a control route in a prefix": b"/ng-rollout/r-a1/ng-control/v1/checkpoint/status",
    "a control route of dots": b"/ng-control/../health",
}

_BODIES: Final[dict[str, bytes]] = {
    "nothing": b"",
    "no JSON": b"{",
    "no UTF-8": b'{"a":"\xff"}',
    "a list": b"[]",
    "a number beyond floats": b"1e999",
    "an integer of 10,000 digits": b"9" * 10_000,
    "100,000 lists": b"[" * 100_000,
    "100,000 objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "gzip": b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\xabV*J\xcc\xcb\x06\x00",
}

_ODD_BODIES: Final[dict[str, bytes]] = {
    "a byte order mark": b"\xef\xbb\xbf{}",
    "surrogates": b'{"episode_id":"\\ud800"}',
    "a repeated key": b'{"episode_id":1,"episode_id":2}',
    "no numbers": b'{"a":NaN,"b":-Infinity,"c":1e999}',
    "NUL in a key": b'{"\\u0000":"\\u0000"}',
    "an object in an object": b'{"episode_id":{"rollout_id":{},"attempt":[]}}',
}
"""A server may take them where it takes any JSON."""

_UPGRADES: Final[dict[str, bytes]] = {
    "h2c": b"upgrade: h2c\r\nconnection: upgrade, http2-settings\r\n"
    b"http2-settings: AAMAAABkAAQAoAAAAAIAAAAA",
    "h2c with bad settings": b"upgrade: h2c\r\nconnection: upgrade, http2-settings\r\n"
    b"http2-settings: \xff!!",
    "h2c without settings": b"upgrade: h2c\r\nconnection: upgrade",
    "a websocket": b"upgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-version: 13\r\n"
    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==",
    "a websocket with a bad key": b"upgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: \xe9",
    "a websocket of another version": b"upgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-version: 99",
    "something else": b"upgrade: tunnel/1.0\r\nconnection: upgrade",
}

_AFTERWARDS: Final[dict[str, bytes]] = {
    "a line end": b"\r\n",
    "bytes": b"\xff\xfe garbage \r\n\r\n",
    "zeros": b"\x00" * 100,
    "half a request": b"GET /hea",
    "a malformed request": b"GET\r\n\r\n",
    "a request with a bad length": b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: x\r\n\r\n",
    "CONNECT": b"CONNECT a:80 HTTP/1.1\r\nhost: a\r\n\r\ntunnelled",
    "an HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "another": HEALTH,
    "a hundred others": HEALTH * 100,
}


def _post_with(headers: bytes) -> bytes:
    return (
        b"POST @PATH@ HTTP/1.1\r\nhost: a\r\n"
        + headers
        + b"\r\ncontent-length: @LENGTH@\r\n\r\n@BODY@"
    )


def _post_of(body: bytes) -> bytes:
    return b"POST @PATH@ HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body) + body


def _pieces(data: bytes, size: int) -> tuple[bytes, ...]:
    return tuple(data[at : at + size] for at in range(0, len(data), size))


def _heads() -> Iterator[Attack]:
    for name, data in _BAD_LINES.items():
        yield Attack(
            name=name, segments=(data,), ending=Ending.STAY, statuses=BAD | {413}, answers_max=1
        )
    for name, data in _SMUGGLED.items():
        yield Attack(
            name=f"{name}, a request hidden behind",
            segments=(data + HEALTH,),
            ending=Ending.STAY,
            statuses=BAD,
            answers_max=1,
        )
    for name, coding in _CODINGS.items():
        head = b"POST @PATH@ HTTP/1.1\r\nhost: a\r\ntransfer-encoding: %b\r\n\r\n" % coding
        yield Attack(
            name=f"coding {name}",
            segments=(head, b"0\r\n\r\n"),
            ending=Ending.STAY,
            statuses=BAD | {501},
            answers_max=1,
        )
    line = b"GET /health HTTP/1.1\r\nhost: a\r\n"
    long = line + b"x: " + b"y" * 200_000 + b"\r\n\r\n"
    many = line + b"".join(b"x%d: y\r\n" % number for number in range(4_000)) + b"\r\n"
    target = b"GET /" + b"x" * 200_000 + b" HTTP/1.1\r\nhost: a\r\n\r\n"
    for name, data in {"long": long, "of many headers": many, "of a long target": target}.items():
        for size in (len(data), 16_384, 1_000):
            yield Attack(
                name=f"a head {name} in pieces of {size}",
                segments=_pieces(data, size),
                ending=Ending.STAY,
                statuses=TOO_LONG,
                answers_max=1,
            )
    yield Attack(
        name="an HTTP/2 preface",
        segments=(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"),
        ending=Ending.STAY,
        statuses=BAD,
        answers_max=2,
    )
    yield Attack(name="HTTP/9.9", segments=(b"GET /health HTTP/9.9\r\nhost: a\r\n\r\n",))
    yield Attack(name="leading line ends", segments=(b"\r\n\r\n" + HEALTH,))
    yield Attack(
        name="a head byte by byte",
        segments=_pieces(HEALTH, 1),
        ending=Ending.ASK,
        statuses=frozenset({200}),
    )
    yield Attack(name="nothing", segments=())
    yield Attack(name="HTTP/1.0", segments=(b"GET /health HTTP/1.0\r\n\r\n",), ending=Ending.STAY)


def _targets() -> Iterator[Attack]:
    for name, target in _TARGETS.items():
        for method in (b"GET", b"POST", b"OPTIONS"):
            data = method + b" " + target + b" HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}"
            yield Attack(name=f"{method.decode()} {name}", segments=(data,), answers_max=1)


def _methods() -> Iterator[Attack]:
    for method in (b"CONNECT", b"TRACE", b"PROPFIND", b"get", b"X" * 5_000):
        data = method + b" @PATH@ HTTP/1.1\r\nhost: a\r\n\r\n"
        yield Attack(name=f"method {method[:10].decode()}", segments=(data, b"more"))
    data = b"CONNECT a:80 HTTP/1.1\r\nhost: a\r\n\r\n"
    yield Attack(name="CONNECT with an authority", segments=(data, b"tunnelled"))


def _documents() -> Iterator[Attack]:
    for name, body in _BODIES.items():
        yield Attack(
            name=f"a body of {name}",
            segments=(_post_of(body),),
            ending=Ending.ASK,
            statuses=NO_DOCUMENT,
        )
    for name, body in _ODD_BODIES.items():
        yield Attack(name=f"a body of {name}", segments=(_post_of(body),))


def _framings() -> Iterator[Attack]:
    for name, data in _BAD_CHUNKS.items():
        yield Attack(
            name=f"chunks: {name}", segments=(CHUNKED + data,), ending=Ending.STAY, answers_max=1
        )
        yield Attack(name=f"chunks: {name}, cut", segments=(CHUNKED, data[: len(data) // 2]))
    extended = b"4;" + b"x" * 70_000 + b"\r\nabcd\r\n0\r\n\r\n"
    yield Attack(name="chunks: an extension of 70 kB", segments=(CHUNKED, extended))
    one_by_one = b"".join(b"1\r\n%c\r\n" % byte for byte in b'{"a":1}' * 100) + b"0\r\n\r\n"
    yield Attack(name="chunks of one byte", segments=(CHUNKED + one_by_one,))
    yield Attack(
        name="trailers", segments=(CHUNKED + b"2\r\n{}\r\n0\r\ncontent-length: 9\r\n\r\n",)
    )
    over = b"POST @PATH@ HTTP/1.1\r\nhost: a\r\ncontent-length: 67108865\r\n\r\n"
    yield Attack(
        name="a byte too much",
        segments=(over, b"x" * 1_000),
        ending=Ending.STAY,
        statuses=frozenset({413}),
        answers_max=1,
    )
    for value in (b"100-continue", b"100-Continue", b"200-ok", b"\xff", b"100-continue, x"):
        shown = value.decode("latin-1")
        yield Attack(name=f"expect {shown}", segments=(_post_with(b"expect: " + value),))
        yield Attack(
            name=f"expect {shown}, and leave",
            segments=(
                b"POST @PATH@ HTTP/1.1\r\nhost: a\r\nexpect: %b\r\ncontent-length: 9\r\n\r\n"
                % value,
            ),
            ending=Ending.LEAVE,
        )


def _switches() -> Iterator[Attack]:
    frames = b"\x81\x83\x00\x00\x00\x00\xff\xff\xff"
    for name, headers in _UPGRADES.items():
        get = b"GET /health HTTP/1.1\r\nhost: a\r\n" + headers + b"\r\n\r\n"
        yield Attack(name=f"upgrade to {name}", segments=(get, frames))
        yield Attack(name=f"upgrade of a POST to {name}", segments=(_post_with(headers), frames))


def _ends() -> Iterator[Attack]:
    for name, data in _AFTERWARDS.items():
        for ending in Ending:
            if ending not in (Ending.STAY, Ending.ASK):
                yield Attack(
                    name=f"{name} afterwards, then it {ending.value}",
                    segments=(POST, data),
                    ending=ending,
                )
        yield Attack(name=f"{name} pipelined", segments=(POST + data,))
        yield Attack(name=f"{name} behind a health check", segments=(HEALTH + data,))
    for ending in (Ending.HALF_CLOSE, Ending.LEAVE, Ending.RESET):
        for where in ("@PATH", "HTTP", "content", "@LENGTH", "@BODY"):
            cut = POST.index(where.encode())
            yield Attack(
                name=f"cut before {where}, then it {ending.value}",
                segments=(POST[:cut],),
                ending=ending,
            )
        yield Attack(
            name=f"half a body, then it {ending.value}",
            segments=(_post_of(b"x" * 1_000_000)[:-500_000],),
            ending=ending,
        )
        yield Attack(
            name=f"half a chunk, then it {ending.value}",
            segments=(CHUNKED + b"ffff\r\n" + b"x" * 1_000,),
            ending=ending,
        )
        yield Attack(name=f"all, then it {ending.value}", segments=(POST,), ending=ending)


ATTACKS: Final[tuple[Attack, ...]] = (
    *_heads(),
    *_targets(),
    *_methods(),
    *_documents(),
    *_framings(),
    *_switches(),
    *_ends(),
)


TO_THE_APPLICATION: Final[tuple[Attack, ...]] = (*_targets(), *_documents())
"""Requests that any server's HTTP takes for such: an application has to say what is wrong."""


def mutant(rnd: random.Random, valid: Valid) -> tuple[bytes, ...]:
    """One or two requests with a few bytes changed, cut anywhere; the same for the same seed."""
    sources = [attack.segments for attack in ATTACKS if sum(map(len, attack.segments)) < 4_000]
    data = bytearray(valid.whole)
    for _ in range(rnd.randrange(2)):
        data += valid.bytes_of(b"".join(rnd.choice(sources)))
    for _ in range(rnd.randrange(1, 6)):
        at = rnd.randrange(len(data))
        kind = rnd.randrange(5)
        if kind == 0:
            data[at : at + rnd.randrange(4)] = rnd.randbytes(rnd.randrange(4))
        elif kind == 1:
            data[at] = rnd.choice(b"\r\n\x00\xff :;,/%?0159aAfF\t")
        elif kind == 2:
            del data[at : at + rnd.randrange(1, 40)]
        elif kind == 3:
            data[at:at] = data[at : at + rnd.randrange(1, 80)]
        else:
            other = valid.bytes_of(b"".join(rnd.choice(sources)))
            data[at:at] = other[: rnd.randrange(1, 60)]
        if not data:
            data += b"\r"
    cuts = sorted(rnd.randrange(len(data) + 1) for _ in range(rnd.randrange(3)))
    return tuple(
        bytes(data[begin:end])
        for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True)
        if begin < end
    )
