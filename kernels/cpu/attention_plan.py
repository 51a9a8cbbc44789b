"""The plan of one call of paged attention: tiles of queries, and the blocks that each tile reads.

Without a cascade a tile holds queries of one sequence. With a cascade it holds queries of sequences whose
page tables begin alike, and its segments walk the tree of shared prefixes from the root (arXiv 2402.05099).

Example: page tables A = 1 2 3 8, B = 1 2 3 7, C = 1 2 4 9, with one new token each, in the last page. Let a
page be a block:

    order                  A B C: lexical by cached pages, so that sequences with a common prefix are adjacent
    common                 - 3 2: blocks shared with the sequence before
    segments of the tile   blocks 0-1 for A B C; block 2 for A B; block 3 for A; block 3 for B; 2-3 for C
    blocks read            2 + 1 + 1 + 1 + 2 = 7, instead of 12 by three tiles

The order is kept from call to call and only checked, because all layers of a step have the same pages.
`choose_rows` sets how many rows a tile may have: larger tiles read shared blocks less often, smaller ones
keep all threads busy until the end.

All functions run inside numba kernels; `attention_records.py` has the records.
"""

from __future__ import annotations

from ramify.kernels.cpu.attention_records import BLOCK, SEGMENT
from ramify.kernels.cpu.codegen import simd as vl
from ramify.kernels.cpu.codegen.compiler import carray, part

ITEM_ROWS = 96
"""The most rows of a tile, unless a KV head has more query heads. Copying a block costs 3% of using it in
such a tile."""
COPY_ROWS = 2.5
"""Reading and copying a block costs as much as using it for COPY_ROWS rows, or more if in no cache."""
LEAST_ROWS = 6
"""Rows of the smallest tiles that `choose_rows` tries: one pass of the products."""
ITEMS_A_THREAD = 4
"""Items are split if there are fewer a thread, so that no thread waits long for the last item."""
MARGIN = 0.95
"""A cascade is chosen if its estimated time is below MARGIN times the time without one."""

QUERY_BYTES = 16
"""Bytes of an entry of a plan's list of queries: the token and its position."""
SEGMENT_BYTES = SEGMENT.itemsize


@part
def new_tokens(frame, sequence):  # type: ignore[no-untyped-def]
    at = frame.starts + 4 * sequence
    return vl.read_i32(at + 4) - vl.read_i32(at)


@part
def visible_blocks(frame, position, queries):  # type: ignore[no-untyped-def]
    """The blocks [begin, end) that `queries` queries from `position` on can see."""
    begin = 0
    if frame.window > 0:
        begin = max(0, position - frame.window + 1) // BLOCK
    return begin, (position + queries + BLOCK - 1) // BLOCK


@part
def _cached_pages(frame, sequence):  # type: ignore[no-untyped-def]
    """Whole pages before the new tokens; 0 if the sequence has no new tokens."""
    new = new_tokens(frame, sequence)
    return (vl.read_i32(frame.lens + 4 * sequence) - new) // frame.page_size if new > 0 else 0


@part
def _common_pages(frame, one, other):  # type: ignore[no-untyped-def]
    """The number of equal leading pages of two sequences, and whether `one` <= `other` in lexical order."""
    a, b = frame.table + 4 * frame.table_width * one, frame.table + 4 * frame.table_width * other
    a_pages, b_pages = _cached_pages(frame, one), _cached_pages(frame, other)
    most = min(a_pages, b_pages)
    page = 0
    while page + 16 <= most:
        differ = 0
        for pair in range(8):
            differ |= vl.read_i64(a + 4 * page + 8 * pair) ^ vl.read_i64(b + 4 * page + 8 * pair)
        if differ != 0:
            break
        page += 16
    while page < most:
        x, y = vl.read_i32(a + 4 * page), vl.read_i32(b + 4 * page)
        if x != y:
            return page, x < y
        page += 1
    return page, a_pages <= b_pages


@part
def sort_sequences(frame):  # type: ignore[no-untyped-def]
    """Sort `frame.order` lexically by pages; set `frame.common` to the blocks that each sequence shares with
    its predecessor. Returns whether any two sequences share a block. Costs one comparison a sequence if the
    order is already right."""
    order, common = frame.order, frame.common
    moved, shared = False, False
    for index in range(1, frame.sequences):
        sequence = vl.read_i64(order + 8 * index)
        pages, ordered = _common_pages(frame, vl.read_i64(order + 8 * index - 8), sequence)
        blocks = pages * frame.page_size // BLOCK
        vl.write_i64(common + 8 * index, blocks)
        shared = shared or blocks > 0
        place = index
        while not ordered:
            moved = True
            vl.write_i64(order + 8 * place, vl.read_i64(order + 8 * place - 8))
            place -= 1
            if place == 0:
                break
            _, ordered = _common_pages(frame, vl.read_i64(order + 8 * place - 8), sequence)
        vl.write_i64(order + 8 * place, sequence)
    if moved:
        for index in range(1, frame.sequences):
            before, here = vl.read_i64(order + 8 * index - 8), vl.read_i64(order + 8 * index)
            blocks = _common_pages(frame, before, here)[0] * frame.page_size // BLOCK
            vl.write_i64(common + 8 * index, blocks)
            shared = shared or blocks > 0
    return shared


@part
def tile_end(frame, first, most_rows):  # type: ignore[no-untyped-def]
    """The end (exclusive) of the tile that begins at sequence `first` of the order."""
    rows = new_tokens(frame, vl.read_i64(frame.order + 8 * first)) * frame.group
    end = first + 1
    while rows > 0 and end < frame.sequences:
        rows += new_tokens(frame, vl.read_i64(frame.order + 8 * end)) * frame.group
        if rows > most_rows or vl.read_i64(frame.common + 8 * end) == 0:
            break
        end += 1
    return end


@part
def _time(frame, most_rows, threads):  # type: ignore[no-untyped-def]
    """Estimated time with tiles of `most_rows` rows (0: no cascade). The unit is the time to use a block for
    one row."""
    total, largest = 0.0, 0.0
    count, first = 0, 0
    while first < frame.sequences:
        end = tile_end(frame, first, most_rows) if most_rows > 0 else first + 1
        work = 0.0
        tiles = 1
        for index in range(first, end):
            sequence = vl.read_i64(frame.order + 8 * index)
            new = new_tokens(frame, sequence)
            begin, stop = visible_blocks(frame, vl.read_i32(frame.lens + 4 * sequence) - new, new)
            read = begin
            if index > first:
                read = min(stop, max(begin, vl.read_i64(frame.common + 8 * index)))
            tiles = max(1, (new * frame.group + ITEM_ROWS - 1) // ITEM_ROWS)
            work += COPY_ROWS * tiles * (stop - read) + new * frame.group * (stop - begin)
        total += work
        count += tiles
        largest = max(largest, work / tiles)
        first = end
    count *= frame.kv_heads
    if most_rows == 0 and count < ITEMS_A_THREAD * threads:
        return total * frame.kv_heads / threads
    mean = total * frame.kv_heads / count
    return mean * ((count + threads - 1) // threads) + (largest - mean) * (threads - 1) / threads


@part
def choose_rows(frame, threads):  # type: ignore[no-untyped-def]
    """The most rows that tiles of a cascade should have; 0 if no cascade saves time. Needs `frame.order` and
    `frame.common`."""
    least = MARGIN * _time(frame, 0, threads)
    chosen = 0
    rows = ITEM_ROWS
    while rows >= LEAST_ROWS:
        time = _time(frame, rows, threads)
        if time < least:
            least, chosen = time, rows
        rows //= 2
    return chosen


@part
def list_queries(frame, sequence, first, count, to):  # type: ignore[no-untyped-def]
    """Append queries ``[first, first + count)`` of a sequence to a list, at `to`; return the list's end."""
    start = vl.read_i32(frame.starts + 4 * sequence)
    position = vl.read_i32(frame.lens + 4 * sequence) - new_tokens(frame, sequence)
    for query in range(first, first + count):
        vl.write_i64(to, start + query)
        vl.write_i64(to + 8, position + query)
        to += QUERY_BYTES
    return to


@part
def fill_segment(frame, segment, queries, first, count, table, begin, end):  # type: ignore[no-untyped-def]
    """Set `segment` to blocks [begin, end) of the page table row `table`, read by queries
    ``[first, first + count)`` of the tile whose queries are listed at `queries`."""
    frame.blocks += frame.kv_heads * (end - begin)
    segment.first, segment.queries, segment.table = first, count, table
    segment.begin, segment.end = begin, end
    low, high = vl.read_i64(queries + QUERY_BYTES * first + 8), 0
    for query in range(first, first + count):
        position = vl.read_i64(queries + QUERY_BYTES * query + 8)
        low, high = min(low, position), max(high, position + 1)
    segment.low = max(0, low - frame.window + 1) if frame.window > 0 else 0
    segment.high = high


@part
def fill_tree(frame, segments, queries, first, end, stack):  # type: ignore[no-untyped-def]
    """Write the segments of a tile of sequences ``[first, end)`` of the order; return their number.

    Parents come before children, so each query meets its blocks in ascending order. `stack` has room for
    three int64 a sequence: a subtree's first sequence, its end, and the first block still to read.
    """
    count, depth = 0, 1
    vl.write_i64(stack, first)
    vl.write_i64(stack + 8, end)
    vl.write_i64(stack + 16, 0)
    while depth > 0:
        depth -= 1
        at = stack + 24 * depth
        low, high, begin = vl.read_i64(at), vl.read_i64(at + 8), vl.read_i64(at + 16)
        table = frame.table + 4 * frame.table_width * vl.read_i64(frame.order + 8 * low)
        before, inside = 0, 0
        for index in range(first, low):
            before += new_tokens(frame, vl.read_i64(frame.order + 8 * index))
        stop, seen = 1 << 62, 1 << 62
        for index in range(low, high):
            sequence = vl.read_i64(frame.order + 8 * index)
            new = new_tokens(frame, sequence)
            inside += new
            from_block, to_block = visible_blocks(frame, vl.read_i32(frame.lens + 4 * sequence) - new, new)
            seen = min(seen, from_block)
            if index > low:
                stop = min(stop, vl.read_i64(frame.common + 8 * index))
            elif high == low + 1:
                stop = to_block
        begin = max(begin, seen)
        if stop > begin:
            segment = carray(vl.as_pointer(segments + SEGMENT_BYTES * count), 1, SEGMENT)[0]
            fill_segment(frame, segment, queries, before, inside, table, begin, stop)
            count += 1
        if high == low + 1:
            continue
        last = high
        for index in range(high - 1, low - 1, -1):
            if index == low or vl.read_i64(frame.common + 8 * index) == stop:
                at = stack + 24 * depth
                vl.write_i64(at, index)
                vl.write_i64(at + 8, last)
                vl.write_i64(at + 16, max(begin, stop))
                depth += 1
                last = index
    return count
