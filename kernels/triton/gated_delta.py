"""The gated delta rule in two launches, and output gates.

The convolution is one program for each token and block of channels. The recurrence is one program of one warp
for each sequence, head and block of the state's columns: the program keeps these in registers over all tokens
of the step, and reads and writes a slot once. Grids depend on the numbers of tokens and sequences alone, so
that a graph can replay a decoding step. The bits depend neither on the batch nor on the chunks of a prompt.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.kernels.arguments.checks import ALL_DTYPES
from ramify.kernels.arguments.gated_delta import (
    L2_EPS,
    DeltaSizes,
    DeltaWeights,
    check_gated_delta,
    check_output_gate,
)
from ramify.kernels.triton.tiles.launch import check_device, padded, warps

_CHANNELS = 512
"""Channels of a program of the convolution."""
_COLUMNS = 8
"""Columns of the state in a program of the recurrence: with 128 rows, 32 registers a thread. Sums over rows
stay within a warp."""


@triton.jit
def _taken(  # type: ignore[no-untyped-def]
    qkv_ptr, conv_ptr, place, first, row, channel, in_bounds, conv_channel, conv_tap, kept,
    TAPS: tl.constexpr,
):  # fmt: skip
    """Row `place` of the concatenation of the history and the step's rows; the history is zeros unless
    `kept`."""
    x = tl.zeros(channel.shape, dtype=tl.float32)
    if place >= TAPS:
        at = qkv_ptr + (first + place - TAPS).to(tl.int64) * row + channel
        x = tl.load(at, mask=in_bounds, other=0.0).to(tl.float32)
    elif kept:
        x = tl.load(conv_ptr + channel * conv_channel + place * conv_tap, mask=in_bounds, other=0.0)
    return x


@triton.jit(do_not_specialize=["sequences"])
def _convolve(  # type: ignore[no-untyped-def]
    qkv_ptr, weight_ptr, conv_ptr, slot_ptr, start_ptr, len_ptr, mixed_ptr, sequences,
    row, conv_slot, conv_channel, conv_tap,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (t, i): channels i * BLOCK and on of token t, after convolution and SiLU, in float32."""
    token = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_bounds = channel < CHANNELS
    # In a decode token t is that of sequence t. Otherwise a binary search finds the sequence.
    low = tl.minimum(token, sequences - 1)
    found = (tl.load(start_ptr + low) <= token) & (tl.load(start_ptr + low + 1) > token)
    high = tl.where(found, low, sequences)
    low = tl.where(found, low, 0)
    while low < high:
        middle = (low + high) // 2
        behind = tl.load(start_ptr + middle + 1) <= token
        low = tl.where(behind, middle + 1, low)
        high = tl.where(behind, high, middle)
    first = tl.load(start_ptr + low)
    kept = tl.load(len_ptr + low) > tl.load(start_ptr + low + 1) - first
    conv_at = conv_ptr + tl.load(slot_ptr + low) * conv_slot
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for tap in tl.static_range(WIDTH):
        x = _taken(
            qkv_ptr, conv_at, token - first + tap, first, row, channel, in_bounds, conv_channel, conv_tap,
            kept, WIDTH - 1,
        )  # fmt: skip
        total += x * tl.load(weight_ptr + tap * CHANNELS + channel, mask=in_bounds, other=0.0)
    mixed = total * tl.sigmoid(total)
    tl.store(mixed_ptr + token.to(tl.int64) * CHANNELS + channel, mixed, mask=in_bounds)


@triton.jit
def _store_history(  # type: ignore[no-untyped-def]
    qkv_ptr, conv_ptr, count, first, row, channel, in_bounds, conv_channel, conv_tap, kept,
    TAPS: tl.constexpr,
):  # fmt: skip
    """Write the last TAPS rows to the history, in ascending order, so that no number is read after it was
    overwritten."""
    for tap in tl.static_range(TAPS):
        x = _taken(
            qkv_ptr, conv_ptr, count + tap, first, row, channel, in_bounds, conv_channel, conv_tap, kept, TAPS
        )  # fmt: skip
        tl.store(conv_ptr + channel * conv_channel + tap * conv_tap, x, mask=in_bounds)


@triton.jit
def store_histories(  # type: ignore[no-untyped-def]
    qkv_ptr, conv_ptr, count, first, row, values, in_value, queries, in_key, conv_channel, conv_tap, kept,
    keys, KEYS: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Write the last TAPS rows of the channels `values`, and if `keys` those of a head's queries and keys."""
    _store_history(
        qkv_ptr, conv_ptr, count, first, row, values, in_value, conv_channel, conv_tap, kept, TAPS
    )  # fmt: skip
    if keys:
        for part in tl.static_range(2):
            _store_history(
                qkv_ptr, conv_ptr, count, first, row, part * KEYS + queries, in_key,
                conv_channel, conv_tap, kept, TAPS,
            )  # fmt: skip


@triton.jit
def _recur(  # type: ignore[no-untyped-def]
    qkv_ptr, mixed_ptr, b_ptr, a_ptr, a_log_ptr, dt_bias_ptr, conv_ptr, recurrent_ptr,
    slot_ptr, start_ptr, len_ptr, out_ptr,
    row, b_row, a_row, conv_slot, conv_channel, conv_tap, recurrent_slot, eps, scale,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    TAPS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
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
        rate = tl.exp(tl.load(a_log_ptr + head))
        shift = tl.load(dt_bias_ptr + head)
        token = first.to(tl.int64)
        for _ in range(count):
            at = mixed_ptr + token * CHANNELS
            q = tl.load(at + queries, mask=in_key, other=0.0)
            k = tl.load(at + KEYS + queries, mask=in_key, other=0.0)
            v = tl.load(at + values, mask=in_value, other=0.0)
            a = tl.load(a_ptr + token * a_row + head).to(tl.float32) + shift
            b = tl.load(b_ptr + token * b_row + head).to(tl.float32)
            softplus = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
            q = q * (tl.rsqrt(tl.sum(q * q, axis=0) + eps) * scale)
            k = k * tl.rsqrt(tl.sum(k * k, axis=0) + eps)
            state = state * tl.exp(-rate * softplus)
            step = tl.sigmoid(b) * (v - tl.sum(state * k[:, None], axis=0))
            state += k[:, None] * step[None, :]
            result = tl.sum(state * q[:, None], axis=0)
            to = out_ptr + (token * HEADS + head) * VALUE_DIM + value
            tl.store(to, result.to(out_ptr.dtype.element_ty), mask=in_value)
            token += 1
        tl.store(state_at, state, mask=in_state)
        store_histories(
            qkv_ptr, conv_ptr + slot * conv_slot, count, first, row, values, in_value, queries, in_key,
            conv_channel, conv_tap, kept, (block == 0) & (head % GROUP == 0), KEYS, TAPS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _gate(  # type: ignore[no-untyped-def]
    x_ptr, gate_ptr, weight_ptr, out_ptr, rows, heads, x_token, gate_token, out_token, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Program i: rows i * ROWS and on, row r being head r % heads of token r // heads."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head = (row // heads).to(tl.int64)[:, None], (row % heads)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    in_bounds = (row < rows)[:, None] & (column < SIZE)
    within = head * SIZE + column
    x = tl.load(x_ptr + token * x_token + within, mask=in_bounds, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + token * gate_token + within, mask=in_bounds, other=0.0).to(tl.float32)
    factor = tl.sigmoid(gate)
    if NORM:
        weight = tl.load(weight_ptr + column, mask=column < SIZE, other=0.0).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x, axis=1) / SIZE + eps)[:, None] * weight
        factor = factor * gate
    y = (x * factor).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * out_token + within, y, mask=in_bounds)


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
    """As `reference.gated_delta.gated_delta_rule`; float16 as well."""
    check_device(qkv)
    sizes, out = check_gated_delta(
        qkv, b, a, weights, conv, recurrent, slots, query_starts, kv_lens, out, dtypes=ALL_DTYPES
    )
    if not sizes.tokens:
        return out
    mixed = convolve(qkv, weights, conv, slots, query_starts, kv_lens, sizes)
    _recur[(triton.cdiv(sizes.value_dim, _COLUMNS), sizes.heads, len(slots))](
        qkv, mixed, b, a, weights.a_log, weights.dt_bias, conv, recurrent,
        slots, query_starts, kv_lens, out,
        qkv.stride(0), b.stride(0), a.stride(0), *conv.stride(), recurrent.stride(0),
        L2_EPS, sizes.key_dim**-0.5,
        KEY_HEADS=sizes.key_heads, HEADS=sizes.heads, KEY_DIM=sizes.key_dim, VALUE_DIM=sizes.value_dim,
        TAPS=sizes.width - 1, BLOCK_K=padded(sizes.key_dim), BLOCK_V=_COLUMNS, num_warps=1,
        enable_fp_fusion=True,
    )  # fmt: skip
    return out


def convolve(
    qkv: Tensor,
    weights: DeltaWeights,
    conv: Tensor,
    slots: Tensor,
    query_starts: Tensor,
    kv_lens: Tensor,
    sizes: DeltaSizes,
) -> Tensor:
    """Queries, keys and values after convolution and SiLU: like qkv, contiguous float32."""
    mixed = torch.empty(qkv.shape, dtype=torch.float32, device=qkv.device)
    _convolve[(sizes.tokens, triton.cdiv(sizes.channels, _CHANNELS))](
        qkv, weights.conv, conv, slots, query_starts, kv_lens, mixed, len(slots),
        qkv.stride(0), *conv.stride(),
        CHANNELS=sizes.channels, WIDTH=sizes.width, BLOCK=_CHANNELS, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return mixed


def output_gate(
    x: Tensor, gate: Tensor, *, norm: tuple[Tensor, float] | None = None, out: Tensor | None = None
) -> Tensor:
    """As `reference.gated_delta.output_gate`; float16 as well."""
    check_device(x)
    out = check_output_gate(x, gate, norm, out, dtypes=ALL_DTYPES)
    tokens, heads, size = x.shape
    weight, eps = norm or (x, 0.0)
    block = padded(size)
    share = max(1, 2048 // block)
    _gate[(triton.cdiv(tokens * heads, share),)](
        x, gate, weight, out, tokens * heads, heads, x.stride(0), gate.stride(0), out.stride(0), eps,
        SIZE=size, BLOCK=block, ROWS=share, NORM=norm is not None,
        num_warps=warps(block * share, x.element_size()), enable_fp_fusion=False,
    )  # fmt: skip
    return out
