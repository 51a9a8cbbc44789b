"""The memory and dtype of this machine. Imports torch only if there is a CUDA device."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ramify.errors import InvalidRequest
from ramify.runtime.config import EngineConfig
from ramify.runtime.host_memory import host_memory

if TYPE_CHECKING:
    import torch

Dtype = Literal["float32", "bfloat16"]
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


@dataclass(frozen=True)
class Machine:
    """A machine on which a model would run. `memory` is in bytes: the host's, or the CUDA device's."""

    device: Literal["cpu", "cuda"]
    name: str
    memory: int
    dtype: Dtype
    """The dtype that the engine's option `dtype` means by `auto`, for models of our own families."""
    free: int | None = None
    """Bytes of `memory` that are free now; None if all are."""


def this_machine(device: Literal["auto", "cpu", "cuda"] = "auto") -> Machine:
    """The CUDA device if there is one and `device` allows it, else the CPU."""
    if device != "cpu" and (device == "cuda" or Path("/dev/nvidiactl").exists()):
        from ramify.runtime.executor.device import resolve_device

        config = EngineConfig(device=device)
        found = resolve_device(config)
        if found.type == "cuda":
            import torch

            properties = torch.cuda.get_device_properties(found)
            return Machine("cuda", properties.name, properties.total_memory, _dtype(config, found))
    memory = host_memory()
    return Machine("cpu", "the CPU", memory.total, "bfloat16", memory.free)


def dtype_of_torch() -> Dtype:
    """The dtype that the engine's option `dtype` means by `auto` if torch computes products on the CPU."""
    import torch

    return _dtype(EngineConfig(attention_backend="torch"), torch.device("cpu"))


def _dtype(config: EngineConfig, device: torch.device) -> Dtype:
    import torch

    from ramify.runtime.executor.device import resolve_dtype

    return "bfloat16" if resolve_dtype(config, device) == torch.bfloat16 else "float32"


def bytes_of(text: str) -> int:
    """The bytes that a text such as ``24GB``, ``24 GiB`` or ``24000M`` names. All units are powers of 1024,
    as in `kv_memory_gb`.

    Raises `InvalidRequest` for any other text.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(?:i?B)?|B)\s*", text, re.IGNORECASE)
    if found is None:
        raise InvalidRequest(
            f"memory is {text!r}; a number with its unit is needed.", field="memory", remedy="Such as 24GB."
        )
    return int(float(found[1]) * 2 ** _UNITS[(found[2] or "").upper()])
