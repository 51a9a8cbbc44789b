"""Writing rows of pages, and copying pages, bit for bit."""

from __future__ import annotations

import pytest
import torch

from ramify.kernels.reference.kv_store import store_kv
from ramify.kernels.registry import ops

BACKENDS = ["cpu", "torch"]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("page_size", "head_dim"), [(1, 64), (3, 80), (16, 64), (64, 7)])
def test_rows_arrive_where_slots_say_and_nowhere_else(dtype, page_size, head_dim):
    tokens, heads, kv_heads, num_pages = 37, 4, 2, 50
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim).to(dtype)
    k, v = qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
    k_pages = torch.randn(num_pages, kv_heads, page_size, head_dim).to(dtype)
    v_pages = torch.randn(num_pages, kv_heads, page_size, head_dim).to(dtype)
    slots = torch.randperm(num_pages * page_size)[:tokens]
    expected_k, expected_v = k_pages.clone(), v_pages.clone()
    for token, slot in enumerate(slots.tolist()):
        expected_k[slot // page_size, :, slot % page_size] = k[token]
        expected_v[slot // page_size, :, slot % page_size] = v[token]
    store_kv(k, v, k_pages, v_pages, slots)
    assert torch.equal(k_pages, expected_k)
    assert torch.equal(v_pages, expected_v)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layers", [(), (3,)])
def test_pages_are_copied_in_every_layer(backend, layers):
    k_pages = torch.randn(*layers, 8, 2, 4, 16)
    v_pages = torch.randn(*layers, 8, 2, 4, 16)
    expected = [pages.clone() for pages in (k_pages, v_pages)]
    for pages in expected:
        pages[..., [5, 7], :, :, :] = pages[..., [0, 0], :, :, :]
        pages[..., 1, :, :, :] = pages[..., 2, :, :, :]
    ops(backend).copy_pages(k_pages, v_pages, [0, 0, 2], [5, 7, 1])
    assert torch.equal(k_pages, expected[0])
    assert torch.equal(v_pages, expected[1])
    ops(backend).copy_pages(k_pages, v_pages, [], [])
    assert torch.equal(k_pages, expected[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("src", "dst", "words"),
    [
        ([0], [0, 1], "sources"),
        ([0, 1], [2, 2], "twice"),
        ([0, 1], [1, 2], "both a source"),
        ([0], [8], "within"),
        ([-1], [2], "within"),
    ],
)
def test_copies_that_depend_on_order_or_leave_the_pool_are_refused(backend, src, dst, words):
    pages = torch.zeros(8, 2, 4, 16)
    with pytest.raises(ValueError, match=words):
        ops(backend).copy_pages(pages, pages.clone(), src, dst)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"k": torch.zeros(3, 2, 8)}, "k is"),
        ({"v": torch.zeros(3, 2, 16).bfloat16()}, "one dtype"),
        ({"k": torch.zeros(3, 16, 2).transpose(1, 2)}, "contiguous"),
        ({"slots": torch.arange(3, dtype=torch.int32)}, "slots"),
        ({"k_pages": torch.zeros(2, 4, 2, 4, 16)}, "num_pages"),
        ({"v_pages": torch.zeros(4, 2, 4, 16).half()}, "float16"),
    ],
)
def test_store_refusals_name_the_argument(change, words):
    arguments = {
        "k": torch.zeros(3, 2, 16),
        "v": torch.zeros(3, 2, 16),
        "k_pages": torch.zeros(4, 2, 4, 16),
        "v_pages": torch.zeros(4, 2, 4, 16),
        "slots": torch.arange(3),
    }
    store_kv(**arguments)
    with pytest.raises(ValueError, match=words):
        store_kv(**{**arguments, **change})
