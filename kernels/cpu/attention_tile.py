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
from ramify.kernels.cpu.codegen.compiler import carray, part
from ramify.kernels.cpu.codegen.dots import DOTS
from ramify.kernels.cpu.codegen.simd import (
    BYTES,
    LANES,
    add,
    as_pointer,
    bf16_at,
    broadcast,
    div,
    exp2,
    f32_at,
    first_lane,
    fma,
    i32_at,
    i64_at,
    lanes_between,
    load,
    load_bf16,
    max_lanes,
    maximum,
    mul,
    set_bf16,
    set_f32,
    set_i64,
    splat_f32,
    store,
    store_bf16,
    sub,
    sum_lanes,
    tanh,
)
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
def up(value, unit):  # type: ignore[no-untyped-def]
    """`value` rounded up to a multiple of `unit`."""
    return (value + unit - 1) // unit * unit


@part
def partial_bytes(frame, rows):  # type: ignore[no-untyped-def]
    """Of one block's result: the rows' maxima and sums, then their weighted values."""
    rows = up(rows, TILE_ROWS)
    return up(8 * rows, 64) + rows * frame.value_row


@part
def scratch_bytes(frame):  # type: ignore[no-untyped-def]
    queries = up(4 * frame.rows * frame.dim, 64)
    keys = frame.dim * _SCORE_ROW
    values = BLOCK * frame.value_row
    results = 2 * partial_bytes(frame, frame.rows)
    return queries + frame.rows * _SCORE_ROW + keys + values + 16 * BLOCK + results


@part
def attend(frame, item, scratch):  # type: ignore[no-untyped-def]
    rows = item.queries * frame.group
    queries = scratch
    scores = queries + up(4 * frame.rows * frame.dim, 64)
    keys = scores + frame.rows * _SCORE_ROW
    values = keys + frame.dim * _SCORE_ROW
    here = values + BLOCK * frame.value_row
    there = here + 8 * BLOCK
    block = there + 8 * BLOCK
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
    segments = carray(as_pointer(item.segments), item.segment_count, SEGMENT)
    _locate(frame, segments[0], segments[0].begin, there)
    for index in range(item.segment_count):
        segment = segments[index]
        first, rows = segment.first * frame.group, segment.queries * frame.group
        mine = queries + first * query_row
        for at in range(segment.begin, segment.end):
            here, there = there, here
            start = at * BLOCK
            count = min(BLOCK, segment.high - start)
            if at + 1 < segment.end:
                _locate(frame, segment, at + 1, there)
            elif index + 1 < item.segment_count:
                _locate(frame, segments[index + 1], segments[index + 1].begin, there)
            else:
                there = here
            _copy_keys(frame, frame.k + head, here, there, count, keys)
            if frame.dots:
                pairs = frame.dim // 2
                multiply_pairs(mine, query_row, keys, _SCORE_ROW, scores, _SCORE_ROW, rows, pairs, count)
            else:
                multiply(mine, query_row, keys, _SCORE_ROW, scores, _SCORE_ROW, rows, frame.dim, count)
            _softmax_rows(frame, item, segment, start, count, scores, block)
            weighted = block + up(8 * up(rows, TILE_ROWS), 64)
            if rows <= IN_PLACE_ROWS and frame.dim % PANEL == 0:
                multiply_in_place(
                    scores,
                    _SCORE_ROW,
                    frame.v + head,
                    here,
                    there,
                    frame.bf16 != 0,
                    weighted,
                    value_row,
                    rows,
                    count,
                    frame.dim,
                )
            else:
                _copy_values(frame, frame.v + head, here, count, values)
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
            at = frame.q + i64_at(item.queries_at + 16 * query) * frame.q_token + item.kv_head * size
            copy_bytes(to, at, size)
            to += size
        for at in range(to, queries + 2 * frame.dim * up(item.queries * frame.group, TILE_ROWS), BYTES):
            store(at, splat_f32(0.0))
        return
    factor = np.float32(frame.query_factor)
    wide = frame.dim - frame.dim % LANES
    row_bytes = 4 * frame.dim
    size = 2 if frame.bf16 else 4
    to = queries
    for query in range(item.queries):
        at = (
            frame.q
            + i64_at(item.queries_at + 16 * query) * frame.q_token
            + item.kv_head * frame.group * frame.dim * size
        )
        for _ in range(frame.group):
            for d in range(0, wide, LANES):
                x = load_bf16(at + 2 * d) if frame.bf16 else load(at + 4 * d)
                store(to + 4 * d, mul(x, broadcast(factor)))
            for d in range(wide, frame.dim):
                x = bf16_at(at + 2 * d) if frame.bf16 else f32_at(at + 4 * d)
                set_f32(to + 4 * d, x * factor)
            at += frame.dim * size
            to += row_bytes
    if item.queries * frame.group % TILE_ROWS == TILE_ROWS - 1:
        for d in range(frame.dim):
            set_f32(to + 4 * d, np.float32(0.0))


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
    row = i32_at(table + 4 * page) * page_bytes + slot * row_bytes
    to = offsets
    for _ in range(start, first):
        set_i64(to, row)
        to += 8
    left = last - first + 1
    while left > 0:
        run = min(left, page_size - slot)
        row = i32_at(table + 4 * page) * page_bytes + slot * row_bytes
        for _ in range(run):
            set_i64(to, row)
            to += 8
            row += row_bytes
        left -= run
        page += 1
        slot = 0
    while to < offsets + 8 * BLOCK:
        set_i64(to, row - row_bytes)
        to += 8


@part
def _copy_keys(frame, pool, here, there, count, keys):  # type: ignore[no-untyped-def]
    """Keys as (dim, BLOCK) float32, so that scores of neighbouring positions share a vector; for dots as
    (dim / 2, BLOCK) pairs.

    Meanwhile ask memory for the next block, a page of which the processor's own prefetcher cannot guess.
    """
    dim, bf16 = frame.dim, frame.bf16 != 0
    for index in range(0, count, LANES):
        at = here + 8 * index
        to = keys + 4 * index
        ahead = there + 8 * index
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
                row = pool + i64_at(at + 8 * lane)
                x = bf16_at(row + 2 * d) if bf16 else f32_at(row + 4 * d)
                set_f32(to + d * _SCORE_ROW + 4 * lane, x)
            d += 1


@part
def _copy_values(frame, pool, here, count, values):  # type: ignore[no-untyped-def]
    """Values as (BLOCK, dim) float32."""
    dim, bf16, value_row = frame.dim, frame.bf16 != 0, frame.value_row
    wide, panels = dim - dim % LANES, dim - dim % PANEL
    to = values
    for index in range(count):
        row = pool + i64_at(here + 8 * index)
        if bf16:
            for d in range(0, panels, PANEL):  # unrolled by the compiler
                for part in range(d, d + PANEL, LANES):
                    store(to + 4 * part, load_bf16(row + 2 * part))
            for d in range(panels, wide, LANES):
                store(to + 4 * d, load_bf16(row + 2 * d))
            for d in range(wide, dim):
                set_f32(to + 4 * d, bf16_at(row + 2 * d))
        else:
            for d in range(0, panels, PANEL):
                for part in range(d, d + PANEL, LANES):
                    store(to + 4 * part, load(row + 4 * part))
            for d in range(panels, wide, LANES):
                store(to + 4 * d, load(row + 4 * d))
            for d in range(wide, dim):
                set_f32(to + 4 * d, f32_at(row + 4 * d))
        to += value_row


@part
def _softmax_rows(frame, item, segment, start, count, scores, block):  # type: ignore[no-untyped-def]
    """Scores to weights 2**(score - maximum), in place; maxima and sums go to `block`."""
    maxima = block
    sums = block + 4 * up(segment.queries * frame.group, TILE_ROWS)
    row = scores
    for query in range(segment.first, segment.first + segment.queries):
        position = i64_at(item.queries_at + 16 * query + 8)
        high = min(count, position + 1 - start)
        low = 0
        if frame.window > 0:
            low = max(0, position - frame.window + 1 - start)
        for _ in range(frame.group):
            top, weight = _softmax_row(frame, row, count, low, high)
            set_f32(maxima, top)
            set_f32(sums, weight)
            maxima += 4
            sums += 4
            row += _SCORE_ROW


@part
def _softmax_row(frame, row, count, low, high):  # type: ignore[no-untyped-def]
    if low >= high:
        for column in range(0, count, LANES):
            store(row + 4 * column, splat_f32(0.0))
        return NO_SCORE, np.float32(0.0)
    scale, factor = splat_f32(frame.query_factor), splat_f32(frame.score_factor)
    best = splat_f32(-np.inf)
    for column in range(0, count, LANES):
        x = load(row + 4 * column)
        if frame.dots:
            x = mul(x, scale)
        if frame.capped:
            x = mul(tanh(x), factor)
        x = lanes_between(x, low - column, high - column)
        store(row + 4 * column, x)
        best = maximum(best, x)
    top = max_lanes(best)
    shift = broadcast(top)
    total = splat_f32(0.0)
    for column in range(0, count, LANES):
        x = exp2(sub(load(row + 4 * column), shift))
        store(row + 4 * column, x)
        total = add(total, x)
    return top, sum_lanes(total)


@part
def clear(frame, total, rows):  # type: ignore[no-untyped-def]
    """Make `total` the result of no blocks."""
    padded = up(rows, TILE_ROWS)
    for row in range(rows):
        set_f32(total + 4 * row, NO_SCORE)
        set_f32(total + 4 * (padded + row), np.float32(0.0))
    values = total + up(8 * padded, 64)
    for at in range(values, values + rows * frame.value_row, BYTES):
        store(at, splat_f32(0.0))


@part
def merge(frame, block, rows, total, room, first):  # type: ignore[no-untyped-def]
    """Fold one block's result of `rows` rows into `total`, a result of `room` rows, from row `first` on.

    Both are laid out as `partial_bytes` says.
    """
    padded, room = up(rows, TILE_ROWS), up(room, TILE_ROWS)
    source = block + up(8 * padded, 64)
    target = total + up(8 * room, 64) + first * frame.value_row
    tops, weights = total + 4 * first, total + 4 * (room + first)
    used = 4 * frame.dim
    for row in range(rows):
        at = 4 * row
        old, new = f32_at(tops + at), f32_at(block + at)
        top = old if old > new else new
        keep, take = exp2(broadcast(old - top)), exp2(broadcast(new - top))
        set_f32(tops + at, top)
        old_sum, new_sum = broadcast(f32_at(weights + at)), broadcast(f32_at(block + 4 * padded + at))
        set_f32(weights + at, first_lane(fma(old_sum, keep, mul(new_sum, take))))
        for d in range(0, used, BYTES):
            store(target + d, fma(load(target + d), keep, mul(load(source + d), take)))
        source += frame.value_row
        target += frame.value_row


@part
def finish(frame, item, total):  # type: ignore[no-untyped-def]
    """Divide by the sums and write the tile's output."""
    rows = item.queries * frame.group
    padded = up(rows, TILE_ROWS)
    values = total + up(8 * padded, 64)
    sums = total + 4 * padded
    wide = frame.dim - frame.dim % LANES
    size = 2 if frame.bf16 else 4
    for query in range(item.queries):
        to = (
            frame.out
            + i64_at(item.queries_at + 16 * query) * frame.out_token
            + item.kv_head * frame.group * frame.dim * size
        )
        for _ in range(frame.group):
            weight = f32_at(sums)
            for d in range(0, wide, LANES):
                x = div(load(values + 4 * d), broadcast(weight))
                if frame.bf16:
                    store_bf16(to + 2 * d, x)
                else:
                    store(to + 4 * d, x)
            for d in range(wide, frame.dim):
                x = f32_at(values + 4 * d) / weight
                if frame.bf16:
                    set_bf16(to + 2 * d, x)
                else:
                    set_f32(to + 4 * d, x)
            sums += 4
            values += frame.value_row
            to += frame.dim * size


@part
def dots_of(bf16, dim):  # type: ignore[no-untyped-def]
    """Whether scores are computed by dots."""
    return bf16 != 0 and DOTS and dim % (2 * LANES) == 0


assert PANEL % LANES == 0
assert BLOCK % PANEL == 0
