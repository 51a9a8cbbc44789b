"""KV identity: a digest of what keys and values depend on, apart from tokens, cache scope and LoRA adapter.

Only engines of equal KV identity exchange pages.
"""

from __future__ import annotations

import functools
import hashlib
import platform
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch

import ramify
from ramify import cache, kernels, machine_code
from ramify.runtime import executor, model
from ramify.runtime.config import EngineConfig
from ramify.runtime.executor.kv_pool import KvPool
from ramify.runtime.kv_transfer.snapshot import VERSION
from ramify.runtime.model.checkpoint import splits_of

OPTIONS = (
    "model_impl",
    "load_format",
    "dtype",
    "quantization",
    "exact_activations",
    "attention_backend",
    "trial",
    "deterministic",
    "context_length",
    "rope_scaling",
    "seed",
)
"""Engine options that change keys and values: options of the arithmetic and of RoPE. The context length has
an effect on RoPE; `seed` determines the weights of a dummy model."""

LIBRARIES = "torch", "numba", "transformers"
"""Libraries that compute keys and values."""
CODE = kernels, model, executor
"""Packages whose sources change keys and values."""

PIECE = 1 << 20
"""Bytes of a file that are read at a time."""


def kv_identity(config: EngineConfig, pool: KvPool, weights: Path) -> str:
    """The KV identity of an engine. Two machines have the same identity if they compute the same keys and
    values for a token. The identity depends on every byte of the weights' files, the sources that compute
    with them, the versions of `LIBRARIES`, the options and the processor's instructions, and not on paths and
    dates."""
    layers, _, *page = pool.k.shape
    parts = (
        VERSION,
        ramify.__version__,
        [version(name) for name in LIBRARIES if find_spec(name)],
        [_sources(package) for package in CODE],
        [getattr(config, name) for name in OPTIONS],
        str(pool.k.dtype),
        (layers, *page),
        _processor(pool.k.device),
        weights_digests(config, weights),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def weights_digests(config: EngineConfig, weights: Path) -> list[str]:
    """The SHA-256 of each of the weights' files; empty for a dummy model.

    A file is read whole, 1 GB in a second, once: its digest is kept in Ramify's cache until the file's
    inode, size, time of modification or time of change is another one.
    """
    return [_digest(path) for path in _weight_files(weights)] if config.load_format != "dummy" else []


def _digest(path: Path) -> str:
    status = path.stat()
    entry = cache.entry_of([path], "digests", path.name, status.st_ino, status.st_ctime_ns)

    def build(folder: Path) -> None:
        (folder / "sha256").write_text(_content_digest(path))

    try:
        found = (cache.ensure(entry, build) / "sha256").read_text()
        cache.remove_outdated(entry)
    except (OSError, cache.NotWritable):  # also a full disk
        return _content_digest(path)
    return found


def _content_digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(PIECE):
            digest.update(piece)
    return digest.hexdigest()


@functools.cache
def _sources(package: ModuleType) -> str:
    return machine_code.digest(Path(*package.__path__), ["**/*.py"])


def _processor(device: torch.device) -> tuple[str, ...]:
    if device.type == "cuda":
        return (device.type, torch.cuda.get_device_name(device))
    from ramify.kernels.cpu.packed_linear.byte_dots import INSTRUCTION  # numba

    capability = torch.backends.cpu.get_cpu_capability()
    return (device.type, platform.machine(), capability, f"bytes by {INSTRUCTION}")


def _weight_files(place: Path) -> list[Path]:
    if not place.is_dir():
        return list(splits_of(place))
    return sorted([place / "config.json", *place.glob("*.safetensors")])
