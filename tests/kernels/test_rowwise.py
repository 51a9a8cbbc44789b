"""Gates, soft caps and log-sums of rows: as exact as torch's, and with bits that depend on the row alone."""

from __future__ import annotations

import pytest
import torch

from ramify.kernels.reference import logits as reference
from tests.kernels import ops_cases as cases
from tests.kernels.backends import CPU, TORCH, Backend

DTYPES = [torch.float32, torch.bfloat16]
SIZES = [1, 5, 16, 100, 3001]
GATES = ["silu_mul", "gelu_mul"]


def random(rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    made = torch.Generator().manual_seed(rows + size)
    return (6 * torch.randn(rows, size + 8, generator=made)).to(dtype)[:, :size]  # strided rows


@pytest.mark.parametrize("backend", [CPU, TORCH], ids=["cpu", "torch"])
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("shape", cases.GATED_SHAPES)
def test_gates(shape: tuple[int, int], dtype: torch.dtype, backend: Backend) -> None:
    if backend is CPU and dtype == torch.float16:
        with pytest.raises(ValueError, match="float32 or bfloat16"):
            CPU.silu_mul(torch.zeros(3, 6, dtype=dtype))
    else:
        cases.check_gated(shape, dtype, "cpu", backend)
    with pytest.raises(ValueError, match="2 size"):
        backend.gelu_mul(torch.zeros(3, 5))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", GATES)
def test_a_gate_has_the_bits_of_its_row_alone(name: str, size: int) -> None:
    for dtype in DTYPES:
        kernel, x = getattr(CPU, name), random(40, 2 * size, dtype)
        whole = kernel(x)
        for row in (0, 7, 39):
            assert torch.equal(kernel(x[row : row + 1])[0], whole[row])


@pytest.mark.parametrize("name", GATES)
def test_gates_of_extremes(name: str) -> None:
    x = torch.tensor([[90.0, -90.0, -1e30, 1e30, torch.nan, 0.0, *[1.0] * 6]])
    found = getattr(CPU, name)(x)[0]
    assert torch.allclose(found[:4], torch.tensor([90.0, 0.0, 0.0, 1e30]))
    assert found[5] == 0
    assert found[4].isnan()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_soft_caps(dtype: torch.dtype, size: int) -> None:
    x = random(40, size, dtype)
    exact = 9 * torch.tanh(x.double() / 9)
    alone = [CPU.soft_cap(x[row : row + 1].clone(), 9.0) for row in (0, 39)]
    assert CPU.soft_cap(x, 9.0) is x
    assert (x.double() - exact).abs().max() <= 3 * torch.finfo(dtype).eps * 9
    assert torch.equal(torch.cat(alone), x[[0, 39]])


@pytest.mark.parametrize("size", [*SIZES, 49_153])
def test_log_sums(size: int) -> None:
    x = random(5, size, torch.float32)
    x[1, : size // 2] = -torch.inf
    x[2] = -torch.inf
    x[3] += 1e4
    found = CPU.log_sum(x)
    exact = torch.logsumexp(x.double(), dim=-1).float()
    assert torch.allclose(reference.log_sum(x), exact, rtol=2e-7, atol=1e-6)
    assert torch.equal(found[2], exact[2])
    rest = [0, 1, 3, 4]
    assert torch.allclose(found[rest], exact[rest], rtol=1.2e-7, atol=2e-7)
    for row in range(5):
        assert torch.equal(CPU.log_sum(x[row : row + 1])[0], found[row])
    with pytest.raises(ValueError, match="must be float32"):
        CPU.log_sum(x.bfloat16())
