"""The manifest: the only commit point of one participant's checkpoint. Values and bytes, no I/O.

- M1 A manifest that decodes was written whole: it carries a digest of all its other fields, and its
  bytes are the only bytes with its meaning.
- M2 Every part is named by the digest of its file; the names are distinct.
- M3 `record_count` is the sum over the parts; a part without records does not exist.
- M4 Two manifests mean the same when they differ only in the nonces of their parts: same participant,
  same checkpoint, same fields, same records.
- M5 The version is looked at before anything else is believed.
- M6 Either every part has a section (version 2) or none has (version 1). A section is what several
  processes have of the same kind, each of other episodes; one episode may be in several sections.

Evolution: a field that is added needs a new schema version, because an old reader refuses what it does
not know; a new reader keeps reading every version that was ever released.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Final

import attrs

from gymtrio.errors import InvalidCheckpointState
from gymtrio.ids import CheckpointId, is_safe_id
from gymtrio.storage import opaque
from gymtrio.storage.bounds import MANIFEST_BYTES_MAX, PARTS_MAX
from gymtrio.storage.failures import printable
from gymtrio.storage.records import Identity
from gymtrio.strict import MalformedValue, describe, structure

MANIFEST_NAME: Final = "manifest.json"

_WITHOUT_SECTIONS: Final = 1
_WITH_SECTIONS: Final = 2
_VERSIONS: Final = (_WITHOUT_SECTIONS, _WITH_SECTIONS)

_DIGEST_FIELD: Final = "manifest_sha256"
_DIGEST_CHARACTERS: Final = 64


def part_name(sha256: str) -> str:
    """The file name of the part with this digest (M2)."""
    return f"records-{sha256}.part"


def _check_digest(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if not (
        isinstance(value, str)
        and len(value) == _DIGEST_CHARACTERS
        and all(character in "0123456789abcdef" for character in value)
    ):
        raise ValueError("expected 64 lower-case hexadecimal digits")


def _check_positive(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if not (isinstance(value, int) and value > 0):
        raise ValueError("expected more than 0")


@attrs.frozen(kw_only=True)
class Part:
    """One file of records; a worker reports this to its coordinator (STO-6)."""

    file: str = attrs.field()
    sha256: str = attrs.field(validator=_check_digest)
    """Of the whole file."""
    content_sha256: str = attrs.field(validator=_check_digest)
    """Of everything before its end, so without the nonce: equal for equal records (M4)."""
    bytes: int = attrs.field(validator=_check_positive)
    record_count: int = attrs.field(validator=_check_positive)
    section: str | None = None
    """Which share of an episode its records are (M6)."""

    @file.validator
    def _is_named_by_its_digest(self, attribute: object, value: str) -> None:
        if value != part_name(self.sha256):
            raise ValueError("not the name of its digest")


@attrs.frozen(kw_only=True)
class Manifest:
    """What one participant committed under one checkpoint id."""

    schema_version: int
    kind: str
    instance: str
    checkpoint_id: str
    parts: tuple[Part, ...]
    """In order of file name."""
    record_count: int
    fields: dict[str, object]
    """JSON that the participant adds, such as an engine's fingerprint; key order is not kept."""

    @property
    def identity(self) -> Identity:
        return Identity(
            kind=self.kind,
            instance=self.instance,
            checkpoint_id=CheckpointId(self.checkpoint_id),
        )


def build(identity: Identity, parts: Sequence[Part], fields: dict[str, object]) -> Manifest:
    """Make the manifest of what was written.

    Raises:
        InvalidCheckpointState: the parts are too many, contain one file twice, or have a section here
            and none there.
    """
    sections = any(part.section is not None for part in parts)
    manifest = Manifest(
        schema_version=_WITH_SECTIONS if sections else _WITHOUT_SECTIONS,
        kind=identity.kind,
        instance=identity.instance,
        checkpoint_id=identity.checkpoint_id,
        parts=tuple(sorted(parts, key=lambda part: part.file)),
        record_count=sum(part.record_count for part in parts),
        fields=fields,
    )
    why = _first_contradiction(manifest)
    if why is not None:
        raise InvalidCheckpointState(f"{MANIFEST_NAME}: {why}")
    return manifest


def encode(manifest: Manifest) -> bytes:
    """Give the one text of a manifest.

    Raises:
        InvalidCheckpointState: the fields are not JSON, or too large; the detail has their path.
    """
    body = to_json(manifest)
    text = _canonical({**body, _DIGEST_FIELD: hashlib.sha256(_canonical(body)).hexdigest()})
    if len(text) >= MANIFEST_BYTES_MAX:
        raise InvalidCheckpointState(
            f"{MANIFEST_NAME}: {len(text)} bytes, limit {MANIFEST_BYTES_MAX}: "
            "what is large belongs into records"
        )
    return text + b"\n"


def decode(data: bytes, where: str = MANIFEST_NAME) -> Manifest:
    """Read what `encode` made, and nothing else (M1).

    Args:
        where: the file, for errors.

    Raises:
        InvalidCheckpointState: it is damaged, newer, or contradicts itself.
    """
    if len(data) > MANIFEST_BYTES_MAX:
        raise InvalidCheckpointState(f"{where}: over {MANIFEST_BYTES_MAX} bytes")
    body = opaque.decode(data, where)
    if not isinstance(body, dict):
        raise InvalidCheckpointState(f"{where}: expected an object")
    version = body.get("schema_version")
    if type(version) is not int or version not in _VERSIONS:
        raise InvalidCheckpointState(
            f"{where}: schema_version is {describe(version)}; "
            f"this side reads {' and '.join(map(str, _VERSIONS))}"
        )
    if data != _canonical(body) + b"\n":
        raise InvalidCheckpointState(f"{where}: not as it was written: other bytes of that meaning")
    digest = body.pop(_DIGEST_FIELD, None)
    if digest != hashlib.sha256(_canonical(body)).hexdigest():
        raise InvalidCheckpointState(f"{where}: not as it was written: its digest does not match")
    try:
        manifest = structure(Manifest, body)
    except MalformedValue as error:
        raise InvalidCheckpointState(f"{where}: {printable(str(error))}") from None
    if body["parts"] != [_part_to_json(part) for part in manifest.parts]:
        raise InvalidCheckpointState(f"{where}: not as it was written: a section that is null")
    why = _first_contradiction(manifest)
    if why is not None:
        raise InvalidCheckpointState(f"{where}: {why}")
    return manifest


def to_json(manifest: Manifest) -> dict[str, object]:
    """The manifest as a JSON object, as commit replies carry it."""
    return {
        **attrs.asdict(manifest, recurse=False),
        "parts": [_part_to_json(part) for part in manifest.parts],
    }


def _part_to_json(part: Part) -> dict[str, object]:
    plain = attrs.asdict(part)
    if part.section is None:
        del plain["section"]
    return plain


def same_meaning(one: Manifest, other: Manifest) -> bool:
    """Say whether both commit the same records under the same id (M4)."""
    return _meaning(one) == _meaning(other)


def _meaning(manifest: Manifest) -> bytes:
    contents = sorted(
        [part.content_sha256, part.bytes, part.record_count, part.section or ""]
        for part in manifest.parts
    )
    # Compared as text: in Python 1 == 1.0 == True, and a NaN equals nothing.
    return _canonical({**to_json(manifest), "parts": contents})


def _canonical(value: object) -> bytes:
    return opaque.encode(value, MANIFEST_NAME, sort_keys=True)


def _first_contradiction(manifest: Manifest) -> str | None:
    for name in ("kind", "instance", "checkpoint_id"):
        if not is_safe_id(getattr(manifest, name)):
            return f"{name}: not a safe name"
    files = [part.file for part in manifest.parts]
    if len(files) > PARTS_MAX:
        return f"{len(files)} parts, limit {PARTS_MAX}"
    if files != sorted(set(files)):
        return "parts: not in order of file name, each once"
    if manifest.record_count != sum(part.record_count for part in manifest.parts):
        return "record_count: not the sum over the parts"
    return _first_wrong_section(manifest)


def _first_wrong_section(manifest: Manifest) -> str | None:
    with_section = [part.section for part in manifest.parts if part.section is not None]
    version = _WITH_SECTIONS if with_section else _WITHOUT_SECTIONS
    if version != manifest.schema_version or len(with_section) not in (0, len(manifest.parts)):
        return (
            f"schema_version {manifest.schema_version}: "
            f"{len(with_section)} of {len(manifest.parts)} parts have a section"
        )
    if not all(map(is_safe_id, with_section)):
        return "section: not a safe name"
    return None
