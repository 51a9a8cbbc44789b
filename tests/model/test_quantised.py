"""Checkpoints that are quantised themselves: the values of their matrices, and the logits of whole models."""

from __future__ import annotations

import torch

from ramify.kernels.packed import pack, unpack
from ramify.runtime.model.quantised import schemes


def test_mxfp4_has_the_values_of_transformers() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.randint(256, (1, 40, 3, 16), dtype=torch.uint8)
    scales = torch.randint(250, (1, 40, 3), dtype=torch.uint8)
    wanted = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)[0].t()
    rows = schemes.mxfp4(blocks[0], scales[0])
    assert torch.equal(rows.values(), wanted)
    assert torch.equal(unpack(pack(rows, inputs=96)), wanted)
