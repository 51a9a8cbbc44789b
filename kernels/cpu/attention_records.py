"""The records of paged attention, and the layout of a thread's scratch memory.

FRAME has the arguments of one call, which its threads share. ITEM is a work item: a tile of query rows and
one KV head. SEGMENT is a range of blocks that queries of a tile read. Addresses and strides are in bytes.
"""

from __future__ import annotations

from ramify.kernels.cpu.attention_amx import CODES, TILES
from ramify.kernels.cpu.attention_loops import PADDED_ROWS, PANEL
from ramify.kernels.cpu.codegen import simd as vl
from ramify.kernels.cpu.codegen.compiler import part
from ramify.kernels.cpu.codegen.dots import DOTS
from ramify.kernels.cpu.codegen.simd import LANES
from ramify.kernels.machine.records import record

BLOCK = 64
"""Positions of a block: one step of the online softmax. At head_dim 64 its keys and its values take 16 KiB
each, so both fit the L1 cache."""

SCORE_ROW = 4 * BLOCK
"""Bytes of a row of scores."""

FRAME = record(
    # Arguments.
    "q", "q_token",  # the address, and bytes from token to token
    "k", "v", "page_bytes", "head_bytes", "row_bytes", "page_size",
    "out", "out_token",
    "tokens",
    "group",  # query heads of one KV head
    "dim",
    "bf16",
    "int8",  # whether pages are int8 rows, each with its scale
    "kv_heads", "sequences", "starts", "lens", "table", "table_width",
    "window", "capped",
    "sinks",  # a float32 for each query head; 0: none
    "cascade",  # whether sequences may share tiles
    "may_tile",  # whether this process may use AMX
    "may_round",  # whether weights may be rounded to bfloat16, to multiply values by dots
    "order",  # sequences in lexical order of their pages, so that common prefixes are adjacent
    "threads", "team", "body", "arena", "arena_bytes",
    # Set by the call.
    "value_row",  # bytes of a row of widened values or of their sums
    "dots",  # whether scores are computed by dots of bfloat16 pairs, with AMX in tiles
    "codes",  # whether the codes of int8 keys are multiplied by AMX, not widened
    "rounded",  # whether weights are rounded
    "rows",  # rows that a thread's scratch memory has room for
    "working",  # threads that take items
    "split",  # whether items write partial results
    "cascade_rows",  # most rows of a tile of several sequences; 0 without a cascade
    "blocks",  # blocks read, summed over all items
    "common",  # for each sequence in `order`: blocks that it shares with the one before
    "items", "item_count",
    "counters",  # two: the next item, and the next thread's scratch memory
    "scratch", "scratch_bytes",
    floats=("query_factor", "score_factor"),  # score_factor is applied after the soft cap
)  # fmt: skip

ITEM = record(
    "queries_at",  # token and position of each query
    "queries", "kv_head", "segments", "segment_count",
    "partial",  # where the result of each block goes; 0: merge the blocks and write the output
)  # fmt: skip

SEGMENT = record(
    "first", "queries",  # the queries of the tile that read these blocks
    "table",  # a row of the page table
    "begin", "end",  # blocks [begin, end)
    "low", "high",  # positions [low, high) are visible to some query
)  # fmt: skip
"""A range of blocks, and the queries of a tile that read them. Segments of one query ascend by block."""


@part
def partial_bytes(frame, rows):  # type: ignore[no-untyped-def]
    """Bytes of the softmax state of one block: `rows` maxima, `rows` sums, then `rows` rows of weighted
    values."""
    rows = vl.round_up(rows, PADDED_ROWS)
    return vl.round_up(8 * rows, 64) + rows * frame.value_row


@part
def widened_bytes(frame):  # type: ignore[no-untyped-def]
    """Bytes that a block of int8 pages needs beside that: the addresses of widened rows, the scales of keys
    and of values, and the widened keys, then the widened values."""
    if not frame.int8:
        return 0
    return BLOCK * (8 + 4 + 4 + frame.dim * (2 if frame.bf16 else 4))


@part
def scratch_bytes(frame):  # type: ignore[no-untyped-def]
    queries = vl.round_up(4 * frame.rows * frame.dim, 64)
    keys = frame.dim * SCORE_ROW
    values = BLOCK * frame.value_row
    results = 2 * partial_bytes(frame, frame.rows)
    return queries + frame.rows * SCORE_ROW + keys + values + 16 * BLOCK + widened_bytes(frame) + results


@part
def codes_of(frame):  # type: ignore[no-untyped-def]
    """Whether the codes of int8 keys are multiplied by AMX; for `frame.dots`. 512 products of 16 and 8 bits
    fit an int32."""
    return CODES and frame.int8 != 0 and frame.dots != 0 and frame.dim % 64 == 0 and frame.dim <= 512


@part
def dots_of(frame):  # type: ignore[no-untyped-def]
    """Whether scores are computed by dots of bfloat16 pairs."""
    return frame.bf16 != 0 and (frame.may_tile if TILES else DOTS) and frame.dim % (2 * LANES) == 0


assert PANEL % LANES == 0
assert BLOCK % PANEL == 0
