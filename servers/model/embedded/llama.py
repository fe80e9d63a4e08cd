"""The only module that touches the native library (libllama through cyllama): typed, and exact.

Invariants, each measured on the pinned build, and checked by the tests of this package:
- L1 under `EXACT` the logits of a position depend on the tokens up to it only: not on how they were
  split into decodes, on what else was in a decode, or on which sequence they were copied from.
  One thread: with two, the work of a token is split in ways that round differently. Fewer than 64
  rows at once: from there on attention takes a tiled path that rounds differently. Separate
  memories per sequence: in a unified one the order of cells depends on the neighbours.
- L2 a runtime is used by one thread at a time; decoding releases the interpreter lock.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import platform
import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from gymtrio.errors import HostError
from servers.model.embedded.host import available_memory_bytes, check_memory, cpu_sha256
from servers.model.embedded.sampling import SAMPLER, Logits, Sampled, sample
from servers.model.embedded.settings import EngineSettings
from servers.model.embedded.steps import Chunk, Copy, Move, Step
from servers.model.embedded.vocabulary import Vocabulary, piece_bytes
from servers.model.embedded.weights import WEIGHTS_SHA256, check_weights, find_weights

ENGINE_INSTALL: Final = "pip install cyllama==0.2.18 numpy"

EXACT: Final[Mapping[str, int | bool]] = MappingProxyType(
    {"n_threads": 1, "n_threads_batch": 1, "n_ubatch": 32, "kv_unified": False}
)
"""Settings under which L1 holds. 32 to 63 rows are equally fast, 64 would gain a tenth."""

_KV_BYTES_PER_TOKEN: Final = 30 * 2 * 192 * 2
"""Layers, keys and values, width of the three key-value heads, 16-bit floats."""

_FIXED_BYTES: Final = 256 * 2**20
"""Weights, work buffers, interpreter with numpy; measured 180 MiB."""


def open_runtime(settings: EngineSettings) -> Runtime:
    """Check everything that the engine needs, then load it; takes a second or two.

    Raises:
        HostError: package, weights or memory are missing; the message says what to do.
    """
    weights = find_weights()
    check_weights(weights)
    check_memory(memory_bytes(settings), available_memory_bytes())
    return Runtime(weights, settings)


def memory_bytes(settings: EngineSettings) -> int:
    """What an engine of this size takes; all of it is touched at the start."""
    return _FIXED_BYTES + settings.sequences * settings.context_tokens * _KV_BYTES_PER_TOKEN


class Runtime:
    """A loaded model with its key-value memory; blocking."""

    def __init__(self, weights: Path, settings: EngineSettings) -> None:
        native = _load_native()
        try:
            self._model: Any = _model_type(native)(
                str(weights), native.LlamaModelParams(), verbose=False
            )
            self._model.n_vocab = self._model.get_vocab().n_vocab
            self._context: Any = native.LlamaContext(
                self._model, _context_params(native, settings), verbose=False
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise HostError(f"the native engine cannot load {weights}: {error}") from error
        assert self._context.n_ctx_seq == settings.context_tokens
        self._batch: Any = native.LlamaBatch(
            n_tokens=settings.batch_tokens_max, embd=0, n_seq_max=1
        )
        self.vocabulary: Final = _vocabulary(self._model.get_vocab())
        self.fingerprint: Final = _fingerprint(native)
        self._row = struct.Struct(f"{len(self.vocabulary.pieces)}f")

    def run(self, step: Step) -> tuple[Sampled, ...]:
        """Perform a step; takes about 12 ms per token.

        Returns:
            The token after each chunk that asks for one, in order.
        """
        for move in step.moves:
            self._move(move)
        self._batch.clear()
        asking: list[tuple[int, Chunk]] = []
        for chunk in step.chunks:
            last = len(chunk.token_ids) - 1
            for offset, token_id in enumerate(chunk.token_ids):
                wanted = chunk.sampling is not None and offset == last
                position = chunk.first_position + offset
                self._batch.add(token_id, position, [chunk.sequence], wanted)
            if chunk.sampling is not None:
                asking.append((self._batch.n_tokens - 1, chunk))
        # Anything but success is a fault of the plan: it raises, and ends the engine.
        self._context.decode(self._batch)
        return tuple(
            sample(self._logits(row), chunk.sampling, chunk.end_position)
            for row, chunk in asking
            if chunk.sampling is not None
        )

    def close(self) -> None:
        """Free the native memory; nothing may be called afterwards."""
        self._batch.close()
        self._context.close()
        self._model.close()

    def _move(self, move: Move) -> None:
        if isinstance(move, Copy):
            self._context.memory_seq_cp(move.source, move.target, -1, -1)
        else:
            assert self._context.memory_seq_rm(move.sequence, move.keep_tokens, -1)

    def _logits(self, row: int) -> Logits:
        # The binding hands out a list; packing it is twice as fast as numpy's conversion, 1 ms.
        packed = self._row.pack(*self._context.get_logits_ith(row))
        return np.frombuffer(packed, dtype=np.float32)


def _load_native() -> Any:
    """Import the binding. It has no types: what comes from it is Any, and stays in this module."""
    try:
        native: Any = importlib.import_module("cyllama.llama.llama_cpp")
    except ImportError as error:
        raise HostError(f"the embedded engine needs cyllama ({error}): {ENGINE_INSTALL}") from error
    native.disable_logging()
    return native


def _model_type(native: Any) -> Any:
    """A model that takes attributes: handing out logits, the binding reads one it does not set."""
    return type("Model", (native.LlamaModel,), {})


def _context_params(native: Any, settings: EngineSettings) -> Any:
    params = native.LlamaContextParams()
    params.n_ctx = settings.sequences * settings.context_tokens
    params.n_seq_max = settings.sequences
    params.n_batch = settings.batch_tokens_max
    for name, value in EXACT.items():
        setattr(params, name, value)
    return params


def _vocabulary(native: Any) -> Vocabulary:
    ids = range(native.n_vocab)
    written = [native.get_text(token_id) for token_id in ids]
    control = {written[token_id]: token_id for token_id in ids if native.is_control(token_id)}
    return Vocabulary(
        pieces=tuple(b"" if text in control else piece_bytes(text) for text in written),
        end_ids=frozenset(token_id for token_id in ids if native.is_eog(token_id)),
        control_ids=MappingProxyType(control),
        tokenize=lambda text: list(native.tokenize(text, False, False)),
    )


def _fingerprint(native: Any) -> Mapping[str, str | int | bool]:
    """Name everything that token ids and log-probs depend on, besides the request.

    A cut that was made under another fingerprint continues, but may differ from an uncut run.
    """
    build = json.loads((Path(native.__file__).parents[1] / "build_config.json").read_text())
    return MappingProxyType(
        {
            "cyllama": importlib.metadata.version("cyllama"),
            "llama_cpp": str(build["versions"]["llama_cpp_version"]),
            "ggml": f"{native.ggml_version()} {native.ggml_commit()}",
            "numpy": np.__version__,
            "sampler": SAMPLER,
            "weights_sha256": WEIGHTS_SHA256,
            "machine": platform.machine(),
            "cpu_sha256": cpu_sha256(),
            "flash_attention": "auto",
            **EXACT,
        }
    )
