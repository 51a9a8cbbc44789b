"""LoRA of several adapters in one product: every backend against the reference, and the reference against a
merged matrix."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ramify.kernels.cpu import lora as cpu
from ramify.kernels.reference.lora import lora as reference
from ramify.kernels.reference.norm import rms_norm
from ramify.kernels.weights.lora import LoraRows, LoraTable, LoraWeight

INPUTS, PARTS = 72, (40, 24, 24)
SLOTS = [0, -1, 2, 0, 5, 2, 2, -1, 7, *[2] * 40]
"""Slot 5 has a part of the matrix, slot 7 nothing."""


def table_of(dtype: torch.dtype, device: str = "cpu") -> LoraTable:
    torch.manual_seed(0)
    table = LoraTable()
    for slot, ranks in {0: (3, 16, 4), 2: (8, 8, 8), 5: (0, 4, 0)}.items():
        parts, start = [], 0
        for columns, rank in zip(PARTS, ranks, strict=True):
            if rank:
                a, b = torch.randn(rank, INPUTS), torch.randn(columns, rank)
                parts.append((start, a.to(device, dtype), b.to(device, dtype), 0.5 + rank))
            start += columns
        table[slot] = LoraWeight.from_parts(parts)
    return table


def merged(table: LoraTable, slot: int) -> torch.Tensor:
    """The matrix (outputs, inputs) that an adapter adds, in float64."""
    whole = torch.zeros(sum(PARTS), INPUTS, dtype=torch.float64)
    if (weight := table.weights.get(slot)) is None:
        return whole
    start = 0
    for part in weight.parts:
        rows = slice(start, start + part.rank)
        b = part.b_of_columns().double()
        scaled = weight.scales[rows].double()[:, None] * weight.a[rows, :INPUTS].double()
        whole[part.start : part.start + part.columns] += b.t() @ scaled
        start += part.rank
    return whole


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_of_adapters(dtype: torch.dtype, normed: bool) -> None:
    table = table_of(dtype)
    x = torch.randn(len(SLOTS), INPUTS).to(dtype)
    before = torch.randn(len(SLOTS), sum(PARTS))
    norm = (torch.rand(INPUTS).to(dtype), 1e-5) if normed else None
    wide = (x if norm is None else rms_norm(x, *norm)).double()
    wanted = torch.stack([row @ merged(table, slot).t() for row, slot in zip(wide, SLOTS, strict=True)])
    rows = LoraRows(np.array(SLOTS))
    for op in (reference, cpu.lora):
        out = op(x, table, rows, out=before.clone(), norm=norm)
        torch.testing.assert_close(out.double(), before.double() + wanted, atol=2e-3, rtol=1e-4)
        free = [row for row, slot in enumerate(SLOTS) if slot not in table.weights]
        assert torch.equal(out[free], before[free])


def test_the_bits_of_a_row_do_not_depend_on_the_rows_beside_it() -> None:
    table = table_of(torch.bfloat16)
    x, out = torch.randn(len(SLOTS), INPUTS).bfloat16(), torch.randn(len(SLOTS), sum(PARTS)).bfloat16()
    together = cpu.lora(x, table, LoraRows(np.array(SLOTS)), out=out.clone())
    for row, slot in enumerate(SLOTS):
        alone = cpu.lora(x[row : row + 1], table, LoraRows(np.array([slot])), out=out[row : row + 1].clone())
        assert torch.equal(alone[0], together[row]), row
