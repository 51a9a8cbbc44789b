"""Each family computes what transformers computes, on random checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ramify.runtime.model.load import load_model

from .checkpoints import CASES, Case, build, expected, prompt, save
from .dense import logits


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_logits_equal_transformers(case: Case, tmp_path: Path) -> None:
    reference = build(case)
    ids = prompt()
    wanted = expected(reference, ids)
    assert wanted.std() > 0.5  # else everything would be close to everything
    model = load_model(save(reference, tmp_path), dtype=torch.float32)
    for step in (0, 1, 7):
        torch.testing.assert_close(logits(model, ids, step=step), wanted, atol=1e-4, rtol=0)
