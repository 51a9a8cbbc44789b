"""Products of at most 32 rows with the weights of qkv and o, bound by reading the weights.

A program sums all inputs of 16 or 32 outputs in ascending order, so that no second launch adds parts: 6,144 x
4,096 are 384 programs for 132 multiprocessors, and 4,096 x 4,096 are 256. W is the left operand, whose
outputs fill the tensor cores' 16 rows; the rows of x are the narrow side.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ramify.kernels.arguments.checks import check_matmul
from ramify.kernels.reference.matmul import plain_matmul
from ramify.kernels.triton.matmul import finish
from ramify.kernels.triton.tiles.launch import check_device, jit

MOST_ROWS = 32
MOST_WEIGHTS = 1 << 25
"""The most numbers of a matrix: qkv and o of an 8B Llama are 25 and 17 million, gate_up 117. Of larger
matrices the library's products are assumed to read as fast as a copy."""


@jit(do_not_specialize=["rows"])
def _skinny_product(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, bias_ptr, out_ptr, rows, outputs, inputs, x_row, weight_row, out_row,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, BIASED: tl.constexpr,
    ADD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row, output = tl.arange(0, ROWS), tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row_there, output_there = row < rows, output < outputs
    column = tl.arange(0, INPUTS)
    x_at = x_ptr + row.to(tl.int64)[None, :] * x_row + column[:, None]
    weight_at = weight_ptr + output.to(tl.int64)[:, None] * weight_row + column[None, :]
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for start in range(0, inputs, INPUTS):
        known = start + column < inputs
        weight = tl.load(weight_at + start, mask=output_there[:, None] & known[None, :], other=0.0)
        x = tl.load(x_at + start, mask=known[:, None] & row_there[None, :], other=0.0)
        total = tl.dot(weight, x, total, input_precision=PRECISION)
    finish(tl.trans(total), out_ptr, bias_ptr, row, row_there, output, output_there, out_row, BIASED, ADD)


def matmul(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None, add: bool = False
) -> Tensor:
    """As `reference.matmul.matmul`. Products of more rows, or with larger matrices, are torch's."""
    rows, outputs = len(x), len(weight)
    if not 0 < rows <= MOST_ROWS or weight.numel() > MOST_WEIGHTS:
        return plain_matmul(x, weight, bias, out=out, add=add)
    check_device(x)
    out = check_matmul(x, weight, bias, out, add)
    few = rows <= 16
    side = 16 if few else 32
    _skinny_product[(triton.cdiv(outputs, side),)](
        x, weight, bias if bias is not None else x, out, rows, outputs, x.shape[1],
        x.stride(0), weight.stride(0), out.stride(0),
        ROWS=side, OUTPUTS=side, INPUTS=128, BIASED=bias is not None, ADD=add, PRECISION="ieee",
        num_warps=4, num_stages=6 if x.element_size() == 2 else 3, enable_fp_fusion=False,
    )  # fmt: skip
    return out
