"""Checkpoints of every released format can be restored for ever (V22).

A version that was released is never written again: its files under `tests/golden/` only ever get
company. The files of the current version are also what the writer makes today, so that the format
does not change without a new version.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

import pytest

from gymtrio.ids import CheckpointId
from gymtrio.storage import opaque
from gymtrio.storage.disk import ThreadDisk
from gymtrio.storage.publication import Publication
from gymtrio.storage.reader import read_checkpoint
from gymtrio.storage.records import Identity, Record
from gymtrio.storage.root import Place
from gymtrio.storage.writer import publish_manifest, write_part
from tests.helpers.checkpoints import commit, episode
from tests.helpers.states import same

GOLDEN: Final = Path(__file__).parents[1] / "golden" / "storage"

IDENTITY: Final = Identity(
    kind="environment", instance="sim", checkpoint_id=CheckpointId("step-1200")
)
FIELDS: Final[dict[str, object]] = {"engine": {"weights": "e3b0", "bits": 4}, "none": None}
STATES: Final[dict[str, object]] = {
    "r-7": {"b": [1, 2.5, -0.0, math.inf, math.nan], "a": {"": [True, None]}},
    "r-8": "\ud83d" + "\ude00" + "\U0001f600 \ud800",
    "r-9": [10**60, -(2**63), {}, []],
}


def records() -> list[Record]:
    return [
        Record(episode(name, number), opaque.encode(state, name))
        for number, (name, state) in enumerate(STATES.items())
    ]


@pytest.mark.parametrize("version", sorted(path.name for path in GOLDEN.iterdir()))
async def test_a_released_checkpoint_is_restored(version: str) -> None:
    """STO-4, V22."""
    loaded = await read_checkpoint(
        ThreadDisk(),
        Place(str(GOLDEN), (version,)),
        kind=IDENTITY.kind,
        instance=IDENTITY.instance,
        scope=None,
    )
    assert loaded.manifest.identity == IDENTITY
    assert loaded.manifest.fields == FIELDS
    states = {
        record.episode_id.rollout_id: opaque.decode(record.payload)
        for record in loaded.every_record()
    }
    assert same(states, STATES)


async def test_the_writer_makes_the_current_versions_byte_for_byte(tmp_path: Path) -> None:
    """V22: a change of format needs a new schema version, and files of it here."""
    await commit(
        ThreadDisk(), Place(str(tmp_path), ("v1",)), records(), identity=IDENTITY, fields=FIELDS
    )
    await commit_in_sections(Place(str(tmp_path), ("v2",)))
    for version in ("v1", "v2"):
        assert files(tmp_path / version) == files(GOLDEN / version)


def files(top: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(top)): path.read_bytes() for path in top.rglob("*") if path.is_file()
    }


async def commit_in_sections(where: Place) -> None:
    """One record in a section, two in another, of which one is of the same episode."""
    first, second, third = records()
    parts = []
    for section, share in {"ledger": [first, second], "cuts": [second, third]}.items():
        part = await write_part(
            ThreadDisk(), where, IDENTITY, share, nonce=section.rjust(32, "0"), section=section
        )
        assert part is not None
        parts.append(part)
    await publish_manifest(ThreadDisk(), where, IDENTITY, parts, FIELDS, publication=Publication())
