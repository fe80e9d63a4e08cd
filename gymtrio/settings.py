"""Settings that every server shares, and how any settings class is read from a mapping.

Vocabulary: a *settings class* is a frozen attrs class whose field names are the keys of a deployment
file. Reading is strict (`gymtrio.strict`): exact types, no unknown key, messages with the path.
Files and environment variables are read by whoever calls; nothing here does I/O.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import attrs

from gymtrio.errors import SettingsError
from gymtrio.limits import LEASE_GRACE_S_DEFAULT
from gymtrio.strict import MalformedValue, build_converter, structure

T = TypeVar("T")

TOKEN_CHARACTERS_MIN: Final = 16
"""Shorter than this, a token can be guessed over the network within days."""

TOKEN_VARIABLE: Final = "GYMTRIO_CONTROL_AUTH_TOKEN"


class Secret:
    """A text that is compared and handed on, and never shown."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return "<secret>"

    def reveal(self) -> str:
        """The text itself: for the header that sends it and the file that keeps it."""
        return self._text

    def matches(self, presented: str) -> bool:
        """Compare in time that depends neither on where the texts differ nor on their lengths."""
        # Digests, because compare_digest tells lengths apart and takes no text beyond ASCII.
        ours = hashlib.sha256(self._text.encode("utf-8", "surrogatepass")).digest()
        theirs = hashlib.sha256(presented.encode("utf-8", "surrogatepass")).digest()
        return hmac.compare_digest(ours, theirs)

    def derive(self, label: str) -> bytes:
        """A key of 32 bytes for one purpose: the same for the same secret and label, for ever."""
        key = self._text.encode("utf-8", "surrogatepass")
        return hmac.new(key, label.encode(), hashlib.sha256).digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self.matches(other._text)

    def __hash__(self) -> int:
        return hash((Secret, self._text))

    def __len__(self) -> int:
        return len(self._text)

    def __bool__(self) -> bool:
        return True


def _secret(value: object, _: object) -> Secret:
    if type(value) is not str:
        raise ValueError(f"expected text, got {type(value).__name__}")
    return Secret(value)


_CONVERTER: Final = build_converter()
_CONVERTER.register_structure_hook(Secret, _secret)


def load_settings(cls: type[T], mapping: object, where: str) -> T:
    """Make a settings class of plain data.

    Args:
        cls: an attrs class; nested classes, optionals, lists, tuples, dicts, enums and literals work.
        where: where the data stands, such as `deployment.yaml: servers.counter.settings`.

    Raises:
        SettingsError: naming the path of the first key or value that does not fit.
    """
    try:
        return structure(cls, mapping, converter=_CONVERTER)
    except MalformedValue as error:
        path = f"{where}.{error.path}" if where and error.path else where or error.path
        raise SettingsError(f"{path}: {error.why}" if path else error.why) from None


def _check_token(token: Secret, where: str) -> None:
    """
    Raises:
        SettingsError: it can be guessed, or cannot be sent as it is: a header carries visible ASCII,
            and what others make of the rest differs (RFC 9110, section 5.5).
    """
    if len(token) < TOKEN_CHARACTERS_MIN:
        raise SettingsError(
            f"{where}: the control token has {len(token)} characters, "
            f"at least {TOKEN_CHARACTERS_MIN} are needed"
        )
    for position, character in enumerate(token.reveal()):
        if not "!" <= character <= "~":
            raise SettingsError(
                f"{where}: the control token cannot be sent in a header: its character at position "
                f"{position} is a blank, or is not printable ASCII"
            )


def _positive(instance: object, attribute: attrs.Attribute[Any], value: float) -> None:
    if not value > 0:
        raise ValueError(f"{attribute.name} must be more than 0 seconds, got {value}")


@attrs.frozen(kw_only=True)
class CheckpointSettings:
    """The `checkpoint` block of a deployment (SET-1). Off by default."""

    enabled: bool = False
    control_auth_token: Secret | None = None
    """What a controller must present; required when enabled."""
    control_auth_token_file: str | None = None
    """A file that holds the token instead; surrounding white space is dropped."""
    lease_grace_seconds: float = attrs.field(default=LEASE_GRACE_S_DEFAULT, validator=_positive)
    """How long after the last deadline a participant waits for a controller that went silent."""
    root: str | None = None
    """Checkpoints are written and read below this directory only; required when enabled."""
    recover: bool = False
    """Start closed, and open at the resume that follows a restore (HARD-3)."""

    def with_token(
        self, environment: Mapping[str, str], read_file: Callable[[str], str], where: str
    ) -> CheckpointSettings:
        """Find the token (value, then file, then variable) and check the block as a whole.

        Args:
            read_file: gives the text of a file, or raises `OSError`.
            where: where the block stands, for messages.

        Returns:
            The same block with `control_auth_token` set, if one was given anywhere.

        Raises:
            SettingsError: enabled without a token or root, a token too short or not of visible ASCII,
                two sources, or a file that cannot be read.
        """
        token = self.control_auth_token
        if self.control_auth_token_file is not None:
            if token is not None:
                raise SettingsError(
                    f"{where}: give control_auth_token or control_auth_token_file, not both"
                )
            try:
                token = Secret(read_file(self.control_auth_token_file).strip())
            except (OSError, UnicodeDecodeError) as error:
                raise SettingsError(f"{where}.control_auth_token_file: {error}") from None
        if token is None and TOKEN_VARIABLE in environment:
            token = Secret(environment[TOKEN_VARIABLE])
        if token is not None:
            _check_token(token, where)
        if self.enabled and token is None:
            raise SettingsError(
                f"{where}: enabled without a token; set control_auth_token, "
                f"control_auth_token_file or the variable {TOKEN_VARIABLE}"
            )
        if self.enabled and self.root is None:
            raise SettingsError(f"{where}: enabled without root, the directory for checkpoints")
        return attrs.evolve(self, control_auth_token=token, control_auth_token_file=None)
