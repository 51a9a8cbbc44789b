"""How many requests and prompt tokens a step takes where the configuration leaves it to the device.

Imports no torch: `ramify inspect` asks as well.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

from ramify.runtime.config import EngineConfig

if TYPE_CHECKING:
    import torch


class BatchLimits(NamedTuple):
    """The defaults of `max_running` and `chunk_tokens`."""

    max_running: int
    chunk_tokens: int


ON_CPU = BatchLimits(128, 512)
ON_CUDA = (
    (64 << 30, BatchLimits(1024, 8192)),
    (32 << 30, BatchLimits(512, 8192)),
    (0, BatchLimits(256, 2048)),
)
"""From this number of bytes of device memory on. vLLM's and SGLang's defaults: 256 to 1,024 requests; 8,192
tokens, and 2,048 on cards of 16 and 24 GiB, which compute 8,192 tokens of an 8B model in over a second."""


def limits_of(memory: int | None) -> BatchLimits:
    """memory : bytes of the CUDA device; None: the device is the CPU"""
    if memory is None:
        return ON_CPU
    return next(limits for least, limits in ON_CUDA if memory >= least)


def with_limits(config: EngineConfig, memory: int | None) -> EngineConfig:
    """`config` with numbers for `max_running` and `chunk_tokens`: those that were given, or the device's."""
    given = BatchLimits(config.max_running or 0, config.chunk_tokens or 0)
    chosen = BatchLimits(*(mine or its for mine, its in zip(given, limits_of(memory), strict=True)))
    return config if chosen == given else dataclasses.replace(config, **chosen._asdict())


def with_limits_of(config: EngineConfig, device: torch.device) -> EngineConfig:
    """As `with_limits`, for a device of this machine."""
    if device.type != "cuda":
        return with_limits(config, None)
    import torch

    return with_limits(config, torch.cuda.get_device_properties(device).total_memory)
