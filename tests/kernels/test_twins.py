"""The twins of the newer kernels: norms of heads, the norm of a sum, the gated activation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ramify.kernels.reference import activation, norm
from ramify.kernels.registry import ops

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norms", ["qk", "q", "k", ""])
def test_head_norms_come_before_the_rotation(backend, norms, dtype):
    tokens, heads, kv_heads, dim = 5, 4, 2, 48
    q, k, v = (
        torch.randn(tokens, heads + 2 * kv_heads, dim).to(dtype).split([heads, kv_heads, kv_heads], dim=1)
    )
    rotation = torch.polar(torch.ones(tokens, dim // 2), torch.randn(tokens, dim // 2))
    weights = {f"{name}_norm": torch.randn(dim).to(dtype) for name in norms}
    pages = torch.full((2, 4, kv_heads, 3, dim), torch.nan, dtype=dtype)
    slots = torch.tensor([3, 4, 5, 0, 11])
    exact = []
    for name, x in (("q_norm", q), ("k_norm", k)):
        wide = x.double()
        if name in weights:
            wide = F.rms_norm(wide, (dim,), weights[name].double(), 1e-5)
        turned = torch.view_as_complex(wide.unflatten(2, (-1, 2))) * rotation[:, None]
        exact.append(torch.view_as_real(turned).flatten(2))
    before = k.clone()
    ops(backend).rope_store_kv(q, k, v, rotation, *pages, slots, **weights, eps=1e-5)
    assert torch.equal(k, before)
    for result, want in ((q, exact[0]), (pages[0][slots // 3, :, slots % 3], exact[1])):
        # bfloat16 may be rounded twice, and the parts of a product cancel
        bound = 2e-6 if dtype == torch.float32 else 2**-7
        assert (result.double() - want).abs().max() <= bound * want.abs().max()
    assert torch.equal(pages[1][slots // 3, :, slots % 3], v)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_head_norms_of_another_size_are_refused(backend):
    q, pages = torch.zeros(3, 2, 16), torch.zeros(2, 4, 2, 4, 16)
    rotation = torch.zeros(3, 8, dtype=torch.complex64)
    with pytest.raises(ValueError, match="k_norm"):
        ops(backend).rope_store_kv(q, q, q, rotation, *pages, torch.arange(3), k_norm=torch.ones(8))


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_weights_of_norms_may_be_float32(backend):
    """Nothing is rounded but the result."""
    x, weight = torch.randn(3, 2, 40).bfloat16(), 1 + 0.01 * torch.randn(40)
    exact = F.rms_norm(x.double(), (40,), weight.double(), 1e-5)

    def error(normed):
        return ((normed.double() - exact) / exact).abs().max()

    once = 1.001 * 2**-8
    assert error(ops(backend).rms_norm(x, weight, 1e-5)) <= once
    assert error(ops(backend).rms_norm(x, weight.bfloat16(), 1e-5)) > once
    k, pages = x.clone(), torch.zeros(2, 1, 2, 4, 40, dtype=torch.bfloat16)
    still, slots = torch.ones(3, 20, dtype=torch.complex64), torch.arange(3)
    ops(backend).rope_store_kv(x, k, k, still, *pages, slots, q_norm=weight, k_norm=weight, eps=1e-5)
    assert error(x) <= once
    assert error(pages[0][0, :, :3].transpose(0, 1)) <= once


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
def test_the_norm_of_a_sum_has_the_bits_of_two_steps(dtype):
    x, residual, weight = (
        torch.randn(3, 40).to(dtype),
        torch.randn(3, 40).to(dtype),
        torch.randn(40).to(dtype),
    )
    total = x + residual
    out = norm.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    assert torch.equal(out, F.rms_norm(total.float(), (40,), weight.float(), 1e-5).to(dtype))
    with pytest.raises(ValueError, match="residual"):
        norm.add_rms_norm(x, residual[:2], weight, 1e-5)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
def test_gated_activation(dtype):
    x = torch.randn(3, 80).to(dtype)
    exact = F.silu(x[:, :40].double()) * x[:, 40:].double()
    out = torch.full((3, 40), torch.nan, dtype=dtype)
    assert activation.silu_mul(x, out=out) is out
    assert (out.double() - exact).abs().max() <= 2 * torch.finfo(dtype).eps * exact.abs().max()
    exact = F.gelu(x[:, :40].double(), approximate="tanh") * x[:, 40:].double()
    assert activation.gelu_mul(x, out=out) is out
    assert (out.double() - exact).abs().max() <= 2 * torch.finfo(dtype).eps * exact.abs().max()
    with pytest.raises(ValueError, match="2 size"):
        activation.silu_mul(x[:, :5])
