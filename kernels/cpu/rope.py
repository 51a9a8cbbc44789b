"""Rotary position embedding and the store of new keys and values, in one pass over a step's new tokens.

    for item of ITEM_TOKENS tokens:                     threads take items in turn
        for query head: q = rotate(norm(q))             in place
        for KV head: K[slot] = rotate(norm(k));  V[slot] = v

Memory: a token's heads lie side by side, `rotation` has cos and sin of each pair of numbers, pages are (page,
KV head, slot, dim). Reading and writing memory bounds the speed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import types
from torch import Tensor

from ramify.kernels.arguments.checks import check_head_norms, check_rope, check_store
from ramify.kernels.arguments.pages import LEAST, MOST_CODE
from ramify.kernels.cpu.codegen import simd as vl
from ramify.kernels.cpu.codegen.compiler import callback, carray, compiled, part
from ramify.kernels.cpu.codegen.functions import copy_bytes, run_body
from ramify.kernels.cpu.codegen.simd import LANES
from ramify.kernels.cpu.parts.norm import normalise
from ramify.kernels.cpu.rowwise import rms_norm
from ramify.kernels.machine.records import Arena, record

ITEM_TOKENS = 8
"""Tokens of a work item: about 5 us of work. Starting a team of threads costs 1 us."""

FRAME = record(
    "q", "q_row", "k", "k_row", "v", "v_row", "rotation", "tokens", "heads", "kv_heads", "dim", "bf16",
    "int8",  # whether pages are int8 rows, each with its scale
    "k_pages", "v_pages", "page_bytes", "head_bytes", "row_bytes", "page_size", "slots",
    "q_norm", "k_norm",  # weights of norms in the dtype of q; 0: none. With `k_norm`, k is normed in place
    "whole_norms",  # whether the norms are over all heads
    "threads", "team", "body", "arena", "arena_bytes",
    floats=("q_eps", "k_eps"),
)  # fmt: skip
"""The arguments of a call, which its threads share. The number of the next item is at `arena`."""


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


@part
def _vector(at, cos_sin, d, bf16):  # type: ignore[no-untyped-def]
    """Numbers d and after of the head at `at`, rotated unless `cos_sin` is 0."""
    x = vl.load_as(at + (2 if bf16 else 4) * d, bf16)
    return _rotated(x, vl.load(cos_sin + 4 * d)) if cos_sin else x


@part
def _number(at, cos_sin, d, bf16):  # type: ignore[no-untyped-def]
    """Number d of the head at `at`, rotated unless `cos_sin` is 0."""
    bytes_ = 2 if bf16 else 4
    x = vl.read_as(at + bytes_ * d, bf16)
    if not cos_sin:
        return x
    other = vl.read_as(at + bytes_ * (d ^ 1), bf16)
    c, s = vl.read_f32(cos_sin + 4 * (d & ~1)), vl.read_f32(cos_sin + 4 * (d | 1))
    return x * c + other * s if d & 1 else x * c - other * s


@part
def _quantise(at, to, cos_sin, dim, bf16):  # type: ignore[no-untyped-def]
    """Write the head of `dim` numbers at `at`, rotated unless `cos_sin` is 0, to `to` as a row of int8 pages
    (`reference.kv_store.quantise_rows`)."""
    wide = dim - dim % LANES
    zero = vl.splat_f32(0.0)
    best, wrong = zero, zero
    for d in range(0, wide, LANES):
        x = _vector(at, cos_sin, d, bf16)
        best = vl.maximum(best, vl.maximum(x, vl.sub(zero, x)))
        wrong = vl.fma(x, zero, wrong)  # a NaN in any lane becomes the scale
    most = vl.max_lanes(best) + vl.sum_lanes(wrong)
    for d in range(wide, dim):
        most = max(most, abs(_number(at, cos_sin, d, bf16)))
    inverse = np.float32(MOST_CODE) / most if most >= LEAST else np.float32(0.0)
    for d in range(0, wide, LANES):
        x = vl.mul(_vector(at, cos_sin, d, bf16), vl.broadcast(inverse))
        vl.store_int8(to + d, vl.nearest(x))
    for d in range(wide, dim):
        x = vl.mul(vl.broadcast(_number(at, cos_sin, d, bf16)), vl.broadcast(inverse))
        vl.write_i8(to + d, vl.first_lane(vl.nearest(x)))
    vl.write_f32(to + dim, most / np.float32(MOST_CODE))


@part
def _norm_heads(frame, weight, eps, at, heads):  # type: ignore[no-untyped-def]
    """Apply the RMS norm to `heads` adjacent heads, in place."""
    size = frame.dim * (2 if frame.bf16 else 4)
    if frame.whole_norms:
        normalise(at, at, weight, heads * frame.dim, eps, frame.bf16, frame.bf16)
    else:
        for head in range(heads):
            place = at + head * size
            normalise(place, place, weight, frame.dim, eps, frame.bf16, frame.bf16)


@part
def _store_token(frame, token):  # type: ignore[no-untyped-def]
    dim, bf16 = frame.dim, frame.bf16
    size = dim * (2 if bf16 else 4)
    cos_sin = frame.rotation + 4 * token * dim
    q, k, v = frame.q + token * frame.q_row, frame.k + token * frame.k_row, frame.v + token * frame.v_row
    if frame.q_norm:
        _norm_heads(frame, frame.q_norm, frame.q_eps, q, frame.heads)
    if frame.k_norm:
        _norm_heads(frame, frame.k_norm, frame.k_eps, k, frame.kv_heads)
    for head in range(frame.heads):
        _rotate(q + head * size, q + head * size, cos_sin, dim, bf16)
    slot = vl.read_i64(frame.slots + 8 * token)
    page = slot // frame.page_size
    to = page * frame.page_bytes + (slot - page * frame.page_size) * frame.row_bytes
    for head in range(frame.kv_heads):
        if frame.int8:
            _quantise(k + head * size, frame.k_pages + to, cos_sin, dim, bf16)
            _quantise(v + head * size, frame.v_pages + to, 0, dim, bf16)
        else:
            _rotate(k + head * size, frame.k_pages + to, cos_sin, dim, bf16)
            copy_bytes(frame.v_pages + to, v + head * size, size)
        to += frame.head_bytes


@callback(types.void(types.voidptr))
def _body(data):  # type: ignore[no-untyped-def]
    frame = carray(data, 1, FRAME)[0]
    first = ITEM_TOKENS * vl.fetch_increment(frame.arena)
    while first < frame.tokens:
        for token in range(first, min(first + ITEM_TOKENS, frame.tokens)):
            _store_token(frame, token)
        first = ITEM_TOKENS * vl.fetch_increment(frame.arena)


@compiled(types.int64(types.int64))
def store_tokens(call_at):  # type: ignore[no-untyped-def]
    """Rotate and store the tokens that the FRAME at address `call_at` describes."""
    frame = carray(vl.as_pointer(call_at), 1, FRAME)[0]
    vl.write_i64(frame.arena, 0)
    run_body(frame, call_at, min(frame.threads, frame.tokens // ITEM_TOKENS))
    return 0


arena = Arena(FRAME, _body.address, 64)


def fill_call(q: Tensor, k: Tensor, v: Tensor, rotation: Tensor, pages: Tensor, slots: Tensor) -> Any:
    """This thread's FRAME, for `store_tokens`, without norms. The caller sets the addresses of the pages.

    pages : the pages of keys or of values; both have the same shape and strides
    """
    call, size = arena.call, q.element_size()
    call.q, call.k, call.v = q.data_ptr(), k.data_ptr(), v.data_ptr()
    call.q_row, call.k_row, call.v_row = (size * x.stride(0) for x in (q, k, v))
    call.rotation, call.slots = rotation.data_ptr(), slots.data_ptr()
    call.tokens, call.heads, call.dim = q.shape
    call.bf16, call.kv_heads, call.page_size = size == 2, pages.shape[1], pages.shape[2]
    kept = pages.element_size()
    call.int8 = kept == 1
    call.page_bytes, call.head_bytes, call.row_bytes = (kept * x for x in pages.stride()[:3])
    call.q_norm = call.k_norm = 0
    call.threads = torch.get_num_threads()
    return call


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
    """As `reference.rope.rope_store_kv`; each norm is a separate pass, whose result is rounded."""
    check_rope(q, k, rotation)
    check_head_norms(q, q_norm, k_norm)
    check_store(k, v, k_pages, v_pages, slots, page_dtypes=(torch.int8,))
    if q_norm is not None:
        rms_norm(q, q_norm, eps, out=q)
    if k_norm is not None:
        k = rms_norm(k, k_norm, eps)
    call = fill_call(q, k, v, rotation, k_pages, slots)
    call.k_pages, call.v_pages = k_pages.data_ptr(), v_pages.data_ptr()
    store_tokens(arena.call_at)
