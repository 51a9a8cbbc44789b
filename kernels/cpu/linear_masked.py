"""Products for masks that allow few outputs: panels without an allowed output are skipped.

    for row: count the panels in which its mask allows an output; sort rows by that count
    for n rows, fewest panels first: estimate the time of the n rows with the union of their panels, and of
        the other rows with all panels
    for the n of least time: out[row] = -inf;  panels of the union · x
    for the other rows: all panels · x

Memory: a mask has a bit for each output, a word for two panels of 16. Reading W is what skipping saves.

A grammar in the middle of a JSON object allows a handful of tokens: a few of the thousands of panels of a
language model's head. Example with 1000 panels and three rows, whose masks touch 2, 5 and 1000 panels:

    sorted by panels   row 0 (2), row 1 (5), row 2 (1000)
    rows 0 and 1       computed for the union of their panels, say 6, rounded up to 8
    row 2              computed for all 1000 panels
    the split          the number of rows, fewest panels first, that makes the estimated total time least
"""

from __future__ import annotations

import numpy as np
from numba import types
from torch import Tensor

from ramify.kernels.arguments.sampling_inputs import check_masked
from ramify.kernels.cpu.codegen import simd as vl
from ramify.kernels.cpu.codegen.compiler import carray, compiled, part
from ramify.kernels.cpu.linear import multiply_rows, way_for
from ramify.kernels.cpu.packed_linear.items import ITEM_PANELS, kernel_rows
from ramify.kernels.cpu.packed_linear.tiles import ROWS
from ramify.kernels.machine.records import Arena, record
from ramify.kernels.weights.packed import PackedWeight

READ_ROWS = {"bf16": 8.0, "f32": 8.0, "int8": 4.0, "fp8": 4.0, "int4": 2.0}
"""The number of rows, by weight format, for which multiplying by a panel takes as long as reading it."""
MARGIN = 0.9
"""Panels are skipped if the estimated time is below MARGIN times the time for all panels."""
SCATTERED = 1.4
"""Cost of a panel whose neighbours are skipped, relative to a panel that is read in one stream."""
CALL_PANELS = 40.0
"""Cost of finding the panels and of a second call, in multiplications of a panel with one row: about 5 us."""


PLAN = record(
    "mask", "words", "mask_rows",  # addresses of int32; -1 in `mask_rows`: no mask
    "rows", "panels",
    "out", "out_row", "outputs",
    "arena", "arena_bytes",
    # Set by the call: memory of the plan, the numbers of panels in `chosen` and of rows that skip.
    "order", "counts", "union", "chosen", "chosen_count", "few",
    floats=("read_rows",),  # `READ_ROWS` of the weight
)  # fmt: skip


@part
def _mask_of(plan, row):  # type: ignore[no-untyped-def]
    at = plan.mask + 4 * plan.words * vl.read_i32(plan.mask_rows + 4 * row)
    return carray(vl.as_pointer(at), plan.words, np.uint32)


@part
def _time(panels, rows, read_rows):  # type: ignore[no-untyped-def]
    """Estimated time of `panels` panels for `rows` rows, in multiplications of one panel with one row."""
    most = ROWS[-1]
    padded = rows // most * most
    if rows > padded:
        padded += kernel_rows(rows - padded)
    return panels * max(read_rows, float(padded)) if rows else 0.0


@part
def _panels_in(bits):  # type: ignore[no-untyped-def]
    """The number of panels (0 to 2) in which a word of a mask allows an output: a word covers two panels."""
    return ((bits & np.uint32(0xFFFF)) != 0) + ((bits >> np.uint32(16)) != 0)


@compiled(types.int64(types.int64))
def _plan(plan_at):  # type: ignore[no-untyped-def]
    """Choose the n rows that skip panels. Returns -n, or the bytes that the arena must have.

    `order` becomes the n rows, ascending, then the other rows. `chosen` becomes the panels to compute for the
    n rows. `out` becomes minus infinity in the n rows.
    """
    plan = carray(vl.as_pointer(plan_at), 1, PLAN)[0]
    rows, panels, words, read_rows = plan.rows, plan.panels, plan.words, plan.read_rows
    plan.order, plan.counts, plan.union = plan.arena, plan.arena + 8 * rows, plan.arena + 16 * rows
    plan.chosen = plan.union + 4 * words
    end = plan.chosen + 4 * (panels + ITEM_PANELS)
    if end > plan.arena + plan.arena_bytes:
        return end - plan.arena
    order = carray(vl.as_pointer(plan.order), rows, np.int64)
    counts = carray(vl.as_pointer(plan.counts), rows, np.int64)
    union = carray(vl.as_pointer(plan.union), words, np.uint32)
    chosen = carray(vl.as_pointer(plan.chosen), panels + ITEM_PANELS, np.int32)
    for row in range(rows):
        needed = panels
        if vl.read_i32(plan.mask_rows + 4 * row) >= 0:
            mask = _mask_of(plan, row)
            needed = 0
            for word in range(words):
                needed += _panels_in(mask[word])
        counts[row] = needed
        place = row
        while place > 0 and counts[order[place - 1]] > needed:
            order[place] = order[place - 1]
            place -= 1
        order[place] = row
    for word in range(words):
        union[word] = 0
    least = MARGIN * _time(panels, rows, read_rows)
    few = 0
    plan.chosen_count = 0
    for place in range(rows):
        row = order[place]
        if counts[row] >= MARGIN * panels:
            break
        mask = _mask_of(plan, row)
        touched = 0
        for word in range(words):
            bits = union[word] | mask[word]
            union[word] = bits
            touched += _panels_in(bits)
        touched = (touched + ITEM_PANELS - 1) // ITEM_PANELS * ITEM_PANELS
        time = SCATTERED * _time(touched, place + 1, read_rows)
        time += _time(panels, rows - place - 1, read_rows)
        if time + CALL_PANELS < least:
            least, few = time + CALL_PANELS, place + 1
    if few == 0:
        return 0
    for word in range(words):
        union[word] = 0
    for place in range(few):
        row = order[place]
        mask = _mask_of(plan, row)
        for word in range(words):
            union[word] |= mask[word]
        to = plan.out + row * plan.out_row
        for output in range(plan.outputs):
            vl.write_f32(to + 4 * output, np.float32(-np.inf))
    count = 0
    for word in range(words):
        bits = union[word]
        if bits & np.uint32(0xFFFF):
            chosen[count] = 2 * word
            count += 1
        if bits >> np.uint32(16):
            chosen[count] = 2 * word + 1
            count += 1
    while count % ITEM_PANELS:
        chosen[count] = chosen[count - 1]
        count += 1
    order[:few].sort()
    order[few:].sort()
    plan.chosen_count = count
    return -few


arena = Arena(PLAN, size=1 << 16)


def masked_linear(
    x: Tensor,
    weight: PackedWeight,
    mask: Tensor,
    mask_rows: Tensor,
    *,
    out: Tensor | None = None,
    by_row: bool = False,
    int16: bool = False,
) -> Tensor:
    """As `reference.linear.masked_linear`; `by_row` and `int16` as in `linear.way_for`."""
    out = check_masked(x, weight, mask, mask_rows, out)
    rows, panels, words = len(x), len(weight.panels), mask.shape[1]
    if not rows:
        return out
    call = arena.call
    call.mask, call.words, call.mask_rows = mask.data_ptr(), words, mask_rows.data_ptr()
    call.rows, call.panels, call.read_rows = rows, panels, READ_ROWS[weight.format]
    call.out, call.out_row, call.outputs = out.data_ptr(), 4 * out.stride(0), weight.results
    few = call.few = -arena.finish(_plan)
    # The way is chosen by the number of all rows, so that skipping panels changes no bit.
    way = way_for(rows, weight.format, x.dtype, by_row=by_row, int16=int16)
    if not few:
        multiply_rows(x, weight, None, out, False, way, rows)
        return out
    if call.chosen_count:
        chosen = (call.chosen, call.chosen_count)
        multiply_rows(x, weight, None, out, False, way, few, chosen, call.order)
    if few < rows:
        multiply_rows(x, weight, None, out, False, way, rows - few, rows_at=call.order + 8 * few)
    return out
