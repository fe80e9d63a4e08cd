"""Every bound of the system, with its unit in the name and its reason beside it.

No I/O, imported by all. A bound that depends on a deployment is a setting, not a limit.
"""

from __future__ import annotations

from typing import Final

ID_CHARACTERS_MAX: Final = 128
"""Ids become file names and path segments; every file system takes 128 bytes."""

ATTEMPT_MAX: Final = 1_000_000
"""More attempts of one rollout than this are a controller gone wild."""

BLOCKERS_LISTED_MAX: Final = 100
"""A reply names this many blockers; the count is always full (CTL-7)."""

RESUMED_IDS_REMEMBERED_MAX: Final = 64
"""Checkpoint ids that stay fenced after their resume (CTL-4)."""

DEADLINE_AHEAD_S_MAX: Final = 24 * 3600.0
"""A deadline further ahead is a unit mistake (milliseconds), not a wish (CTL-8)."""

LEASE_GRACE_S_DEFAULT: Final = 600.0
"""How long after the last deadline a participant waits for a controller that went silent."""

PARTICIPANTS_SCOPE_EPISODES_MAX: Final = 100_000
"""Episodes one control call may name: six times the largest deployment we measure."""

CONTROL_BODY_BYTES_MAX: Final = 16 * 2**20
"""A scope of 100,000 ids with room to spare."""

DATA_BODY_BYTES_MAX: Final = 64 * 2**20
"""Tool outputs and conversations; beyond it a request answers 413 (SRV-5)."""

FRAME_BYTES_MAX: Final = 64 * 2**20
"""One record of one episode, or one message: what a peer can make us buffer."""

FRAME_NESTING_MAX: Final = 64
"""Depth of our own closed messages; the deepest we define is 8."""

OPAQUE_NESTING_MAX: Final = 200
"""Depth of opaque JSON state: below the recursion limit of every supported Python, with room for
the frames of the caller."""

OPAQUE_INTEGER_DIGITS_MAX: Final = 4_300
"""Python refuses to parse longer decimal integers; refusing at export beats failing at restore."""

LOOP_SLICE_S: Final = 0.001
"""Work on the event loop yields after this long. A control call takes some twenty turns of the
loop, each with a slice of a commit in it, and has a tenth of a second (CTL-10)."""

WAKE_SLICE_TASKS: Final = 100
"""Parked tasks woken per pass of the loop: a batch runs whole before I/O is looked at again. An
episode that goes on to its next step takes 10 to 20 us, and the resume that let it is answered
meanwhile, see above."""

READINESS_POLL_S: Final = 1.0
"""A waiting prepare looks again at least this often, should a change go unannounced."""

RESULTS_UNACKNOWLEDGED_MAX: Final = 16_384
"""Results that wait for their caller's acknowledgement, besides those of episodes that run: as many as
run at once in the largest deployment. Over it new episodes are refused, since none may be lost."""

RESULTS_UNHEARD_MAX: Final = 4_096
"""Results of callers that left and had not asked for keeping; over it the oldest are dropped. A
connection that broke is made again within seconds."""

RESULT_UNHEARD_S_MAX: Final = LEASE_GRACE_S_DEFAULT
"""And for how long: a controller that went silent for longer has lost its checkpoint as well."""

CLEANUP_S_MAX: Final = 10.0
"""Deadline of every shielded clean-up (STEP-7)."""

STOP_S_MAX: Final = 60.0
"""How long a commit with `stop` waits for a server to free what its sessions hold outside."""

CLEANUP_TRY_S: Final = 3.0
"""A clean-up that has not ended by then is tried again: its request or reply may be lost."""

CLEANUP_RETRY_DELAY_S: Final = 0.2
"""Between two tries of what a clean-up could not reach."""

DISCOVERY_TRIES_MAX: Final = 3
"""A server that cannot be reached three times is an error, never an absent participant."""

CONTROL_RETRY_DELAY_S: Final = 0.2
"""Between tries of a control call whose connection was lost; its deadline bounds the tries."""

CONTROL_REPLY_S_MAX: Final = 1.0
"""A server answers by the deadline of a call; its answer gets this long to arrive. Without
it a prepare that ran out of time would look like a server that is silent (CTL-7)."""

RENEW_INTERVAL_S_MAX: Final = 10.0
"""A held checkpoint's lease is renewed at least this often."""

RESUME_S_MIN: Final = 30.0
"""Resuming gets at least this long, also after a deadline has passed: it must not be given up."""

STAGE_PATIENCE_S: Final = 2.0
"""A resume or retire waits for earlier stages this long in all, though somebody has not answered."""
