"""Norms, activation, rotary store and page copies on a GPU, also in the sizes of real models."""

from __future__ import annotations

import itertools

import pytest
import torch

from ramify.kernels.triton import kv_store, norm, rope
from tests.kernels import ops_cases as cases

CUDA = "cuda"
BF16, FP32, FP16 = torch.bfloat16, torch.float32, torch.float16
NORMS = [*cases.NORM_SHAPES, (4096, 4096), (300, 5120), (77, 65536), (1000, 40, 128)]
SUMS = [(0, 64), (1, 576), (3, 5), (4096, 4096), (300, 5120)]
GATED = [*cases.GATED_SHAPES, (4096, 14336), (1, 17408)]
ROPES = [*cases.ROPE_SHAPES, (128, 16, 32, 8), (128, 64, 40, 8)]


@pytest.mark.parametrize(
    ("shape", "dtype"), cases.in_dtypes(NORMS, (3, 5), (4096, 4096), (77, 65536)), ids=str
)
def test_norm(shape, dtype):
    cases.check_norm(shape, dtype, CUDA)


@pytest.mark.parametrize(("shape", "dtype"), cases.in_dtypes(SUMS, (3, 5), (4096, 4096)), ids=str)
def test_norm_of_a_sum(shape, dtype):
    cases.check_add_norm(shape, dtype, CUDA)


@pytest.mark.parametrize(("shape", "dtype"), cases.in_dtypes(GATED, (3, 100), (4096, 14336)), ids=str)
def test_activation(shape, dtype):
    cases.check_gated(shape, dtype, CUDA)


@pytest.mark.parametrize(
    ("shape", "norms", "dtype"),
    [
        *itertools.product(ROPES, ["", "qk"], [BF16]),
        *itertools.product(ROPES[:1], ["q", "k"], [BF16]),
        *itertools.product(ROPES[:2], ["qk"], [FP32]),
        (ROPES[0], "qk", FP16),
    ],
    ids=str,
)
def test_rotary_store(shape, norms, dtype):
    cases.check_rope(shape, 700, dtype, CUDA, norms)


def test_nothing_new_is_nothing_to_do():
    cases.check_rope(cases.ROPE_SHAPES[0], 0, torch.float32, CUDA)


@pytest.mark.parametrize("layers", [(), (32,)])
@pytest.mark.parametrize(
    ("page", "dtype"), cases.in_dtypes([(2, 4, 16), (3, 5, 7), (8, 16, 128)], (8, 16, 128)), ids=str
)
def test_page_copies(layers, page, dtype):
    cases.check_copy(layers, dtype, CUDA, page)


def test_pools_beyond_two_billion_numbers():
    """Offsets need 64 bits: the last page of a pool of 2.1 billion bfloat16 numbers."""
    if torch.cuda.mem_get_info()[0] < 10e9:
        pytest.skip("needs 10 GB of device memory")
    pages = torch.empty(2, 66000, 8, 32, 128, dtype=torch.bfloat16, device=CUDA)
    k, v = pages
    last = len(k) - 1
    k[0], v[0] = 1.0, 2.0
    kv_store.copy_pages(k, v, [0], [last])
    assert (k[last] == 1.0).all()
    assert (v[last] == 2.0).all()
    new = torch.randn(1, 8, 128, dtype=torch.bfloat16, device=CUDA)
    turn = torch.ones(1, 64, dtype=torch.complex64, device=CUDA)
    rope.rope_store_kv(new.clone(), 3 * new, new, turn, k, v, torch.tensor([last * 32 + 30], device=CUDA))
    assert torch.equal(k[last, :, 30], 3 * new[0])


def test_a_captured_step_is_replayed():
    """No launch waits or transfers, so that a CUDA graph can hold them."""
    x, residual = (torch.randn(8, 4096, dtype=torch.bfloat16, device=CUDA) for _ in range(2))
    weight, out = torch.ones(4096, dtype=torch.bfloat16, device=CUDA), torch.empty_like(x)
    start = residual.clone()
    norm.add_rms_norm(x, residual.clone(), weight, 1e-5, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm.add_rms_norm(x, residual, weight, 1e-5, out=out)
    for seed in range(2):
        x.copy_(cases.random(8, 4096, dtype=torch.bfloat16, device=CUDA, seed=seed))
        residual.copy_(start)
        graph.replay()
        assert torch.equal(residual, start + x)
        assert torch.equal(out, norm.rms_norm(residual, weight, 1e-5))
