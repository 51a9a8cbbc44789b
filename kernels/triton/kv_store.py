"""Copying pages of all layers in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.kernels.arguments.checks import check_copy
from ramify.kernels.triton.tiles.launch import check_device, padded, warps

_BLOCK = 2048
"""Numbers of keys, and of values, that a program moves."""


@triton.jit(do_not_specialize=["count"])
def _copy(  # type: ignore[no-untyped-def]
    k_ptr, v_ptr, page_ptr, count, layer_stride, page_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (i, b, l): block b of the i-th page to copy, in layer l."""
    entry = tl.program_id(0)
    within = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_bounds = within < SIZE
    layer = tl.program_id(2).to(tl.int64) * layer_stride
    src = layer + tl.load(page_ptr + entry).to(tl.int64) * page_stride + within
    dst = layer + tl.load(page_ptr + count + entry).to(tl.int64) * page_stride + within
    k = tl.load(k_ptr + src, mask=in_bounds)
    v = tl.load(v_ptr + src, mask=in_bounds)
    tl.store(k_ptr + dst, k, mask=in_bounds)
    tl.store(v_ptr + dst, v, mask=in_bounds)


def head_block(kv_heads: int, head_dim: int) -> int:
    """Heads of a program, a power of two: all heads of a token if they fit a block."""
    return max(1, min(padded(kv_heads), _BLOCK // padded(head_dim)))


def copy_pages(k_pages: Tensor, v_pages: Tensor, src: Sequence[int], dst: Sequence[int]) -> None:
    """As `reference.kv_store.copy_pages`. Must not be captured in a CUDA graph: the list of pages is copied
    from the host.

    Raises
    ------
    ValueError
        As in the reference; also if the numbers of a page are not contiguous or the pools differ in strides.
    """
    check_device(k_pages)
    check_copy(k_pages, v_pages, src, dst)
    if src:
        copy_listed(k_pages, v_pages, listed(src, dst, k_pages.device))


def listed(src: Sequence[int], dst: Sequence[int], device: torch.device) -> Tensor:
    """Pages to copy, for `copy_listed`: (2, N) int32 on `device`."""
    pages = torch.tensor([src, dst], dtype=torch.int32, pin_memory=device.type == "cuda")
    return pages.to(device, non_blocking=True)


def copy_listed(k_pages: Tensor, v_pages: Tensor, pages: Tensor) -> None:
    """As `copy_pages`, with `pages` from `listed`, which are not checked. Only launches a kernel."""
    if k_pages.itemsize == 1:  # moved as bytes, as a GPU without float8 cannot load float8
        k_pages, v_pages = k_pages.view(torch.uint8), v_pages.view(torch.uint8)
    shape, strides = k_pages.shape[-3:], k_pages.stride()
    if strides != v_pages.stride() or strides[-3:] != (shape[1] * shape[2], shape[2], 1):
        raise ValueError("each page must be contiguous, and k_pages and v_pages alike in strides.")
    count = pages.shape[1]
    layers, layer_stride = (k_pages.shape[0], strides[0]) if k_pages.dim() == 5 else (1, 0)
    size = shape.numel()
    block = min(_BLOCK, padded(size))
    _copy[(count, triton.cdiv(size, block), layers)](
        k_pages, v_pages, pages, count, layer_stride, strides[-4], SIZE=size, BLOCK=block,
        num_warps=warps(block, k_pages.element_size(), most=8), enable_fp_fusion=False,
    )  # fmt: skip
