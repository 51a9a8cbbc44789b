"""Torch's own products with an 8B Llama's matrices, as shares of the ceilings. They are most of a step's
time.

A graph multiplies by several matrices in turn, which together are larger than the cache.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_timing import Timer
from benchmarks.gpu_visit.device import device_of, free
from benchmarks.gpu_visit.figures import Figures
from benchmarks.roofline import ceilings

SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
}
"""(outputs, inputs)"""
ROWS = (1, 256, 32, 16, 4096)
TINY_SHAPES, TINY_ROWS = {"qkv": (96, 64), "head": (200, 64)}, (1, 3)
ROTATED_BYTES = 256 << 20
"""Bytes of all matrices in one graph: five times the cache of an H100."""


@torch.inference_mode()
def run(figures: Figures) -> None:
    device, dtype = device_of(figures), torch.bfloat16
    bandwidth, flops = ceilings(device, dtype)
    timer = Timer(device)
    shapes, numbers = (TINY_SHAPES, TINY_ROWS) if figures.tiny else (SHAPES, ROWS)
    for rows in numbers:
        for name, (outputs, inputs) in shapes.items():
            case = f"{name}, {rows} rows"
            with figures.attempt(case):
                bytes_ = outputs * inputs * dtype.itemsize
                sets = 2 if figures.tiny else max(1, -(-ROTATED_BYTES // bytes_))
                made = [
                    (_random(rows, inputs, device), _random(outputs, inputs, device)) for _ in range(sets)
                ]
                found, failed = timer.timings({"torch": _all(made)}, seconds=0.05)
                if failed:
                    raise RuntimeError(failed["torch"])
                seconds = found["torch"].seconds / sets
                moved = bytes_ + rows * (inputs + outputs) * dtype.itemsize
                floors = {"bandwidth": moved / bandwidth, "products": 2 * rows * outputs * inputs / flops}
                bound = max(floors, key=floors.__getitem__)
                share = floors[bound] / seconds
                figures.add(
                    case,
                    seconds=seconds,
                    spread=found["torch"].spread,
                    bound=bound,
                    of_ceiling=share,
                    captured=found["torch"].captured,
                )
                del made
            free(device)


def _random(rows: int, columns: int, device: torch.device) -> Tensor:
    return torch.randn(rows, columns, device=device).to(torch.bfloat16)


def _all(made: list[tuple[Tensor, Tensor]]) -> Callable[[], None]:
    def multiply() -> None:
        for x, weight in made:
            F.linear(x, weight)

    return multiply
