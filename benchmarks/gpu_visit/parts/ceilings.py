"""Ceilings of the device: the rates of a large copy and of a large product."""

from __future__ import annotations

import torch

from benchmarks.gpu_visit.figures import Figures
from benchmarks.roofline import ceilings

EXPECTED = {"NVIDIA H100": (3.0e12, 798e12), "NVIDIA H200": (4.3e12, 788e12)}
"""Bytes a second and FLOP/s that were measured earlier on such cards. A share below 0.95 means that the card
is in a bad state."""


def run(figures: Figures) -> None:
    device = torch.device("cpu" if figures.tiny else "cuda")
    name = "" if figures.tiny else torch.cuda.get_device_name()
    found = ceilings(device, torch.float32 if figures.tiny else torch.bfloat16)
    expected = next((values for card, values in EXPECTED.items() if name.startswith(card)), (None, None))
    for case, unit, value, known in zip(
        ("copy", "product"), ("bytes_s", "flop_s"), found, expected, strict=True
    ):
        share = {} if known is None else {"expected": known, "of_expected": value / known}
        figures.add(case, **{unit: value}, **share)
