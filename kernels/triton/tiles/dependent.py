"""Programmatic dependent launch: a kernel starts while its predecessor runs (CUDA programming guide)."""

from __future__ import annotations

import triton.language as tl

from ramify.kernels.triton.tiles.launch import INTERPRETED, jit

_INTERPRETED = tl.constexpr(INTERPRETED)


@jit
def wait(DEPENDENT: tl.constexpr):  # type: ignore[no-untyped-def]
    """With DEPENDENT, which a launch has with `launch_pdl`: wait until the predecessor has ended, and let the
    next such launch start. Before, a kernel may only read weights; nothing that another launch writes or
    reads."""
    if DEPENDENT and not _INTERPRETED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
