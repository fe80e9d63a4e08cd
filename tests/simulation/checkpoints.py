"""What is on the disk, read by eyes of our own: manifests, the parts they name, and nothing else."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, Final

import attrs

from gymtrio.participants.environment import EnvironmentRecord
from tests.simulation.disk import ROOT, Machine
from tests.simulation.lineage import records_of
from tests.simulation.tokens import TokenShelf

if TYPE_CHECKING:
    from tests.simulation.oracles import Oracles

KINDS: Final = {"env": "environment", "policy": "model", "agent": "agent", "tools": "resources"}


@attrs.define(eq=False)
class Checkpoints:
    """Checks I17 and I20 to I22 on the tree of files."""

    machine: Machine
    shelf: TokenShelf
    oracles: Oracles
    acknowledged: dict[str, dict[str, bytes]] = attrs.field(factory=dict)
    """Directory of a participant's part to its files, as they were when its commit was answered."""

    def tree(self) -> dict[str, dict[str, bytes]]:
        """Files by participant directory."""
        found: dict[str, dict[str, bytes]] = {}
        for path, data in self.machine.files.tree().items():
            directory, _, name = path.rpartition("/")
            if "/gym/" in path:
                found.setdefault(directory, {})[name] = data
        return found

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
        self.oracles.start_over(
            publication, {key for key, record in episodes.items() if record.boundary is None}
        )
        keys = publication.commits["policy"].extra["staging_keys"]
        missing = [key for key in keys if key not in self.shelf.records]
        if missing:
            self.oracles.fail("I17", f"{publication.checkpoint_id}: no tokens under {missing}")

    def after_crash(self, *, power: bool) -> None:
        """Whatever can be read now is whole, and what was acknowledged is all there (I20-I22)."""
        why = "power loss" if power else "kill"
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
