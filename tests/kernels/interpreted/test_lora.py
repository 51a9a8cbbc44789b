"""LoRA adapters of several requests in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ramify.kernels.reference.lora import lora as reference
from ramify.kernels.triton.lora import lora
from ramify.kernels.weights.lora import LoraRows
from tests.kernels.test_lora import INPUTS, PARTS, SLOTS, table_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_batch_of_adapters(dtype: torch.dtype) -> None:
    table, rows = table_of(dtype), LoraRows(np.array(SLOTS))
    x, out = torch.randn(len(SLOTS), INPUTS).to(dtype), torch.randn(len(SLOTS), sum(PARTS))
    wanted = reference(x, table, rows, out=out.clone())
    found = lora(x, table, rows, out=out.clone())
    torch.testing.assert_close(found, wanted, atol=2e-3, rtol=1e-4)
    free = [row for row, slot in enumerate(SLOTS) if slot not in table.weights]
    assert torch.equal(found[free], out[free])
    for row in (0, 2, 4, 30):
        one = LoraRows(np.array(SLOTS[row : row + 1]))
        assert torch.equal(lora(x[row : row + 1], table, one, out=out[row : row + 1].clone())[0], found[row])
