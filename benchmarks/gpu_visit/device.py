"""The device of a part, and the release of its memory between cases."""

from __future__ import annotations

import gc

import torch

from benchmarks.gpu_visit.figures import Figures


def device_of(figures: Figures) -> torch.device:
    """The GPU; the CPU in a rehearsal, where Triton's interpreter runs the kernels."""
    return torch.device("cpu") if figures.tiny else torch.device("cuda", torch.cuda.current_device())


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free(device: torch.device) -> None:
    """Return the memory of deleted tensors to the device, so that the next case can use it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
