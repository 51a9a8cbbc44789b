"""Rooflines: the least that a pass must read and compute, and the most that a device can do per second."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.timing import fastest
from ramify.runtime.executor.kv_pool import page_bytes
from ramify.runtime.model.decoder import Model
from ramify.runtime.model.layers import Linear
from ramify.runtime.model.shape.config import ModelConfig

CPU_COPY_BYTES = 1 << 28
CPU_PRODUCT = 1024


def dense(config: ModelConfig) -> bool:
    """Return whether the counts below hold for this model: each pass multiplies by all weights, and each
    layer sees all positions."""
    return config.experts is None and config.states is None and not any(config.windows)


def weight_bytes(model: Model) -> int:
    """Bytes of weights that every pass with logits reads: all but the embedding, of which only some rows are
    read."""
    total = sum(_size(parameter) for parameter in model.parameters())
    if not model.config.tie_embeddings or (model.head is not None and model.head.packed):
        total -= _size(model.embedding)
    packed = [part for module in model.modules() if isinstance(module, Linear) for part in module.packed]
    return total + sum(_size(part.panels) + _size(part.scales) for part in packed)


def kv_bytes(config: ModelConfig, positions: int, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of `positions` positions, in all layers."""
    return page_bytes(config, 1, dtype) * positions


def prefill_flop(config: ModelConfig, tokens: int) -> int:
    """Operations of the matrix units for a prompt: products with the layers' weights, and causal attention.
    The head is left out, because it is multiplied with one token only.
    """
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    hidden = config.hidden_size
    weights = hidden * (queries + 2 * keys) + queries * hidden + 3 * hidden * config.intermediate_size
    pairs = tokens * (tokens + 1) // 2
    return config.num_layers * (2 * weights * tokens + 4 * queries * pairs)


def read_bandwidth() -> float:
    """Bytes a second that a sum over 512 MiB of the CPU's memory reads, with torch's threads."""
    large = torch.ones(1 << 27)
    return large.nbytes / fastest([large.sum], 0.3)[0]


def ceilings(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Bytes a second, read plus written, of a large copy, and FLOP/s of a large product in `dtype`."""
    if device.type == "cuda":
        from benchmarks import gpu_timing

        found = gpu_timing.ceilings(gpu_timing.Timer(device), dtype)
        torch.cuda.empty_cache()
        return found
    source = torch.randint(100, (CPU_COPY_BYTES,), dtype=torch.int8)
    target = torch.ones_like(source)
    a = torch.randn(CPU_PRODUCT, CPU_PRODUCT).to(dtype)
    copy, product = fastest([lambda: target.copy_(source), lambda: a @ a], 0.1)
    return 2 * CPU_COPY_BYTES / copy, 2 * CPU_PRODUCT**3 / product


def _size(tensor: torch.Tensor | nn.Parameter) -> int:
    return tensor.numel() * tensor.element_size()
