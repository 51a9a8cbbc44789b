"""Cases of the small Triton kernels, run by the interpreter's tests on the CPU and by the GPU's on CUDA."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.kernels.weights.quantised import QuantisedWeight
from tests.kernels.backends import TRITON, Backend

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NORM_SHAPES = [(1, 576), (7, 64), (3, 5), (4, 100), (5, 3, 48), (0, 64), (2, 4096), (33, 1, 128)]
GATED_SHAPES = [(1, 1), (3, 100), (2, 2048), (5, 3000), (0, 8)]
ROPE_SHAPES = [
    (64, 16, 4, 2),
    (80, 3, 9, 3),
    (128, 1, 4, 4),
    (6, 5, 5, 1),
    (50, 64, 16, 2),
    (256, 16, 20, 10),
]
"""(head_dim, page_size, heads, kv_heads)"""
MATMUL_SHAPES = [(1, 5, 3), (3, 130, 70), (20, 40, 1030), (65, 129, 40), (0, 8, 8)]
"""(rows, outputs, inputs)"""


def in_dtypes(shapes: Sequence[Any], *others: Any) -> list[tuple[Any, torch.dtype]]:
    """Every shape in bfloat16, the `others` in float32 as well, and the last of them in float16.

    A GPU compiles a kernel for each dtype and for most shapes.
    """
    return [
        *((shape, torch.bfloat16) for shape in shapes),
        *((shape, torch.float32) for shape in others),
        (others[-1], torch.float16),
    ]


def random(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def poisoned(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=device)


def assert_as_good(result: Tensor, torchs: Tensor, exact: Tensor) -> None:
    """Assert at most three times the error of torch at the same dtype, both against float64. On an H100
    cuBLAS sums 4,096 float32 products in parts, and has half the error of a sum in order."""
    if not exact.numel():
        return
    floor = torch.finfo(result.dtype).eps * exact.abs().max()
    error, other = ((each.double() - exact).abs().max() for each in (result, torchs))
    assert error <= 3 * other + 0.5 * floor, f"{error:.3g} against torch's {other:.3g}"
    assert error <= 8 * floor, "torch at this dtype is far off itself"


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    exact = x.double()
    return exact / (exact.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def check_norm(shape: Sequence[int], dtype: torch.dtype, device: str, kernels: Backend = TRITON) -> None:
    x = random(*shape[:-1], 2 * shape[-1], dtype=dtype, device=device)[..., : shape[-1]]  # strided rows
    weight = random(shape[-1], dtype=dtype, device=device, seed=1)
    out = poisoned(*shape, dtype=dtype, device=device)
    assert kernels.rms_norm(x, weight, 1e-5, out=out) is out
    assert_as_good(out, F.rms_norm(x, weight.shape, weight, 1e-5), normed(x, weight, 1e-5))
    for row in range(min(2, len(x))):
        assert torch.equal(kernels.rms_norm(x[row : row + 1], weight, 1e-5), out[row : row + 1]), "alone"
    assert torch.equal(kernels.rms_norm(x, weight.float(), 1e-5), out), "the weight may be float32"
    assert kernels.rms_norm(x, weight, 1e-5, out=x) is x
    assert torch.equal(x, out)


def check_norm_of_extremes(kernels: Backend = TRITON) -> None:
    """Check norms of zeros, and of numbers whose sum of squares is near float32's largest."""
    assert torch.equal(kernels.rms_norm(torch.zeros(2, 32), torch.ones(32), 1e-5), torch.zeros(2, 32))
    large = kernels.rms_norm(torch.full((1, 32), 1e18), torch.ones(32), 1e-5)
    assert torch.allclose(large, torch.ones(1, 32))


def check_add_norm(shape: Sequence[int], dtype: torch.dtype, device: str, kernels: Backend = TRITON) -> None:
    x, residual = (random(*shape, dtype=dtype, device=device, seed=seed) for seed in (1, 2))
    weight = random(shape[-1], dtype=dtype, device=device, seed=3)
    total = x + residual
    out = poisoned(*shape, dtype=dtype, device=device)
    assert kernels.add_rms_norm(x, residual, weight, 1e-5, out=out) is out
    if dtype == torch.bfloat16 and device == "cpu":  # the interpreter cuts float32 off instead of rounding
        assert torch.allclose(residual, total, rtol=2**-7)
    else:
        assert torch.equal(residual, total), "the sum is rounded once"
    assert torch.equal(out, kernels.rms_norm(residual, weight, 1e-5)), "the bits of two steps"


def check_gated(shape: Sequence[int], dtype: torch.dtype, device: str, kernels: Backend = TRITON) -> None:
    rows, size = shape
    x = 4 * random(rows, 2 * size + 8, dtype=dtype, device=device)[:, : 2 * size]
    gate, up = x.chunk(2, -1)
    gelu = functools.partial(F.gelu, approximate="tanh")
    for kernel, function in ((kernels.silu_mul, F.silu), (kernels.gelu_mul, gelu)):
        out = poisoned(*shape, dtype=dtype, device=device)
        assert kernel(x, out=out) is out
        assert_as_good(out, function(gate) * up, function(gate.double()) * up.double())


def check_rope(
    shape: tuple[int, int, int, int],
    tokens: int,
    dtype: torch.dtype,
    device: str,
    norms: str = "",
    kernels: Backend = TRITON,
) -> None:
    """Check rotation and store; `norms` names which of "q" and "k" have a norm."""
    dim, page_size, heads, kv_heads = shape
    num_pages = tokens // page_size + 3
    qkv = random(tokens, heads + 2 * kv_heads, dim, dtype=dtype, device=device)
    angle = 9 * random(tokens, dim // 2, dtype=torch.float32, device=device, seed=1)
    rotation = torch.polar(torch.ones_like(angle), angle)
    slots = torch.randperm(num_pages * page_size)[:tokens].to(device)
    weights = {name: random(dim, dtype=dtype, device=device, seed=2 + i) for i, name in enumerate("qk")}
    given = {f"{name}_norm": weights[name] for name in norms}
    fused = qkv.clone()
    q, k, v = fused.split([heads, kv_heads, kv_heads], dim=1)
    k_pages = poisoned(num_pages, kv_heads, page_size, dim, dtype=dtype, device=device)
    v_pages = k_pages.clone()
    kernels.rope_store_kv(q, k, v, rotation, k_pages, v_pages, slots, **given, eps=1e-5)
    assert torch.equal(fused[:, heads:], qkv[:, heads:]), "k and v are left as they were"
    page, offset = slots // page_size, slots % page_size
    assert torch.equal(v_pages[page, :, offset], v)
    for name, result, before in (("q", q, qkv[:, :heads]), ("k", k_pages[page, :, offset], k)):
        exact, torchs = before.double(), before
        if name in norms:
            exact = normed(before, weights[name], 1e-5)
            torchs = F.rms_norm(before, (dim,), weights[name], 1e-5)
        assert_as_good(result, _turned(torchs.float(), rotation).to(dtype), _turned(exact, rotation))
    k_pages[page, :, offset] = torch.nan
    v_pages[page, :, offset] = torch.nan
    assert k_pages.isnan().all(), "no other row was written"
    assert v_pages.isnan().all()


def _turned(x: Tensor, rotation: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.reshape(*x.shape[:2], x.shape[2] // 2, 2).contiguous())
    return torch.view_as_real(pairs * rotation[:, None].to(pairs.dtype)).flatten(2)


def check_copy(
    layers: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    page: tuple[int, int, int],
    kernels: Backend = TRITON,
) -> None:
    pools = [random(*layers, 8, *page, dtype=dtype, device=device, seed=seed) for seed in (1, 2)]
    for pool in pools:
        pool.select(-4, 6).fill_(torch.nan)
    expected = [pool.clone() for pool in pools]
    for pool in expected:
        pool[..., [5, 7, 1], :, :, :] = pool[..., [0, 0, 2], :, :, :]
    kernels.copy_pages(*pools, [0, 0, 2], [5, 7, 1])
    for pool, want in zip(pools, expected, strict=True):
        assert torch.equal(pool.nan_to_num(9.0), want.nan_to_num(9.0))
    kernels.copy_pages(*pools, [], [])


def check_matmul(
    shape: tuple[int, int, int], dtype: torch.dtype, device: str, *, bias: bool = False, add: bool = False
) -> None:
    """Check a product of `shape` (rows, outputs, inputs); x and the weight are strided, with NaN behind their
    rows."""
    rows, outputs, inputs = shape
    x, weight = (poisoned(count, inputs + 3, dtype=dtype, device=device) for count in (rows, outputs))
    x, weight = x[:, :inputs], weight[:, :inputs]
    x.copy_(random(rows, inputs, dtype=dtype, device=device))
    weight.copy_(random(outputs, inputs, dtype=dtype, device=device, seed=1))
    shift = random(outputs, dtype=dtype, device=device, seed=2) if bias else None
    wide = poisoned(rows, outputs + 5, dtype=dtype, device=device)
    out = wide[:, :outputs]
    exact = x.double() @ weight.double().t()
    torchs = F.linear(x, weight, shift)
    if shift is not None:
        exact = exact + shift.double()
    if add:
        before = random(rows, outputs, dtype=dtype, device=device, seed=3)
        out.copy_(before)
        exact, torchs = exact + before.double(), torchs + before
    given = out.clone() if add else None
    assert TRITON.matmul(x, weight, shift, out=out, add=add) is out
    assert_as_good(out, torchs, exact)
    assert wide[:, outputs:].isnan().all(), "written beyond its rows"
    # On the CPU a product's bits may depend on the row's place in its tile.
    last = (rows - 1) // 64 * 64 if device == "cpu" else max(rows - 2, 0)
    for low, high in {(0, 1), (0, min(rows, 3)), (last, rows)} if rows else ():
        part = None if given is None else given[low:high].clone()
        alone = TRITON.matmul(x[low:high], weight, shift, out=part, add=add)
        assert torch.equal(alone, out[low:high]), "other rows changed a bit"


def check_product(
    product: Callable[..., Tensor],
    twin: Callable[..., Tensor],
    x: Tensor,
    weight: QuantisedWeight,
    share: float,
    *,
    bias: bool = False,
    add: bool = False,
) -> None:
    """Compare with `twin`: sums may differ by `share` of the sum of absolute values. The result's rows are
    strided."""
    (rows, _), outputs, dtype, device = x.shape, len(weight.values()), x.dtype, x.device.type
    given = random(outputs, dtype=dtype, device=device, seed=2) if bias else None
    wide = poisoned(rows, outputs + 5, dtype=dtype, device=device)
    out = wide[:, :outputs]
    if add:
        out.copy_(random(rows, outputs, dtype=dtype, device=device, seed=3))
    wanted = twin(x, weight, given, out=out.clone() if add else None, add=add)
    assert product(x, weight, given, out=out, add=add) is out
    # Both round once, and their float32 sums differ in the order alone.
    of_terms = x.float().abs() @ weight.values().abs().t()
    allowed = share * of_terms + 2 * torch.finfo(dtype).eps * wanted.float().abs()
    assert ((out.float() - wanted.float()).abs() <= allowed).all()
    assert wide[:, outputs:].isnan().all(), "written beyond its rows"
