"""Which kinds of servers may have several workers."""

from __future__ import annotations

import attrs


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
