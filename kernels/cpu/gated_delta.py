"""The gated delta rule, token by token, with a block of the state's columns in the first-level cache.

    for sequence, key head:                             a work item; threads take items in turn
        for block of 16 tokens:
            q, k, v = silu(convolution(qkv));  decay, beta = gates(a, b)       to scratch memory
            for value head of the key head, two vectors of the state's columns:
                for token: d = beta (v - decay · Sᵀk);  S = decay · S + k dᵀ;  out = Sᵀq

Memory: a slot's state S is (heads, key_dim, value_dim) float32, its convolution state the last width - 1
inputs. A thread's scratch memory has these inputs, a block of tokens and their gates. Decodes are bound by
reading and writing S, prefills by arithmetic.

Columns of a head's state do not depend on each other, so the recurrence runs over the block's tokens for two
vectors of columns at a time: 128 rows of two vectors are 16 KB with AVX-512. One pass over the rows does the
following, where k, q and d are the token's key, query and scaled difference, and k' is the next token's key:

    S[i] ← decay · S[i] + k[i] · d        the update of this token
    sum + S[i] · q[i], sum + S[i] · k'[i]   its result, and the product that the next token begins with

Every number comes from the same operations in the same order, so the bits are the same alone or in a batch,
prefilled whole, in chunks or decoded, and with any number of threads. The chunked form (arXiv 2406.06484) is
not used: its sums depend on where a chunk begins, and here the rule is about 1% of a model's arithmetic.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import types
from torch import Tensor

from ramify.kernels.arguments.gated_delta import L2_EPS, DeltaWeights, check_gated_delta, check_output_gate
from ramify.kernels.cpu.attention import SERIAL_WORK
from ramify.kernels.cpu.codegen import simd as vl
from ramify.kernels.cpu.codegen.compiler import callback, carray, compiled, part
from ramify.kernels.cpu.codegen.functions import run_body
from ramify.kernels.cpu.codegen.simd import LANES, LOG2_E
from ramify.kernels.cpu.parts.norm import inverse_rms
from ramify.kernels.machine.records import Arena, ThreadCall, record

BLOCK = 16
"""Tokens whose inputs are prepared at once: 70 KB of scratch memory for Qwen3.5's heads."""

FRAME = record(
    # Arguments. Names with `_row`, `_slot`, `_channel` or `_tap` are strides in bytes.
    "qkv", "qkv_row", "b", "b_row", "a", "a_row", "bf16",
    "weights", "a_log", "dt_bias",  # of the convolution, and of the gates
    "conv", "conv_slot", "conv_channel", "conv_tap", "recurrent", "recurrent_slot", "slot_count",
    "slots", "starts", "lens", "sequences", "tokens", "key_heads", "heads", "key_dim", "value_dim", "width",
    "out",
    "threads", "team", "body", "arena", "arena_bytes",
    # Set by the call.
    "group", "out_row",  # value heads of a key head; bytes of a row of out
    "counters", "scratch", "scratch_bytes",
)  # fmt: skip
"""The arguments of a call, which its threads share."""
_COUNTER_BYTES = 128


@part
def _sigmoid(x):  # type: ignore[no-untyped-def]
    one = vl.splat_f32(1.0)
    power = vl.minimum(vl.splat_f32(127.0), vl.mul(x, vl.splat_f32(-LOG2_E)))
    return vl.div(one, vl.add(one, vl.exp2(power)))


@part
def _scan(state, row, second, mixed, mixed_row, tokens, key_dim, value, gates, out, out_row, bf16):  # type: ignore[no-untyped-def]
    """Run the recurrence over `tokens` tokens for two vectors of columns, at `state` and `second` bytes
    further.

    row : bytes of a row of the state
    mixed : the queries of the first token, followed by its keys; its values are `value` bytes after its
        queries
    gates : decay and beta of the first token
    """
    keys = mixed + 4 * key_dim
    zero = vl.splat_f32(0.0)
    known, known2 = zero, zero
    for i in range(key_dim):
        k = vl.broadcast(vl.read_f32(keys + 4 * i))
        known = vl.fma(vl.load(state + i * row), k, known)
        known2 = vl.fma(vl.load(state + i * row + second), k, known2)
    for token in range(tokens):
        query = mixed + token * mixed_row
        key = query + 4 * key_dim
        following = key + (mixed_row if token + 1 < tokens else 0)
        decay = vl.broadcast(vl.read_f32(gates + 8 * token))
        beta = vl.broadcast(vl.read_f32(gates + 8 * token + 4))
        step = vl.mul(beta, vl.sub(vl.load(query + value), vl.mul(decay, known)))
        step2 = vl.mul(beta, vl.sub(vl.load(query + value + second), vl.mul(decay, known2)))
        known, known2, result, result2 = zero, zero, zero, zero
        for i in range(key_dim):
            k = vl.broadcast(vl.read_f32(key + 4 * i))
            q = vl.broadcast(vl.read_f32(query + 4 * i))
            n = vl.broadcast(vl.read_f32(following + 4 * i))
            at = state + i * row
            s, s2 = vl.load(at), vl.load(at + second)
            s, s2 = vl.fma(s, decay, vl.mul(k, step)), vl.fma(s2, decay, vl.mul(k, step2))
            vl.store(at, s)
            vl.store(at + second, s2)
            result, result2 = vl.fma(s, q, result), vl.fma(s2, q, result2)
            known, known2 = vl.fma(s, n, known), vl.fma(s2, n, known2)
        to = out + token * out_row
        vl.store_as(to, result, bf16)
        vl.store_as(to + (second // 2 if bf16 else second), result2, bf16)


@part
def _scale_heads(at, row, tokens, dim, factor):  # type: ignore[no-untyped-def]
    """Divide each row of `dim` numbers by its L2 norm, and multiply it by `factor`."""
    for token in range(tokens):
        total = vl.splat_f32(0.0)
        for i in range(0, dim, LANES):
            x = vl.load(at + token * row + 4 * i)
            total = vl.fma(x, x, total)
        scale = vl.broadcast(np.float32(factor / math.sqrt(np.float64(vl.sum_lanes(total)) + L2_EPS)))
        for i in range(0, dim, LANES):
            to = at + token * row + 4 * i
            vl.store(to, vl.mul(vl.load(to), scale))


@part
def _first_channel(frame, key_head, place):  # type: ignore[no-untyped-def]
    """The first column of a key head's queries (place 0), keys (1) or values (2)."""
    if place == 2:
        return (2 * frame.key_heads * frame.key_dim) + key_head * frame.group * frame.value_dim
    return (place * frame.key_heads + key_head) * frame.key_dim


@part
def _item(frame, sequence, key_head, scratch):  # type: ignore[no-untyped-def]
    begin = vl.read_i32(frame.starts + 4 * sequence)
    count = vl.read_i32(frame.starts + 4 * sequence + 4) - begin
    if count == 0:
        return
    fresh = vl.read_i32(frame.lens + 4 * sequence) == count
    slot = vl.read_i64(frame.slots + 8 * sequence)
    key_dim, value_dim, group, taps = frame.key_dim, frame.value_dim, frame.group, frame.width - 1
    channels = key_dim * 2 + group * value_dim
    row = 4 * channels
    raw, gates = scratch, scratch + (taps + 2 * BLOCK) * row
    mixed = raw + (taps + BLOCK) * row
    size = 2 if frame.bf16 else 4
    all_channels = 2 * frame.key_heads * key_dim + frame.key_heads * group * value_dim
    head_bytes = 4 * key_dim * value_dim
    state = frame.recurrent + slot * frame.recurrent_slot + key_head * group * head_bytes
    conv = frame.conv + slot * frame.conv_slot
    if fresh:
        for at in range(state, state + group * head_bytes, 4 * LANES):
            vl.store(at, vl.splat_f32(0.0))
    for place in range(3):
        length = group * value_dim if place == 2 else key_dim
        at = conv + _first_channel(frame, key_head, place) * frame.conv_channel
        for tap in range(taps):
            to = raw + tap * row + 4 * place * key_dim
            for i in range(length):
                number = np.float32(0.0)
                if not fresh:
                    number = vl.read_f32(at + i * frame.conv_channel + tap * frame.conv_tap)
                vl.write_f32(to + 4 * i, number)
    for start in range(0, count, BLOCK):
        tokens = min(BLOCK, count - start)
        first = begin + start
        for place in range(3):
            length = group * value_dim if place == 2 else key_dim
            channel = _first_channel(frame, key_head, place)
            weights = frame.weights + 4 * channel
            for token in range(tokens):
                at = frame.qkv + (first + token) * frame.qkv_row + size * channel
                source = raw + token * row + 4 * place * key_dim
                for i in range(0, length, LANES):
                    newest = vl.load_as(at + size * i, frame.bf16)
                    vl.store(source + taps * row + 4 * i, newest)
                    total = vl.mul(vl.load(source + 4 * i), vl.load(weights + 4 * i))
                    for tap in range(1, taps):
                        weight = vl.load(weights + 4 * (tap * all_channels + i))
                        total = vl.fma(vl.load(source + tap * row + 4 * i), weight, total)
                    total = vl.fma(newest, vl.load(weights + 4 * (taps * all_channels + i)), total)
                    vl.store(mixed + token * row + 4 * (place * key_dim + i), vl.mul(total, _sigmoid(total)))
        _scale_heads(mixed, row, tokens, key_dim, 1.0 / math.sqrt(np.float64(key_dim)))
        _scale_heads(mixed + 4 * key_dim, row, tokens, key_dim, 1.0)
        for inner in range(group):
            head = key_head * group + inner
            rate = -math.exp(np.float64(vl.read_f32(frame.a_log + 4 * head)))
            shift = np.float64(vl.read_f32(frame.dt_bias + 4 * head))
            for token in range(tokens):
                a = vl.read_as(frame.a + (first + token) * frame.a_row + size * head, frame.bf16) + shift
                b = np.float64(vl.read_as(frame.b + (first + token) * frame.b_row + size * head, frame.bf16))
                softplus = max(a, 0.0) + math.log1p(math.exp(-abs(a)))
                vl.write_f32(gates + 8 * token, np.float32(math.exp(rate * softplus)))
                vl.write_f32(gates + 8 * token + 4, np.float32(1.0 / (1.0 + math.exp(-b))))
            for column in range(0, value_dim, 2 * LANES):
                # If a single vector is left, it is computed twice.
                second = 4 * LANES if column + LANES < value_dim else 0
                _scan(
                    state + inner * head_bytes + 4 * column, 4 * value_dim, second,
                    mixed, row, tokens, key_dim, 4 * (2 * key_dim + inner * value_dim + column), gates,
                    frame.out + first * frame.out_row + size * (head * value_dim + column), frame.out_row,
                    frame.bf16,
                )  # fmt: skip
        for at in range(raw, raw + taps * row, 4 * LANES):
            vl.store(at, vl.load(at + tokens * row))
    for place in range(3):
        length = group * value_dim if place == 2 else key_dim
        to = conv + _first_channel(frame, key_head, place) * frame.conv_channel
        for tap in range(taps):
            at = raw + tap * row + 4 * place * key_dim
            for i in range(length):
                vl.write_f32(to + i * frame.conv_channel + tap * frame.conv_tap, vl.read_f32(at + 4 * i))


@callback(types.void(types.voidptr))
def _body(data):  # type: ignore[no-untyped-def]
    frame = carray(data, 1, FRAME)[0]
    scratch = frame.scratch + vl.fetch_increment(frame.counters + 64) * frame.scratch_bytes
    index = vl.fetch_increment(frame.counters)
    while index < frame.sequences * frame.key_heads:
        # The last sequences first: prefills come after decodes, and long items are best started first.
        sequence = frame.sequences - 1 - index // frame.key_heads
        _item(frame, sequence, index % frame.key_heads, scratch)
        index = vl.fetch_increment(frame.counters)


@compiled(types.int64(types.int64))
def run_delta_rule(call_at):  # type: ignore[no-untyped-def]
    """Compute the call that the FRAME at address `call_at` describes.

    Returns 0 when done; n > 0 if the arena must have n bytes; -1 - i if the lengths or the slot of sequence i
    are wrong.
    """
    frame = carray(vl.as_pointer(call_at), 1, FRAME)[0]
    frame.group = frame.heads // frame.key_heads
    row = 4 * (2 * frame.key_dim + frame.group * frame.value_dim)
    frame.scratch_bytes = vl.round_up((frame.width - 1 + 2 * BLOCK) * row + 8 * BLOCK, 64)
    needed = _COUNTER_BYTES + frame.threads * frame.scratch_bytes
    if needed > frame.arena_bytes:
        return needed
    work = 0
    for sequence in range(frame.sequences):
        first = vl.read_i32(frame.starts + 4 * sequence)
        count = vl.read_i32(frame.starts + 4 * sequence + 4) - first
        slot = vl.read_i64(frame.slots + 8 * sequence)
        if first < 0 or count < 0 or first + count > frame.tokens:
            return -1 - sequence
        if vl.read_i32(frame.lens + 4 * sequence) < count or slot < 0 or slot >= frame.slot_count:
            return -1 - sequence
        work += count * frame.heads * frame.key_dim * (frame.value_dim // LANES) * 4
    frame.out_row = frame.heads * frame.value_dim * (2 if frame.bf16 else 4)
    frame.counters, frame.scratch = frame.arena, frame.arena + _COUNTER_BYTES
    vl.write_i64(frame.counters, 0)
    vl.write_i64(frame.counters + 64, 0)
    threads = min(frame.threads, frame.sequences * frame.key_heads)
    run_body(frame, call_at, 1 if work < SERIAL_WORK else threads)
    return 0


GATE = record(
    "x", "x_token", "gate", "gate_token", "out", "out_token", "weight", "weight_bf16",
    "tokens", "heads", "size", "bf16",
    floats=("eps",),
)  # fmt: skip
"""The arguments of `_gate_rows`; `weight` is the address of a norm's weight, or 0 without a norm."""


@compiled(types.int64(types.int64))
def _gate_rows(call_at):  # type: ignore[no-untyped-def]
    call = carray(vl.as_pointer(call_at), 1, GATE)[0]
    size, weight, bf16, weight_bf16 = call.size, call.weight, call.bf16, call.weight_bf16
    bytes_, weight_bytes = 2 if bf16 else 4, 2 if weight_bf16 else 4
    for token in range(call.tokens):
        for head in range(call.heads):
            offset = head * size * bytes_
            at, to = call.x + token * call.x_token + offset, call.out + token * call.out_token + offset
            by = call.gate + token * call.gate_token + offset
            scale = vl.splat_f32(1.0)
            if weight:
                scale = vl.broadcast(inverse_rms(at, size, call.eps, bf16))
            for i in range(0, size, LANES):
                g = vl.load_as(by + bytes_ * i, bf16)
                factor = _sigmoid(g)
                if weight:
                    weighted = vl.mul(scale, vl.load_as(weight + weight_bytes * i, weight_bf16))
                    factor = vl.mul(vl.mul(factor, g), weighted)
                vl.store_as(to + bytes_ * i, vl.mul(vl.load_as(at + bytes_ * i, bf16), factor), bf16)
    return 0


arena = Arena(FRAME, _body.address)
_gate = ThreadCall(GATE)


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
    """As `reference.gated_delta.gated_delta_rule`."""
    sizes, out = check_gated_delta(qkv, b, a, weights, conv, recurrent, slots, query_starts, kv_lens, out)
    call, size = arena.call, qkv.element_size()
    call.qkv, call.qkv_row, call.bf16 = qkv.data_ptr(), qkv.stride(0) * size, size == 2
    call.b, call.b_row = b.data_ptr(), b.stride(0) * size
    call.a, call.a_row = a.data_ptr(), a.stride(0) * size
    call.weights, call.a_log, call.dt_bias = (each.data_ptr() for each in weights)
    call.conv, call.recurrent = conv.data_ptr(), recurrent.data_ptr()
    call.conv_slot, call.conv_channel, call.conv_tap = (4 * stride for stride in conv.stride())
    call.recurrent_slot, call.slot_count = 4 * recurrent.stride(0), len(recurrent)
    call.slots, call.starts, call.lens = slots.data_ptr(), query_starts.data_ptr(), kv_lens.data_ptr()
    call.sequences, call.tokens, call.width = len(slots), sizes.tokens, sizes.width
    call.key_heads, call.heads = sizes.key_heads, sizes.heads
    call.key_dim, call.value_dim = sizes.key_dim, sizes.value_dim
    call.out = out.data_ptr()
    call.threads = torch.get_num_threads()
    wrong = arena.finish(run_delta_rule)
    if wrong:
        raise ValueError(
            f"sequence {-1 - wrong}: query_starts must ascend within the {sizes.tokens} rows of qkv, "
            f"kv_lens count the new tokens, and its slot be one of the {len(recurrent)}."
        )
    return out


def output_gate(
    x: Tensor, gate: Tensor, *, norm: tuple[Tensor, float] | None = None, out: Tensor | None = None
) -> Tensor:
    """As `reference.gated_delta.output_gate`."""
    out = check_output_gate(x, gate, norm, out)
    tokens, heads, size = x.shape
    if size % LANES:
        raise ValueError(f"x is {tuple(x.shape)}; its last axis must be a multiple of {LANES}.")
    call, bytes_ = _gate.call, x.element_size()
    call.x, call.x_token = x.data_ptr(), x.stride(0) * bytes_
    call.gate, call.gate_token = gate.data_ptr(), gate.stride(0) * bytes_
    call.out, call.out_token = out.data_ptr(), out.stride(0) * bytes_
    call.tokens, call.heads, call.size, call.bf16 = tokens, heads, size, bytes_ == 2
    call.weight = 0
    if norm is not None:
        call.weight, call.eps, call.weight_bf16 = norm[0].data_ptr(), norm[1], norm[0].element_size() == 2
    _gate_rows(_gate.call_at)
    return out
