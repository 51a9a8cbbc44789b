"""Which queries share a tile of paged attention, and what the tile reads: the plan of one call.

Without a cascade a tile holds queries of one sequence. With one it holds those of several whose page tables
begin alike: what all of them share is read once for all, then what fewer share, down to each one's own, so
any tree of prefixes is walked from its root (arXiv 2402.05099). Sequences are put in the lexical order of
their pages, in which whoever shares a prefix is adjacent. That order is kept from call to call and only
checked, as all layers of a step have the same pages.

A tile takes fewer rows where threads would otherwise wait for the last one: `choose_rows` weighs the blocks
that are read once more against the end of the longest item.

All functions are numba's; see `attention_tile.py` for the records.
"""

from __future__ import annotations

from ramify.kernels.cpu.attention_tile import BLOCK, SEGMENT
from ramify.kernels.cpu.codegen import simd as vl
from ramify.kernels.cpu.codegen.compiler import carray, part

ITEM_ROWS = 96
"""Rows of a tile (more where one query has more heads): copying a block costs 4% of using it."""
COPY_ROWS = 2.5
"""Reading and copying a block costs as much as using it for so many rows, or more where it is in no cache."""
LEAST_ROWS = 6
"""No cascade tries tiles of fewer rows: those of one pass of the products."""
ITEMS_A_THREAD = 4
"""Fewer items than this for each thread are split, so that no thread waits long for the last one."""
MARGIN = 0.95
"""A cascade must take less than this share of the time without."""

QUERY_BYTES = 16
"""An entry of a plan's list of queries: token, position."""
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
    """Whole pages before the new tokens; none where there are no new tokens."""
    new = new_tokens(frame, sequence)
    return (vl.read_i32(frame.lens + 4 * sequence) - new) // frame.page_size if new > 0 else 0


@part
def _common_pages(frame, one, other):  # type: ignore[no-untyped-def]
    """Equal leading pages of two sequences, and whether the first comes before the second, or is equal."""
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
    """Bring `frame.order` into lexical order; write to `frame.common` the blocks that each sequence shares
    with the one before it. Whether any two share one. Where nothing moves, one comparison a sequence."""
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
    """The end of the run of sequences, in the order and from `first` on, that lie in one tile."""
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
    """How long tiles of up to `most_rows` rows take, 0 meaning no cascade: uses of a block for one row."""
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
    """Rows of the tiles of a cascade; 0 where none pays. `frame.order` and `frame.common` are set."""
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
    """Write queries `first` to `first + count` of a sequence to the plan's list; the address after them."""
    start = vl.read_i32(frame.starts + 4 * sequence)
    position = vl.read_i32(frame.lens + 4 * sequence) - new_tokens(frame, sequence)
    for query in range(first, first + count):
        vl.write_i64(to, start + query)
        vl.write_i64(to + 8, position + query)
        to += QUERY_BYTES
    return to


@part
def fill_segment(frame, segment, queries, first, count, table, begin, end):  # type: ignore[no-untyped-def]
    """Blocks [begin, end) of a row of the page table, for `count` queries of a tile from `first` on.

    `queries` is where the tile's queries begin in the plan's list.
    """
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
    """The segments of a tile of the sequences [first, end) of the order; how many.

    Parents come before children, so each query meets its blocks in ascending order. `stack` has room for
    three numbers for each sequence.
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
