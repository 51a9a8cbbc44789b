"""Masking logits on the CPU: the same bits as the twin's, and nothing beyond the row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ramify.kernels.registry import ops


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 500, 4096])
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("some", [False, True])
def test_masks_as_the_twin_does(vocab: int, rows: int, some: bool) -> None:
    draw = np.random.default_rng(vocab + rows)
    words = draw.integers(0, 2**32, (rows, -(-vocab // 32)), dtype=np.uint32)
    words[draw.random(words.shape) < 0.4] = 0
    words[draw.random(words.shape) < 0.4] = 0xFFFFFFFF
    mask = torch.from_numpy(words.view(np.int32))
    which = torch.from_numpy(draw.integers(-1, rows, rows).astype(np.int32)) if some else None
    whole = torch.randn(rows, vocab + 8)  # rows lie apart, and what is between them stays
    mine, twin = whole.clone(), whole.clone()
    ops("cpu").apply_mask(mine[:, :vocab], mask, which)
    ops("torch").apply_mask(twin[:, :vocab], mask, which)
    assert torch.equal(mine, twin)


def test_what_does_not_fit_is_refused_by_name() -> None:
    for backend in ("cpu", "torch"):
        with pytest.raises(ValueError, match="mask"):
            ops(backend).apply_mask(torch.zeros(2, 64), torch.zeros(2, 3, dtype=torch.int32))
