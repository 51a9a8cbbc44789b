"""KV identity: a digest of what keys and values depend on, apart from tokens, cache scope and LoRA adapter.

Only engines of equal KV identity exchange pages.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator
from pathlib import Path

import torch

import ramify
from ramify.runtime.config import EngineConfig
from ramify.runtime.executor.kv_pool import KvPool
from ramify.runtime.kv_transfer.snapshot import VERSION
from ramify.runtime.model.checkpoint import splits_of

OPTIONS = (
    "model_impl",
    "load_format",
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

HEAD = 1 << 18
SAMPLES, SAMPLE = 64, 1 << 12
"""Sampling of a large weights file, as reading all of it would take a second for each GB. The digest covers
the first HEAD bytes, which contain the shapes, and SAMPLES places of SAMPLE bytes. Another checkpoint differs
nearly everywhere."""


def kv_identity(config: EngineConfig, pool: KvPool, weights: Path) -> str:
    """The KV identity of an engine. Two machines have the same identity if they compute the same keys and
    values for a token. The identity depends on the content of the weights' files, the options and the
    processor's instructions, and not on paths and dates."""
    layers, _, *page = pool.k.shape
    parts = (
        VERSION,
        ramify.__version__,
        [getattr(config, name) for name in OPTIONS],
        str(pool.k.dtype),
        (layers, *page),
        _processor(pool.k.device),
    )
    digest = hashlib.sha256(repr(parts).encode())
    for path in _weight_files(weights) if config.load_format != "dummy" else ():
        for piece in _content(path):
            digest.update(piece)
    return digest.hexdigest()[:32]


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


def _content(path: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    yield size.to_bytes(8, "little")
    with path.open("rb") as file:
        yield file.read(HEAD)
        if size > HEAD:
            for index in range(SAMPLES):
                file.seek(HEAD + (size - HEAD) * index // SAMPLES)
                yield file.read(SAMPLE)
            file.seek(max(HEAD, size - SAMPLE))
            yield file.read(SAMPLE)
