"""Attention over paged keys and values: reads pages in place, mixes prefill chunks and decodes.

The new tokens of a sequence and the query heads of one KV head make up rows. A work item is a tile of rows
and one KV head. It walks over blocks of BLOCK positions: the block's keys are copied once, widened and
transposed, its values widened; all rows of the tile use them from the cache. Per block and row there is a
softmax of its own (maximum, sum, weighted values), and blocks are merged in ascending order by the online
softmax (arXiv 1805.02867, 2205.14135). Where items are fewer than threads can share evenly, they are split
into runs of blocks (arXiv 2311.01282), whose results are merged in the same order afterwards.

So every number of the output comes from the same operations in the same order however a row is batched,
tiled, chunked or split: it is the same bit for bit alone or in a batch, prefilled whole, in chunks or
decoded, and with any number of threads.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from numba import types

from ramify.kernels.checks import check_attention, wrong_lengths
from ramify.kernels.cpu.attention_tile import (
    BLOCK,
    FRAME,
    ITEM,
    attend,
    clear,
    finish,
    merge,
    partial_bytes,
    scratch_bytes,
    up,
)
from ramify.kernels.cpu.compiler import callback, carray, compiled, part, sources
from ramify.kernels.cpu.fork import call_at, fork_at
from ramify.kernels.cpu.simd import LANES, as_pointer, i32_at, next_ticket, set_i64
from ramify.kernels.cpu.team import fork_address
from ramify.kernels.cpu.tiles import PANEL, TILE_ROWS

ITEM_ROWS = 96
"""Rows of a work item (more where one query has more heads): copying a block costs 4% of using it."""
SERIAL_WORK = 20_000
"""Below so many vector operations (a few us) one thread is done before a second would help."""
ITEMS_A_THREAD = 4
"""Fewer items than this for each thread are split, so that no thread waits long for the last one."""

_LOG2_E = 1.4426950408889634


def _build_body(sources: str) -> Any:
    @callback(types.void(types.voidptr))
    def body(data):  # type: ignore[no-untyped-def]
        """What each thread does: take items until there are none."""
        sources  # noqa: B018
        frame = carray(data, 1, FRAME)[0]
        scratch = frame.scratch + next_ticket(frame.counters + 64) * frame.scratch_bytes
        index = next_ticket(frame.counters)
        while index < frame.item_count:
            attend(frame, carray(as_pointer(frame.items), frame.item_count, ITEM)[index], scratch)
            index = next_ticket(frame.counters)

    return body


_FRAME_BYTES, _ITEM_BYTES = FRAME.itemsize, ITEM.itemsize
_COUNTER_BYTES = 128


@part
def _blocks(frame, position, queries):  # type: ignore[no-untyped-def]
    """The blocks [begin, end) that `queries` queries from `position` on can see."""
    begin = 0
    if frame.window > 0:
        begin = max(0, position - frame.window + 1) // BLOCK
    return begin, (position + queries + BLOCK - 1) // BLOCK


@part
def _merge_split_items(frame, items, count):  # type: ignore[no-untyped-def]
    """Merge the blocks of each split tile in ascending order and write its output."""
    total = frame.scratch
    index = 0
    while index < count:
        item = items[index]
        rows = item.queries * frame.group
        clear(frame, total, rows)
        block = item.partial
        same = True
        while same:
            for _ in range(items[index].begin, items[index].end):
                merge(frame, block, total, rows)
                block += partial_bytes(frame, rows)
            index += 1
            same = index < count and items[index].begin > 0 and items[index].partial == block
            same = same and items[index].query == item.query and items[index].kv_head == item.kv_head
        finish(frame, item, total)


def _build_run(sources: str) -> Any:
    @compiled(types.int64(*[types.int64] * 22, *[types.float64] * 2, *[types.int64] * 6))
    def run(  # type: ignore[no-untyped-def]
        q, q_token, k, v, page_bytes, head_bytes, row_bytes, page_size, out, out_token,
        group, dim, bf16, kv_heads, sequences, starts, lens, table, table_width, window, capped, tokens,
        query_factor, score_factor,
        threads, fork, body, arena, arena_bytes, item_rows,
    ):  # fmt: skip
        """0 when done; above 0, the bytes of arena that are needed; below 0, -1 - the wrong sequence."""
        sources  # noqa: B018
        frame = carray(as_pointer(arena), 1, FRAME)[0]
        frame.q, frame.q_token, frame.k, frame.v = q, q_token, k, v
        frame.page_bytes, frame.head_bytes, frame.row_bytes = page_bytes, head_bytes, row_bytes
        frame.page_size, frame.out, frame.out_token = page_size, out, out_token
        frame.group, frame.dim, frame.bf16 = group, dim, bf16
        frame.value_row = 4 * up(dim, PANEL)
        frame.window, frame.capped = window, capped
        frame.query_factor, frame.score_factor = query_factor, score_factor
        queries_an_item = max(1, item_rows // group)
        frame.rows = up(queries_an_item * group, TILE_ROWS)
        frame.scratch_bytes = up(scratch_bytes(frame), 64)

        count, blocks, work = 0, 0, 0
        for sequence in range(sequences):
            first = i32_at(starts + 4 * sequence)
            length = i32_at(starts + 4 * sequence + 4) - first
            stored = i32_at(lens + 4 * sequence)
            if first < 0 or length < 0 or first + length > tokens:
                return -1 - sequence
            if stored < length or stored > table_width * page_size:
                return -1 - sequence
            for query in range(0, length, queries_an_item):
                queries = min(queries_an_item, length - query)
                begin, end = _blocks(frame, stored - length + query, queries)
                count += 1
                blocks += end - begin
                work += (end - begin) * BLOCK * (dim // LANES + 1) * (2 * queries * group + 12)
        if count == 0:
            return 0
        count, blocks, work = count * kv_heads, blocks * kv_heads, work * kv_heads
        if work < SERIAL_WORK:
            threads = 1
        span = blocks
        if threads > 1 and count < ITEMS_A_THREAD * threads < blocks:
            span = max(1, blocks // (2 * ITEMS_A_THREAD * threads))
        split = span < blocks
        counters = arena + up(_FRAME_BYTES, 64)
        scratch = counters + _COUNTER_BYTES
        items_at = scratch + threads * frame.scratch_bytes
        most = count + blocks // span if split else count
        partial = items_at + up(most * _ITEM_BYTES, 64)
        end_of_arena = partial
        if split:
            end_of_arena += blocks * up(8 * frame.rows, 64) + blocks * frame.rows * frame.value_row
        if end_of_arena > arena + arena_bytes:
            return end_of_arena - arena

        items = carray(as_pointer(items_at), most, ITEM)
        count = 0
        for sequence in range(sequences):
            first = i32_at(starts + 4 * sequence)
            length = i32_at(starts + 4 * sequence + 4) - first
            stored = i32_at(lens + 4 * sequence)
            # From the last tile on: it sees most, and long items are best started first.
            for tile in range((length + queries_an_item - 1) // queries_an_item - 1, -1, -1):
                query = tile * queries_an_item
                queries = min(queries_an_item, length - query)
                position = stored - length + query
                begin, end = _blocks(frame, position, queries)
                for kv_head in range(kv_heads):
                    for at in range(begin, end, span):
                        item = items[count]
                        item.query, item.queries, item.position = first + query, queries, position
                        item.kv_head, item.table = kv_head, table + 4 * table_width * sequence
                        item.begin, item.end = at, min(end, at + span)
                        item.partial = partial if split else 0
                        if split:
                            partial += (item.end - at) * partial_bytes(frame, queries * group)
                        count += 1
        frame.items, frame.item_count = items_at, count
        frame.counters, frame.scratch = counters, scratch
        set_i64(counters, 0)
        set_i64(counters + 64, 0)
        frame.threads, frame.split = min(threads, count), split
        if frame.threads == 1:
            call_at(body, arena)  # GOMP_parallel would set up a team of one: 0.8 us
        else:
            fork_at(fork, body, arena, frame.threads)
        if split:
            _merge_split_items(frame, items, count)
        return 0

    return run


_body = _build_body(sources())
_run = _build_run(sources())


class _Arena(threading.local):
    """Working memory of one calling thread, kept between calls."""

    def __init__(self) -> None:
        self.grow(1 << 20)

    def grow(self, size: int) -> None:
        self.memory = np.empty(size + 64, np.uint8)
        self.address = -(-self.memory.ctypes.data // 64) * 64
        self.size = size


_arena = _Arena()


def last_plan() -> Any:
    """The frame of this thread's last call, for tests and benchmarks: how its work was shared out."""
    return _arena.memory[_arena.address - _arena.memory.ctypes.data :][: FRAME.itemsize].view(FRAME)[0]


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
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `reference.attention.paged_attention`, whose docstring is the contract."""
    out = check_attention(q, k_pages, v_pages, page_table, query_starts, kv_lens, window, soft_cap, out)
    tokens, heads, dim = q.shape
    _, kv_heads, page_size, _ = k_pages.shape
    page_stride, head_stride, row_stride, _ = k_pages.stride()
    bf16 = q.dtype == torch.bfloat16
    size = 2 if bf16 else 4
    sequences, table_width = page_table.shape
    if soft_cap > 0.0:
        query_factor, score_factor = scale / soft_cap, soft_cap * _LOG2_E
    else:
        query_factor, score_factor = scale * _LOG2_E, 1.0
    group = heads // kv_heads
    while True:
        result = _run(
            q.data_ptr(), q.stride(0) * size, k_pages.data_ptr(), v_pages.data_ptr(),
            page_stride * size, head_stride * size, row_stride * size, page_size,
            out.data_ptr(), out.stride(0) * size,
            group, dim, bf16, kv_heads, sequences,
            query_starts.data_ptr(), kv_lens.data_ptr(), page_table.data_ptr(), table_width,
            window, soft_cap > 0.0, tokens,
            query_factor, score_factor,
            torch.get_num_threads(), fork_address(), _body.address,
            _arena.address, _arena.size, ITEM_ROWS,
        )  # fmt: skip
        if result == 0:
            return out
        if result < 0:
            raise wrong_lengths(-1 - result, tokens, table_width * page_size)
        _arena.grow(2 * result)
