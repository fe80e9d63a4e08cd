"""Errors of the operating system to ours, in one table (STO-8).

A failed call is never tried again on the same file: after a failed sync the kernel has marked the pages
clean, and a second sync would succeed without writing them (HARD-12).
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from gymtrio.errors import InvalidCheckpointState

_MEANING: Final[dict[int, str]] = {
    errno.EACCES: "permission denied",
    errno.EDQUOT: "disk quota exceeded",
    errno.EEXIST: "something else has that name",
    errno.EFBIG: "file too large for this file system or process",
    errno.EINVAL: "not possible on this file system",
    errno.EIO: "input/output error of the device",
    errno.EISDIR: "a directory stands where a file was expected",
    errno.ELOOP: "a symbolic link stands there; links are not followed",
    errno.EMFILE: "this process has too many open files",
    errno.ENAMETOOLONG: "the name is too long",
    errno.ENFILE: "this machine has too many open files",
    errno.ENODEV: "the device is gone",
    errno.ENOENT: "it does not exist",
    errno.ENOSPC: "no space left on the device",
    errno.ENOTDIR: "a file or a symbolic link stands where a directory was expected",
    errno.EOPNOTSUPP: "not possible on this file system",
    errno.EPERM: "not permitted, or not possible on this file system",
    errno.EROFS: "the file system is read-only",
    errno.ESTALE: "the network file system has lost it",
    errno.ETIMEDOUT: "the network file system did not answer",
}


def explain(error: OSError) -> str:
    """Say what an error of the operating system means here, with its name."""
    number = error.errno or 0
    meaning = _MEANING.get(number) or error.strerror or "unknown error"
    return f"{meaning} ({errno.errorcode.get(number, f'errno {number}')})"


def printable(text: str) -> str:
    """Escape what was read from a file, because details go into logs (I36)."""
    return text if text.isprintable() else ascii(text)


@contextmanager
def refusing(doing: str, what: object) -> Iterator[None]:
    """Turn an `OSError` of the block into a refusal.

    Args:
        doing: the verb, as in "cannot sync".
        what: the file or directory.

    Raises:
        InvalidCheckpointState: instead of the `OSError`; the detail names the file and the error.
    """
    try:
        yield
    except OSError as error:
        raise InvalidCheckpointState(f"cannot {doing} {what}: {explain(error)}") from error
