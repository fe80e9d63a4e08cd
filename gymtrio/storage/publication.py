"""Whether a commit may still be stopped (CTL-10)."""

from __future__ import annotations

import trio


class Publication:
    """The point of no return of one commit, shared by its writer and by resume.

    A writer asks `begin` right before the manifest becomes visible and `end`s when that is durable or
    has failed. A resume asks `stop`: before that point the writer is stopped for good, after it the
    resume waits for `ended`.
    """

    def __init__(self) -> None:
        self.ended = trio.Event()
        """Nothing of the write runs any more, or nothing may be published any more."""
        self._stopped = False
        self._begun = False

    @property
    def stopped(self) -> bool:
        return self._stopped

    def begin(self) -> bool:
        """Pass the point of no return; False: it was stopped, publish nothing."""
        if self._stopped:
            return False
        self._begun = True
        return True

    def end(self) -> None:
        self.ended.set()

    def stop(self) -> bool:
        """Forbid the publication; False: it has begun and not ended, wait for `ended`."""
        if self._begun and not self.ended.is_set():
            return False
        self._stopped = True
        return True
