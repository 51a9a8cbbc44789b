"""The fused rotary store and the RMS norms: compiled and reference, as good as torch against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ramify.kernels.reference.kv_store import read_rows
from tests.kernels import ops_cases as cases
from tests.kernels.backends import CPU, TORCH

DTYPES = [torch.float32, torch.bfloat16]
BACKENDS = pytest.mark.parametrize("backend", [CPU, TORCH], ids=["cpu", "torch"])


@BACKENDS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 33])
@pytest.mark.parametrize("shape", cases.ROPE_SHAPES)
def test_rotary_store(shape, tokens, dtype, backend):
    cases.check_rope(shape, tokens, dtype, "cpu", kernels=backend)


@BACKENDS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norms", ["qk", "q", "k"])
def test_head_norms_come_before_the_rotation(norms, dtype, backend):
    for shape in cases.ROPE_SHAPES[:3]:
        cases.check_rope(shape, 5, dtype, "cpu", norms, kernels=backend)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 2, 80), (2, 2, 20)])
def test_int8_rows_have_the_codes_and_scales_of_the_reference(heads, kv_heads, dim, dtype):
    qkv = (30 * cases.random(21, heads + 2 * kv_heads, dim, dtype=torch.float32, device="cpu")).to(dtype)
    qkv[3] = 0
    angle = 9 * cases.random(21, dim // 2, dtype=torch.float32, device="cpu", seed=1)
    turn, slots = torch.polar(torch.ones_like(angle), angle), torch.randperm(3 * 16)[:21]
    stored = []
    for backend in (CPU, TORCH):
        pages = torch.zeros(2, 3, kv_heads, 16, dim + 4, dtype=torch.int8)
        q, k, v = qkv.clone().split([heads, kv_heads, kv_heads], dim=1)
        backend.rope_store_kv(q, k, v, turn, *pages, slots)
        assert torch.equal(k, qkv[:, heads : heads + kv_heads]), "k is not changed"
        stored.append(pages[:, slots // 16, :, slots % 16].transpose(0, 1))
    assert torch.equal(stored[0][1], stored[1][1]), "values are not rotated"
    keys, wanted = (read_rows(rows[0]) for rows in stored)
    step = wanted.abs().amax(-1, keepdim=True) / 127
    assert ((keys - wanted).abs() <= 1.01 * step).all()
    assert (stored[0][0] != stored[1][0]).float().mean() < 0.02, "a rotation may differ by a last bit"
    assert (read_rows(stored[0][1]) - v.float()).abs().max() <= 0.501 * v.float().abs().max() / 127
    assert stored[0][:, 3].eq(0).all()


@BACKENDS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", cases.NORM_SHAPES)
def test_rms_norm(shape, dtype, backend):
    cases.check_norm(shape, dtype, "cpu", kernels=backend)


@BACKENDS
def test_rms_norm_of_zeros_and_of_large_numbers(backend):
    cases.check_norm_of_extremes(backend)


@BACKENDS
def test_weights_of_norms_may_be_float32(backend):
    """Nothing is rounded but the result."""
    x, weight = torch.randn(3, 2, 40).bfloat16(), 1 + 0.01 * torch.randn(40)
    exact = F.rms_norm(x.double(), (40,), weight.double(), 1e-5)

    def error(normed):
        return ((normed.double() - exact) / exact).abs().max()

    once = 1.001 * 2**-8
    assert error(backend.rms_norm(x, weight, 1e-5)) <= once
    assert error(backend.rms_norm(x, weight.bfloat16(), 1e-5)) > once
    k, pages = x.clone(), torch.zeros(2, 1, 2, 4, 40, dtype=torch.bfloat16)
    still, slots = torch.ones(3, 20, dtype=torch.complex64), torch.arange(3)
    backend.rope_store_kv(x, k, k, still, *pages, slots, q_norm=weight, k_norm=weight, eps=1e-5)
    assert error(x) <= once
    assert error(pages[0][0, :, :3].transpose(0, 1)) <= once


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_the_norm_of_a_sum_has_the_bits_of_two_steps(dtype):
    x, residual, weight = (torch.randn(*shape).to(dtype) for shape in ((3, 40), (3, 40), (40,)))
    total = x + residual
    out = TORCH.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    assert torch.equal(out, F.rms_norm(total.float(), (40,), weight.float(), 1e-5).to(dtype))
    with pytest.raises(ValueError, match="residual"):
        TORCH.add_rms_norm(x, residual[:2], weight, 1e-5)


X, WEIGHT = torch.zeros(3, 16), torch.ones(16)


@BACKENDS
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


@BACKENDS
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q": torch.zeros(3, 2, 8)}, "q is"),
        ({"q": torch.zeros(3, 2, 16).bfloat16()}, "one dtype"),
        ({"q": torch.zeros(3, 16, 2).transpose(1, 2)}, "q must be contiguous"),
        ({"rotation": torch.zeros(3, 4, dtype=torch.complex64)}, "rotation"),
        ({"rotation": torch.zeros(3, 8)}, "complex64"),
        ({"k": torch.zeros(3, 3, 16)}, "k is"),
        ({"k": torch.zeros(3, 16, 2).transpose(1, 2)}, "contiguous"),
        ({"v": torch.zeros(3, 2, 16).bfloat16()}, "one dtype"),
        ({"slots": torch.arange(2)}, "k is"),
        ({"slots": torch.arange(3, dtype=torch.int32)}, "slots"),
        ({"k_pages": torch.zeros(2, 4, 2, 4, 16)}, "num_pages"),
        ({"v_pages": torch.zeros(4, 2, 4, 16).half()}, "float16"),
        ({"k_norm": torch.ones(8)}, "k_norm"),
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
