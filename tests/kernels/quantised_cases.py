"""Products with quantised weights held against their twin, on any device: W4A16, W8A16."""

from __future__ import annotations

import torch
from gguf import GGMLQuantizationType

from ramify.kernels.reference import quantised as reference
from ramify.kernels.triton import quantised
from ramify.kernels.weights.quantised import QuantisedWeight, lay_out
from ramify.kernels.weights.rows import Rows
from ramify.runtime.model.gguf.blocks import rows_of as rows_of_blocks
from tests.kernels import ops_cases as cases
from tests.model.gguf_files import random_blocks

SHIFTED, E2M1 = torch.arange(-8, 8, dtype=torch.int8), torch.tensor([0, 1, 2, 3, 4, 6, 8, 12] * 2).char()
FORMS = [
    ("int4", 128),
    ("int4 shifted", 64),
    ("int4 order", 32),
    ("int4 table", 32),
    ("int8 offsets", 16),
    ("int8", 128),
    ("fp8", 0),
    ("fp8", 128),
]
"""(form, inputs of a group), 0: one factor for an output."""
GGUF = [("Q4_K", 32), ("Q6_K", 16)]
"""Block types of GGUF files: int4 with offsets, int8."""


def rows_of(form: str, outputs: int, inputs: int, group: int) -> Rows:
    """Rows as the readers of checkpoints give them; those of GGUF files are padded to whole blocks."""
    if form in dict(GGUF):
        padded, kind = -(-inputs // 256) * 256, GGMLQuantizationType[form]
        blocks = rows_of_blocks(random_blocks((outputs, padded), kind, rms=0.02), kind, (outputs, padded))
        assert blocks is not None
        return blocks
    made = torch.Generator().manual_seed(1)
    shape, groups = (outputs, inputs), -(-inputs // group) if group else 1
    factors = (torch.rand(outputs, groups, generator=made) + 0.5) / 64
    offsets = -8 * factors * torch.rand(outputs, groups, generator=made)
    codes = torch.randint(256, shape, generator=made, dtype=torch.uint8)
    if form == "fp8":
        numbers = (4 * torch.randn(shape, generator=made)).to(torch.float8_e4m3fn)
        return Rows(numbers, factors, group=group)
    if form.startswith("int8"):
        return Rows(codes.view(torch.int8), factors, offsets if "offsets" in form else None, group=group)
    table = SHIFTED if "shifted" in form else E2M1 if "table" in form else None
    order = torch.randperm(inputs, generator=made).int() if "order" in form else None
    offsets_ = offsets if table is None else None
    return Rows(codes & 15, factors.half(), offsets_, table, group=group, order=order)


def weight_of(form: str, group: int, outputs: int, inputs: int, device: str = "cpu") -> QuantisedWeight:
    laid = lay_out(rows_of(form, outputs, inputs, group), inputs=inputs, device=device)
    assert laid is not None
    return laid


def check(
    form: str,
    group: int,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    share: float = 1e-6,
    **given: bool,
) -> None:
    """Compare with the reference: sums may differ by `share` of the sum of absolute values. `shape` is (rows,
    outputs, inputs); x is strided, and NaN lies behind its rows."""
    rows, outputs, inputs = shape
    weight = weight_of(form, group, outputs, inputs, device)
    x = cases.poisoned(rows, inputs + 3, dtype=dtype, device=device)[:, :inputs]
    x.copy_(cases.random(rows, inputs, dtype=dtype, device=device))
    cases.check_product(quantised.quantised_matmul, reference.quantised_matmul, x, weight, share, **given)
