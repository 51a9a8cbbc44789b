"""One work item of paged attention: a tile of query rows, one KV head, and segments of blocks to read.

All functions are numba's; addresses are int64 in bytes; `frame`, `item` and `segment` are records of `FRAME`,
`ITEM` and `SEGMENT`. See `attention.py` for the algorithm.
"""

from __future__ import annotations

import numpy as np

from ramify.kernels.cpu.attention_loops import (
    PANEL,
    TILE_ROWS,
    multiply,
    multiply_in_place,
    multiply_pairs,
    transpose_bf16,
    transpose_bf16_pairs,
    transpose_f32,
    transpose_pairs,
)
from ramify.kernels.cpu.codegen import simd as vl
from ramify.kernels.cpu.codegen.compiler import carray, part
from ramify.kernels.cpu.codegen.dots import DOTS
from ramify.kernels.cpu.codegen.simd import BYTES, LANES
from ramify.kernels.cpu.kv_store import copy_bytes

BLOCK = 64
"""Positions that share one softmax. Keys and values take 16 KiB each at 64 dimensions: both fit the L1."""

IN_PLACE_ROWS = 8
"""Up to so many rows (decodes, mostly) use values straight from the pages; more use a widened copy."""

NO_SCORE = np.float32(-3e38)
"""The maximum of no scores: finite, so that it can be subtracted from itself."""

_SCORE_ROW = 4 * BLOCK

FRAME = np.dtype(
    [
        ("q", np.int64),
        ("q_token", np.int64),  # bytes from token to token
        ("k", np.int64),
        ("v", np.int64),
        ("page_bytes", np.int64),
        ("head_bytes", np.int64),
        ("row_bytes", np.int64),
        ("page_size", np.int64),
        ("out", np.int64),
        ("out_token", np.int64),
        ("group", np.int64),  # query heads of one KV head
        ("dim", np.int64),
        ("value_row", np.int64),  # bytes of a row of widened values or of their sums
        ("bf16", np.int64),
        ("dots", np.int64),  # scores by dots of bfloat16 pairs
        ("window", np.int64),
        ("capped", np.int64),
        ("query_factor", np.float64),
        ("score_factor", np.float64),  # applied after the cap
        ("rows", np.int64),  # room for rows in a scratch space
        ("threads", np.int64),
        ("split", np.int64),  # whether items write partial results
        ("cascade_rows", np.int64),  # most rows of a tile of several sequences; 0: there is none
        ("blocks", np.int64),  # that all items read
        ("kv_heads", np.int64),
        ("sequences", np.int64),
        ("starts", np.int64),
        ("lens", np.int64),
        ("table", np.int64),
        ("table_width", np.int64),
        ("order", np.int64),  # the sequences, so that those with a common prefix are adjacent
        ("common", np.int64),  # blocks that each one in that order shares with the one before it
        ("items", np.int64),
        ("item_count", np.int64),
        ("counters", np.int64),  # two: the next item, the next scratch space
        ("scratch", np.int64),
        ("scratch_bytes", np.int64),
    ],
    align=True,
)
"""The arguments of one call, for the threads that work on it."""

ITEM = np.dtype(
    [
        ("queries_at", np.int64),  # token and position of each query
        ("queries", np.int64),
        ("kv_head", np.int64),
        ("segments", np.int64),
        ("segment_count", np.int64),
        ("partial", np.int64),  # where each block's result goes; 0: merge them and finish
    ],
    align=True,
)

SEGMENT = np.dtype(
    [
        ("first", np.int64),  # the first query of the tile that reads these blocks
        ("queries", np.int64),
        ("table", np.int64),  # a row of the page table
        ("begin", np.int64),  # blocks [begin, end)
        ("end", np.int64),
        ("low", np.int64),  # positions [low, high) are seen by some query
        ("high", np.int64),
    ],
    align=True,
)
"""Blocks that some queries of a tile read. Segments of one query are in ascending order."""


@part
def round_up(value, unit):  # type: ignore[no-untyped-def]
    """`value` rounded up to a multiple of `unit`."""
    return (value + unit - 1) // unit * unit


@part
def partial_bytes(frame, rows):  # type: ignore[no-untyped-def]
    """Of one block's result: the rows' maxima and sums, then their weighted values."""
    rows = round_up(rows, TILE_ROWS)
    return round_up(8 * rows, 64) + rows * frame.value_row


@part
def scratch_bytes(frame):  # type: ignore[no-untyped-def]
    queries = round_up(4 * frame.rows * frame.dim, 64)
    keys = frame.dim * _SCORE_ROW
    values = BLOCK * frame.value_row
    results = 2 * partial_bytes(frame, frame.rows)
    return queries + frame.rows * _SCORE_ROW + keys + values + 16 * BLOCK + results


@part
def attend(frame, item, scratch):  # type: ignore[no-untyped-def]
    rows = item.queries * frame.group
    queries = scratch
    scores = queries + round_up(4 * frame.rows * frame.dim, 64)
    keys = scores + frame.rows * _SCORE_ROW
    values = keys + frame.dim * _SCORE_ROW
    offsets = values + BLOCK * frame.value_row
    next_offsets = offsets + 8 * BLOCK
    block = next_offsets + 8 * BLOCK
    total = block + partial_bytes(frame, frame.rows)

    _load_queries(frame, item, queries)
    merging = item.partial == 0
    if merging:
        clear(frame, total, rows)
    else:
        block = item.partial
    head = item.kv_head * frame.head_bytes
    query_row, value_row = 4 * frame.dim, frame.value_row
    if frame.dots:
        query_row = 2 * frame.dim
    segments = carray(vl.as_pointer(item.segments), item.segment_count, SEGMENT)
    _locate(frame, segments[0], segments[0].begin, next_offsets)
    for index in range(item.segment_count):
        segment = segments[index]
        first, rows = segment.first * frame.group, segment.queries * frame.group
        mine = queries + first * query_row
        for at in range(segment.begin, segment.end):
            offsets, next_offsets = next_offsets, offsets
            start = at * BLOCK
            count = min(BLOCK, segment.high - start)
            if at + 1 < segment.end:
                _locate(frame, segment, at + 1, next_offsets)
            elif index + 1 < item.segment_count:
                _locate(frame, segments[index + 1], segments[index + 1].begin, next_offsets)
            else:
                next_offsets = offsets
            _copy_keys(frame, frame.k + head, offsets, next_offsets, count, keys)
            if frame.dots:
                pairs = frame.dim // 2
                multiply_pairs(mine, query_row, keys, _SCORE_ROW, scores, _SCORE_ROW, rows, pairs, count)
            else:
                multiply(mine, query_row, keys, _SCORE_ROW, scores, _SCORE_ROW, rows, frame.dim, count)
            _softmax_rows(frame, item, segment, start, count, scores, block)
            weighted = block + round_up(8 * round_up(rows, TILE_ROWS), 64)
            if rows <= IN_PLACE_ROWS and frame.dim % PANEL == 0:
                multiply_in_place(
                    scores,
                    _SCORE_ROW,
                    frame.v + head,
                    offsets,
                    next_offsets,
                    frame.bf16 != 0,
                    weighted,
                    value_row,
                    rows,
                    count,
                    frame.dim,
                )
            else:
                _copy_values(frame, frame.v + head, offsets, count, values)
                multiply(scores, _SCORE_ROW, values, value_row, weighted, value_row, rows, count, frame.dim)
            if merging:
                merge(frame, block, rows, total, item.queries * frame.group, first)
            else:
                block += partial_bytes(frame, rows)
    if merging:
        finish(frame, item, total)


@part
def _load_queries(frame, item, queries):  # type: ignore[no-untyped-def]
    """The tile's rows as float32 times the query factor, or for dots as they are.

    Padding rows of the last tile of six are 0.
    """
    if frame.dots:
        size = 2 * frame.group * frame.dim
        to = queries
        for query in range(item.queries):
            at = frame.q + vl.read_i64(item.queries_at + 16 * query) * frame.q_token + item.kv_head * size
            copy_bytes(to, at, size)
            to += size
        for at in range(to, queries + 2 * frame.dim * round_up(item.queries * frame.group, TILE_ROWS), BYTES):
            vl.store(at, vl.splat_f32(0.0))
        return
    factor = np.float32(frame.query_factor)
    wide = frame.dim - frame.dim % LANES
    row_bytes = 4 * frame.dim
    size = 2 if frame.bf16 else 4
    to = queries
    for query in range(item.queries):
        at = (
            frame.q
            + vl.read_i64(item.queries_at + 16 * query) * frame.q_token
            + item.kv_head * frame.group * frame.dim * size
        )
        for _ in range(frame.group):
            for d in range(0, wide, LANES):
                vl.store(to + 4 * d, vl.mul(vl.load_as(at + size * d, frame.bf16), vl.broadcast(factor)))
            for d in range(wide, frame.dim):
                vl.write_f32(to + 4 * d, vl.read_as(at + size * d, frame.bf16) * factor)
            at += frame.dim * size
            to += row_bytes
    if item.queries * frame.group % TILE_ROWS == TILE_ROWS - 1:
        for d in range(frame.dim):
            vl.write_f32(to + 4 * d, np.float32(0.0))


@part
def _locate(frame, segment, block, offsets):  # type: ignore[no-untyped-def]
    """Byte offset in its pool of the row of each position of a block.

    A position which no query sees gets the row of the nearest one that is seen: the pages there may hold
    anything, and a weight of 0 times NaN is not 0.
    """
    table, start, low, high = segment.table, block * BLOCK, segment.low, segment.high
    page_size, row_bytes, page_bytes = frame.page_size, frame.row_bytes, frame.page_bytes
    first, last = max(start, low), min(start + BLOCK, high) - 1
    page = first // page_size
    slot = first - page * page_size
    row = vl.read_i32(table + 4 * page) * page_bytes + slot * row_bytes
    to = offsets
    for _ in range(start, first):
        vl.write_i64(to, row)
        to += 8
    left = last - first + 1
    while left > 0:
        run = min(left, page_size - slot)
        row = vl.read_i32(table + 4 * page) * page_bytes + slot * row_bytes
        for _ in range(run):
            vl.write_i64(to, row)
            to += 8
            row += row_bytes
        left -= run
        page += 1
        slot = 0
    while to < offsets + 8 * BLOCK:
        vl.write_i64(to, row - row_bytes)
        to += 8


@part
def _copy_keys(frame, pool, offsets, next_offsets, count, keys):  # type: ignore[no-untyped-def]
    """Keys as (dim, BLOCK) float32, so that scores of neighbouring positions share a vector; for dots as
    (dim / 2, BLOCK) pairs.

    Meanwhile ask memory for the next block, a page of which the processor's own prefetcher cannot guess.
    """
    dim, bf16 = frame.dim, frame.bf16 != 0
    for index in range(0, count, LANES):
        at = offsets + 8 * index
        to = keys + 4 * index
        ahead = next_offsets + 8 * index
        d = 0
        if frame.dots:
            while d < dim:
                transpose_pairs(pool + 2 * d, at, ahead, to + d // 2 * _SCORE_ROW, _SCORE_ROW)
                d += 2 * LANES
        elif bf16:
            while d + 2 * LANES <= dim:
                transpose_bf16_pairs(pool + 2 * d, at, ahead, to + d * _SCORE_ROW, _SCORE_ROW)
                d += 2 * LANES
            while d + LANES <= dim:
                transpose_bf16(pool + 2 * d, at, ahead, to + d * _SCORE_ROW, _SCORE_ROW)
                d += LANES
        else:
            while d + LANES <= dim:
                transpose_f32(pool + 4 * d, at, ahead, to + d * _SCORE_ROW, _SCORE_ROW)
                d += LANES
        while d < dim:
            for lane in range(LANES):
                row = pool + vl.read_i64(at + 8 * lane)
                x = vl.read_as(row + (2 if bf16 else 4) * d, bf16)
                vl.write_f32(to + d * _SCORE_ROW + 4 * lane, x)
            d += 1


@part
def _copy_values(frame, pool, offsets, count, values):  # type: ignore[no-untyped-def]
    """Values as (BLOCK, dim) float32."""
    dim, bf16, value_row = frame.dim, frame.bf16 != 0, frame.value_row
    size = 2 if bf16 else 4
    wide, panels = dim - dim % LANES, dim - dim % PANEL
    to = values
    for index in range(count):
        row = pool + vl.read_i64(offsets + 8 * index)
        for d in range(0, panels, PANEL):  # unrolled by the compiler
            for e in range(d, d + PANEL, LANES):
                vl.store(to + 4 * e, vl.load_as(row + size * e, bf16))
        for d in range(panels, wide, LANES):
            vl.store(to + 4 * d, vl.load_as(row + size * d, bf16))
        for d in range(wide, dim):
            vl.write_f32(to + 4 * d, vl.read_as(row + size * d, bf16))
        to += value_row


@part
def _softmax_rows(frame, item, segment, start, count, scores, block):  # type: ignore[no-untyped-def]
    """Scores to weights 2**(score - maximum), in place; maxima and sums go to `block`."""
    maxima = block
    sums = block + 4 * round_up(segment.queries * frame.group, TILE_ROWS)
    row = scores
    for query in range(segment.first, segment.first + segment.queries):
        position = vl.read_i64(item.queries_at + 16 * query + 8)
        high = min(count, position + 1 - start)
        low = 0
        if frame.window > 0:
            low = max(0, position - frame.window + 1 - start)
        for _ in range(frame.group):
            top, weight = _softmax_row(frame, row, count, low, high)
            vl.write_f32(maxima, top)
            vl.write_f32(sums, weight)
            maxima += 4
            sums += 4
            row += _SCORE_ROW


@part
def _softmax_row(frame, row, count, low, high):  # type: ignore[no-untyped-def]
    if low >= high:
        for column in range(0, count, LANES):
            vl.store(row + 4 * column, vl.splat_f32(0.0))
        return NO_SCORE, np.float32(0.0)
    scale, factor = vl.splat_f32(frame.query_factor), vl.splat_f32(frame.score_factor)
    best = vl.splat_f32(-np.inf)
    for column in range(0, count, LANES):
        x = vl.load(row + 4 * column)
        if frame.dots:
            x = vl.mul(x, scale)
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
        vl.store(row + 4 * column, x)
        total = vl.add(total, x)
    return top, vl.sum_lanes(total)


@part
def clear(frame, total, rows):  # type: ignore[no-untyped-def]
    """Make `total` the result of no blocks."""
    padded = round_up(rows, TILE_ROWS)
    for row in range(rows):
        vl.write_f32(total + 4 * row, NO_SCORE)
        vl.write_f32(total + 4 * (padded + row), np.float32(0.0))
    values = total + round_up(8 * padded, 64)
    for at in range(values, values + rows * frame.value_row, BYTES):
        vl.store(at, vl.splat_f32(0.0))


@part
def merge(frame, block, rows, total, room, first):  # type: ignore[no-untyped-def]
    """Fold one block's result of `rows` rows into `total`, a result of `room` rows, from row `first` on.

    Both are laid out as `partial_bytes` says.
    """
    padded, room = round_up(rows, TILE_ROWS), round_up(room, TILE_ROWS)
    source = block + round_up(8 * padded, 64)
    target = total + round_up(8 * room, 64) + first * frame.value_row
    tops, weights = total + 4 * first, total + 4 * (room + first)
    used = 4 * frame.dim
    for row in range(rows):
        at = 4 * row
        old, new = vl.read_f32(tops + at), vl.read_f32(block + at)
        top = old if old > new else new
        keep, take = vl.exp2(vl.broadcast(old - top)), vl.exp2(vl.broadcast(new - top))
        vl.write_f32(tops + at, top)
        old_sum, new_sum = (
            vl.broadcast(vl.read_f32(weights + at)),
            vl.broadcast(vl.read_f32(block + 4 * padded + at)),
        )
        vl.write_f32(weights + at, vl.first_lane(vl.fma(old_sum, keep, vl.mul(new_sum, take))))
        for d in range(0, used, BYTES):
            vl.store(target + d, vl.fma(vl.load(target + d), keep, vl.mul(vl.load(source + d), take)))
        source += frame.value_row
        target += frame.value_row


@part
def finish(frame, item, total):  # type: ignore[no-untyped-def]
    """Divide by the sums and write the tile's output."""
    rows = item.queries * frame.group
    padded = round_up(rows, TILE_ROWS)
    values = total + round_up(8 * padded, 64)
    sums = total + 4 * padded
    wide = frame.dim - frame.dim % LANES
    size = 2 if frame.bf16 else 4
    for query in range(item.queries):
        to = (
            frame.out
            + vl.read_i64(item.queries_at + 16 * query) * frame.out_token
            + item.kv_head * frame.group * frame.dim * size
        )
        for _ in range(frame.group):
            weight = vl.read_f32(sums)
            for d in range(0, wide, LANES):
                vl.store_as(to + size * d, vl.div(vl.load(values + 4 * d), vl.broadcast(weight)), frame.bf16)
            for d in range(wide, frame.dim):
                vl.write_as(to + size * d, vl.read_f32(values + 4 * d) / weight, frame.bf16)
            sums += 4
            values += frame.value_row
            to += frame.dim * size


@part
def dots_of(bf16, dim):  # type: ignore[no-untyped-def]
    """Whether scores are computed by dots."""
    return bf16 != 0 and DOTS and dim % (2 * LANES) == 0


assert PANEL % LANES == 0
assert BLOCK % PANEL == 0
