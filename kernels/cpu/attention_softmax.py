"""The online softmax of a tile: weights of a block of scores, the merge of blocks, and the output.

The softmax state of a set of blocks is a maximum, a sum of weights and weighted values for each row. Its
layout in memory: `attention_records.partial_bytes`.
"""

from __future__ import annotations

import numpy as np

from ramify.kernels.cpu.attention_loops import PADDED_ROWS
from ramify.kernels.cpu.attention_records import BLOCK, SCORE_ROW
from ramify.kernels.cpu.codegen import simd as vl
from ramify.kernels.cpu.codegen.compiler import part
from ramify.kernels.cpu.codegen.simd import BYTES, LANES, LOG2_E

NO_SCORE = np.float32(-3e38)
"""The maximum of an empty set of scores: finite, so that its difference with itself is 0, not NaN."""


@part
def softmax_rows(frame, item, segment, start, count, scores, scales, block):  # type: ignore[no-untyped-def]
    """Turn scores into weights 2**(score - maximum), in place; write the maxima and sums to `block`.

    With `frame.rounded` the weights become bfloat16, and the sums are sums of rounded weights. For int8 pages
    scores are multiplied by the keys' `scales`, and weights, after they are summed, by the values' scales
    behind these.
    """
    maxima = block
    sums = block + 4 * vl.round_up(segment.queries * frame.group, PADDED_ROWS)
    row = scores
    for query in range(segment.first, segment.first + segment.queries):
        position = vl.read_i64(item.queries_at + 16 * query + 8)
        high = min(count, position + 1 - start)
        low = 0
        if frame.window > 0:
            low = max(0, position - frame.window + 1 - start)
        for _ in range(frame.group):
            if frame.rounded and not frame.capped and low == 0 and high == BLOCK:
                top, weight = _softmax_whole_row(frame, row, scales)
            else:
                top, weight = _softmax_row(frame, row, scales, count, low, high)
            vl.write_f32(maxima, top)
            vl.write_f32(sums, weight)
            maxima += 4
            sums += 4
            row += SCORE_ROW


@part
def _score(frame, row, scales, column, scale):  # type: ignore[no-untyped-def]
    """The scores of the positions from `column` on, times the keys' scales of int8 pages and the factor."""
    x = vl.load(row + 4 * column)
    if frame.int8:
        x = vl.mul(x, vl.load(scales + 4 * column))
    return vl.mul(x, scale) if frame.dots else x


@part
def _store_weights(frame, row, scales, column, x):  # type: ignore[no-untyped-def]
    """Write weights, times the values' scales of int8 pages, and return what the sum of weights adds."""
    weight = x
    if frame.int8:
        weight = vl.mul(x, vl.load(scales + 4 * (BLOCK + column)))
    if frame.rounded:
        weight = vl.store_rounded(row + 2 * column, weight)
    else:
        vl.store(row + 4 * column, weight)
    return x if frame.int8 else weight


@part
def _softmax_whole_row(frame, row, scales):  # type: ignore[no-untyped-def]
    """`_softmax_row`, with the same bits, if all positions of the block are visible, weights are rounded and
    scores have no cap: the case of most rows of a prefill."""
    scale = vl.splat_f32(frame.query_factor)
    best = _score(frame, row, scales, 0, scale)
    for column in range(LANES, BLOCK, LANES):
        best = vl.maximum(best, _score(frame, row, scales, column, scale))
    top = vl.max_lanes(best)
    shift = vl.broadcast(top)
    total = vl.splat_f32(0.0)
    for column in range(0, BLOCK, LANES):
        x = vl.exp2(vl.sub(_score(frame, row, scales, column, scale), shift))
        total = vl.add(total, _store_weights(frame, row, scales, column, x))
    return top, vl.sum_lanes(total)


@part
def _softmax_row(frame, row, scales, count, low, high):  # type: ignore[no-untyped-def]
    if low >= high:
        for column in range(0, count, LANES):
            vl.store(row + 4 * column, vl.splat_f32(0.0))
        return NO_SCORE, np.float32(0.0)
    scale, factor = vl.splat_f32(frame.query_factor), vl.splat_f32(frame.score_factor)
    best = vl.splat_f32(-np.inf)
    for column in range(0, count, LANES):
        x = _score(frame, row, scales, column, scale)
        if frame.capped:
            x = vl.mul(vl.tanh(x), factor)
        x = vl.lanes_between(x, low - column, high - column)
        vl.store(row + 4 * column, x)
        best = vl.maximum(best, x)
    top = vl.max_lanes(best)
    shift = vl.broadcast(top)
    total = vl.splat_f32(0.0)
    for column in range(0, count, LANES):
        x = vl.exp2(vl.sub(vl.load(row + 4 * column), shift))
        total = vl.add(total, _store_weights(frame, row, scales, column, x))
    return top, vl.sum_lanes(total)


@part
def clear(frame, item, total):  # type: ignore[no-untyped-def]
    """Set `total` to the softmax state before the first block: the state of the sinks, or the empty state."""
    rows = item.queries * frame.group
    padded = vl.round_up(rows, PADDED_ROWS)
    for row in range(rows):
        top, weight = NO_SCORE, np.float32(0.0)
        if frame.sinks:
            head = item.kv_head * frame.group + row % frame.group
            top, weight = vl.read_f32(frame.sinks + 4 * head) * np.float32(LOG2_E), np.float32(1.0)
        vl.write_f32(total + 4 * row, top)
        vl.write_f32(total + 4 * (padded + row), weight)
    values = total + vl.round_up(8 * padded, 64)
    for at in range(values, values + rows * frame.value_row, BYTES):
        vl.store(at, vl.splat_f32(0.0))


@part
def merge(frame, block, rows, total, room, first):  # type: ignore[no-untyped-def]
    """Merge the state of a block, which has `rows` rows, into rows ``[first, first + rows)`` of `total`,
    which has `room` rows."""
    padded, room = vl.round_up(rows, PADDED_ROWS), vl.round_up(room, PADDED_ROWS)
    source = block + vl.round_up(8 * padded, 64)
    target = total + vl.round_up(8 * room, 64) + first * frame.value_row
    tops, weights = total + 4 * first, total + 4 * (room + first)
    used = 4 * frame.dim
    for row in range(rows):
        at = 4 * row
        old, new = vl.read_f32(tops + at), vl.read_f32(block + at)
        top = old if old > new else new
        keep, take = vl.exp2(vl.broadcast(old - top)), vl.exp2(vl.broadcast(new - top))
        vl.write_f32(tops + at, top)
        old_sum = vl.broadcast(vl.read_f32(weights + at))
        new_sum = vl.broadcast(vl.read_f32(block + 4 * padded + at))
        vl.write_f32(weights + at, vl.first_lane(vl.fma(old_sum, keep, vl.mul(new_sum, take))))
        for d in range(0, used, BYTES):
            vl.store(target + d, vl.fma(vl.load(target + d), keep, vl.mul(vl.load(source + d), take)))
        source += frame.value_row
        target += frame.value_row


@part
def finish(frame, item, total):  # type: ignore[no-untyped-def]
    """Divide by the sums and write the tile's output."""
    rows = item.queries * frame.group
    padded = vl.round_up(rows, PADDED_ROWS)
    values = total + vl.round_up(8 * padded, 64)
    sums = total + 4 * padded
    wide = frame.dim - frame.dim % LANES
    size = 2 if frame.bf16 else 4
    for query in range(item.queries):
        to = frame.out + vl.read_i64(item.queries_at + 16 * query) * frame.out_token
        to += item.kv_head * frame.group * frame.dim * size
        for _ in range(frame.group):
            weight = vl.read_f32(sums)
            for d in range(0, wide, LANES):
                vl.store_as(to + size * d, vl.div(vl.load(values + 4 * d), vl.broadcast(weight)), frame.bf16)
            for d in range(wide, frame.dim):
                vl.write_as(to + size * d, vl.read_f32(values + 4 * d) / weight, frame.bf16)
            sums += 4
            values += frame.value_row
            to += frame.dim * size
