"""The bounds of storage, each with its reason; those that others share are in `gymtrio.limits`."""

from __future__ import annotations

from typing import Final

from gymtrio.limits import FRAME_BYTES_MAX

RECORD_BYTES_MAX: Final = FRAME_BYTES_MAX
"""Payload of one record: what restoring one episode may make us hold at once."""

RECORD_CHUNK_BYTES: Final = 2**20
"""A longer payload is cut into frames of this size, so that neither side ever copies or checks more
than this in one stretch of the loop."""

WRITE_BATCH_BYTES: Final = 2**20
"""Gathered before a write: a thread hop per megabyte costs nothing beside the write."""

READ_CHUNK_BYTES: Final = 2**20
"""Read and hashed per thread hop, parsed in slices after it."""

OPAQUE_PIECE_BYTES: Final = 2**16
"""Of opaque state, read in one stretch of the loop: 1 to 5 ms, by what it is made of."""

OPAQUE_PIECE_ITEMS: Final = 4_000
"""Of opaque state, written in one stretch of the loop: 2 to 4 ms."""

MANIFEST_BYTES_MAX: Final = 2**19
"""Parsed and compared in one stretch of the loop; what does not fit belongs into records."""

PARTS_MAX: Final = 512
"""Parts of one manifest: more workers than any host has cores."""

DIRECTORY_DEPTH_MAX: Final = 32
"""Components of a checkpoint directory below the root: each is an open descriptor and a sync."""

NAME_BYTES_MAX: Final = 255
"""Of one path component, on every file system we know."""

PATH_CHARACTERS_MAX: Final = 4096
"""Of a whole path, as the kernel has it."""

TEMPORARY_NAMES_MAX: Final = 1000
"""Leftovers of killed processes that are passed over before a directory is refused as a mess."""

DISK_STEPS_MAX: Final = 64
"""Calls under way at once, hung ones included: beyond it the disk is refused, not waited for."""

STOP_GRACE_S: Final = 0.05
"""How long a stopped write waits for the system call it is in: half of what a resume may take
(CTL-10). One that hangs longer is left to its thread, which then cleans up by itself."""

RELEASE_S_MAX: Final = 0.5
"""How long the end of a write or a read waits for the release when nobody has stopped it: half of
what a refusal may take (STO-8)."""

PUBLISH_S_MAX: Final = 10.0
"""Deadline of the shielded link and directory sync; a resume waits for them, a controller retries."""

PATH_SHOWN_CHARACTERS_MAX: Final = 300
"""Of a path inside opaque state, in a detail; its two ends say where the fault is."""
