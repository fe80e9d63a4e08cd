"""What this machine offers the engine: memory, and the CPU that its results depend on."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path
from typing import Final

from gymtrio.errors import HostError

_CGROUP: Final = Path("/sys/fs/cgroup")
_MIB: Final = 2**20


def available_memory_bytes(
    meminfo: Path = Path("/proc/meminfo"), cgroup: Path = _CGROUP
) -> int | None:
    """Say how much memory can still be taken: of the machine, or of its control group if less.

    Returns:
        Bytes, or None where the system does not tell.
    """
    offers = (_machine_bytes(meminfo), _cgroup_bytes(cgroup))
    return min((offer for offer in offers if offer is not None), default=None)


def check_memory(needed_bytes: int, available_bytes: int | None) -> None:
    """Refuse a start that would be killed later, in the middle of everybody's work.

    Raises:
        HostError: less is available than needed; the message names the settings to lower.
    """
    if available_bytes is not None and available_bytes < needed_bytes:
        raise HostError(
            f"the embedded engine needs {needed_bytes // _MIB} MiB of memory, "
            f"{available_bytes // _MIB} MiB are available: lower parallel_calls, cached_sequences "
            "or context_tokens"
        )


def cpu_sha256(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Digest model and instruction sets of the CPU: kernels are chosen, and round, by them."""
    lines = _read(cpuinfo).splitlines()
    told = sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    return hashlib.sha256("\n".join([platform.machine(), *told]).encode()).hexdigest()


def _machine_bytes(meminfo: Path) -> int | None:
    for line in _read(meminfo).splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return None


def _cgroup_bytes(cgroup: Path) -> int | None:
    limit, used = _read(cgroup / "memory.max").strip(), _read(cgroup / "memory.current").strip()
    if not limit.isdecimal() or not used.isdecimal():
        return None
    return max(0, int(limit) - int(used))


def _read(path: Path) -> str:
    """The text of a system file, empty where this system has none."""
    try:
        return path.read_text()
    except OSError:
        return ""
