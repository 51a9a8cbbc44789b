"""The fused rotary store and the RMS norm: compiled and twin against float64."""

from __future__ import annotations

import pytest
import torch

from ramify.kernels.registry import ops
from tests.kernels.cpu_ops import CPU

TORCH = ops("torch")
DTYPES = [torch.float32, torch.bfloat16]


def assert_as_good(result: torch.Tensor, twin: torch.Tensor, exact: torch.Tensor) -> None:
    """At most twice the twin's error, plus four float32 roundings."""
    floor = 4 * torch.finfo(torch.float32).eps * exact.abs().max()
    twin_error = (twin.double() - exact).abs().max()
    assert (result.double() - exact).abs().max() <= 2 * twin_error + floor
    assert twin_error <= exact.abs().max() * (1e-6 if result.dtype == torch.float32 else 2**-8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 33])
@pytest.mark.parametrize(("head_dim", "page_size"), [(64, 16), (80, 3), (128, 1), (6, 5), (50, 64)])
def test_rotary_store(head_dim, page_size, tokens, dtype):
    heads, kv_heads, num_pages = 4, 2, 40
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim).to(dtype)
    rotation = torch.polar(torch.ones(tokens, head_dim // 2), 9 * torch.randn(tokens, head_dim // 2))
    slots = torch.randperm(num_pages * page_size)[:tokens]
    pairs = qkv[:, : heads + kv_heads].double().reshape(tokens, heads + kv_heads, head_dim // 2, 2)
    turned = torch.view_as_complex(pairs) * rotation[:, None].to(torch.complex128)
    exact = torch.view_as_real(turned).flatten(2)
    results = []
    for backend in (CPU, TORCH):
        fused = qkv.clone()
        q, k, v = fused.split([heads, kv_heads, kv_heads], dim=1)
        k_pages = torch.full((num_pages, kv_heads, page_size, head_dim), torch.nan, dtype=dtype)
        v_pages = k_pages.clone()
        backend.rope_store_kv(q, k, v, rotation, k_pages, v_pages, slots)
        assert torch.equal(fused[:, heads:], qkv[:, heads:]), "k and v are left as they were"
        page, offset = slots // page_size, slots % page_size
        assert torch.equal(v_pages[page, :, offset], qkv[:, heads + kv_heads :])
        results.append(torch.cat([q, k_pages[page, :, offset]], dim=1))
        k_pages[page, :, offset] = torch.nan
        assert k_pages.isnan().all(), "no other row was written"
    if tokens:
        assert_as_good(*results, exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 576), (7, 64), (3, 5), (4, 100), (5, 3, 48), (0, 64)])
def test_rms_norm(shape, dtype):
    x = torch.randn(*shape[:-1], 2 * shape[-1]).to(dtype)[..., : shape[-1]]  # strided rows
    weight = torch.randn(shape[-1]).to(dtype)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    out = torch.full(shape, torch.nan, dtype=dtype)
    assert CPU.rms_norm(x, weight, 1e-5, out=out) is out
    if len(x):
        assert_as_good(out, TORCH.rms_norm(x, weight, 1e-5), exact)
    assert CPU.rms_norm(x, weight, 1e-5, out=x) is x
    assert torch.equal(x, out)


def test_rms_norm_of_zeros_and_of_large_numbers():
    assert torch.equal(CPU.rms_norm(torch.zeros(2, 32), torch.ones(32), 1e-5), torch.zeros(2, 32))
    large = CPU.rms_norm(torch.full((1, 32), 1e18), torch.ones(32), 1e-5)
    assert torch.allclose(large, torch.ones(1, 32))


X, WEIGHT = torch.zeros(3, 16), torch.ones(16)


@pytest.mark.parametrize("backend", [CPU, TORCH], ids=["cpu", "torch"])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((X.half(), WEIGHT.half(), 1e-5), "x is"),
        ((X.t(), torch.ones(3), 1e-5), "x is"),
        ((X[0], WEIGHT, 1e-5), "x is"),
        ((X, WEIGHT[:8], 1e-5), "weight"),
        ((X, WEIGHT.bfloat16(), 1e-5), "weight"),
    ],
)
def test_norm_refusals_name_the_argument(backend, arguments, words):
    with pytest.raises(ValueError, match=words):
        backend.rms_norm(*arguments)
    with pytest.raises(ValueError, match="out must be"):
        backend.rms_norm(X, WEIGHT, 1e-5, out=torch.zeros(3, 8))


@pytest.mark.parametrize("backend", [CPU, TORCH], ids=["cpu", "torch"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q": torch.zeros(3, 2, 8)}, "q is"),
        ({"q": torch.zeros(3, 2, 16).bfloat16()}, "one dtype"),
        ({"q": torch.zeros(3, 16, 2).transpose(1, 2)}, "q must be contiguous"),
        ({"rotation": torch.zeros(3, 4, dtype=torch.complex64)}, "rotation"),
        ({"rotation": torch.zeros(3, 8)}, "complex64"),
        ({"slots": torch.arange(2)}, "k is"),
    ],
)
def test_rope_refusals_name_the_argument(backend, change, words):
    arguments = {
        "q": torch.zeros(3, 2, 16),
        "k": torch.zeros(3, 2, 16),
        "v": torch.zeros(3, 2, 16),
        "rotation": torch.zeros(3, 8, dtype=torch.complex64),
        "k_pages": torch.zeros(4, 2, 4, 16),
        "v_pages": torch.zeros(4, 2, 4, 16),
        "slots": torch.arange(3),
    }
    backend.rope_store_kv(**arguments)
    with pytest.raises(ValueError, match=words):
        backend.rope_store_kv(**{**arguments, **change})
