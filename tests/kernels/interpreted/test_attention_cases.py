"""The attention benchmark's cases in small: ours and torch's compute the same, and the counts are right."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.kernel_cases.attention import attention
from tests.kernels.kernel_cases.base import Case, cases

CASES = [case for case in attention(True) if not case.compiled]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_rival_computes_the_same(case: Case):
    torch.manual_seed(0)
    work = case.build(torch.device("cpu"))
    found, _ = work.errors()  # this machine lacks some backends
    assert "twin" in found
    assert "twin" not in work.rivals, "it is not timed"
    assert max(found.values()) < 2e-3
    assert work.moved > 0
    assert work.flop > 0


def test_the_cases_are_registered_under_their_full_size():
    names = [case.name for compiled in (False, True) for case in cases(compiled=compiled)]
    assert len(names) == len(set(names))
    assert {case.name for case in CASES} <= {case.name for case in cases()}
    assert sum(name.endswith("compiled") for name in names) == 3


def test_counts():
    """Decode 1 x 4k in tiny: 64 tokens, 2 KV heads of 64, float16; 4 query heads."""
    work = CASES[0].build(torch.device("cpu"))
    assert work.moved == 2 * 64 * 2 * 64 * 2 + 2 * 4 * 64 * 2
    assert work.flop == 4 * 4 * 64 * 64
