"""Rotary position embedding and the store of new keys and values, in one pass over a step's new tokens."""

from __future__ import annotations

from typing import Any

from numba import types
from torch import Tensor

from ramify.kernels.checks import check_head_norms, check_rope, check_store
from ramify.kernels.cpu.codegen import simd as vl
from ramify.kernels.cpu.codegen.compiler import compiled, part, sources
from ramify.kernels.cpu.codegen.simd import LANES
from ramify.kernels.cpu.kv_store import copy_bytes
from ramify.kernels.cpu.norm import rms_norm


@part
def _rotated(x, cos_sin):  # type: ignore[no-untyped-def]
    """Pairs (a, b) of x times (c, s) of `cos_sin` as complex numbers: (ac - bs, bc + as)."""
    crossed = vl.mul(vl.swapped_lanes(x), vl.negated_even_lanes(vl.odd_lanes(cos_sin)))
    return vl.fma(x, vl.even_lanes(cos_sin), crossed)


@part
def _rotate(at, to, cos_sin, dim, bf16):  # type: ignore[no-untyped-def]
    """Rotate the head of `dim` numbers at `at` and write it to `to`, which may be `at`."""
    bytes_ = 2 if bf16 else 4
    wide = dim - dim % LANES
    for d in range(0, wide, LANES):
        x = vl.load_as(at + bytes_ * d, bf16)
        vl.store_as(to + bytes_ * d, _rotated(x, vl.load(cos_sin + 4 * d)), bf16)
    for d in range(wide, dim, 2):
        a, b = vl.read_as(at + bytes_ * d, bf16), vl.read_as(at + bytes_ * (d + 1), bf16)
        c, s = vl.read_f32(cos_sin + 4 * d), vl.read_f32(cos_sin + 4 * d + 4)
        vl.write_as(to + bytes_ * d, a * c - b * s, bf16)
        vl.write_as(to + bytes_ * (d + 1), b * c + a * s, bf16)


def _build(sources: str) -> Any:
    @compiled(types.int64(*[types.int64] * 19))
    def run(  # type: ignore[no-untyped-def]
        q, q_token, k, k_token, v, v_token, rotation, k_pages, v_pages,
        page_bytes, head_bytes, row_bytes, page_size, slots, tokens, heads, kv_heads, dim, bf16,
    ):  # fmt: skip
        sources  # noqa: B018
        size = dim * (2 if bf16 else 4)
        for token in range(tokens):
            cos_sin = rotation + 4 * token * dim
            at = q + token * q_token
            for _ in range(heads):
                _rotate(at, at, cos_sin, dim, bf16)
                at += size
            slot = vl.read_i64(slots + 8 * token)
            page = slot // page_size
            to = page * page_bytes + (slot - page * page_size) * row_bytes
            for head in range(kv_heads):
                _rotate(k + token * k_token + head * size, k_pages + to, cos_sin, dim, bf16)
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
    """As `reference.rope.rope_store_kv`; norms are separate passes and round in between."""
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
