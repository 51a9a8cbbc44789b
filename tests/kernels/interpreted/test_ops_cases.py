"""The benchmark cases of the small kernels in small: ours and torch's compute the same."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.kernel_cases.base import Case
from tests.kernels.kernel_cases.ops import ops

CASES = list(ops(True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ours_and_torchs_compute_the_same(case: Case):
    torch.manual_seed(0)
    work = case.build(torch.device("cpu"))
    assert work.moved > 0
    found, failed = work.errors()
    assert found
    assert not failed
    assert max(found.values()) < 1e-3
    for call in work.rivals.values():
        call()


def test_names_differ():
    names = [case.name for case in ops(False)]
    assert len(names) == len(set(names))
