"""A digest that tells a model apart from every other one whose answers may differ."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ramify.messages import ModelInfo
from ramify.runtime.config import EngineConfig
from ramify.runtime.model.checkpoint import ModelFiles
from ramify.runtime.model.gguf.header import splits_of

OPTIONS = (
    "load_format",
    "quantization",
    "exact_activations",
    "attention_backend",
    "deterministic",
    "tensor_parallel",
    "jump_forward",
    "rope_scaling",
    "seed",
)
"""Options of the engine that change answers: arithmetic, and how forced text is split into tokens. `seed` is
one of them, as it determines the weights of a dummy model."""


def fingerprint(files: ModelFiles, config: EngineConfig, info: ModelInfo) -> str:
    """A digest of the files' paths, sizes and modification times, and of the options with which the model is
    computed."""
    paths = sorted({path for folder in (files.weights, files.tokenizer) for path in _files(folder)})
    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    options = [getattr(config, name) for name in OPTIONS]
    identity = (stats, options, info.dtype, info.device, info.context_length, info.model_impl)
    return hashlib.sha256(repr(identity).encode()).hexdigest()[:32]


def _files(place: Path) -> list[Path]:
    return [path for path in place.iterdir() if path.is_file()] if place.is_dir() else splits_of(place)
