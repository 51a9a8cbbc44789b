"""One work item of paged attention: a tile of query rows, one KV head, and segments of blocks to read.

All functions run inside numba kernels. Addresses are int64 in bytes. `frame`, `item` and `segment` are
records of `attention_records.py`. See `attention.py` for the algorithm.
"""

from __future__ import annotations

import numpy as np

from ramify.kernels.cpu.attention_amx import (
    AMX_ROWS,
    FEW_ROWS,
    TILES,
    configure_tiles,
    key_code_tiles,
    key_tiles,
    turn_code_scores,
    turn_scores,
    value_tiles,
)
from ramify.kernels.cpu.attention_int8 import (
    factors_of,
    read_scales,
    score_codes,
    split_queries,
    turn_split_queries,
    turned_of,
)
from ramify.kernels.cpu.attention_loops import (
    PADDED_ROWS,
    PANEL,
    TILE_ROWS,
    multiply,
    multiply_in_place,
    multiply_pairs,
    pair_codes,
    pair_rows,
    transpose_bf16,
    transpose_bf16_pairs,
    transpose_f32,
    transpose_pairs,
    transpose_pairs_alone,
)
from ramify.kernels.cpu.attention_records import BLOCK, SCORE_ROW, SEGMENT, partial_bytes, widened_bytes
from ramify.kernels.cpu.attention_softmax import clear, finish, merge, softmax_rows
from ramify.kernels.cpu.codegen import simd as vl
from ramify.kernels.cpu.codegen.compiler import carray, part
from ramify.kernels.cpu.codegen.functions import copy_bytes
from ramify.kernels.cpu.codegen.simd import BYTES, LANES
from ramify.kernels.cpu.parts.int8_rows import widen_rows

IN_PLACE_ROWS = 8
"""Tiles of at most this many rows (mostly decodes) read values from the pages; larger tiles read a widened
copy."""


@part
def attend(frame, item, later, scratch):  # type: ignore[no-untyped-def]
    """Compute `item`. While its last block is computed, the first block of item `later` is prefetched."""
    rows = item.queries * frame.group
    queries = scratch
    scores = queries + vl.round_up(4 * frame.rows * frame.dim, 64)
    keys = scores + frame.rows * SCORE_ROW
    values = keys + frame.dim * SCORE_ROW
    offsets = values + BLOCK * frame.value_row
    next_offsets = offsets + 8 * BLOCK
    near = next_offsets + 8 * BLOCK
    scales = near + 8 * BLOCK
    wide = scales + 8 * BLOCK
    block = next_offsets + 8 * BLOCK + widened_bytes(frame)
    total = block + partial_bytes(frame, frame.rows)

    _load_queries(frame, item, queries)
    merging = item.partial == 0
    if merging:
        clear(frame, item, total)
    else:
        block = item.partial
    base, later_base = frame.k + item.kv_head * frame.head_bytes, frame.k + later.kv_head * frame.head_bytes
    to_values = frame.v - frame.k
    query_row, value_row = 4 * frame.dim, frame.value_row
    if frame.dots:
        query_row = 2 * frame.dim
    widening = frame.int8 and not (frame.codes and frame.rounded)
    wide_row = frame.dim * (2 if frame.bf16 else 4)
    if widening:
        for index in range(BLOCK):
            vl.write_i64(near + 8 * index, wide + index * wide_row)
    few = False
    if TILES and frame.dots:
        whole = item.segment_count == 1 and frame.page_size % AMX_ROWS == 0
        whole = whole and (not frame.int8 or frame.codes)
        few = whole and frame.rounded != 0 and rows <= FEW_ROWS
        _use_tiles(values, rows if few else AMX_ROWS, frame.codes)
        if few and frame.codes:
            turn_split_queries(frame, queries, rows)
        elif few:
            _turn_queries(frame, queries, rows)
    segments = carray(vl.as_pointer(item.segments), item.segment_count, SEGMENT)
    _locate(frame, segments[0], segments[0].begin, next_offsets, base)
    after = carray(vl.as_pointer(later.segments), 1, SEGMENT)[0]
    for index in range(item.segment_count):
        segment = segments[index]
        first, rows = segment.first * frame.group, segment.queries * frame.group
        mine = queries + first * query_row
        for at in range(segment.begin, segment.end):
            offsets, next_offsets = next_offsets, offsets
            start = at * BLOCK
            count = min(BLOCK, segment.high - start)
            if TILES and frame.dots:
                count = vl.round_up(count, 2 * AMX_ROWS)  # a tile of weights has as many columns
            if at + 1 < segment.end:
                _locate(frame, segment, at + 1, next_offsets, base)
            elif index + 1 < item.segment_count:
                _locate(frame, segments[index + 1], segments[index + 1].begin, next_offsets, base)
            else:
                _locate(frame, after, after.begin, next_offsets, later_base)
            rows_at, later_at, values_at = offsets, next_offsets, to_values
            if frame.int8 and not frame.codes:
                widened = vl.round_up(count, LANES)
                widen_rows(offsets, next_offsets, 0, widened, frame.dim, frame.bf16, wide, scales)
                rows_at, later_at = near, near
            if few:
                _score_few(frame, segment, start, count, base, queries, keys, scores, next_offsets)
            elif frame.codes:
                score_codes(frame, offsets, next_offsets, count, queries, first, rows, keys, scores)
            elif frame.dots:
                _copy_keys(frame, rows_at, later_at, count, keys)
                pairs = frame.dim // 2
                multiply_pairs(
                    mine, query_row, keys, SCORE_ROW, scores, SCORE_ROW, rows, pairs, count, later_at
                )
            else:
                _copy_keys(frame, rows_at, later_at, count, keys)
                multiply(mine, query_row, keys, SCORE_ROW, scores, SCORE_ROW, rows, frame.dim, count, 0)
            if widening:
                widened, at = vl.round_up(count, LANES), scales + 4 * BLOCK
                widen_rows(offsets, next_offsets, to_values, widened, frame.dim, frame.bf16, wide, at)
                rows_at, later_at, values_at = near, near, 0
            if frame.codes:  # only now, as some rows were prefetched shortly before
                read_scales(frame, offsets, to_values, count, scales)
            softmax_rows(frame, item, segment, start, count, scores, scales, block)
            if few:  # in between, as a burst of requests stalls the processor
                _prefetch_rows(frame, next_offsets + 16 * AMX_ROWS)
            depth = (count + 1) // 2 if frame.rounded else count
            weighted = block + vl.round_up(8 * vl.round_up(rows, PADDED_ROWS), 64)
            by_tiles = TILES and frame.rounded
            if rows <= IN_PLACE_ROWS and frame.dim % PANEL == 0 and not by_tiles:
                multiply_in_place(
                    scores,
                    SCORE_ROW,
                    values_at,
                    rows_at,
                    later_at,
                    frame.bf16 != 0,
                    frame.rounded != 0,
                    weighted,
                    value_row,
                    rows,
                    depth,
                    frame.dim,
                )
            else:
                _copy_values(frame, values_at, rows_at, later_at, count, values)
                if few:
                    for column in range(0, 4 * frame.dim, 2 * 64):
                        at = values + column
                        value_tiles(scores, SCORE_ROW, at, value_row, weighted + column, value_row, depth, 0)
                elif frame.rounded:
                    multiply_pairs(
                        scores, SCORE_ROW, values, value_row, weighted, value_row, rows, depth, frame.dim, 0
                    )
                else:
                    multiply(
                        scores, SCORE_ROW, values, value_row, weighted, value_row, rows, depth, frame.dim, 0
                    )
            if few:
                _prefetch_rows(frame, next_offsets + 24 * AMX_ROWS)
            if merging:
                merge(frame, block, rows, total, item.queries * frame.group, first)
            else:
                block += partial_bytes(frame, rows)
    if merging:
        finish(frame, item, total)


@part
def _use_tiles(config, rows, codes):  # type: ignore[no-untyped-def]
    """Configure the AMX tiles, by 64 bytes of memory at `config`: for `multiply_pairs` if `rows` is AMX_ROWS,
    else for `key_tiles`, or with `codes` `key_code_tiles`, and for `value_tiles` of `rows` rows. Fewer rows
    take less time."""
    for at in range(config, config + 64, 8):
        vl.write_i64(at, 0)
    vl.write_i64(config, 1)  # the palette
    # 16 bits for each tile: the bytes of its rows. Then 8 bits for each: its rows.
    vl.write_i64(config + 16, 0x0040004000400040)
    vl.write_i64(config + 24, 0x0040004000400040)
    vl.write_i64(config + 48, 0x1010101010101010)
    if rows < AMX_ROWS:
        vl.write_i64(config + 16, 0x0020004000400040 if codes else 0x0010004000400040)
        vl.write_i64(config + 24, 0x0040004000200020 if codes else 0x0040004000100010)
        vl.write_i64(config + 48, 0x1010101010000000 | rows * 0x010101)
    configure_tiles(config, 0, 0, 0, 0)


@part
def _turn_queries(frame, queries, rows):  # type: ignore[no-untyped-def]
    """Write the transpose of `rows` rows of pairs at `queries` behind them, (pairs, FEW_ROWS)."""
    to = queries + 2 * frame.dim * AMX_ROWS
    for row in range(rows):
        for at in range(0, 2 * frame.dim, 4):
            pair = vl.read_i32(queries + row * 2 * frame.dim + at)
            vl.write_low_i32(to + FEW_ROWS * at + 4 * row, np.int64(pair))


@part
def _prefetch_rows(frame, table):  # type: ignore[no-untyped-def]
    """Prefetch the 16 rows of a page whose addresses are in `table`."""
    first, row_bytes = 0, 2 * frame.dim
    if frame.int8:  # a row ends in the cache line in which the next row begins
        vl.prefetch(vl.read_i64(table))
        first, row_bytes = 64, frame.dim + 64
    for index in range(AMX_ROWS):
        row = vl.read_i64(table + 8 * index)
        for byte in range(first, row_bytes, 64):
            vl.prefetch(row + byte)


@part
def _score_few(frame, segment, start, count, base, queries, spare, scores, ahead):  # type: ignore[no-untyped-def]
    """The scores of the rows that `_turn_queries` or `turn_split_queries` has transposed, for the block at
    `start`. Prefetches the first 32 keys of the next block, whose addresses are in the table `ahead`."""
    chunks, results = spare, spare + 64
    first = max(start, segment.low) // AMX_ROWS * AMX_ROWS
    last = (min(start + BLOCK, segment.high) - 1) // AMX_ROWS * AMX_ROWS
    turned = queries + 2 * frame.dim * AMX_ROWS
    for column in range(0, count, 2 * AMX_ROWS):
        for chunk in range(2):
            position = min(max(start + column + AMX_ROWS * chunk, first), last)
            page = position // frame.page_size
            at = base + vl.read_i32(segment.table + 4 * page) * frame.page_bytes
            vl.write_i64(chunks + 8 * chunk, at + (position - page * frame.page_size) * frame.row_bytes)
        if frame.codes:
            turned, factors = turned_of(frame, queries), factors_of(frame, queries)
            key_code_tiles(chunks, frame.row_bytes, turned, results, frame.dim // 4)
            for chunk in range(2):
                to = scores + 4 * (column + AMX_ROWS * chunk)
                turn_code_scores(results + AMX_ROWS * 8 * FEW_ROWS * chunk, to, SCORE_ROW, factors, 0)
        else:
            key_tiles(chunks, frame.row_bytes, turned, results, frame.dim // 2)
            for chunk in range(2):
                to = scores + 4 * (column + AMX_ROWS * chunk)
                turn_scores(results + AMX_ROWS * 4 * FEW_ROWS * chunk, to, SCORE_ROW, 0, 0)
        _prefetch_rows(frame, ahead + 4 * column)


@part
def _load_queries(frame, item, queries):  # type: ignore[no-untyped-def]
    """Copy the tile's query rows to `queries`: as float32 times the query factor or, for dots, as unchanged
    bfloat16.

    Rows that pad the last pass of a product to six rows are 0.
    """
    if frame.codes:
        split_queries(frame, item, queries)
        return
    if frame.dots:
        size = 2 * frame.group * frame.dim
        to = queries
        for query in range(item.queries):
            at = frame.q + vl.read_i64(item.queries_at + 16 * query) * frame.q_token + item.kv_head * size
            copy_bytes(to, at, size)
            to += size
        end = queries + 2 * frame.dim * vl.round_up(item.queries * frame.group, TILE_ROWS)
        for at in range(to, end, BYTES):
            vl.store(at, vl.splat_f32(0.0))
        return
    factor = np.float32(frame.query_factor)
    wide = frame.dim - frame.dim % LANES
    row_bytes = 4 * frame.dim
    size = 2 if frame.bf16 else 4
    to = queries
    for query in range(item.queries):
        at = frame.q + vl.read_i64(item.queries_at + 16 * query) * frame.q_token
        at += item.kv_head * frame.group * frame.dim * size
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
def _locate(frame, segment, block, offsets, base):  # type: ignore[no-untyped-def]
    """Write to `offsets`, for each position of a block, `base` plus the position's byte offset in the pool.

    A position that no query sees gets the entry of the nearest visible position. An invisible position may
    hold anything, and a weight of 0 times NaN is NaN.
    """
    table, start, low, high = segment.table, block * BLOCK, segment.low, segment.high
    page_size, row_bytes, page_bytes = frame.page_size, frame.row_bytes, frame.page_bytes
    first, last = max(start, low), min(start + BLOCK, high) - 1
    page = first // page_size
    slot = first - page * page_size
    row = vl.read_i32(table + 4 * page) * page_bytes + slot * row_bytes + base
    to = offsets
    for _ in range(start, first):
        vl.write_i64(to, row)
        to += 8
    left = last - first + 1
    while left > 0:
        run = min(left, page_size - slot)
        row = vl.read_i32(table + 4 * page) * page_bytes + slot * row_bytes + base
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
def _copy_keys(frame, offsets, next_offsets, count, keys):  # type: ignore[no-untyped-def]
    """Copy a block's keys as (dim, BLOCK) float32, so that scores of neighbouring positions share a vector;
    for dots as (dim / 2, BLOCK) pairs of bfloat16.

    Prefetches the rows of the next block (`next_offsets`), as the processor cannot predict where they lie.
    """
    dim, bf16 = frame.dim, frame.bf16 != 0
    for index in range(0, count, LANES):
        at = offsets + 8 * index
        to = keys + 4 * index
        ahead = next_offsets + 8 * index
        d = 0
        if frame.dots:
            while d < dim:
                if (
                    0 < d <= dim // 2 and not TILES
                ):  # lines that the product prefetches, to spread the requests
                    transpose_pairs_alone(2 * d, at, ahead, to + d // 2 * SCORE_ROW, SCORE_ROW)
                else:
                    transpose_pairs(2 * d, at, ahead, to + d // 2 * SCORE_ROW, SCORE_ROW)
                d += 2 * LANES
        elif bf16:
            while d + 2 * LANES <= dim:
                transpose_bf16_pairs(2 * d, at, ahead, to + d * SCORE_ROW, SCORE_ROW)
                d += 2 * LANES
            while d + LANES <= dim:
                transpose_bf16(2 * d, at, ahead, to + d * SCORE_ROW, SCORE_ROW)
                d += LANES
        else:
            while d + LANES <= dim:
                transpose_f32(4 * d, at, ahead, to + d * SCORE_ROW, SCORE_ROW)
                d += LANES
        while d < dim:
            for lane in range(LANES):
                row = vl.read_i64(at + 8 * lane)
                x = vl.read_as(row + (2 if bf16 else 4) * d, bf16)
                vl.write_f32(to + d * SCORE_ROW + 4 * lane, x)
            d += 1


@part
def _copy_values(frame, pool, offsets, next_offsets, count, values):  # type: ignore[no-untyped-def]
    """Copy a block's values as (BLOCK, dim) float32; for rounded weights as (BLOCK / 2, dim) pairs of
    bfloat16. With AMX it prefetches the rows of the next block, as `_copy_keys`."""
    if frame.rounded:
        pairs, row_bytes = (count + 1) // 2, 2 * frame.dim
        if frame.codes:
            pair_codes(pool, offsets, next_offsets, values, frame.value_row, pairs, frame.dim, 0)
            return
        pair_rows(pool, offsets, next_offsets, values, frame.value_row, pairs, row_bytes, 0)
        return
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
