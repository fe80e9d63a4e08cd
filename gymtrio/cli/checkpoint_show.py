"""`gymtrio checkpoint show DIRECTORY`: verify a checkpoint and print what it holds, as JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import trio

from gymtrio.cli.command import Command
from gymtrio.errors import SettingsError
from gymtrio.ids import CaptureKey, is_safe_id, parse_capture_key
from gymtrio.storage import manifest as manifests
from gymtrio.storage.disk import ThreadDisk
from gymtrio.storage.reader import LoadedCheckpoint, read_checkpoint
from gymtrio.storage.root import Place
from gymtrio.storage.show import record_to_json
from gymtrio.wire.control import Kind


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, help="the checkpoint_dir of a commit")
    parser.add_argument("--episode", metavar="KEY", help="only this episode, such as task-7-a1")
    parser.add_argument(
        "--manifests", action="store_true", help="verify everything, print no records"
    )


def _run(arguments: argparse.Namespace) -> int:
    directory: Path = arguments.directory.resolve()
    scope: frozenset[CaptureKey] | None = None
    if arguments.episode is not None:
        scope = frozenset({parse_capture_key(arguments.episode).capture_key})
    found = list(_participants(directory))
    if not found:
        raise SettingsError(f"{arguments.directory}: no checkpoint: there is no gym/KIND/INSTANCE")
    place = Place("/", directory.parts[1:])
    for kind, instance in found:
        loaded = trio.run(_read, place, kind, instance, scope)
        _print(loaded, records=not arguments.manifests)
    return 0


def _participants(directory: Path) -> Iterator[tuple[str, str]]:
    for kind in Kind:
        for folder in sorted((directory / "gym" / kind.value).glob("*")):
            if is_safe_id(folder.name):
                yield kind.value, folder.name


async def _read(
    place: Place, kind: str, instance: str, scope: frozenset[CaptureKey] | None
) -> LoadedCheckpoint:
    return await read_checkpoint(ThreadDisk(), place, kind=kind, instance=instance, scope=scope)


def _print(loaded: LoadedCheckpoint, *, records: bool) -> None:
    where = {"kind": loaded.manifest.kind, "instance": loaded.manifest.instance}
    print(json.dumps({"manifest": manifests.to_json(loaded.manifest)}))
    if records:
        for record in loaded.every_record():
            print(json.dumps(where | record_to_json(record)))


COMMANDS = (
    Command(
        name="checkpoint show",
        help="verify a checkpoint and print its manifests and records as JSON lines",
        run=_run,
        add_arguments=_add_arguments,
    ),
)
