"""The manifest: one text per meaning, nothing believed that was not written so."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymtrio.errors import InvalidCheckpointState
from gymtrio.storage import manifest as manifests
from gymtrio.storage import opaque
from gymtrio.storage.bounds import MANIFEST_BYTES_MAX, PARTS_MAX
from gymtrio.storage.manifest import Manifest, Part, part_name
from tests.helpers.checkpoints import FIELDS, IDENTITY


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def part(name: str = "a", content: str = "c", **changes: Any) -> Part:
    fields: dict[str, Any] = {
        "file": part_name(digest(name)),
        "sha256": digest(name),
        "content_sha256": digest(content),
        "bytes": 100,
        "record_count": 2,
    }
    return Part(**(fields | changes))


def example(*parts: Part, **fields: object) -> Manifest:
    return manifests.build(IDENTITY, parts or (part(),), fields or FIELDS)


def plain(one: Part | None = None) -> dict[str, Any]:
    """A part without a section, as a manifest has it."""
    parts: Any = manifests.to_json(example(one or part()))["parts"]
    return dict(parts[0])


def rewritten(**changes: object) -> bytes:
    """A manifest with other values and a digest that fits them."""
    body = manifests.to_json(example()) | changes
    text = opaque.encode(body, "x", sort_keys=True)
    body["manifest_sha256"] = hashlib.sha256(text).hexdigest()
    return opaque.encode(body, "x", sort_keys=True) + b"\n"


REVERSED = sorted([plain(part(name)) for name in "ab"], key=lambda p: p["file"])[::-1]

SHORT_DIGEST = {"file": part_name("0" * 63), "sha256": "0" * 63}

FIELD_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), FIELD_VALUES, max_size=4))
def test_a_manifest_comes_back(fields: dict[str, object]) -> None:
    manifest = example(f=fields)
    assert manifests.decode(manifests.encode(manifest)) == manifest


def test_no_parts_and_many_parts_come_back() -> None:
    for count in (0, 1, 5):
        manifest = manifests.build(IDENTITY, [part(str(n)) for n in range(count)], {})
        assert manifest.record_count == 2 * count
        assert manifests.decode(manifests.encode(manifest)) == manifest


def test_it_is_json_that_people_and_tools_can_read() -> None:
    body = json.loads(manifests.encode(example()))
    assert body["kind"] == "resources"
    assert body["record_count"] == 2
    assert body["fields"] == FIELDS


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "not JSON"),
        (b"[]", "expected an object"),
        (b"{}\n", "schema_version is null; this side reads 1 and 2"),
        (rewritten(schema_version=3), "schema_version is 3; this side reads 1 and 2"),
        (rewritten(schema_version=2), "schema_version 2: 0 of 1 parts have a section"),
        (rewritten(parts=[plain() | {"section": "a"}]), "schema_version 1: 1 of 1 parts"),
        (rewritten(parts=[plain() | {"section": None}]), "a section that is null"),
        (rewritten(parts=[plain() | {"section": "../a"}], schema_version=2), "not a safe name"),
        (rewritten(parts=[], record_count=0, schema_version=2), "schema_version 2: 0 of 0"),
        (rewritten(schema_version=True), "schema_version is True"),
        (rewritten(schema_version=1.0), "schema_version is 1.0"),
        (rewritten(extra=1), "unknown key"),
        (rewritten(record_count=3), "record_count: not the sum"),
        (rewritten(record_count="2"), "record_count: expected int"),
        (rewritten(parts=[plain()] * 2, record_count=4), "each once"),
        (rewritten(parts=REVERSED, record_count=4), "in order"),
        (rewritten(parts=[plain() | {"file": "../../x"}]), "name of its digest"),
        (rewritten(parts=[plain() | {"sha256": "0" * 64}]), "name of its digest"),
        (rewritten(parts=[plain() | SHORT_DIGEST]), "hexadecimal"),
        (rewritten(parts=[plain() | {"bytes": -1}]), "more than 0"),
        (rewritten(parts=[plain() | {"record_count": 0}]), "more than 0"),
        (rewritten(checkpoint_id="a/b"), "checkpoint_id: not a safe name"),
        (rewritten(kind=""), "kind: not a safe name"),
        (rewritten(fields=[]), "fields: expected an object"),
        (rewritten() + b"\n", "other bytes of that meaning"),
        (rewritten()[:-1], "other bytes of that meaning"),
        (b" " + rewritten(), "other bytes of that meaning"),
        (rewritten().replace(b'"abc"', b'"\\u0061bc"'), "other bytes of that meaning"),
        (rewritten().replace(b'"abc"', b'"abd"'), "digest does not match"),
        (b'"' + b"x" * MANIFEST_BYTES_MAX + b'"', "over 524288 bytes"),
        (b"[" * 10_000, "nested deeper"),
    ],
    ids=range(31),
)
def test_what_was_not_written_so_is_refused(data: bytes, why: str) -> None:
    """STO-4, I23."""
    with pytest.raises(InvalidCheckpointState, match="^m/manifest.json: .*" + why):
        manifests.decode(data, "m/manifest.json")


def test_every_flipped_bit_and_every_cut_is_refused() -> None:
    """STO-4, I23."""
    data = manifests.encode(example())
    for position in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            with pytest.raises(InvalidCheckpointState):
                manifests.decode(bytes(damaged))
        with pytest.raises(InvalidCheckpointState):
            manifests.decode(data[:position])


def test_fields_that_are_not_json_are_refused_with_their_path() -> None:
    with pytest.raises(InvalidCheckpointState, match=r"\$.fields.a\[1\]: a builtins.tuple"):
        manifests.encode(example(a=[1, ()]))


def test_fields_that_are_too_large_are_refused() -> None:
    fits = MANIFEST_BYTES_MAX - len(manifests.encode(example(a="")))
    assert len(manifests.encode(example(a="x" * fits))) == MANIFEST_BYTES_MAX
    with pytest.raises(InvalidCheckpointState, match="belongs into records"):
        manifests.encode(example(a="x" * (fits + 1)))


def test_parts_with_sections_make_a_manifest_of_version_2() -> None:
    """STO-6: without them it stays the one that older readers know."""
    assert example(part("a"), part("b")).schema_version == 1
    manifest = example(part("a", section="ledger"), part("b", section="cuts"))
    assert manifest.schema_version == 2
    assert manifests.decode(manifests.encode(manifest)) == manifest
    with pytest.raises(InvalidCheckpointState, match="1 of 2 parts have a section"):
        example(part("a", section="ledger"), part("b"))


def test_too_many_parts_are_refused_and_as_many_as_allowed_fit() -> None:
    parts = [part(str(n)) for n in range(PARTS_MAX + 1)]
    manifests.encode(manifests.build(IDENTITY, parts[:-1], {}))
    with pytest.raises(InvalidCheckpointState, match="513 parts, limit 512"):
        manifests.build(IDENTITY, parts, {})


def test_the_same_meaning_is_the_same_records_under_the_same_id() -> None:
    """STO-2: another write of the same records differs in the names of its files alone."""
    one = example(part("a", "c"), part("b", "d"), n=math.nan)
    assert manifests.same_meaning(one, example(part("y", "d"), part("x", "c"), n=math.nan))
    for other in (
        example(part("a", "c"), n=math.nan),
        example(part("a", "c"), part("b", "c"), n=math.nan),
        example(part("a", "c"), part("b", "d", bytes=99), n=math.nan),
        example(part("a", "c", record_count=1), part("b", "d", record_count=3), n=math.nan),
        example(part("a", "c"), part("b", "d"), n=1),
        example(part("a", "c", section="s"), part("b", "d", section="s"), n=math.nan),
        attrs.evolve(one, checkpoint_id="step-8"),
        attrs.evolve(one, instance="other"),
        attrs.evolve(one, kind="agent"),
    ):
        assert not manifests.same_meaning(one, other)


def test_numbers_of_another_type_are_another_meaning() -> None:
    """In Python 1 == 1.0 == True."""
    kinds = [example(n=n) for n in (1, 1.0, True)]
    for one in kinds:
        assert [manifests.same_meaning(one, other) for other in kinds].count(True) == 1
