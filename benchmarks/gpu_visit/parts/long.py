"""Long contexts: decodes of 32 x 8k and 1 x 32k tokens. Then what deterministic mode costs at 1 and 256."""

from __future__ import annotations

import dataclasses

import torch

from benchmarks.engine import Sizes, decodes
from benchmarks.gpu_visit.device import device_of, free
from benchmarks.gpu_visit.engines import add_row, add_state, build
from benchmarks.gpu_visit.figures import Figures
from benchmarks.roofline import ceilings

ALONE = Sizes(prompt=0, branches=0, prefixes=(), steps=16)
"""Decodes alone."""
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
    bandwidth = 0.0
    with figures.attempt("long"):
        engine = build(figures, "long", many, context_length=one.context + 1024)
        bandwidth, _ = ceilings(device, engine.dtype)
        for sizes in (many, one):
            with figures.attempt(f"{sizes.batches[0]} x {sizes.context}"):
                for row in decodes(engine, sizes, bandwidth):
                    add_row(figures, row)
        add_state(figures, "long: measured", engine)
        del engine
    free(device)
    with figures.attempt("deterministic"):
        engine = build(figures, "deterministic", deterministic, deterministic=True)
        for row in decodes(engine, deterministic, bandwidth or ceilings(device, engine.dtype)[0]):
            add_row(figures, row, of="deterministic ")
        add_state(figures, "deterministic: measured", engine)
        del engine
    free(device)
