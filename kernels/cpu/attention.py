"""Attention over paged keys and values: reads pages in place, mixes prefill chunks and decodes.

    for tile of query rows, KV head:                    a work item; threads take items in turn
        for block of 64 positions:                      from the page table
            K[dim, 64], V[64, dim] = widened copies     each copied once, then in the first-level cache
            for row of the tile:                        a query head of a new token
                W[64] = 2 ** (K · q - max)              online softmax (arXiv 1805.02867, 2205.14135)
                state = merge(state, (max, ΣW, W · V))

Memory: pages are (page, KV head, slot, dim); a thread's scratch memory holds queries, scores, K, V and two
softmax states (`attention_records.py`). Decodes are bound by reading pages, prefills by the two products.

Sequences that begin with the same pages may share a tile, which reads those pages once (cascade attention,
`attention_plan.py`). If there are too few items for the threads, items are split into ranges of blocks (split
KV, arXiv 2311.01282), and their states are merged afterwards in the same order.

Scores are dots of pairs of bfloat16: by AMX tiles, or on AMD's processors with AVX512_BF16 by the instruction
of `codegen/dots.py`. The products of weights and values are float32. With `rounded` they are dots of bfloat16
pairs as well: half the operations, or with AMX a sixteenth. The codes of int8 pages are multiplied by AMX
(`attention_int8.py`) or widened (`parts/int8_rows.py`); the scales of keys multiply scores, those of values
weights.

Every number of the output comes from the same operations in the same order. So a sequence's bits are the same
alone or in a batch, with or without a cascade, prefilled whole, in chunks or decoded, and with any number of
threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import types

from ramify.kernels.arguments.checks import check_attention, wrong_lengths
from ramify.kernels.cpu.attention_amx import TILES, release_tiles
from ramify.kernels.cpu.attention_loops import PADDED_ROWS, PANEL
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
    codes_of,
    dots_of,
    partial_bytes,
    scratch_bytes,
)
from ramify.kernels.cpu.attention_softmax import clear, finish, merge
from ramify.kernels.cpu.attention_tile import attend
from ramify.kernels.cpu.codegen import simd as vl
from ramify.kernels.cpu.codegen.compiler import callback, carray, compiled, part
from ramify.kernels.cpu.codegen.functions import run_body
from ramify.kernels.cpu.codegen.simd import LANES, LOG2_E
from ramify.kernels.cpu.linear import tiles_allowed
from ramify.kernels.machine.records import Arena

SERIAL_WORK = 20_000
"""Calls of fewer vector operations (a few us of work) run on one thread: a second one would not help."""


@callback(types.void(types.voidptr))
def _body(data):  # type: ignore[no-untyped-def]
    frame = carray(data, 1, FRAME)[0]
    scratch = frame.scratch + vl.fetch_increment(frame.counters + 64) * frame.scratch_bytes
    items = carray(vl.as_pointer(frame.items), frame.item_count, ITEM)
    index = vl.fetch_increment(frame.counters)
    while index < frame.item_count:
        later = min(index + frame.working, frame.item_count - 1)  # what this thread is likely to take next
        attend(frame, items[index], items[later], scratch)
        index = vl.fetch_increment(frame.counters)
    if TILES and frame.dots:
        release_tiles(0, 0, 0, 0, 0)


_ITEM_BYTES = ITEM.itemsize
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

    span : the most blocks of a part, if items are split into parts
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


@compiled(types.int64(types.int64))
def run_attention(call_at):  # type: ignore[no-untyped-def]
    """Compute the attention that the FRAME at address `call_at` describes.

    Returns 0 when done; n > 0 if the arena must have n bytes; -1 - i if the lengths of sequence i are wrong.
    """
    frame = carray(vl.as_pointer(call_at), 1, FRAME)[0]
    group, dim, sequences, threads = frame.group, frame.dim, frame.sequences, frame.threads
    frame.dots = dots_of(frame)
    frame.codes = codes_of(frame)
    frame.rounded = frame.may_round and frame.dots
    frame.value_row = 4 * vl.round_up(dim, PANEL)
    frame.common = frame.order + 8 * sequences
    queries_an_item = max(1, ITEM_ROWS // group)
    # If five rows are left for the last pass of a product, it computes six. AMX computes sixteen.
    frame.rows = vl.round_up(queries_an_item * group + 1, PADDED_ROWS)
    frame.scratch_bytes = vl.round_up(scratch_bytes(frame), 64)

    count, blocks, work, listed = 0, 0, 0, 0
    for sequence in range(sequences):
        first = vl.read_i32(frame.starts + 4 * sequence)
        length = vl.read_i32(frame.starts + 4 * sequence + 4) - first
        stored = vl.read_i32(frame.lens + 4 * sequence)
        if first < 0 or length < 0 or first + length > frame.tokens:
            return -1 - sequence
        if stored < length or stored > frame.table_width * frame.page_size:
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
    count, blocks, work = count * frame.kv_heads, blocks * frame.kv_heads, work * frame.kv_heads
    if work < SERIAL_WORK:
        threads = 1
    frame.cascade_rows = 0
    if frame.cascade != 0 and sequences > 1 and sort_sequences(frame):
        frame.cascade_rows = choose_rows(frame, threads)
    span = blocks
    if frame.cascade_rows == 0 and threads > 1 and count < ITEMS_A_THREAD * threads < blocks:
        span = max(1, blocks // (2 * ITEMS_A_THREAD * threads))
    split = span < blocks
    scratch = frame.arena + _COUNTER_BYTES
    items_at = scratch + threads * frame.scratch_bytes
    most = count + blocks // span if split else count
    segments = items_at + most * _ITEM_BYTES
    queries_at = segments + (most + 2 * sequences) * SEGMENT_BYTES
    stack = queries_at + listed * QUERY_BYTES
    partial = vl.round_up(stack + 24 * sequences + 24, 64)
    end_of_arena = partial
    if split:
        end_of_arena += blocks * vl.round_up(8 * frame.rows, 64) + blocks * frame.rows * frame.value_row
    if end_of_arena > frame.arena + frame.arena_bytes:
        return end_of_arena - frame.arena

    frame.scratch, frame.blocks = scratch, 0
    items = carray(vl.as_pointer(items_at), most, ITEM)
    count = _fill_items(frame, items, segments, queries_at, stack, span, partial if split else 0)
    frame.items, frame.item_count = items_at, count
    frame.counters = frame.arena
    vl.write_i64(frame.counters, 0)
    vl.write_i64(frame.counters + 64, 0)
    frame.working, frame.split = min(threads, count), split
    run_body(frame, call_at, frame.working)
    if split:
        _merge_split_items(frame, items, count)
    return 0


class _Arena(Arena):
    """A thread's arena, with the order of sequences that the thread's last call found."""

    def __init__(self) -> None:
        super().__init__(FRAME, _body.address)
        self._sequences = -1

    def order_of(self, sequences: int) -> int:
        """The address of an order of sequences: the order of the last call if that call had `sequences`
        sequences, else the ascending order."""
        if sequences != self._sequences:
            self._sequences = sequences
            self._orders = np.zeros((2, max(1, sequences)), np.int64)
            self._orders[0, :sequences] = np.arange(sequences)
        return self._orders.ctypes.data


arena = _Arena()


def fill_call(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    page_table: torch.Tensor,
    query_starts: torch.Tensor,
    kv_lens: torch.Tensor,
    out: torch.Tensor,
) -> Any:
    """This thread's FRAME with the arguments that all layers of a step share.

    The caller sets `k`, `v`, `sinks`, `window`, `capped`, `cascade`, `may_round`, `query_factor` and
    `score_factor`.
    """
    tokens, heads, dim = q.shape
    size, kept = q.element_size(), k_pages.element_size()
    call = arena.call
    call.q, call.q_token = q.data_ptr(), q.stride(0) * size
    call.out, call.out_token = out.data_ptr(), out.stride(0) * size
    call.page_bytes, call.head_bytes, call.row_bytes = (kept * x for x in k_pages.stride()[:3])
    _, kv_heads, call.page_size, _ = k_pages.shape
    call.kv_heads, call.group, call.dim = kv_heads, heads // kv_heads, dim
    call.bf16, call.int8, call.tokens = size == 2, kept == 1, tokens
    sequences, call.table_width = page_table.shape
    call.sequences, call.order = sequences, arena.order_of(sequences)
    call.starts, call.lens, call.table = query_starts.data_ptr(), kv_lens.data_ptr(), page_table.data_ptr()
    call.threads, call.may_tile = torch.get_num_threads(), tiles_allowed()
    return call


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

    cascade : read the pages of a common prefix once for all sequences that share it, where this is faster.
        The bits of the result are the same.
    rounded : the softmax weights may be rounded to bfloat16 if q is bfloat16. Done only on processors that
        are faster with dots of bfloat16.
    """
    out = check_attention(
        q, k_pages, v_pages, page_table, query_starts, kv_lens, window, soft_cap, out, sinks,
        page_dtypes=(torch.int8,),
    )  # fmt: skip
    call = fill_call(q, k_pages, page_table, query_starts, kv_lens, out)
    call.k, call.v = k_pages.data_ptr(), v_pages.data_ptr()
    call.sinks = 0 if sinks is None else sinks.data_ptr()
    call.window, call.capped, call.cascade, call.may_round = window, soft_cap > 0.0, cascade, rounded
    if soft_cap > 0.0:
        call.query_factor, call.score_factor = scale / soft_cap, soft_cap * LOG2_E
    else:
        call.query_factor, call.score_factor = scale * LOG2_E, 1.0
    wrong = arena.finish(run_attention)
    if wrong:
        raise wrong_lengths(-1 - wrong, len(q), page_table.shape[1] * k_pages.shape[2])
    return out
