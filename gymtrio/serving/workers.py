"""Which servers may have several workers, and how a worker finds its coordinator."""

from __future__ import annotations

from typing import Final

import attrs

COORDINATOR_VARIABLE: Final = "GYMTRIO_COORDINATOR"
"""Path of the socket at which the coordinator of a server with several workers listens."""

WORKER_VARIABLE: Final = "GYMTRIO_WORKER"
"""Which worker this process is; its replacement has the same name."""

WORKERS_MAX: Final = 256
"""More than any host has cores; a checkpoint has a part of each."""


def instance_of(pid: int) -> str:
    """What a worker calls its incarnation: whoever started the process knows it."""
    return f"pid-{pid}"


def only_one_worker(instance: object, attribute: attrs.Attribute[int], value: int) -> None:
    """Validate `num_workers` of a server whose live state is in one process (ENV-7, AGT-9).

    Raises:
        ValueError: it is not 1.
    """
    if value != 1:
        raise ValueError(
            f"num_workers is {value}: this kind of server keeps its live episodes and sessions in "
            "one process; several workers cannot share them yet"
        )


def some_workers(instance: object, attribute: attrs.Attribute[int], value: int) -> None:
    """Validate `num_workers` of a server that may have several.

    Raises:
        ValueError: it is out of range.
    """
    if not 1 <= value <= WORKERS_MAX:
        raise ValueError(f"num_workers is {value}: from 1 to {WORKERS_MAX}")
