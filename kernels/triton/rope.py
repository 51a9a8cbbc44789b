"""Rotary position embedding, norms of query and key heads, and the store of keys and values, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.kernels.arguments.checks import ALL_DTYPES, FLOAT8, check_head_norms, check_rope, check_store
from ramify.kernels.triton.float8 import to_float8
from ramify.kernels.triton.kv_store import head_block
from ramify.kernels.triton.tiles.dependent import wait
from ramify.kernels.triton.tiles.launch import check_device, padded, warps


@triton.jit
def _normed(x, weight_ptr, dim, eps, HEAD_DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """The RMS norm of each row of x; the columns of x from HEAD_DIM on are 0."""
    weight = tl.load(weight_ptr + dim, mask=dim < HEAD_DIM).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)
    return x * scale[:, None] * weight[None, :]


@triton.jit
def _rotated(x, cos, sin, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pairs of neighbours as complex numbers, times cos + i sin. A thread loads both neighbours of a pair."""
    re, im = tl.split(tl.reshape(x, [BLOCK_H, BLOCK_D // 2, 2]))
    cos, sin = cos[None, :], sin[None, :]
    return tl.reshape(tl.join(re * cos - im * sin, im * cos + re * sin), [BLOCK_H, BLOCK_D])


@triton.jit
def _rope_store(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, rotation_ptr, k_pages_ptr, v_pages_ptr, slot_ptr, q_norm_ptr, k_norm_ptr,
    q_token, k_token, v_token, page_stride, head_stride, row_stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr, PAGE_SIZE: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr,
    TO_FLOAT8: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program p of a token: BLOCK_H query heads or, after these, BLOCK_H heads of keys and values."""
    Q_PARTS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    PARTS: tl.constexpr = Q_PARTS + (KV_HEADS + BLOCK_H - 1) // BLOCK_H
    program = tl.program_id(0)
    token, part = (program // PARTS).to(tl.int64), program % PARTS
    dim = tl.arange(0, BLOCK_D)
    within = tl.arange(0, BLOCK_H)
    wait(DEPENDENT)
    cos_sin = tl.load(rotation_ptr + token * HEAD_DIM + dim, mask=dim < HEAD_DIM, other=0.0)
    cos, sin = tl.split(tl.reshape(cos_sin, [BLOCK_D // 2, 2]))
    if part < Q_PARTS:
        head = part * BLOCK_H + within
        in_bounds = (head < HEADS)[:, None] & (dim < HEAD_DIM)[None, :]
        q_at = q_ptr + token * q_token + head[:, None] * HEAD_DIM + dim[None, :]
        q = tl.where(in_bounds, tl.load(q_at, mask=in_bounds).to(tl.float32), 0.0)
        if Q_NORM:
            q = _normed(q, q_norm_ptr, dim, eps, HEAD_DIM)
        q = _rotated(q, cos, sin, BLOCK_H, BLOCK_D)
        tl.store(q_at, q.to(q_ptr.dtype.element_ty), mask=in_bounds)
    else:
        head = (part - Q_PARTS) * BLOCK_H + within
        in_bounds = (head < KV_HEADS)[:, None] & (dim < HEAD_DIM)[None, :]
        slot = tl.load(slot_ptr + token)
        offset = head[:, None] * HEAD_DIM + dim[None, :]
        k = tl.load(k_ptr + token * k_token + offset, mask=in_bounds).to(tl.float32)
        v = tl.load(v_ptr + token * v_token + offset, mask=in_bounds)
        k = tl.where(in_bounds, k, 0.0)
        if K_NORM:
            k = _normed(k, k_norm_ptr, dim, eps, HEAD_DIM)
        k = _rotated(k, cos, sin, BLOCK_H, BLOCK_D)
        row = slot // PAGE_SIZE * page_stride + slot % PAGE_SIZE * row_stride
        to = row + head.to(tl.int64)[:, None] * head_stride + dim[None, :]
        if TO_FLOAT8:
            tl.store(k_pages_ptr + to, to_float8(k), mask=in_bounds)
            tl.store(v_pages_ptr + to, to_float8(v.to(tl.float32)), mask=in_bounds)
        else:
            tl.store(k_pages_ptr + to, k.to(k_pages_ptr.dtype.element_ty), mask=in_bounds)
            tl.store(v_pages_ptr + to, v, mask=in_bounds)


def rope_store_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rotation: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    dependent: bool = False,
) -> None:
    """As `reference.rope.rope_store_kv`; float16 as well. `dependent` as in `norm.rms_norm`."""
    check_device(q)
    check_rope(q, k, rotation)
    check_head_norms(q, q_norm, k_norm)
    check_store(k, v, k_pages, v_pages, slots, dtypes=ALL_DTYPES, page_dtypes=(FLOAT8,))
    tokens, heads, head_dim = q.shape
    _, kv_heads, page_size, _ = k_pages.shape
    share, block = head_block(kv_heads, head_dim), padded(head_dim)
    parts = triton.cdiv(heads, share) + triton.cdiv(kv_heads, share)
    _rope_store[(tokens * parts,)](
        q, k, v, torch.view_as_real(rotation), k_pages, v_pages, slots,
        q if q_norm is None else q_norm, k if k_norm is None else k_norm,
        q.stride(0), k.stride(0), v.stride(0), *k_pages.stride()[:3], eps,
        HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, BLOCK_D=block, BLOCK_H=share,
        PAGE_SIZE=page_size, Q_NORM=q_norm is not None, K_NORM=k_norm is not None,
        TO_FLOAT8=k_pages.dtype == FLOAT8, DEPENDENT=dependent, launch_pdl=dependent,
        num_warps=warps(share * block, q.element_size(), vectors=1, most=8), enable_fp_fusion=False,
    )  # fmt: skip
