"""Settings: strict reading, and the checkpoint block."""

from __future__ import annotations

from enum import Enum
from typing import Any, Literal

import attrs
import pytest

from gymtrio.errors import SettingsError
from gymtrio.settings import TOKEN_VARIABLE, CheckpointSettings, Secret, load_settings

TOKEN = "0123456789abcdef-token"


class Mode(Enum):
    REPLAY = "replay"
    WAIT = "wait"


@attrs.frozen(kw_only=True)
class Inner:
    retries: int = 3
    names: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class Outer:
    """A settings class with everything that one may have."""

    url: str
    timeout_s: float = 1.0
    verbose: bool = False
    mode: Mode = Mode.WAIT
    level: Literal["low", "high"] = "low"
    limit: int | None = None
    inner: Inner = attrs.field(factory=Inner)
    inners: list[Inner] = attrs.field(factory=list)
    by_name: dict[str, Inner] = attrs.field(factory=dict)
    opaque: object = None


def test_everything_a_settings_class_may_have_is_read() -> None:
    read = load_settings(
        Outer,
        {
            "url": "http://x",
            "timeout_s": 5,
            "verbose": True,
            "mode": "replay",
            "level": "high",
            "limit": None,
            "inner": {"retries": 1, "names": ["a", "b"]},
            "inners": [{}, {"retries": 2}],
            "by_name": {"n": {"retries": 9}},
            "opaque": {"any": [1, "thing"]},
        },
        "here",
    )
    assert read == Outer(
        url="http://x",
        timeout_s=5.0,
        verbose=True,
        mode=Mode.REPLAY,
        level="high",
        inner=Inner(retries=1, names=("a", "b")),
        inners=[Inner(), Inner(retries=2)],
        by_name={"n": Inner(retries=9)},
        opaque={"any": [1, "thing"]},
    )
    assert type(read.timeout_s) is float


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "here.url: missing"),
        ({"url": 1}, "here.url: expected str, got 1"),
        ({"url": "x", "timeout_s": "1"}, "here.timeout_s: expected a number, got str"),
        ({"url": "x", "verbose": 1}, "here.verbose: expected bool, got 1"),
        ({"url": "x", "limit": True}, "here.limit: expected int, got True"),
        ({"url": "x", "inner": {"retries": 1.0}}, "here.inner.retries: expected int, got 1.0"),
        ({"url": "x", "inner": {"names": "ab"}}, "here.inner.names: expected a list, got str"),
        ({"url": "x", "mode": "repaly"}, "here.mode: expected one of 'replay', 'wait', got str"),
        (
            {"url": "x", "by_name": {"n": {"retrys": 1}}},
            "here.by_name.n.retrys: unknown key; did you mean 'retries'?",
        ),
        ([], "here: expected an object, got list"),
    ],
)
def test_what_does_not_fit_is_named_with_its_path(value: object, message: str) -> None:
    """SET-1: unknown keys are refused with the nearest known name."""
    with pytest.raises(SettingsError) as caught:
        load_settings(Outer, value, "here")
    assert str(caught.value) == message


def checked(
    value: dict[str, Any],
    environment: dict[str, str] | None = None,
    files: dict[str, str] | None = None,
) -> CheckpointSettings:
    def read(path: str) -> str:
        if path not in (files or {}):
            raise FileNotFoundError(2, "No such file", path)
        return (files or {})[path]

    block = load_settings(CheckpointSettings, value, "checkpoint")
    return block.with_token(environment or {}, read, "checkpoint")


def test_checkpointing_is_off_by_default() -> None:
    """SET-1: one `checkpoint` block, off by default."""
    block = checked({})
    assert not block.enabled
    assert block.control_auth_token is None
    assert block.lease_grace_seconds == 600
    assert not block.recover


@pytest.mark.parametrize(
    ("value", "environment", "files"),
    [
        ({"control_auth_token": TOKEN}, {}, {}),
        ({"control_auth_token_file": "f"}, {}, {"f": f"  {TOKEN}\n"}),
        ({}, {TOKEN_VARIABLE: TOKEN}, {}),
        ({"control_auth_token": TOKEN}, {TOKEN_VARIABLE: "another token, unused"}, {}),
    ],
)
def test_the_token_comes_from_a_value_a_file_or_a_variable(
    value: dict[str, Any], environment: dict[str, str], files: dict[str, str]
) -> None:
    """SET-1: `control_auth_token`, also from a file or environment variable."""
    block = checked({"enabled": True, "root": "/c", **value}, environment, files)
    assert block.control_auth_token is not None
    assert block.control_auth_token.reveal() == TOKEN


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"enabled": True, "root": "/c"}, "enabled without a token"),
        ({"enabled": True, "control_auth_token": TOKEN}, "enabled without root"),
        ({"control_auth_token": "short"}, "5 characters, at least 16"),
        ({"control_auth_token": ""}, "0 characters, at least 16"),
        ({"control_auth_token": "geheimschlüssel-17"}, "position 10 .* printable ASCII"),
        ({"control_auth_token": "秘密の鍵" * 5}, "position 0 .* printable ASCII"),
        ({"control_auth_token": "two words are not one"}, "position 3 .* printable ASCII"),
        ({"control_auth_token": "0123456789abcdef\n"}, "position 16 .* printable ASCII"),
        ({"control_auth_token_file": "gone"}, "control_auth_token_file: .*No such file"),
        ({"control_auth_token": TOKEN, "control_auth_token_file": "f"}, "not both"),
        (
            {"control_auth_token": 12345678901234567890},
            "control_auth_token: expected text, got int",
        ),
        ({"lease_grace_seconds": 0}, "lease_grace_seconds must be more than 0"),
        ({"lease_grace_seconds": True}, "expected a number, got True"),
        (
            {"lease_grace_secnds": 1},
            "checkpoint.lease_grace_secnds: unknown key; did you mean 'lease_grace_seconds'",
        ),
    ],
)
def test_a_checkpoint_block_that_makes_no_sense_is_refused(
    value: dict[str, Any], message: str
) -> None:
    """SET-1, CTL-2: enabling checkpointing without a token is refused at start."""
    with pytest.raises(SettingsError, match=message) as caught:
        checked(value)
    assert str(caught.value).startswith("checkpoint")
    assert TOKEN not in str(caught.value)


def test_a_secret_is_compared_and_never_shown() -> None:
    """CTL-2, SET-1: compared in constant time, never logged."""
    secret = Secret(TOKEN)
    block = CheckpointSettings(control_auth_token=secret)
    for text in (repr(secret), str(secret), f"{secret}", repr(block), str(attrs.asdict(block))):
        assert TOKEN not in text
    assert secret.matches(TOKEN)
    assert secret == Secret(TOKEN)
    for other in ("", TOKEN[:-1], TOKEN + "x", TOKEN.upper(), "\ud800", "ü" * 16):
        assert not secret.matches(other)


def test_keys_derived_from_a_secret_are_lasting_and_apart() -> None:
    """RES-6: a deterministic key."""
    assert Secret(TOKEN).derive("a") == Secret(TOKEN).derive("a")
    assert len(Secret(TOKEN).derive("a")) == 32
    assert Secret(TOKEN).derive("a") != Secret(TOKEN).derive("b")
    assert Secret(TOKEN).derive("a") != Secret(TOKEN + "x").derive("a")
