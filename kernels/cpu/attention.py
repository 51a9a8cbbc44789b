"""Attention over paged keys and values: reads pages in place, mixes prefill chunks and decodes.

A row is one query head of one new token. A work item is a tile of rows and the KV head that they share. It
walks over the KV cache in blocks of BLOCK positions. The block's keys are copied once, widened to float32 and
transposed; its values are widened; all rows of the tile then use them from the processor's cache. Each block
gives each row a softmax state (maximum, sum, weighted values), and the states are merged in ascending order
of blocks by the online softmax (arXiv 1805.02867, 2205.14135).

Sequences that begin with the same pages may share a tile, which reads those pages once (cascade attention,
`attention_plan.py`). If there are too few items for the threads, items are split into ranges of blocks (split
KV, arXiv 2311.01282), and their states are merged afterwards in the same order.

Scores are dots of pairs of bfloat16 on AMD's processors with AVX512_BF16 (`codegen/dots.py`). Weights times
values are float32, or on request (`rounded`) such dots as well, which takes half as many operations.

So every number of the output comes from the same operations in the same order. The bits are the same alone or
in a batch, with or without a cascade, prefilled whole, in chunks or decoded, and with any number of threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import types

from ramify.kernels.arguments.checks import check_attention, wrong_lengths
from ramify.kernels.cpu.attention_loops import PANEL, TILE_ROWS
from ramify.kernels.cpu.attention_plan import (
    ITEM_ROWS,
    ITEMS_A_THREAD,
    QUERY_BYTES,
    SEGMENT_BYTES,
    choose_rows,
    fill_segment,
    fill_tree,
    list_queries,
    new_tokens,
    sort_sequences,
    tile_end,
    visible_blocks,
)
from ramify.kernels.cpu.attention_records import (
    BLOCK,
    FRAME,
    ITEM,
    SEGMENT,
    dots_of,
    partial_bytes,
    scratch_bytes,
)
from ramify.kernels.cpu.attention_softmax import clear, finish, merge
from ramify.kernels.cpu.attention_tile import attend
from ramify.kernels.cpu.codegen import simd as vl
from ramify.kernels.cpu.codegen.arena import Arena
from ramify.kernels.cpu.codegen.compiler import callback, carray, compiled, part
from ramify.kernels.cpu.codegen.simd import LANES, LOG2_E
from ramify.kernels.cpu.codegen.thread_team_calls import call_address, run_on_team
from ramify.kernels.machine.threads import team_entry

SERIAL_WORK = 20_000
"""Vector operations (a few us of work) below which a second thread would not help."""


@callback(types.void(types.voidptr))
def _body(data):  # type: ignore[no-untyped-def]
    """The body of each thread: take items until none are left."""
    frame = carray(data, 1, FRAME)[0]
    scratch = frame.scratch + vl.fetch_increment(frame.counters + 64) * frame.scratch_bytes
    items = carray(vl.as_pointer(frame.items), frame.item_count, ITEM)
    index = vl.fetch_increment(frame.counters)
    while index < frame.item_count:
        later = min(index + frame.threads, frame.item_count - 1)  # what this thread is likely to take next
        attend(frame, items[index], items[later], scratch)
        index = vl.fetch_increment(frame.counters)


_FRAME_BYTES, _ITEM_BYTES = FRAME.itemsize, ITEM.itemsize
_COUNTER_BYTES = 128


@part
def _merge_split_items(frame, items, count):  # type: ignore[no-untyped-def]
    """Merge the block states of each split tile in ascending order and write the tile's output."""
    total = frame.scratch
    index = 0
    while index < count:
        item = items[index]
        rows = item.queries * frame.group
        clear(frame, item, total)
        block = item.partial
        same = True
        while same:
            segment = carray(vl.as_pointer(items[index].segments), 1, SEGMENT)[0]
            for _ in range(segment.begin, segment.end):
                merge(frame, block, rows, total, rows, 0)
                block += partial_bytes(frame, rows)
            index += 1
            same = index < count and items[index].partial == block
            same = same and items[index].queries_at == item.queries_at
            same = same and items[index].kv_head == item.kv_head
        finish(frame, item, total)


@part
def _fill_items(frame, items, segments, queries, stack, span, partial):  # type: ignore[no-untyped-def]
    """Write all work items of the call, their segments and the list of queries; return the number of items.

    span : most blocks of an item that is split
    partial : memory for block states of split items; 0 if no item is split
    """
    queries_an_item = max(1, ITEM_ROWS // frame.group)
    count, first = 0, 0
    while first < frame.sequences:
        end = first + 1
        if frame.cascade_rows > 0:
            end = tile_end(frame, first, frame.cascade_rows)
        sequence = vl.read_i64(frame.order + 8 * first)
        length = new_tokens(frame, sequence)
        if end > first + 1:
            tile = queries
            for index in range(first, end):
                sequence = vl.read_i64(frame.order + 8 * index)
                queries = list_queries(frame, sequence, 0, new_tokens(frame, sequence), queries)
            found = fill_tree(frame, segments, tile, first, end, stack)
            for kv_head in range(frame.kv_heads):
                item = items[count]
                item.queries_at, item.queries = tile, (queries - tile) // QUERY_BYTES
                item.kv_head, item.partial = kv_head, 0
                item.segments, item.segment_count = segments, found
                count += 1
            segments += found * SEGMENT_BYTES
            first = end
            continue
        # The last tile comes first: it sees the most positions, and long items are best started first.
        for number in range((length + queries_an_item - 1) // queries_an_item - 1, -1, -1):
            query = number * queries_an_item
            inside = min(queries_an_item, length - query)
            tile = queries
            queries = list_queries(frame, sequence, query, inside, queries)
            begin, stop = visible_blocks(frame, vl.read_i64(tile + 8), inside)
            runs = (stop - begin + span - 1) // span
            for run in range(runs):
                segment = carray(vl.as_pointer(segments + run * SEGMENT_BYTES), 1, SEGMENT)[0]
                at = begin + run * span
                table = frame.table + 4 * frame.table_width * sequence
                fill_segment(frame, segment, tile, 0, inside, table, at, min(stop, at + span))
            for kv_head in range(frame.kv_heads):
                for run in range(runs):
                    item = items[count]
                    item.queries_at, item.queries, item.kv_head = tile, inside, kv_head
                    item.segments, item.segment_count = segments + run * SEGMENT_BYTES, 1
                    item.partial = partial
                    if partial != 0:
                        blocks = min(span, stop - begin - run * span)
                        partial += blocks * partial_bytes(frame, inside * frame.group)
                    count += 1
            segments += runs * SEGMENT_BYTES
        first = end
    return count


@compiled(types.int64(*[types.int64] * 26, *[types.float64] * 2, *[types.int64] * 5))
def run(  # type: ignore[no-untyped-def]
    q, q_token, k, v, page_bytes, head_bytes, row_bytes, page_size, out, out_token,
    group, dim, bf16, kv_heads, sequences, starts, lens, table, table_width, window, capped,
    sinks, tokens, order, cascade, rounded, query_factor, score_factor,
    threads, team, body, arena, arena_bytes,
):  # fmt: skip
    """Returns 0 when done; n > 0 if the arena must have n bytes; -1 - i if the lengths of sequence i are
    wrong."""
    frame = carray(vl.as_pointer(arena), 1, FRAME)[0]
    frame.q, frame.q_token, frame.k, frame.v = q, q_token, k, v
    frame.page_bytes, frame.head_bytes, frame.row_bytes = page_bytes, head_bytes, row_bytes
    frame.page_size, frame.out, frame.out_token = page_size, out, out_token
    frame.group, frame.dim, frame.bf16 = group, dim, bf16
    frame.dots = dots_of(bf16, dim)
    frame.rounded = rounded and frame.dots
    frame.value_row = 4 * vl.round_up(dim, PANEL)
    frame.window, frame.capped, frame.sinks = window, capped, sinks
    frame.query_factor, frame.score_factor = query_factor, score_factor
    frame.kv_heads, frame.sequences, frame.starts, frame.lens = kv_heads, sequences, starts, lens
    frame.table, frame.table_width = table, table_width
    frame.order, frame.common = order, order + 8 * sequences
    queries_an_item = max(1, ITEM_ROWS // group)
    # A tile's last five rows are computed as six.
    frame.rows = vl.round_up(queries_an_item * group + 1, TILE_ROWS)
    frame.scratch_bytes = vl.round_up(scratch_bytes(frame), 64)

    count, blocks, work, listed = 0, 0, 0, 0
    for sequence in range(sequences):
        first = vl.read_i32(starts + 4 * sequence)
        length = vl.read_i32(starts + 4 * sequence + 4) - first
        stored = vl.read_i32(lens + 4 * sequence)
        if first < 0 or length < 0 or first + length > tokens:
            return -1 - sequence
        if stored < length or stored > table_width * page_size:
            return -1 - sequence
        listed += length
        for query in range(0, length, queries_an_item):
            queries = min(queries_an_item, length - query)
            begin, end = visible_blocks(frame, stored - length + query, queries)
            count += 1
            blocks += end - begin
            work += (end - begin) * BLOCK * (dim // LANES + 1) * (2 * queries * group + 12)
    if count == 0:
        return 0
    count, blocks, work = count * kv_heads, blocks * kv_heads, work * kv_heads
    if work < SERIAL_WORK:
        threads = 1
    frame.cascade_rows = 0
    if cascade != 0 and sequences > 1 and sort_sequences(frame):
        frame.cascade_rows = choose_rows(frame, threads)
    span = blocks
    if frame.cascade_rows == 0 and threads > 1 and count < ITEMS_A_THREAD * threads < blocks:
        span = max(1, blocks // (2 * ITEMS_A_THREAD * threads))
    split = span < blocks
    counters = arena + vl.round_up(_FRAME_BYTES, 64)
    scratch = counters + _COUNTER_BYTES
    items_at = scratch + threads * frame.scratch_bytes
    most = count + blocks // span if split else count
    segments = items_at + most * _ITEM_BYTES
    queries_at = segments + (most + 2 * sequences) * SEGMENT_BYTES
    stack = queries_at + listed * QUERY_BYTES
    partial = vl.round_up(stack + 24 * sequences + 24, 64)
    end_of_arena = partial
    if split:
        end_of_arena += blocks * vl.round_up(8 * frame.rows, 64) + blocks * frame.rows * frame.value_row
    if end_of_arena > arena + arena_bytes:
        return end_of_arena - arena

    frame.scratch, frame.blocks = scratch, 0
    items = carray(vl.as_pointer(items_at), most, ITEM)
    count = _fill_items(frame, items, segments, queries_at, stack, span, partial if split else 0)
    frame.items, frame.item_count = items_at, count
    frame.counters = counters
    vl.write_i64(counters, 0)
    vl.write_i64(counters + 64, 0)
    frame.threads, frame.split = min(threads, count), split
    if frame.threads == 1:
        call_address(body, arena)  # a team of one would cost 0.8 us
    else:
        run_on_team(team, body, arena, frame.threads)
    if split:
        _merge_split_items(frame, items, count)
    return 0


body_address = _body.address


class _Arena(Arena):
    """A thread's arena, and the order of sequences that its last call found."""

    def __init__(self) -> None:
        super().__init__()
        self.sequences = -1

    def order(self, sequences: int) -> int:
        """Address of an order of `sequences` sequences: the last call's if it had as many, else ascending."""
        if sequences != self.sequences:
            self.sequences = sequences
            self.orders = np.zeros((2, max(1, sequences)), np.int64)
            self.orders[0, :sequences] = np.arange(sequences)
        return self.orders.ctypes.data


arena = _Arena()


def last_plan() -> Any:
    """The FRAME of this thread's last call, for tests and benchmarks: how the work was divided."""
    return arena.memory[arena.address - arena.memory.ctypes.data :][: FRAME.itemsize].view(FRAME)[0]


def paged_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    query_starts: torch.Tensor,
    kv_lens: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    cascade: bool = True,
    rounded: bool = False,
) -> torch.Tensor:
    """As `reference.attention.paged_attention`.

    cascade : where it is faster, read the pages of a common prefix once for all sequences that share it. The
        bits of the result are the same.
    rounded : for bfloat16, the weights of values may be rounded to bfloat16, which is done where the
        processor is faster with it
    """
    out = check_attention(
        q, k_pages, v_pages, page_table, query_starts, kv_lens, window, soft_cap, out, sinks
    )
    tokens, heads, dim = q.shape
    _, kv_heads, page_size, _ = k_pages.shape
    page_stride, head_stride, row_stride, _ = k_pages.stride()
    bf16 = q.dtype == torch.bfloat16
    size = 2 if bf16 else 4
    sequences, table_width = page_table.shape
    if soft_cap > 0.0:
        query_factor, score_factor = scale / soft_cap, soft_cap * LOG2_E
    else:
        query_factor, score_factor = scale * LOG2_E, 1.0
    group = heads // kv_heads
    while True:
        result = run(
            q.data_ptr(), q.stride(0) * size, k_pages.data_ptr(), v_pages.data_ptr(),
            page_stride * size, head_stride * size, row_stride * size, page_size,
            out.data_ptr(), out.stride(0) * size,
            group, dim, bf16, kv_heads, sequences,
            query_starts.data_ptr(), kv_lens.data_ptr(), page_table.data_ptr(), table_width,
            window, soft_cap > 0.0, 0 if sinks is None else sinks.data_ptr(), tokens,
            arena.order(sequences), cascade, rounded,
            query_factor, score_factor,
            torch.get_num_threads(), team_entry(), body_address, arena.address, arena.size,
        )  # fmt: skip
        if result == 0:
            return out
        if result < 0:
            raise wrong_lengths(-1 - result, tokens, table_width * page_size)
        arena.grow(2 * result)
