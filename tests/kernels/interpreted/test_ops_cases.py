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
    result = work.run()
    for call in work.rivals.values():
        other = call()
        if result is not None and result.is_floating_point():
            assert torch.allclose(result.float(), other.float(), atol=4e-3)
        elif case.name.startswith("greedy"):
            assert torch.equal(result, other)


def test_names_differ():
    names = [case.name for case in ops(False)]
    assert len(names) == len(set(names))
