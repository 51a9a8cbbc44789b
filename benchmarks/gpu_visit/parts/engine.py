"""The whole engine: decodes at batch 1, 32 and 256, a prompt of 4,096 tokens, 64 branches over 8,192."""

from __future__ import annotations

import dataclasses

import torch

from benchmarks.engine import Row, Sizes, branches, compared, prefills
from benchmarks.gpu_visit.device import device_of, free
from benchmarks.gpu_visit.engines import TINY, add_decodes, add_row, add_state, build
from benchmarks.gpu_visit.figures import Figures
from benchmarks.roofline import ceilings

SIZES = Sizes(batches=(1, 32, 256), prompt=4096, chunk=8192, prefixes=(8192,))


@torch.inference_mode()
def run(figures: Figures) -> None:
    sizes, device = TINY if figures.tiny else SIZES, device_of(figures)
    shared: list[Row] = []
    with figures.attempt("engine"):
        whole(figures, sizes, device, shared)
    free(device)
    if shared:
        with figures.attempt("without cascade"):
            without_cascade(figures, dataclasses.replace(sizes, batches=()), shared)
        free(device)


def whole(figures: Figures, sizes: Sizes, device: torch.device, shared: list[Row]) -> None:
    """Measure an engine of its own, which is deleted at the end even after a failure. Adds the rows of the
    cascade to `shared`."""
    engine = build(figures, "engine", sizes)
    bandwidth, flops = ceilings(device, engine.dtype)
    figures.add("ceilings", bytes_s=bandwidth, flop_s=flops)
    add_decodes(figures, engine, sizes, bandwidth)
    with figures.attempt("prefill"):
        for row in prefills(engine, sizes, flops):
            add_row(figures, row)
    with figures.attempt("cascade"):
        for row in branches(engine, sizes):
            shared.append(row)
            add_row(figures, row)
    add_state(figures, "engine: measured", engine)


def without_cascade(figures: Figures, sizes: Sizes, shared: list[Row]) -> None:
    engine = build(figures, "without cascade", sizes, cascade=False)
    for row, flat in zip(shared, branches(engine, sizes), strict=True):
        add_row(figures, compared(flat, row, "the speed with it"), of="without ")
