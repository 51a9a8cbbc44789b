"""The gated delta rule of prompts in chunks (arXiv 2406.06484, 2412.06464), three launches a layer.

Within a chunk, with G the sum of the log-decays up to a token, the differences d of all tokens at once:

    A[i, j] = beta_i · exp(G_i - G_j) · kᵢ·kⱼ for j < i        T = (1 + A)⁻¹, by forward substitution
    d = T (beta · (v - exp(G) · k S))                          S the state before the chunk
    out = exp(G) · q S + P d,  P[i, j] = exp(G_i - G_j) · qᵢ·kⱼ for j ≤ i
    S ← exp(G_last) · S + (exp(G_last - G) · k)ᵀ d

`_solve` computes T for all chunks at once, as T depends on no state. `_scan` goes over the chunks of a
sequence in turn, with some columns of a head's state in registers: 32 tokens a round, where
`gated_delta._recur` takes one. T is 128 bytes a token and head. Products are TF32, so results differ from the
twin's by some 1e-3 of their size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.kernels.arguments.checks import ALL_DTYPES
from ramify.kernels.arguments.gated_delta import L2_EPS, DeltaWeights, check_gated_delta
from ramify.kernels.triton import gated_delta
from ramify.kernels.triton.gated_delta import convolve, store_histories
from ramify.kernels.triton.tiles.launch import padded

CHUNK = 32
"""Tokens of a chunk. Substitution takes a round for each; twice as many would make its tile four times as
large."""
_COLUMNS = 64
"""Columns of the state in a program of `_scan`: with 128 rows and 8 warps, 32 registers a thread. 32 columns
in 4 warps spill 110 registers in the loop for sm_90, 64 in 8 warps 4; 48 heads are 96 programs."""


@triton.jit
def _gates(  # type: ignore[no-untyped-def]
    a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, token, there, head, a_row, b_row,
):  # fmt: skip
    """beta, and the sums of log-decays from the chunk's first token on; 0 more for tokens that are not
    there."""
    rate = tl.exp(tl.load(a_log_ptr + head))
    a = tl.load(a_ptr + token * a_row + head, mask=there, other=0.0).to(tl.float32) + tl.load(
        dt_bias_ptr + head
    )
    softplus = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
    total = tl.cumsum(tl.where(there, -rate * softplus, 0.0), 0)
    b = tl.load(b_ptr + token * b_row + head, mask=there, other=0.0).to(tl.float32)
    return tl.where(there, tl.sigmoid(b), 0.0), total


@triton.jit
def _rows(at, token, there, column, known, row):  # type: ignore[no-untyped-def]
    mask = there[:, None] & known[None, :]
    return tl.load(at + token[:, None] * row + column[None, :], mask=mask, other=0.0)


@triton.jit
def _unit(x, eps):  # type: ignore[no-untyped-def]
    return x * tl.rsqrt(tl.sum(x * x, axis=1) + eps)[:, None]


@triton.jit(do_not_specialize=["sequences"])
def _solve(  # type: ignore[no-untyped-def]
    mixed_ptr, b_ptr, a_ptr, a_log_ptr, dt_bias_ptr, start_ptr, solved_ptr, sequences, b_row, a_row, eps,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, CHANNELS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (c, h): T of chunk c and head h. The chunks of sequence s begin at start // CHUNK + s, so that
    some numbers are no chunk's."""
    place, head = tl.program_id(0), tl.program_id(1)
    low, high = tl.cast(0, tl.int32), sequences
    while low < high:  # the last sequence that begins at `place` or before
        middle = (low + high) // 2
        before = tl.load(start_ptr + middle) // CHUNK + middle <= place
        low = tl.where(before, middle + 1, low)
        high = tl.where(before, high, middle)
    first = tl.load(start_ptr + low - 1)
    count = tl.load(start_ptr + low) - first
    begin = (place - first // CHUNK - (low - 1)) * CHUNK
    if begin < count:
        row = tl.arange(0, CHUNK)
        there, token = begin + row < count, (first + begin + row).to(tl.int64)
        beta, total = _gates(
            a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, token, there, head, a_row, b_row
        )  # fmt: skip
        key = tl.arange(0, BLOCK_K)
        at = mixed_ptr + KEY_HEADS * KEY_DIM + head // (HEADS // KEY_HEADS) * KEY_DIM
        k = _unit(_rows(at, token, there, key, key < KEY_DIM, CHANNELS), eps)
        below = row[:, None] > row[None, :]
        decay = tl.exp(tl.where(below, total[:, None] - total[None, :], 0.0))
        products = tl.dot(k, tl.trans(k), input_precision=PRECISION)
        left = tl.where(below, beta[:, None] * decay * products, 0.0)
        solved = tl.where(row[:, None] == row[None, :], 1.0, 0.0)
        for i in range(1, CHUNK):
            factors = tl.sum(tl.where((row == i)[:, None], left, 0.0), axis=0)  # row i of A
            known = tl.sum(factors[:, None] * solved, axis=0)
            solved = tl.where((row == i)[:, None], solved - known[None, :], solved)
        to = solved_ptr + (place.to(tl.int64) * HEADS + head) * CHUNK * CHUNK
        tl.store(to + row[:, None] * CHUNK + row[None, :], solved)


@triton.jit
def _scan(  # type: ignore[no-untyped-def]
    qkv_ptr, mixed_ptr, b_ptr, a_ptr, a_log_ptr, dt_bias_ptr, solved_ptr, conv_ptr, recurrent_ptr,
    slot_ptr, start_ptr, len_ptr, out_ptr,
    row, b_row, a_row, conv_slot, conv_channel, conv_tap, recurrent_slot, eps, scale,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    TAPS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (i, h, s): columns i * BLOCK_V and on of head h in sequence s."""
    GROUP: tl.constexpr = HEADS // KEY_HEADS
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + HEADS * VALUE_DIM
    block, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(start_ptr + sequence)
    count = tl.load(start_ptr + sequence + 1) - first
    if count > 0:
        kept = tl.load(len_ptr + sequence) > count
        slot = tl.load(slot_ptr + sequence)
        key, value = tl.arange(0, BLOCK_K), block * BLOCK_V + tl.arange(0, BLOCK_V)
        in_key, in_value = key < KEY_DIM, value < VALUE_DIM
        in_state = in_key[:, None] & in_value[None, :]
        state_at = recurrent_ptr + slot * recurrent_slot + head * KEY_DIM * VALUE_DIM
        state_at = state_at + key[:, None] * VALUE_DIM + value[None, :]
        state = tl.zeros([BLOCK_K, BLOCK_V], dtype=tl.float32)
        if kept:
            state = tl.load(state_at, mask=in_state, other=0.0)
        queries = head // GROUP * KEY_DIM + key
        values = 2 * KEYS + head * VALUE_DIM + value
        within = tl.arange(0, CHUNK)
        at_most = within[:, None] >= within[None, :]
        solved_at = solved_ptr + (first // CHUNK + sequence).to(tl.int64) * HEADS * CHUNK * CHUNK
        solved_at = solved_at + head * CHUNK * CHUNK + within[:, None] * CHUNK + within[None, :]
        for begin in range(0, count, CHUNK):
            there, token = begin + within < count, (first + begin + within).to(tl.int64)
            beta, total = _gates(
                a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, token, there, head, a_row, b_row
            )  # fmt: skip
            q = _unit(_rows(mixed_ptr, token, there, queries, in_key, CHANNELS), eps) * scale
            k = _unit(_rows(mixed_ptr + KEYS, token, there, queries, in_key, CHANNELS), eps)
            v = _rows(mixed_ptr, token, there, values, in_value, CHANNELS)
            grown = tl.exp(total)[:, None]
            missing = beta[:, None] * (v - grown * tl.dot(k, state, input_precision=PRECISION))
            step = tl.dot(tl.load(solved_at), missing, input_precision=PRECISION)
            decay = tl.exp(tl.where(at_most, total[:, None] - total[None, :], 0.0))
            products = tl.where(at_most, decay * tl.dot(q, tl.trans(k), input_precision=PRECISION), 0.0)
            result = grown * tl.dot(q, state, input_precision=PRECISION)
            result += tl.dot(products, step, input_precision=PRECISION)
            to = out_ptr + (token[:, None] * HEADS + head) * VALUE_DIM + value[None, :]
            in_out = there[:, None] & in_value[None, :]
            tl.store(to, result.to(out_ptr.dtype.element_ty), mask=in_out)
            last = tl.min(total, 0)  # log-decays are at most 0
            faded = tl.exp(last - total)[:, None] * k
            state = tl.exp(last) * state + tl.dot(tl.trans(faded), step, input_precision=PRECISION)
            solved_at += HEADS * CHUNK * CHUNK
        tl.store(state_at, state, mask=in_state)
        store_histories(
            qkv_ptr, conv_ptr + slot * conv_slot, count, first, row, values, in_value, queries, in_key,
            conv_channel, conv_tap, kept, (block == 0) & (head % GROUP == 0), KEYS, TAPS,
        )  # fmt: skip


def gated_delta_rule(
    qkv: Tensor,
    b: Tensor,
    a: Tensor,
    weights: DeltaWeights,
    conv: Tensor,
    recurrent: Tensor,
    slots: Tensor,
    query_starts: Tensor,
    kv_lens: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """As `reference.gated_delta.gated_delta_rule`; float16 as well. Steps of few tokens a sequence take
    `kernels.triton.gated_delta`."""
    if len(qkv) - len(slots) < CHUNK:
        return gated_delta.gated_delta_rule(
            qkv, b, a, weights, conv, recurrent, slots, query_starts, kv_lens, out=out
        )
    sizes, out = check_gated_delta(
        qkv, b, a, weights, conv, recurrent, slots, query_starts, kv_lens, out, dtypes=ALL_DTYPES
    )
    mixed = convolve(qkv, weights, conv, slots, query_starts, kv_lens, sizes)
    chunks = sizes.tokens // CHUNK + len(slots)
    solved = torch.empty(chunks, sizes.heads, CHUNK, CHUNK, dtype=torch.float32, device=qkv.device)
    constants = {
        "KEY_HEADS": sizes.key_heads,
        "HEADS": sizes.heads,
        "KEY_DIM": sizes.key_dim,
        "CHUNK": CHUNK,
        "BLOCK_K": padded(sizes.key_dim),
        "PRECISION": "tf32",
        "enable_fp_fusion": True,
    }
    _solve[(chunks, sizes.heads)](
        mixed, b, a, weights.a_log, weights.dt_bias, query_starts, solved, len(slots),
        b.stride(0), a.stride(0), L2_EPS, CHANNELS=sizes.channels, num_warps=4, **constants,
    )  # fmt: skip
    _scan[(triton.cdiv(sizes.value_dim, _COLUMNS), sizes.heads, len(slots))](
        qkv, mixed, b, a, weights.a_log, weights.dt_bias, solved, conv, recurrent,
        slots, query_starts, kv_lens, out,
        qkv.stride(0), b.stride(0), a.stride(0), *conv.stride(), recurrent.stride(0),
        L2_EPS, sizes.key_dim**-0.5,
        VALUE_DIM=sizes.value_dim, TAPS=sizes.width - 1, BLOCK_V=_COLUMNS, num_warps=8, **constants,
    )  # fmt: skip
    return out
