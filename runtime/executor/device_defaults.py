"""Sizes of steps and of pages, if the configuration leaves them to the device.

Imports no torch, because `ramify inspect` uses it as well.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

from ramify.runtime.config import EngineConfig

if TYPE_CHECKING:
    import torch


class DeviceDefaults(NamedTuple):
    """Defaults for the options of the same names."""

    max_running: int
    chunk_tokens: int
    page_size: int


ON_CPU = DeviceDefaults(128, 512, 16)
ON_CUDA = (
    (64 << 30, DeviceDefaults(1024, 8192, 64)),
    (32 << 30, DeviceDefaults(512, 8192, 64)),
    (0, DeviceDefaults(256, 2048, 64)),
)
"""(least bytes of device memory, defaults). As in vLLM and SGLang, these are 256 to 1,024 requests and 8,192
tokens a step, or 2,048 tokens on cards of 16 and 24 GiB. On such a card 8,192 tokens of an 8B model would
take over a second: 131 TFLOP at the 121 TFLOP/s of an L4's data sheet."""


def defaults_of(memory: int | None) -> DeviceDefaults:
    """The defaults for a device.

    memory : bytes of the CUDA device; None: the device is the CPU
    """
    if memory is None:
        return ON_CPU
    return next(defaults for least, defaults in ON_CUDA if memory >= least)


def with_defaults(config: EngineConfig, memory: int | None) -> EngineConfig:
    """`config` with a number for each option of `DeviceDefaults`: its own if it is set, else the device's
    default."""
    of_device = defaults_of(memory)._asdict()
    missing = {name: number for name, number in of_device.items() if getattr(config, name) is None}
    return dataclasses.replace(config, **missing) if missing else config


def with_defaults_of(config: EngineConfig, device: torch.device) -> EngineConfig:
    """`config` with the defaults of a device of this machine."""
    if device.type != "cuda":
        return with_defaults(config, None)
    import torch

    return with_defaults(config, torch.cuda.get_device_properties(device).total_memory)
