"""Scores of int8 keys by AMX tiles, which multiply int8 and sum in int32.

    q  ≈  factor · (256 high + low)                 a query row of bfloat16 as two int8 rows, 16 bits together
    q · k  =  factor · scale · (256 high · codes + low · codes)

The sums are exact, so a score has the same bits in both ways of `attention_amx.py`. Rounding q to 16 bits has
1/256 of the error of rounding keys to codes. Keys are not widened: 16 rows of a page are a tile as they lie,
or 4 neighbouring codes move as one integer.
"""

from __future__ import annotations

import numpy as np

from ramify.kernels.arguments.pages import LEAST
from ramify.kernels.cpu.attention_amx import AMX_ROWS, FEW_ROWS
from ramify.kernels.cpu.attention_loops import multiply_codes, transpose_pairs
from ramify.kernels.cpu.attention_records import SCORE_ROW
from ramify.kernels.cpu.codegen import simd as vl
from ramify.kernels.cpu.codegen.compiler import part
from ramify.kernels.cpu.codegen.simd import LANES

MOST_SPLIT = 127 * 256 + 127
"""The largest number that 256 high + low can be if both are int8."""


@part
def low_rows(frame, queries):  # type: ignore[no-untyped-def]
    """The address of the lower int8 rows of the tile's queries; the higher rows are at `queries`."""
    return queries + frame.rows * frame.dim


@part
def factors_of(frame, queries):  # type: ignore[no-untyped-def]
    """The address of the float32 factors of the tile's query rows."""
    return queries + 2 * frame.rows * frame.dim


@part
def turned_of(frame, queries):  # type: ignore[no-untyped-def]
    """The address of the transposed rows of `turn_split_queries`."""
    return queries + 3 * frame.rows * frame.dim


@part
def split_queries(frame, item, queries):  # type: ignore[no-untyped-def]
    """Split the tile's query rows into int8 rows at `queries`."""
    dim, high, low, factor = frame.dim, queries, low_rows(frame, queries), factors_of(frame, queries)
    zero, half, unit = vl.splat_f32(0.0), vl.splat_f32(0.5), vl.splat_f32(256.0)
    for query in range(item.queries):
        at = frame.q + vl.read_i64(item.queries_at + 16 * query) * frame.q_token
        at += item.kv_head * frame.group * dim * 2
        for _ in range(frame.group):
            best, wrong = zero, zero
            for d in range(0, dim, LANES):
                x = vl.load_bf16(at + 2 * d)
                best = vl.maximum(best, vl.maximum(x, vl.sub(zero, x)))
                wrong = vl.fma(x, zero, wrong)  # a NaN in any lane becomes the factor
            most = vl.max_lanes(best) + vl.sum_lanes(wrong)
            inverse = np.float32(MOST_SPLIT) / most if most >= LEAST else np.float32(0.0)
            for d in range(0, dim, LANES):
                x = vl.nearest(vl.mul(vl.load_bf16(at + 2 * d), vl.broadcast(inverse)))
                upper = vl.nearest(vl.div(vl.add(x, half), unit))  # so that the rest is in [-128, 127]
                vl.store_int8(high + d, upper)
                vl.store_int8(low + d, vl.sub(x, vl.mul(upper, unit)))
            vl.write_f32(factor, most / np.float32(MOST_SPLIT))
            at += 2 * dim
            high += dim
            low += dim
            factor += 4


@part
def turn_split_queries(frame, queries, rows):  # type: ignore[no-untyped-def]
    """Write the transpose of the int8 rows: (dim / 4, 2 FEW_ROWS) of 4 int8, the higher rows first."""
    to, low = turned_of(frame, queries), low_rows(frame, queries)
    for row in range(rows):
        for d in range(0, frame.dim, 4):
            at = to + 2 * FEW_ROWS * d + 4 * row
            vl.write_low_i32(at, np.int64(vl.read_i32(queries + row * frame.dim + d)))
            vl.write_low_i32(at + 4 * FEW_ROWS, np.int64(vl.read_i32(low + row * frame.dim + d)))


@part
def read_scales(frame, offsets, to_values, count, scales):  # type: ignore[no-untyped-def]
    """Write the scales of a block's keys, and behind the scales of BLOCK keys those of its values."""
    for index in range(count):
        at = vl.read_i64(offsets + 8 * index) + frame.dim
        vl.write_f32(scales + 4 * index, vl.read_f32(at))
        vl.write_f32(scales + SCORE_ROW + 4 * index, vl.read_f32(at + to_values))


@part
def score_codes(frame, offsets, next_offsets, count, queries, first, rows, keys, scores):  # type: ignore[no-untyped-def]
    """The scores of `rows` query rows from row `first` on, without the keys' scales. Prefetches the rows of
    the next block."""
    dim, sums = frame.dim, keys + frame.dim // 4 * SCORE_ROW
    for index in range(0, count, LANES):
        at, ahead, to = offsets + 8 * index, next_offsets + 8 * index, keys + 4 * index
        for d in range(0, dim, 4 * LANES):
            transpose_pairs(d, at, ahead, to + d // 4 * SCORE_ROW, SCORE_ROW)
        for row in range(LANES):
            vl.prefetch(vl.read_i64(ahead + 8 * row) + dim)  # a row ends in the next cache line
    high, low = queries + first * dim, low_rows(frame, queries) + first * dim
    factor = factors_of(frame, queries) + 4 * first
    lower = sums + AMX_ROWS * SCORE_ROW
    for start in range(0, rows, AMX_ROWS):
        multiply_codes(
            high + start * dim, dim, keys, SCORE_ROW, sums, SCORE_ROW, AMX_ROWS, dim // 4, count, 0
        )
        multiply_codes(
            low + start * dim, dim, keys, SCORE_ROW, lower, SCORE_ROW, AMX_ROWS, dim // 4, count, 0
        )
        for row in range(min(AMX_ROWS, rows - start)):
            times = vl.broadcast(vl.read_f32(factor + 4 * (start + row)))
            for column in range(row * SCORE_ROW, row * SCORE_ROW + 4 * count, 4 * LANES):
                joined = vl.joined_int32(sums + column, lower + column)
                vl.store(scores + start * SCORE_ROW + column, vl.mul(joined, times))
