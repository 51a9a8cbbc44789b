"""Predictions, written down before the measurement, by the start of a device's name.

Source of all of them: estimates from the kernels' bytes and operations, for a card that copies 3.0 TB/s and
multiplies 790 TFLOP/s in bfloat16. None was measured.
"""

from __future__ import annotations

from typing import Any

import torch

SOURCE = "estimates"
Range = tuple[float, float]

SECONDS: dict[str, dict[str, Range]] = {
    "NVIDIA H100": {
        "decode 1 x 1024": (6.8e-3, 7.2e-3),
        "decode 32 x 1024": (8.6e-3, 9.0e-3),
        "decode 256 x 1024": (21e-3, 23e-3),
        "prefill 4096": (102e-3, 110e-3),
    }
}
"""Of Llama-3.1-8B's shape in bfloat16."""

OF_CEILING: dict[str, dict[str, Range]] = {
    "NVIDIA H100": {
        "qkv, 1 ": (0.65, 0.80),
        "qkv, 16 ": (0.65, 0.80),
        "qkv, 32 ": (0.65, 0.80),
        "o, 1 ": (0.65, 0.80),
        "o, 16 ": (0.65, 0.80),
        "o, 32 ": (0.65, 0.80),
    }
}
"""Of torch's products, by the start of a case's name. Those of our kernels are with their cases in
`tests.kernels.kernel_cases`."""


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def seconds(case: str, found: float, device: str | None = None) -> dict[str, Any]:
    """The prediction beside what was found; nothing where there is none."""
    table = _of_device(SECONDS, device)
    return _beside(table[case], found) if case in table else {}


def of_ceiling(case: str, found: float, device: str | None = None) -> dict[str, Any]:
    """As `seconds`, for shares of a ceiling."""
    table = _of_device(OF_CEILING, device)
    fitting = [start for start in table if case.startswith(start)]
    return _beside(table[max(fitting, key=len)], found) if fitting else {}


def _of_device(tables: dict[str, dict[str, Range]], device: str | None) -> dict[str, Range]:
    name = device or device_name()
    return next((table for start, table in tables.items() if name.startswith(start)), {})


def _beside(expected: Range, found: float) -> dict[str, Any]:
    """miss : by which share the result is above the range (below: negative); 0 inside"""
    low, high = expected
    miss = found / high - 1 if found > high else found / low - 1 if found < low else 0.0
    return {"expected": expected, "found": found, "miss": miss, "source": SOURCE}
