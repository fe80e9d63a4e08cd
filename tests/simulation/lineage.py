"""What the policy server knows of each episode, against what agents heard and the backend computed.

Decodes the model's part of every published checkpoint with the real record types: I8 for cuts, I14,
I16, I25's stamp, I28.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, TypeVar

import attrs

from gymtrio.capture.tokens import StagingKey, TokenRecord
from gymtrio.ids import CaptureKey, CheckpointId
from gymtrio.participants.policy.records import PolicyRecord
from gymtrio.storage.records import Identity, PartDecoder
from gymtrio.wire.codec import unpack
from tests.simulation.engine import Engine, conversation
from tests.simulation.network import Exchange

if TYPE_CHECKING:
    from tests.simulation.oracles import Oracles

PART: Final = ".part"


@attrs.define(eq=False)
class Lineage:
    engine: Engine
    oracles: Oracles
    heard: dict[str, list[str]] = attrs.field(factory=dict)
    """Capture key to the conversations whose answers its policy server has sent whole."""
    restored_cuts: dict[str, Any] = attrs.field(factory=dict)
    """Capture key to the cut that its attempt was restored with, while nothing shows it was used."""
    begun_before: int = 0
    """How many calls the backend had begun before the last restore."""
    restored_rows: dict[str, int] = attrs.field(factory=dict)
    restored_unsure: dict[str, int] = attrs.field(factory=dict)
    """How many of the restored rows are of answers that may not have been heard."""
    sent_before: dict[str, dict[str, int]] = attrs.field(factory=dict)
    """By checkpoint: how many answers each attempt had been sent when its commit was answered."""
    latest_before: dict[str, dict[str, set[str]]] = attrs.field(factory=dict)
    """By checkpoint: the call that each attempt had begun last and that was still generated when the
    commit was answered, and what that goes on from."""
    of_checkpoint: dict[str, dict[CaptureKey, PolicyRecord]] = attrs.field(factory=dict)

    def answered(self, exchange: Exchange) -> None:
        """A whole answer left the policy server."""
        if exchange.key is not None:
            said = conversation(exchange.json()["input"])
            self.heard.setdefault(exchange.key, []).append(said)
            self._delivered(exchange.key, said)

    def _delivered(self, key: str, said: str) -> None:
        cut = self.restored_cuts.get(key)
        if cut is not None and said == self._conversation_of(cut):
            del self.restored_cuts[key]

    def _conversation_of(self, cut: Any) -> str | None:
        for extension, said in self.engine.begun:
            if extension.model_call_id == cut.continuation.source_model_call_id:
                return said
        return None

    def unclaimed(self) -> list[str]:
        """Attempts with a restored cut that no call has gone on from."""
        begun = {
            extension.continuation.source_model_call_id
            for extension, _ in self.engine.begun[self.begun_before :]
            if extension.continuation is not None
        }
        return [
            key
            for key, cut in self.restored_cuts.items()
            if cut.continuation.source_model_call_id not in begun
        ]

    def committed(self, checkpoint_id: str) -> None:
        """The policy server has answered a commit: what it holds is what it had sent by then."""
        keys = self.heard.keys() | self.restored_rows.keys()
        self.sent_before[checkpoint_id] = {
            key: len(self.heard.get(key, ())) + self.restored_rows.get(key, 0) for key in keys
        }

        latest: dict[str, set[str]] = {}
        for extension, _ in self.engine.begun:
            latest.pop(extension.capture_key, None)
            if extension.model_call_id in self.engine.live:
                gone_on = extension.continuation
                sources = set() if gone_on is None else {gone_on.source_model_call_id}
                latest[extension.capture_key] = {extension.model_call_id, *sources}
        self.latest_before[checkpoint_id] = latest

    def published(self, publication: Any, files: dict[str, bytes]) -> None:
        shares = records_of(PolicyRecord, "model", "policy", publication.checkpoint_id, files)
        records = {key: self._whole(key, of_each) for key, of_each in shares.items()}
        self.of_checkpoint[publication.checkpoint_id] = records
        fail = self.oracles.fail
        for episode_id in publication.scope:
            key = episode_id.capture_key
            if key not in publication.commits["policy"].episode_ids:
                continue
            record = records.get(key, PolicyRecord())
            sent = self.sent_before[publication.checkpoint_id].get(key, 0)
            # Of an answer that is lost on its way nobody knows whether it was heard; nor of one that a
            # worker of the server died with, until the call comes again.
            unsure = len(record.uncertain)
            if unsure and not self.oracles.workers_died:
                fail("I16", f"{key}: {unsure} rows are uncertain, and no worker has died")
            if len(record.rows) - unsure > sent:
                fail("I16", f"{key}: {len(record.rows)} rows, {sent} answers were delivered")
            sure = sent - self.restored_unsure.get(key, 0)
            if len(record.rows) < sure and not self.oracles.lossy:
                fail("I16", f"{key}: {len(record.rows)} rows of {sent} delivered answers")
            latest = self.latest_before[publication.checkpoint_id].get(key)
            wanted = self.restored_cuts.get(key)
            if latest is not None and wanted is not None:
                # While the latest has generated nothing, the restored one stands.
                latest |= {wanted.continuation.source_model_call_id}
            if latest is not None and record.cut is not None:
                source = record.cut.continuation.source_model_call_id
                if source not in latest:
                    fail("I28", f"{key}: the cut of {source}, and {latest} was begun after it")
            if wanted is not None and record.cut is None:
                fail("I8", f"{key}: its restored cut was not delivered and is not exported again")

    def _whole(self, key: CaptureKey, shares: list[PolicyRecord]) -> PolicyRecord:
        """What several processes wrote of one episode: its rows are of one of them, its cut of one."""
        rows = [share.rows for share in shares if share.rows]
        cuts = [share.cut for share in shares if share.cut is not None]
        if len(rows) > 1 or len(cuts) > 1:
            self.oracles.fail("I18", f"{key}: {len(rows)} processes wrote rows, {len(cuts)} a cut")
        return PolicyRecord(
            rows=rows[0] if rows else (),
            cut=cuts[0] if cuts else None,
            uncertain=tuple(call for share in shares for call in share.uncertain),
        )

    def restored(self, publication: Any) -> None:
        self.begun_before = len(self.engine.begun)
        for episode_id in publication.scope:
            record = self.of_checkpoint[publication.checkpoint_id].get(episode_id.capture_key)
            every = (self.heard, self.restored_rows, self.restored_unsure, self.restored_cuts)
            for known in every:
                for key in [k for k in known if k.split("-a")[0] == episode_id.rollout_id]:
                    del known[key]
            if record is not None:
                key = episode_id.next_attempt().capture_key
                self.restored_rows[key] = len(record.rows)
                self.restored_unsure[key] = len(record.uncertain)
                if record.cut is not None:
                    self.restored_cuts[key] = record.cut

    def fresh(self) -> None:
        """The servers started without any past."""
        self.heard.clear()
        self.restored_rows.clear()
        self.restored_unsure.clear()
        self.restored_cuts.clear()

    def generation_begins(self, exchange: Exchange) -> None:
        """The policy server asks the backend: a cut that fits is gone on from (CUT-4)."""
        body = json.loads(exchange.body)
        extension = body["gymtrio"]
        attempt = extension["attempt"]
        key = str(extension["rollout_id"]) + (f"-a{attempt}" if attempt else "")
        said = conversation(body["input"])
        going_on = [
            call.extension.continuation.source_model_call_id
            for call in self.engine.live.values()
            if call.extension.continuation is not None and call.extension.capture_key == key
        ]
        continuation = extension.get("continuation")
        if continuation is not None and continuation["source_model_call_id"] in going_on:
            self.oracles.fail("I14", f"{key}: one cut is continued twice at once")
        cut = self.restored_cuts.get(key)
        if cut is None or continuation is not None or said != self._conversation_of(cut):
            return
        # A repetition of the call that goes on from it has nothing to go on from.
        if cut.continuation.source_model_call_id not in going_on:
            self.oracles.fail("I25", f"{key}: its durable prefix is generated again")

    def stamps(self, records: dict[StagingKey, TokenRecord]) -> None:
        """At the end: whole records are stamped with the oldest version that contributed (I25)."""
        oldest = {a.extension.model_call_id: a.oldest for a in self.engine.answered}
        for record in records.values():
            wanted = oldest.get(record.model_call_id)
            if wanted is None or not str(record.staging_key).endswith("/whole"):
                continue
            if record.policy_version != wanted:
                what = f"stamped {record.policy_version}, not {wanted}"
                self.oracles.fail("I25", f"{record.staging_key}: {what}")


R = TypeVar("R")


def records_of(
    cls: type[R], kind: str, instance: str, checkpoint_id: CheckpointId, files: dict[str, bytes]
) -> dict[CaptureKey, list[R]]:
    """Read one participant's records out of its files, those of each of its processes."""
    identity = Identity(kind=kind, instance=instance, checkpoint_id=checkpoint_id)
    found: dict[CaptureKey, list[R]] = {}
    for name, data in files.items():
        if name.endswith(PART):
            decoder = PartDecoder(identity, scope=None, where=name)
            decoder.receive_data(data)
            while decoder.advance():
                pass
            for record in decoder.records:
                key = record.episode_id.capture_key
                found.setdefault(key, []).append(unpack(cls, record.payload))
    return found
