"""Copying pages, bit for bit."""

from __future__ import annotations

import pytest
import torch

from ramify.kernels.reference.kv_store import copy_pages


@pytest.mark.parametrize("layers", [(), (3,)])
def test_pages_are_copied_in_every_layer(layers):
    k_pages = torch.randn(*layers, 8, 2, 4, 16)
    v_pages = torch.randn(*layers, 8, 2, 4, 16)
    expected = [pages.clone() for pages in (k_pages, v_pages)]
    for pages in expected:
        pages[..., [5, 7], :, :, :] = pages[..., [0, 0], :, :, :]
        pages[..., 1, :, :, :] = pages[..., 2, :, :, :]
    copy_pages(k_pages, v_pages, [0, 0, 2], [5, 7, 1])
    assert torch.equal(k_pages, expected[0])
    assert torch.equal(v_pages, expected[1])
    copy_pages(k_pages, v_pages, [], [])
    assert torch.equal(k_pages, expected[0])


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
def test_copies_that_depend_on_order_or_leave_the_pool_are_refused(src, dst, words):
    pages = torch.zeros(8, 2, 4, 16)
    with pytest.raises(ValueError, match=words):
        copy_pages(pages, pages.clone(), src, dst)
