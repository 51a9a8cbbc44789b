"""Mixtures of packed experts (arXiv 2401.04088) in one call: router, choice, experts, shared expert, sum.

    logits = norm(x) · router;  for row: choose top_k experts, weights
    sort the pairs (row, expert) by expert
    for expert that is chosen: for its rows: inner = gate(x · gate_up)      one call of the threads
    for expert that is chosen: for its rows: y = inner · down               another
    for row: out = Σ weight · y (+ shared expert) (+ residual)

Memory: `WORK`, divided by `_lay_out`; weights as in `linear`. Few rows are bound by reading the chosen
experts.

Example: rows 0, 1, 2 choose experts (5, 2), (5, 7), (2, 5). Sorted by expert: 2 has rows 0 and 2, 5 has rows
0, 1 and 2, 7 has row 1. All products with gate_up are one call of the threads, with an item for every four
panels of experts 2, 5 and 7. All products with down are another call. So each chosen expert is read once, and
other experts are not read.

Every pair of a row and an expert has its own row of results. The results of a row are summed in the order in
which it chose its experts. So a row's bits depend on other rows only if the bits of `linear` do.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numba import types
from torch import Tensor

from ramify.kernels.arguments.checks import check_packed_experts
from ramify.kernels.cpu import linear
from ramify.kernels.cpu.codegen import simd as vl
from ramify.kernels.cpu.codegen.compiler import carray, compiled, part
from ramify.kernels.cpu.codegen.simd import LANES
from ramify.kernels.cpu.linear import FRAME_BYTES, SERIAL_BYTES, counter_bytes, divide, launch, locate
from ramify.kernels.cpu.packed_linear.items import FRAME
from ramify.kernels.cpu.parts.norm import normalise
from ramify.kernels.machine.records import Arena, record
from ramify.kernels.weights.packed import LAYOUT
from ramify.kernels.weights.routing import LEAST_SUM
from ramify.kernels.weights.rows import FORMATS
from ramify.kernels.weights.stack import EXPERTS, PackedExperts

WORK = record("normed", "logits", "choice", "chosen", "weights", "rows", "places", "inner", "y", "shared",
              "shared_y", "starts", "end")  # fmt: skip
"""The addresses of a call's intermediate results."""

CALL = record(
    "experts", "x", "x_row", "bf16", "tokens", "out", "out_row", "add", "norm",
    "ways", "expert_ways", "threads", "team", "body", "arena", "arena_bytes",
    floats=("eps",),
)  # fmt: skip
"""The arguments of a call. `ways` and `expert_ways` have `linear.way_for` of each weight format: `ways` for
the number of all rows, `expert_ways` for the number of rows of one expert."""

_run_product = linear.run_product
LAYOUT_BYTES = LAYOUT.itemsize
_WORK_BYTES = -(-WORK.itemsize // 64) * 64
_FRAME_BYTES = -(-FRAME.itemsize // 64) * 64


@part
def _lay_out(work, experts, tokens, size, at):  # type: ignore[no-untyped-def]
    """Give each intermediate result its memory, from `at` on; set `work.end` to the end of the last one."""
    pairs = tokens * experts.top_k
    work.normed = at
    work.logits = work.normed + vl.round_up(tokens * experts.hidden * size, 64)
    work.choice = work.logits + vl.round_up(tokens * (experts.count + 1) * 4, 64)
    work.chosen = work.choice + vl.round_up(experts.count * 16 + experts.groups * 8, 64)
    work.weights = work.chosen + vl.round_up(pairs * 8, 64)
    work.rows = work.weights + vl.round_up(pairs * 4, 64)
    work.places = work.rows + vl.round_up(pairs * 8, 64)
    work.starts = work.places + vl.round_up(pairs * 8, 64)
    work.inner = work.starts + vl.round_up((experts.count + 2) * 8, 64)
    work.y = work.inner + vl.round_up(pairs * experts.size * size, 64)
    work.shared = work.y + vl.round_up(pairs * experts.hidden * 4, 64)
    work.shared_y, work.end = work.shared, work.shared
    if experts.shared_gate_up:
        work.shared_y = work.shared + vl.round_up(tokens * experts.shared_size * size, 64)
        work.end = work.shared_y + vl.round_up(tokens * experts.hidden * 4, 64)


@part
def _take_best(choice, count):  # type: ignore[no-untyped-def]
    """The place of the largest number of `choice`, the lowest place among equals; 0 if all are NaN. The
    number taken becomes NaN, so that the next call does not take it again."""
    best = -1
    for place in range(count):
        number = choice[place]
        if number == number and (best < 0 or number > choice[best]):
            best = place
    if best < 0:  # only a row of NaNs leads here
        return 0
    choice[best] = np.nan
    return best


@part
def _route(experts, work, token):  # type: ignore[no-untyped-def]
    """As `reference.experts.route`, for one row of logits."""
    count, top_k = experts.count, experts.top_k
    row = count + (1 if experts.shared_gate else 0)
    logits = carray(vl.as_pointer(work.logits + 4 * token * row), row, np.float32)
    scores = carray(vl.as_pointer(work.choice), count, np.float64)
    choice = carray(vl.as_pointer(work.choice + 8 * count), count, np.float64)
    best = carray(vl.as_pointer(work.choice + 16 * count), experts.groups, np.float64)
    chosen = carray(vl.as_pointer(work.chosen + 8 * token * top_k), top_k, np.int64)
    weights = carray(vl.as_pointer(work.weights + 4 * token * top_k), top_k, np.float32)
    largest = logits[0]
    for place in range(count):
        largest = max(largest, logits[place])
    total = 0.0
    for place in range(count):
        if experts.sigmoid:
            scores[place] = 1.0 / (1.0 + math.exp(-logits[place]))
        else:
            scores[place] = math.exp(logits[place] - largest)
            total += scores[place]
    for place in range(count):
        if not experts.sigmoid:
            scores[place] /= total
        choice[place] = scores[place]
        if experts.correction:
            choice[place] += vl.read_f32(experts.correction + 4 * place)
    if experts.groups > 1:
        members = count // experts.groups
        for group in range(experts.groups):
            first, second = -np.inf, -np.inf
            for place in range(group * members, (group + 1) * members):
                number = choice[place]
                if number > first:
                    first, second = number, first
                elif number > second:
                    second = number
            best[group] = first + second
        for _ in range(experts.top_groups):
            _take_best(best, experts.groups)
        for group in range(experts.groups):
            if best[group] == best[group]:
                for place in range(group * members, (group + 1) * members):
                    choice[place] = np.nan
    total = 0.0
    for place in range(top_k):
        chosen[place] = _take_best(choice, count)
        total += scores[chosen[place]]
    factor = experts.scale / (total + LEAST_SUM) if experts.normalised else experts.scale
    for place in range(top_k):
        weights[place] = scores[chosen[place]] * factor


@part
def _sort(experts, work, tokens):  # type: ignore[no-untyped-def]
    """Sort the pairs (row, expert) by expert. Writes `rows`, the row of each sorted pair; `places`, each
    pair's place among the sorted pairs; and `starts`, the place of each expert's first pair."""
    pairs = tokens * experts.top_k
    chosen = carray(vl.as_pointer(work.chosen), pairs, np.int64)
    rows = carray(vl.as_pointer(work.rows), pairs, np.int64)
    places = carray(vl.as_pointer(work.places), pairs, np.int64)
    starts = carray(vl.as_pointer(work.starts), experts.count + 2, np.int64)
    starts[:] = 0
    for pair in range(pairs):
        starts[chosen[pair] + 2] += 1
    for expert in range(experts.count):
        starts[expert + 2] += starts[expert + 1]
    # starts[e + 1] is where the next pair of expert e goes, and in the end where expert e + 1 starts.
    for pair in range(pairs):
        place = starts[chosen[pair] + 1]
        starts[chosen[pair] + 1] += 1
        rows[place], places[pair] = pair // experts.top_k, place


@part
def _products(call, experts, work, layouts, x, x_row, rows_at, out, out_row, out_bf16, arena, room):  # type: ignore[no-untyped-def]
    """Multiply the sorted pairs' rows by their experts' matrices. Returns 0 when done, else the bytes of
    memory that are needed from `arena` on; `room` is what there is."""
    starts = carray(vl.as_pointer(work.starts), experts.count + 2, np.int64)
    pairs, products = starts[experts.count], 0
    for expert in range(experts.count):
        products += starts[expert + 1] > starts[expert]
    threads = call.threads
    counters = arena + vl.round_up(products * FRAME_BYTES, 64)
    at = counters + counter_bytes(threads)
    if at > arena + room:
        return at - arena
    head = carray(vl.as_pointer(arena), 1, FRAME)[0]
    head.counters = counters
    place, items, expert = 0, 0, 0
    while expert < experts.count:
        first, rows = starts[expert], starts[expert + 1] - starts[expert]
        if rows:
            frame = carray(vl.as_pointer(arena + place * FRAME_BYTES), 1, FRAME)[0]
            layout_at = layouts + expert * LAYOUT_BYTES
            layout = carray(vl.as_pointer(layout_at), 1, LAYOUT)[0]
            if threads * SERIAL_BYTES > layout.panels * layout.panel_bytes * pairs:
                threads = 1
            frame.layout, frame.rows, frame.panels = layout_at, rows, layout.panels
            frame.way = vl.read_i64(call.expert_ways + 8 * layout.form)
            frame.out, frame.out_row, frame.out_bf16 = out + first * out_row, out_row, out_bf16
            frame.add, frame.chosen, frame.norm_at, frame.rows_at, frame.extra = 0, 0, 0, 0, 0
            frame.from_x, frame.from_row, frame.from_bf16 = x, x_row, call.bf16
            frame.x_rows_at = rows_at + 8 * first if rows_at else 0
            if not rows_at:
                frame.from_x = x + first * x_row
            divide(frame, layout, threads)
            # The first frame has the memory of all: blocks of rows differ, and with them the scratch memory.
            head.scratch_bytes = max(head.scratch_bytes, frame.scratch_bytes)
            at = locate(frame, layout, at)
            items += frame.items
            place += 1
        expert += 1
    threads = min(threads, items)
    head.scratch = at
    end = at + threads * head.scratch_bytes
    if end > arena + room:
        return end - arena
    head.team, head.body, head.times = call.team, call.body, 0
    launch(arena, products, threads)
    return 0


@part
def _sum(call, experts, work):  # type: ignore[no-untyped-def]
    """Write each row's weighted sum of results to `out`: the chosen experts in the order of choice, then the
    shared expert."""
    top_k, hidden, size = experts.top_k, experts.hidden, 2 if call.bf16 else 4
    whole = hidden - hidden % LANES
    row = experts.count + (1 if experts.shared_gate else 0)
    for token in range(call.tokens):
        out = call.out + token * call.out_row
        shared, gate = work.shared_y + 4 * token * hidden, np.float32(1.0)
        if experts.shared_gate:
            logit = vl.read_f32(work.logits + 4 * (token * row + experts.count))
            gate = np.float32(1.0 / (1.0 + math.exp(-logit)))
        for i in range(0, hidden, LANES):
            last = hidden if i >= whole else 0
            if not last:
                total = vl.splat_f32(0.0)
                for pair in range(token * top_k, (token + 1) * top_k):
                    weight = vl.splat_f32(vl.read_f32(work.weights + 4 * pair))
                    at = work.y + 4 * (vl.read_i64(work.places + 8 * pair) * hidden + i)
                    total = vl.fma(weight, vl.load(at), total)
                if experts.shared_gate_up:
                    total = vl.fma(vl.splat_f32(gate), vl.load(shared + 4 * i), total)
                if call.add:
                    total = vl.add(total, vl.load_as(out + size * i, call.bf16))
                vl.store_as(out + size * i, total, call.bf16)
            for j in range(i, last):
                number = np.float32(0.0)
                for pair in range(token * top_k, (token + 1) * top_k):
                    at = work.y + 4 * (vl.read_i64(work.places + 8 * pair) * hidden + j)
                    number += vl.read_f32(work.weights + 4 * pair) * vl.read_f32(at)
                if experts.shared_gate_up:
                    number += gate * vl.read_f32(shared + 4 * j)
                if call.add:
                    number += vl.read_as(out + size * j, call.bf16)
                vl.write_as(out + size * j, number, call.bf16)


@part
def _whole(call, layout_at, x, x_row, out, out_row, out_bf16, arena, room):  # type: ignore[no-untyped-def]
    """Multiply all rows by one matrix. Returns the same as `_products`."""
    if room < _FRAME_BYTES:
        return _FRAME_BYTES
    frame = carray(vl.as_pointer(arena), 1, FRAME)[0]
    frame.layout, frame.rows = layout_at, call.tokens
    frame.way = vl.read_i64(call.ways + 8 * carray(vl.as_pointer(layout_at), 1, LAYOUT)[0].form)
    frame.from_x, frame.from_row, frame.from_bf16 = x, x_row, call.bf16
    frame.out, frame.out_row, frame.out_bf16, frame.add = out, out_row, out_bf16, 0
    frame.norm_at, frame.chosen, frame.rows_at, frame.extra = 0, 0, 0, 0
    frame.threads, frame.team, frame.body, frame.times = call.threads, call.team, call.body, 0
    frame.arena, frame.arena_bytes = arena + _FRAME_BYTES, room - _FRAME_BYTES
    missing = _run_product(arena)
    return _FRAME_BYTES + missing if missing else 0


@compiled(types.int64(types.int64))
def run_experts(call_at):  # type: ignore[no-untyped-def]
    """Compute the mixture that the CALL at address `call_at` describes.

    Returns 0 when done. Otherwise returns the bytes that the arena must have, and has written nothing to
    `out`.
    """
    call = carray(vl.as_pointer(call_at), 1, CALL)[0]
    experts = carray(vl.as_pointer(call.experts), 1, EXPERTS)[0]
    work = carray(vl.as_pointer(call.arena), 1, WORK)[0]
    tokens, hidden, size = call.tokens, experts.hidden, 2 if call.bf16 else 4
    _lay_out(work, experts, tokens, size, call.arena + _WORK_BYTES)
    arena, room = work.end, call.arena + call.arena_bytes - work.end
    if room < 0:
        return -room + call.arena_bytes
    x, x_row = call.x, call.x_row
    if call.norm:
        x, x_row = work.normed, hidden * size
        for token in range(tokens):
            at = call.x + token * call.x_row
            normalise(at, x + token * x_row, call.norm, hidden, call.eps, call.bf16, call.bf16)
    used = arena - call.arena
    row = 4 * (experts.count + (1 if experts.shared_gate else 0))
    missing = _whole(call, experts.router, x, x_row, work.logits, row, 0, arena, room)
    if missing:
        return used + missing
    for token in range(tokens):
        _route(experts, work, token)
    _sort(experts, work, tokens)
    inner_row = experts.size * size
    missing = _products(call, experts, work, experts.gate_up, x, x_row, work.rows, work.inner, inner_row,
                        call.bf16, arena, room)  # fmt: skip
    if missing:
        return used + missing
    missing = _products(call, experts, work, experts.down, work.inner, inner_row, 0, work.y, 4 * hidden,
                        0, arena, room)  # fmt: skip
    if missing:
        return used + missing
    if experts.shared_gate_up:
        inner_row = experts.shared_size * size
        missing = _whole(call, experts.shared_gate_up, x, x_row, work.shared, inner_row, call.bf16, arena,
                         room)  # fmt: skip
        if missing:
            return used + missing
        missing = _whole(call, experts.shared_down, work.shared, inner_row, work.shared_y, 4 * hidden, 0,
                         arena, room)  # fmt: skip
        if missing:
            return used + missing
    _sum(call, experts, work)
    return 0


arena = Arena(CALL, linear.body_address)


def ways_of(rows: int, dtype: torch.dtype, *, by_row: bool, int8: bool) -> np.ndarray:
    """`linear.way_for` of each weight format, for `rows` rows."""
    ways = (linear.way_for(rows, form, dtype, by_row=by_row, int8=int8) for form in FORMATS)
    return np.array(list(ways), np.int64)


def fill_call(x: Tensor, out: Tensor, ways: np.ndarray, expert_ways: np.ndarray) -> Any:
    """This thread's CALL, for `run_experts`. The caller sets the mixture, norm and `add`."""
    call, size, out_size = arena.call, x.element_size(), out.element_size()
    call.x, call.x_row, call.bf16, call.tokens = x.data_ptr(), size * x.stride(0), size == 2, len(x)
    call.out, call.out_row = out.data_ptr(), out_size * out.stride(0)
    call.ways, call.expert_ways = ways.ctypes.data, expert_ways.ctypes.data
    call.threads = torch.get_num_threads()
    return call


def expert_block(
    x: Tensor,
    experts: PackedExperts,
    *,
    norm: tuple[Tensor, float] | None = None,
    out: Tensor | None = None,
    add: bool = False,
    by_row: bool = False,
    int8: bool = False,
) -> Tensor:
    """As `reference.experts.expert_block`; `by_row` and `int8` as in `linear.way_for`."""
    out = check_packed_experts(x, experts, norm, out, add)
    if not len(x):
        return out
    ways = ways_of(len(x), x.dtype, by_row=by_row, int8=int8)
    expert_ways = ways_of(experts.rows_of_expert(len(x)), x.dtype, by_row=by_row, int8=int8)
    call = fill_call(x, out, ways, expert_ways)
    call.experts, call.add = experts.layout[0], add
    call.norm, call.eps = (0, 0.0) if norm is None else (norm[0].data_ptr(), norm[1])
    arena.finish(run_experts)
    return out
