"""Our kernels against the card's ceilings and torch's own: the cases of `benchmarks.kernels`.

The most important cases come first, and no case begins once the part's time is nearly up.
"""

from __future__ import annotations

import time

import torch

from benchmarks.gpu_timing import Timer
from benchmarks.gpu_visit.device import device_of, free
from benchmarks.gpu_visit.figures import Figures
from benchmarks.jit import watched
from benchmarks.kernels import Wrong, measure
from benchmarks.roofline import ceilings
from ramify.kernels.triton.ahead import fix_cache_keys
from tests.kernels.kernel_cases.base import Case, cases

FIRST = (
    "decode 64 x 4k",
    "prefill 8k",
    "decode 1 x 4k",
    "cascade 64 over 8k",
    "prefill 1k after 15k",
    "decode 32",
    "decode 512",
    "add + norm",
    "silu",
    "rope + store",
    "greedy",
    "draw",
    "deterministic product",
)
"""Beginnings of the names of cases, in the order in which they run. All other cases come after them."""
SECONDS = 0.1
"""Seconds for measuring each call."""
BESIDE_S = 15
"""Seconds of the part that are reserved for all else: imports, ceilings, and the case that runs when the time
is up."""
TINY_S = 5.0


def run(figures: Figures) -> None:
    device, compiled = device_of(figures), watched()
    fix_cache_keys()
    end = time.monotonic() + (TINY_S if figures.tiny else figures.seconds - BESIDE_S)
    bandwidth, flops = ceilings(device, torch.bfloat16)
    timer = Timer(device)
    torch.manual_seed(0)
    left = sorted(cases(tiny=figures.tiny), key=rank)
    while left and time.monotonic() < end:
        case = left.pop(0)
        with figures.attempt(case.name):
            row = dict(measure(case, timer, bandwidth, flops, SECONDS))
            if "error" in row:
                raise Wrong(row["error"])
            figures.add(row.pop("case"), **row)
        free(device)
    figures.add(
        "all cases",
        left_out=[case.name for case in left],
        kernels_compiled=compiled.kernels,
        kernels_loaded=compiled.loaded,
        jit_s=compiled.seconds,
    )


def rank(case: Case) -> int:
    return next((place for place, start in enumerate(FIRST) if case.name.startswith(start)), len(FIRST))
