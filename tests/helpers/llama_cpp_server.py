"""A llama.cpp server in a process of its own, with the weights of the embedded engine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from servers.model.embedded.weights import find_weights

PROGRAM: Final = """
import sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.port = 0
params.n_ctx = 4 * 1024
params.n_parallel = 4
# One thread and small batches: then results do not depend on what else is decoded.
params.n_ubatch = 32
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
params.kv_unified = False
params.warmup = False
server = xllamacpp.Server(params)
print("listening at", server.listening_address, flush=True)
sys.stdin.read()
"""


@contextmanager
def llama_cpp_server(log: Path) -> Iterator[str]:
    """Run the server for the time of the block; gives its base URL."""
    command = [sys.executable, "-c", PROGRAM, str(find_weights())]
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("listening at "):
                yield line.split()[-1]
                return
        raise RuntimeError(f"llama.cpp does not start: {log.read_text()[-2000:]}")
    finally:
        process.kill()
        process.communicate()
