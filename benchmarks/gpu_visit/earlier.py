"""Times of an earlier visit to the same card (docs/kernels.md, 2026-11-27), with which new times are
compared."""

from __future__ import annotations

import torch

SECONDS = {
    "NVIDIA H100": {
        "decode 1 x 1024": 6.34e-3,
        "decode 32 x 1024": 7.9e-3,
        "decode 256 x 1024": 19.7e-3,
        "prefill 4096": 102e-3,
        "cascade, 64 over 8192": 8.5e-3,
    },
    "NVIDIA H200": {
        "decode 1 x 1024": 4.82e-3,
        "decode 32 x 1024": 5.93e-3,
        "decode 256 x 1024": 15.7e-3,
        "prefill 4096": 102e-3,
        "cascade, 64 over 8192": 6.84e-3,
    },
}
"""Card → case → seconds of a step with Llama-3.1-8B's shape in bfloat16."""


def compared(case: str, seconds: float, device: str | None = None) -> dict[str, float]:
    """The comparison of `seconds` with the earlier time of `case`; empty if the case or the card has none.

    longer : the share by which `seconds` exceed the earlier time
    """
    name = device or (torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu")
    table = next((table for card, table in SECONDS.items() if name.startswith(card)), {})
    return {"longer": seconds / table[case] - 1} if case in table else {}
