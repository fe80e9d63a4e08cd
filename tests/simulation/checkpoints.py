"""What is on the disk, read by eyes of our own: manifests, the parts they name, and nothing else."""

from __future__ import annotations

import hashlib
import json
import math
from typing import TYPE_CHECKING, Any, Final

import attrs

from gymtrio.participants.environment import EnvironmentRecord
from tests.helpers.page_cache import Loss, Operation
from tests.simulation.disk import ROOT, Machine
from tests.simulation.lineage import records_of
from tests.simulation.tokens import TokenShelf

if TYPE_CHECKING:
    from tests.simulation.oracles import Oracles

KINDS: Final = {"env": "environment", "policy": "model", "agent": "agent", "tools": "resources"}


@attrs.define(eq=False)
class Checkpoints:
    """Checks I17, I20 to I23 and I31 on the tree of files."""

    machine: Machine
    shelf: TokenShelf
    oracles: Oracles
    acknowledged: dict[str, dict[str, bytes]] = attrs.field(factory=dict)
    """Directory of a participant's part to its files, as they were when its commit was answered."""
    visible: set[str] = attrs.field(factory=set)
    """Directories with a manifest."""
    ended: dict[str, set[str]] = attrs.field(factory=dict)
    """Directory to the names in it when its participant was resumed."""

    def operated(self, operation: Operation) -> None:
        """A file operation has been done: once a manifest can be seen, its parts are durable (I20).

        A sync that failed has lost what others had pending in a directory that they share, and tells
        nobody but its caller: then only a publication, which needs all of them, is looked at.
        """
        if operation.name != "link" or self.machine.failed_syncs:
            return
        durable = self.machine.files.after(Loss.EVERYTHING).tree()
        for directory, files in self.tree().items():
            if "manifest.json" not in files or self._rotten(directory):
                continue
            if directory not in self.visible:
                self.visible.add(directory)
                _, name, _, _, server = directory.removeprefix(ROOT).split("/")
                self.oracles.published_by(server, name)
            for part in _parts(files):
                data = durable.get(f"{directory}/{part['file']}", b"")
                if hashlib.sha256(data).hexdigest() != part["sha256"]:
                    self.oracles.fail("I20", f"{directory}: a manifest before its part is durable")

    def resumed(self, server: str, name: str) -> None:
        """A participant has answered a resume: no file of it appears any more (I31)."""
        directory = f"{ROOT}/{name}/gym/{KINDS[server]}/{server}"
        self.ended.setdefault(directory, set(self.tree().get(directory, {})))

    def restored(self, server: str, name: str, asked_at: float) -> None:
        """A participant was restored from its files: they were not damaged (I23)."""
        directory = f"{ROOT}/{name}/gym/{KINDS[server]}/{server}"
        if self._rotten(directory, before=asked_at):
            self.oracles.fail("I23", f"{directory}: restored, with a bit changed")

    def _rotten(self, directory: str, *, before: float = math.inf) -> bool:
        """Whether something that its manifest needs is damaged."""
        found = [path.rpartition("/") for path, at in self.machine.rotten.items() if at < before]
        names = {name for above, _, name in found if above == directory}
        if "manifest.json" in names:
            return True
        files = self.tree().get(directory, {})
        return bool(names and "manifest.json" in files) and any(
            part["file"] in names for part in _parts(files)
        )

    def tree(self) -> dict[str, dict[str, bytes]]:
        """Files by participant directory, as they were before anything in them was damaged."""
        found: dict[str, dict[str, bytes]] = {}
        for path, data in {**self.machine.files.tree(), **self._undamaged()}.items():
            directory, _, name = path.rpartition("/")
            if "/gym/" in path:
                found.setdefault(directory, {})[name] = data
        return found

    def _undamaged(self) -> dict[str, bytes]:
        there = self.machine.files.tree() if self.machine.undamaged else {}
        return {path: data for path, data in self.machine.undamaged.items() if path in there}

    def published(self, publication: Any) -> None:
        """Every commit of it was answered: it is there, whole, and stays as it is (I20, I22)."""
        tree = self.tree()
        for server, kind in KINDS.items():
            directory = f"{ROOT}/{publication.checkpoint_id}/gym/{kind}/{server}"
            files = tree.get(directory, {})
            if "manifest.json" not in files:
                self.oracles.fail("I20", f"{directory}: acknowledged, but has no manifest")
                continue
            self._check_whole(directory, files)
            named = {part["file"] for part in _parts(files)} | {"manifest.json"}
            self.acknowledged[directory] = {name: files.get(name, b"") for name in sorted(named)}
        self.oracles.lineage.published(
            publication, tree.get(f"{ROOT}/{publication.checkpoint_id}/gym/model/policy", {})
        )
        episodes = records_of(
            EnvironmentRecord,
            "environment",
            "env",
            publication.checkpoint_id,
            tree.get(f"{ROOT}/{publication.checkpoint_id}/gym/environment/env", {}),
        )
        # A replay step that failed while the checkpoint was open: they begin anew (STEP-4).
        self.oracles.progress.start_over(
            publication, {key for key, (record,) in episodes.items() if record.boundary is None}
        )
        keys = publication.commits["policy"].extra["staging_keys"]
        missing = [key for key in keys if key not in self.shelf.records]
        if missing:
            self.oracles.fail("I17", f"{publication.checkpoint_id}: no tokens under {missing}")

    def after_crash(self, *, power: bool) -> None:
        """Whatever can be read now is whole, and what was acknowledged is all there (I20-I22)."""
        why = "power loss" if power else "kill"
        if power:
            # What was removed and not synced may be there again.
            self.ended.clear()
        tree = self.tree()
        for directory, files in tree.items():
            if "manifest.json" in files:
                self._check_whole(directory, files)
        for directory, wanted in self.acknowledged.items():
            files = tree.get(directory, {})
            changed = [name for name, data in wanted.items() if files.get(name) != data]
            if changed:
                self.oracles.fail(
                    "I20", f"{directory}: after a {why} {changed} are not as they were"
                )

    def at_end(self, *, undisturbed: bool) -> None:
        """
        Args:
            undisturbed: nobody was killed and no file operation failed: nothing is left over (I22).
        """
        self.after_crash(power=False)
        for directory, names in self.ended.items():
            appeared = sorted(set(self.tree().get(directory, {})) - names)
            if appeared:
                self.oracles.fail("I31", f"{directory}: {appeared} appeared after the resume")
        for directory, files in self.tree().items() if undisturbed else ():
            named = {"manifest.json"}
            if "manifest.json" in files:
                named |= {part["file"] for part in _parts(files)}
            left = sorted(set(files) - named)
            if left:
                self.oracles.fail("I22", f"{directory}: left over: {left}")

    def _check_whole(self, directory: str, files: dict[str, bytes]) -> None:
        try:
            parts = _parts(files)
        except (ValueError, KeyError, TypeError) as error:
            self.oracles.fail("I20", f"{directory}: a manifest that is not whole: {error!r}")
            return
        for part in parts:
            data = files.get(part["file"])
            if data is None or hashlib.sha256(data).hexdigest() != part["sha256"]:
                self.oracles.fail("I20", f"{directory}: its manifest names what is not whole")


def _parts(files: dict[str, bytes]) -> list[Any]:
    parts: list[Any] = json.loads(files["manifest.json"])["parts"]
    return parts
