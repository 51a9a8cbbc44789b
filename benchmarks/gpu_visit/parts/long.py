"""Long contexts: decodes of 32 x 8k and 1 x 32k tokens. Then the cost of deterministic mode at batch 1 and
256."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.engine import Sizes
from benchmarks.gpu_visit.device import device_of, free
from benchmarks.gpu_visit.engines import add_decodes, add_state, build
from benchmarks.gpu_visit.figures import Figures
from benchmarks.roofline import ceilings

ALONE = Sizes(prompt=0, branches=0, prefixes=(), steps=16)
"""Sizes with decodes and nothing else."""
MANY = dataclasses.replace(ALONE, batches=(32,), context=8 << 10)
ONE = dataclasses.replace(ALONE, batches=(1,), context=32 << 10)
DETERMINISTIC = dataclasses.replace(ALONE, batches=(1, 256))
TINY = {
    MANY: dataclasses.replace(ALONE, batches=(2,), context=40, steps=1, chunk=16),
    ONE: dataclasses.replace(ALONE, batches=(1,), context=80, steps=1, chunk=16),
    DETERMINISTIC: dataclasses.replace(ALONE, batches=(1,), context=8, steps=1, chunk=16),
}


@torch.inference_mode()
def run(figures: Figures) -> None:
    device = device_of(figures)
    many, one, deterministic = (TINY[size] if figures.tiny else size for size in TINY)
    with figures.attempt("ceilings"):
        dtype = torch.float32 if figures.tiny else torch.bfloat16
        bandwidth, _ = ceilings(device, dtype)
        with figures.attempt("long"):
            measure(figures, "long", (many, one), bandwidth, context_length=one.context + 1024)
        free(device)
        with figures.attempt("deterministic"):
            measure(figures, "deterministic", (deterministic,), bandwidth, deterministic=True)


def measure(figures: Figures, case: str, several: Sequence[Sizes], bandwidth: float, **changes: Any) -> None:
    """Measure decodes of an engine with pages for the first of `several`. The engine is deleted at the end,
    even after a failure."""
    engine = build(figures, case, several[0], **changes)
    for sizes in several:
        of = "deterministic " if changes.get("deterministic") else ""
        add_decodes(figures, engine, sizes, bandwidth, of=of)
    add_state(figures, f"{case}: measured", engine)
