"""The attention kernel: one tile of query rows walks over one range of paged keys and values.

Prefill, decode and cascade use this kernel with different tiles and work items (see `attention_plan`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ramify.kernels.triton.tiles.launch import INTERPRETED, jit

ITEM_FIELDS = tl.constexpr(9)
"""int32 fields of a work item, in the order in which `attend` loads them."""
BY_FLOAT16 = tl.constexpr(triton.__version__.startswith("3.6.") and not INTERPRETED)
"""Whether float8 is converted to float16 first on GPUs before sm_90. Triton 3.6 converts float8 to bfloat16
by an instruction that these GPUs lack, so that assembling fails."""


@jit
def _tanh(x):  # type: ignore[no-untyped-def]
    """tanh from exp2; near 0, where 1 - exp2 cancels, from a series of relative error below 1e-8."""
    e = tl.exp2(-2.8853900817779268 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    square = x * x
    series = tl.fma(square, 0.003592128036572481, -0.008863235529902197)
    series = tl.fma(square, series, 0.021869488536155203)
    series = tl.fma(square, series, -0.05396825396825397)
    series = tl.fma(square, series, 0.13333333333333333)
    series = tl.fma(square, series, -0.3333333333333333)
    return tl.where(tl.abs(x) < 0.25, tl.fma(x * square, series, x), tl.where(x < 0, -far, far))


@jit
def fold(  # type: ignore[no-untyped-def]
    top, total, acc, other_top, other_total, other_acc, TILED: tl.constexpr
):  # fmt: skip
    """Merge two softmax states (maximum, sum, weighted values); an empty state changes no bit."""
    new_top = tl.maximum(top, other_top)
    finite = tl.where(new_top == float("-inf"), 0.0, new_top)
    old, new = tl.exp2(top - finite), tl.exp2(other_top - finite)
    total = tl.fma(total, old, other_total * new)
    if TILED:
        old, new = old[:, None], new[:, None]
    acc = tl.fma(acc, old, other_acc * new)
    return new_top, total, acc


@jit
def sink_state(sinks):  # type: ignore[no-untyped-def]
    """The softmax state of sinks: the maximum, in base 2, and the sum of weights. A sink is a position whose
    value is 0."""
    top = tl.load(sinks) * 1.4426950408889634
    return top, tl.full(top.shape, 1.0, tl.float32)


@jit
def _widened(x, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """`x` in the dtype of the queries, exactly."""
    if BY_FLOAT16 and x.dtype.is_fp8() and not tl.target_info.cuda_capability_geq(9, 0):
        x = x.to(tl.float16)
    return x.to(DTYPE)


@jit
def _walk(  # type: ignore[no-untyped-def]
    top, total, acc, q, low, high, first, limit, position, k_head, v_head, table,
    page_stride, row_stride, in_factor, out_factor, window,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, SOFT_CAP: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr,
    ONE_PAGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Merge the keys and values at positions [low, high) into the state, in blocks of BLOCK_N.

    Positions before `first` and from `limit` on are not read: they may hold NaN, and 0 times NaN is NaN.
    Scores enter the exponent by one explicit fused multiply-add, so that masked and unmasked blocks round
    alike.
    """
    column = tl.arange(0, BLOCK_N)
    dim = tl.arange(0, BLOCK_D)
    for start in range(low, high, BLOCK_N):
        place = start + column
        if WINDOWED:
            known = (place >= first) & (place < limit)
        else:
            known = place < limit
        if ONE_PAGE:
            page = tl.load(table + start // PAGE_SIZE).to(tl.int64)
            offset = page * page_stride + (start % PAGE_SIZE) * row_stride
            offsets = (column * row_stride)[:, None] + dim[None, :]
            k_from, v_from = k_head + offset + offsets, v_head + offset + offsets
        else:
            if MASKED:
                page = tl.load(table + place // PAGE_SIZE, mask=known, other=0).to(tl.int64)
            else:
                page = tl.load(table + place // PAGE_SIZE).to(tl.int64)
            offsets = (page * page_stride + (place % PAGE_SIZE) * row_stride)[:, None] + dim[None, :]
            k_from, v_from = k_head + offsets, v_head + offsets
        if MASKED and HEAD_DIM < BLOCK_D:
            in_bounds = known[:, None] & (dim < HEAD_DIM)[None, :]
        elif MASKED:
            in_bounds = known[:, None] & (dim < BLOCK_D)[None, :]
        elif HEAD_DIM < BLOCK_D:
            in_bounds = (column < BLOCK_N)[:, None] & (dim < HEAD_DIM)[None, :]
        if MASKED or HEAD_DIM < BLOCK_D:
            k = tl.load(k_from, mask=in_bounds, other=0.0)
        else:
            k = tl.load(k_from)
        scores = tl.dot(q, tl.trans(_widened(k, q.dtype)), input_precision=PRECISION)
        if SOFT_CAP:
            scores = _tanh(scores * in_factor)
        if MASKED:
            seen = (place[None, :] <= position[:, None]) & known[None, :]
            if WINDOWED:
                seen &= place[None, :] > position[:, None] - window
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * out_factor)
        if MASKED:
            finite = tl.where(new_top == float("-inf"), 0.0, new_top)
        else:
            finite = new_top
        weights = tl.exp2(tl.fma(scores, out_factor, -finite[:, None]))
        shrink = tl.exp2(top - finite)
        total = tl.fma(total, shrink, tl.sum(weights, 1))
        acc = acc * shrink[:, None]
        if MASKED or HEAD_DIM < BLOCK_D:
            v = tl.load(v_from, mask=in_bounds, other=0.0)
        else:
            v = tl.load(v_from)
        acc = tl.dot(weights.to(q.dtype), _widened(v, q.dtype), acc, input_precision=PRECISION)
        top = new_top
    return top, total, acc


# Arguments that vary from batch to batch must not specialise the kernel.
@jit(
    do_not_specialize=["table_stride", "window"],
    do_not_specialize_on_alignment=["part_ptr", "top_ptr", "total_ptr", "token_ptr", "sink_ptr"],
)
def attend(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, out_ptr, part_ptr, top_ptr, total_ptr, table_ptr, item_ptr, token_ptr, sink_ptr,
    q_stride, out_stride, page_stride, head_stride, row_stride, table_stride,
    in_factor, out_factor, window,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr, CHUNK: tl.constexpr,
    LISTED: tl.constexpr, WINDOWED: tl.constexpr, SOFT_CAP: tl.constexpr, SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Program ``i * KV_HEADS + h``: KV head h of work item i.

    Row r of the item is query head ``h * GROUP + (row + r) % GROUP`` of token ``first + (row + r) // GROUP``,
    an index into the batch or, with LISTED, into `token_ptr`. The row sees [begin, end) up to its own
    position. If `slot` is negative the output is written, else the state, to row ``slot + row + r``.

    CHUNK > 0 is the deterministic form. It has a state for every CHUNK positions, aligned to absolute
    positions. The states are merged in ascending order, or written `stride` rows apart, for `merge` to merge
    in the same order.
    """
    head = tl.program_id(0) % KV_HEADS
    item = item_ptr + tl.program_id(0) // KV_HEADS * ITEM_FIELDS
    first, row, rows = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    start, table_row = tl.load(item + 3), tl.load(item + 4)
    begin, end = tl.load(item + 5), tl.load(item + 6)
    slot, stride = tl.load(item + 7), tl.load(item + 8)
    if rows == 0:
        return
    r = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    query = (row + r) // GROUP
    position = start + query
    token = first + query
    if LISTED:
        token = tl.load(token_ptr + token, mask=r < rows, other=0)
    q_head = head * GROUP + (row + r) % GROUP
    live = (r < rows)[:, None] & (dim < HEAD_DIM)[None, :]
    q_from = q_ptr + (token.to(tl.int64) * q_stride + q_head * HEAD_DIM)[:, None] + dim[None, :]
    q = tl.load(q_from, mask=live, other=0.0)
    k_head = k_ptr + head.to(tl.int64) * head_stride
    v_head = v_ptr + head.to(tl.int64) * head_stride
    table = table_ptr + table_row.to(tl.int64) * table_stride
    ONE_PAGE: tl.constexpr = PAGE_SIZE % BLOCK_N == 0
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if SINKS:  # if states are written, their merge begins with the sink
        sink, weight = sink_state(sink_ptr + q_head)
        top, total = tl.where(slot < 0, sink, top), tl.where(slot < 0, weight, total)
    lowest = begin
    if WINDOWED:  # the first position that the first row sees
        lowest = tl.maximum(begin, start + row // GROUP - window + 1)
    part = (slot + row + r).to(tl.int64) * KV_HEADS + head
    if CHUNK > 0:
        for chunk in range(begin // CHUNK, tl.cdiv(end, CHUNK)):
            low, high = tl.maximum(chunk * CHUNK, begin), tl.minimum(chunk * CHUNK + CHUNK, end)
            empty_top = tl.full([BLOCK_M], float("-inf"), tl.float32)
            empty_total = tl.zeros([BLOCK_M], tl.float32)
            empty_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            own_top, own_total, own_acc = _walk(
                empty_top, empty_total, empty_acc, q, low, high, lowest, end, position, k_head, v_head, table,
                page_stride, row_stride, in_factor, out_factor, window,
                True, WINDOWED, SOFT_CAP, HEAD_DIM, BLOCK_D, BLOCK_N, PAGE_SIZE, ONE_PAGE, PRECISION,
            )  # fmt: skip
            if slot >= 0:
                at = part + (chunk - begin // CHUNK).to(tl.int64) * stride * KV_HEADS
                tl.store(top_ptr + at, own_top, mask=r < rows)
                tl.store(total_ptr + at, own_total, mask=r < rows)
                tl.store(part_ptr + at[:, None] * HEAD_DIM + dim[None, :], own_acc, mask=live)
            else:
                top, total, acc = fold(top, total, acc, own_top, own_total, own_acc, True)
    else:
        full_low = begin
        if WINDOWED:  # the first block that the last row sees whole
            all_see = tl.maximum(start + (row + rows - 1) // GROUP - window + 1, begin)
            full_low = tl.minimum(begin + tl.cdiv(all_see - begin, BLOCK_N) * BLOCK_N, end)
            top, total, acc = _walk(
                top, total, acc, q, begin, full_low, lowest, end, position, k_head, v_head, table,
                page_stride, row_stride, in_factor, out_factor, window,
                True, WINDOWED, SOFT_CAP, HEAD_DIM, BLOCK_D, BLOCK_N, PAGE_SIZE, ONE_PAGE, PRECISION,
            )  # fmt: skip
        whole = tl.maximum(tl.minimum(end, start + row // GROUP + 1) - full_low, 0)
        full_high = full_low + whole // BLOCK_N * BLOCK_N
        top, total, acc = _walk(
            top, total, acc, q, full_low, full_high, lowest, end, position, k_head, v_head, table,
            page_stride, row_stride, in_factor, out_factor, window,
            False, WINDOWED, SOFT_CAP, HEAD_DIM, BLOCK_D, BLOCK_N, PAGE_SIZE, ONE_PAGE, PRECISION,
        )  # fmt: skip
        top, total, acc = _walk(
            top, total, acc, q, full_high, end, lowest, end, position, k_head, v_head, table,
            page_stride, row_stride, in_factor, out_factor, window,
            True, WINDOWED, SOFT_CAP, HEAD_DIM, BLOCK_D, BLOCK_N, PAGE_SIZE, ONE_PAGE, PRECISION,
        )  # fmt: skip
        if slot >= 0:
            tl.store(top_ptr + part, top, mask=r < rows)
            tl.store(total_ptr + part, total, mask=r < rows)
            tl.store(part_ptr + part[:, None] * HEAD_DIM + dim[None, :], acc, mask=live)
    if slot < 0:
        out = acc / tl.where(r < rows, total, 1.0)[:, None]
        out_to = out_ptr + (token.to(tl.int64) * out_stride + q_head * HEAD_DIM)[:, None] + dim[None, :]
        tl.store(out_to, out.to(out_ptr.dtype.element_ty), mask=live)
