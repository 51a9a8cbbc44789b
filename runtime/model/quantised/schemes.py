"""The stored tensors of a quantised matrix as `kernels.packed.Rows`: one function for each scheme."""

from __future__ import annotations

import torch
from torch import Tensor

from ramify.kernels.packed import Rows

E2M1 = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)
"""The numbers of E2M1, four bits with two of exponent and one of mantissa (OCP Microscaling Formats 1.0),
doubled."""


def mxfp4(blocks: Tensor, scales: Tensor) -> Rows:
    """A matrix of gpt-oss (`quant_method: mxfp4`).

    blocks : (outputs, groups, 16) uint8
        Two codes a byte, the lower four bits first: 32 inputs a group.
    scales : (outputs, groups) uint8
        Exponents of two, plus 127.
    """
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(1)
    # 2**(scale - 128), halved for the table, by its bits. bfloat16 has the exponents of float32.
    wide = scales.short()
    bits = torch.where(wide > 1, wide - 1 << 7, 32 << wide)
    return Rows(codes, bits.view(torch.bfloat16), table=E2M1)
