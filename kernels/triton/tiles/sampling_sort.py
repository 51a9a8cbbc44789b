"""A bitonic sort of one block in registers (Batcher, "Sorting networks and their applications", 1968)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _exchanged(  # type: ignore[no-untyped-def]
    cube, index, BIT: tl.constexpr, STAGE: tl.constexpr, LOG: tl.constexpr
):
    """Compare and exchange each number with its partner, whose index differs in BIT. The larger number comes
    first where bit STAGE of the index is 0.

    The partner is computed as the sum of the pair minus the number, exact in wrapping arithmetic. (Triton's
    own sort reduces with xor, which its interpreter does number by number.)
    """
    partner = tl.sum(cube, axis=LOG - 1 - BIT, keep_dims=True) - cube
    larger = ((index >> BIT) ^ (index >> STAGE)) & 1 == 0
    return tl.where(larger, tl.maximum(cube, partner), tl.minimum(cube, partner))


@triton.jit
def sorted_block(x, LOG: tl.constexpr):  # type: ignore[no-untyped-def]
    """2**LOG int64 in descending order. The block is a hypercube with an axis for each bit of the index."""
    index = tl.reshape(tl.arange(0, 2**LOG), [2] * LOG)
    cube = tl.reshape(x, [2] * LOG)
    for stage in tl.static_range(1, LOG + 1):
        for step in tl.static_range(stage):
            cube = _exchanged(cube, index, stage - 1 - step, stage, LOG)
    return tl.reshape(cube, [2**LOG])
