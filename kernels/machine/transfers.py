"""Copies from the host to a device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def to_device(values: Tensor | np.ndarray, device: torch.device | str) -> Tensor:
    """`values` as a tensor on `device`. The copy to a CUDA device is asynchronous, from pinned memory."""
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    if torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
