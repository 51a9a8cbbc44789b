"""Rotary position embedding and the store of what it rotated, in one pass over a step's new tokens."""

from __future__ import annotations

from typing import Any

from numba import types
from torch import Tensor

from ramify.kernels.checks import check_head_norms, check_rope, check_store
from ramify.kernels.cpu.codegen.compiler import compiled, part, sources
from ramify.kernels.cpu.codegen.simd import (
    LANES,
    bf16_at,
    even_lanes,
    f32_at,
    fma,
    i64_at,
    load,
    load_bf16,
    mul,
    negated_even_lanes,
    odd_lanes,
    set_bf16,
    set_f32,
    store,
    store_bf16,
    swapped_lanes,
)
from ramify.kernels.cpu.kv_store import copy_bytes
from ramify.kernels.cpu.norm import rms_norm


@part
def _rotated(x, turn):  # type: ignore[no-untyped-def]
    """Pairs (a, b) of x times (c, s) of `turn` as complex numbers: (ac - bs, bc + as)."""
    crossed = mul(swapped_lanes(x), negated_even_lanes(odd_lanes(turn)))
    return fma(x, even_lanes(turn), crossed)


@part
def _rotate(at, to, turn, dim, bf16):  # type: ignore[no-untyped-def]
    """One head of `dim` numbers, from one place to another (or the same)."""
    wide = dim - dim % LANES
    if bf16:
        for d in range(0, wide, LANES):
            store_bf16(to + 2 * d, _rotated(load_bf16(at + 2 * d), load(turn + 4 * d)))
        for d in range(wide, dim, 2):
            a, b = bf16_at(at + 2 * d), bf16_at(at + 2 * d + 2)
            c, s = f32_at(turn + 4 * d), f32_at(turn + 4 * d + 4)
            set_bf16(to + 2 * d, a * c - b * s)
            set_bf16(to + 2 * d + 2, b * c + a * s)
    else:
        for d in range(0, wide, LANES):
            store(to + 4 * d, _rotated(load(at + 4 * d), load(turn + 4 * d)))
        for d in range(wide, dim, 2):
            a, b = f32_at(at + 4 * d), f32_at(at + 4 * d + 4)
            c, s = f32_at(turn + 4 * d), f32_at(turn + 4 * d + 4)
            set_f32(to + 4 * d, a * c - b * s)
            set_f32(to + 4 * d + 4, b * c + a * s)


def _build(sources: str) -> Any:
    @compiled(types.int64(*[types.int64] * 19))
    def run(  # type: ignore[no-untyped-def]
        q, q_token, k, k_token, v, v_token, rotation, k_pages, v_pages,
        page_bytes, head_bytes, row_bytes, page_size, slots, tokens, heads, kv_heads, dim, bf16,
    ):  # fmt: skip
        sources  # noqa: B018
        size = dim * (2 if bf16 else 4)
        for token in range(tokens):
            turn = rotation + 4 * token * dim
            at = q + token * q_token
            for _ in range(heads):
                _rotate(at, at, turn, dim, bf16)
                at += size
            slot = i64_at(slots + 8 * token)
            page = slot // page_size
            to = page * page_bytes + (slot - page * page_size) * row_bytes
            for head in range(kv_heads):
                _rotate(k + token * k_token + head * size, k_pages + to, turn, dim, bf16)
                copy_bytes(v_pages + to, v + token * v_token + head * size, size)
                to += head_bytes
        return 0

    return run


run = _build(sources())


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
) -> None:
    """As `reference.rope.rope_store_kv`, whose docstring is the contract. Norms are a pass of their own."""
    check_rope(q, k, rotation)
    check_head_norms(q, q_norm, k_norm)
    check_store(k, v, k_pages, v_pages, slots)
    if q_norm is not None:
        rms_norm(q, q_norm, eps, out=q)
    if k_norm is not None:
        k = rms_norm(k, k_norm, eps)
    tokens, heads, dim = q.shape
    _, kv_heads, page_size, _ = k_pages.shape
    page, head, row, _ = k_pages.stride()
    size = q.element_size()
    run(
        q.data_ptr(), q.stride(0) * size, k.data_ptr(), k.stride(0) * size, v.data_ptr(), v.stride(0) * size,
        rotation.data_ptr(), k_pages.data_ptr(), v_pages.data_ptr(),
        page * size, head * size, row * size, page_size, slots.data_ptr(), tokens, heads, kv_heads,
        dim, size == 2,
    )  # fmt: skip
