"""All layers of a step in one compiled call.

    for layer:
        q, k, v = norm(x) · qkv (+ adapters);  K, V[slots] = rotate(k), v;  rotate(q)
        attended = attention(q, K, V)
        x += attended · output
        x += (gate(norm(x) · gate_up)) · down, or experts(norm(x))

With one row a kernel takes 10 to 60 us, and Python takes 15 us to reach the next kernel. In a model of 30
layers, with 150 calls, this makes a token take about 1.5 times as long. Here a step calls compiled code once.
The kernels are the functions that the single operations run, in the same order, so the results have the same
bits.

Memory: a record of addresses for each layer, and the calls of the single operations, each filled once a step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import types
from torch import Tensor

from ramify.kernels.arguments.checks import check_attention, check_rope, check_store, wrong_lengths
from ramify.kernels.arguments.pages import head_dim_of
from ramify.kernels.cpu import attention, experts, linear, rope
from ramify.kernels.cpu import lora as adapters
from ramify.kernels.cpu.attention_records import FRAME as ATTENTION
from ramify.kernels.cpu.codegen import simd as vl
from ramify.kernels.cpu.codegen.compiler import carray, compiled, part
from ramify.kernels.cpu.codegen.simd import LOG2_E
from ramify.kernels.cpu.codegen.timers import OPERATION_TIMES, begin, lap
from ramify.kernels.cpu.experts import CALL
from ramify.kernels.cpu.packed_linear.items import FRAME as PRODUCT
from ramify.kernels.machine.records import Arena, new_record, record
from ramify.kernels.weights.lora import Extra, LoraRows
from ramify.kernels.weights.packed import LAYOUT, PackedWeight
from ramify.kernels.weights.rows import FORMATS
from ramify.kernels.weights.stack import LayerWeights, Norm, PackedExperts

MOST_PARTS = 3
"""The most matrices in which the projections of queries, keys and values are stored."""
PROJECT, STORE, ATTEND, OUTPUT, GATE_UP, DOWN = range(6)
"""The operations of a layer; in a layer with experts GATE_UP is the whole mixture."""
OPERATIONS = DOWN + 1

LAYER = record(
    "attention_norm", "qkv", "key_layout", "value_layout", "key_from", "value_from", "q_norm", "k_norm",
    "k_pages", "v_pages", "window", "sinks", "output", "mlp_norm", "gate_up", "down",
    "qkv_lora", "output_lora", "gate_up_lora", "down_lora",
    "experts", "whole_norms",
    floats=("attention_eps", "q_eps", "k_eps", "mlp_eps"),
)  # fmt: skip
"""The arguments of a layer: addresses, window, epsilons. `key_layout` and `value_layout` are 0 unless keys
and values have matrices of their own; `key_from` and `value_from` are the first numbers of keys and of values
in a row of qkv. Each `_lora` field is the address of `LoraTable.addresses`. `experts` is the address of a
record of `EXPERTS`, or 0. `whole_norms` says whether q_norm and k_norm are over all heads."""

STEP = record(
    "layers", "layer_count",
    "x", "x_row", "qkv", "attended", "gated", "gated_row", "bf16",
    "terms", "terms_row",  # memory for what adapters add to a product
    "extra",  # addresses of the rows of `terms`, as `extra` of a product's FRAME
    "ways",  # `linear.way_for` of each format
    "product", "rope", "attention", "experts", "lora",  # addresses of calls; 0 in `lora`: no adapters
    "place",  # the next operation to run, counted through all layers
)  # fmt: skip
"""The arguments of a step. Python sets the fields of the calls' records that all layers share, the kernel
sets the others for each layer."""

ROPE, LORA = rope.FRAME, adapters.FRAME
_run_product, _run_attention, _run_experts = linear.run_product, attention.run_attention, experts.run_experts
_store_tokens, _add_adapters = rope.store_tokens, adapters.add_adapters


@part
def _adapt(step, table, product, columns):  # type: ignore[no-untyped-def]
    """Write what the adapters add to the `columns` columns of a product to `step.terms`, and let `product`
    add it. Does nothing if no adapter of the step changes the matrix of `table`."""
    product.extra, product.extra_from = 0, 0
    if not step.lora:
        return
    call = carray(vl.as_pointer(step.lora), 1, LORA)[0]
    found = 0
    for segment in range(call.segment_count):
        found |= vl.read_i64(table + 8 * vl.read_i64(call.segments + 24 * segment))
    if not found:
        return
    layout = carray(vl.as_pointer(product.layout), 1, LAYOUT)[0]
    call.table, call.x, call.x_row, call.bf16 = table, product.from_x, product.from_row, step.bf16
    call.inputs, call.outputs = layout.inputs, columns
    call.out, call.out_row, call.out_bf16, call.zero = step.terms, step.terms_row, 0, 1
    call.norm, call.eps = product.norm_at, product.eps
    _add_adapters(step.lora)
    product.extra = step.extra


@part
def _set_weight(step, product, layout):  # type: ignore[no-untyped-def]
    product.layout = layout
    product.way = vl.read_i64(step.ways + 8 * carray(vl.as_pointer(layout), 1, LAYOUT)[0].form)


@part
def _set_rows(product, x, x_row, norm, eps, out, out_row, add):  # type: ignore[no-untyped-def]
    product.from_x, product.from_row, product.norm_at, product.eps = x, x_row, norm, eps
    product.out, product.out_row, product.add = out, out_row, add


@part
def _multiply(step, product, layout, table, columns):  # type: ignore[no-untyped-def]
    """Multiply by the matrix of `layout`. Returns 0 when done, else the bytes that the arena must have.

    columns : the columns of the product before its gate
    """
    _set_weight(step, product, layout)
    _adapt(step, table, product, columns)
    return _run_product(step.product)


@part
def _project(step, layer, product, qkv_row):  # type: ignore[no-untyped-def]
    """Compute queries, keys and values by one to three matrices. Returns the same as `_multiply`."""
    size = 2 if step.bf16 else 4
    _set_rows(product, step.x, step.x_row, layer.attention_norm, layer.attention_eps, step.qkv, qkv_row, 0)
    missing = _multiply(step, product, layer.qkv, layer.qkv_lora, qkv_row // size)
    for place in range(2):
        layout, start = layer.key_layout, layer.key_from
        if place == 1:
            layout, start = layer.value_layout, layer.value_from
        if layout and missing == 0:
            _set_weight(step, product, layout)
            product.out, product.extra_from = step.qkv + size * start, 4 * start
            missing = _run_product(step.product)
    return missing


@compiled(types.int64(types.int64))
def _run_layers(step_at):  # type: ignore[no-untyped-def]
    """Run the operations from `step.place` on.

    Returns 0 when done; n > 0 if the operation at `place` needs an arena of n bytes (call again to go
    on); -1 - i if the lengths of sequence i are wrong.
    """
    step = carray(vl.as_pointer(step_at), 1, STEP)[0]
    layers = carray(vl.as_pointer(step.layers), step.layer_count, LAYER)
    product = carray(vl.as_pointer(step.product), 1, PRODUCT)[0]
    turn = carray(vl.as_pointer(step.rope), 1, ROPE)[0]
    attend = carray(vl.as_pointer(step.attention), 1, ATTENTION)[0]
    size = 2 if step.bf16 else 4
    hidden, inner = step.x_row // size, step.gated_row // size
    since = begin(product.times)
    while step.place < OPERATIONS * step.layer_count:
        layer = layers[step.place // OPERATIONS]
        operation = step.place % OPERATIONS
        missing = 0
        if operation == PROJECT:
            missing = _project(step, layer, product, turn.q_row)
        elif operation == STORE:
            turn.k_pages, turn.v_pages, turn.whole_norms = layer.k_pages, layer.v_pages, layer.whole_norms
            turn.q_norm, turn.k_norm = layer.q_norm, layer.k_norm
            turn.q_eps, turn.k_eps = layer.q_eps, layer.k_eps
            _store_tokens(step.rope)
        elif operation == ATTEND:
            attend.k, attend.v = layer.k_pages, layer.v_pages
            attend.window, attend.sinks = layer.window, layer.sinks
            missing = _run_attention(step.attention)
        elif operation == OUTPUT:
            _set_rows(product, step.attended, attend.out_token, 0, 0.0, step.x, step.x_row, 1)
            missing = _multiply(step, product, layer.output, layer.output_lora, hidden)
        elif layer.experts:
            if operation == GATE_UP:
                call = carray(vl.as_pointer(step.experts), 1, CALL)[0]
                call.experts, call.norm, call.eps = layer.experts, layer.mlp_norm, layer.mlp_eps
                missing = _run_experts(step.experts)
        elif operation == GATE_UP:
            _set_rows(
                product, step.x, step.x_row, layer.mlp_norm, layer.mlp_eps, step.gated, step.gated_row, 0
            )
            missing = _multiply(step, product, layer.gate_up, layer.gate_up_lora, 2 * inner)
        else:
            _set_rows(product, step.gated, step.gated_row, 0, 0.0, step.x, step.x_row, 1)
            missing = _multiply(step, product, layer.down, layer.down_lora, hidden)
        if missing != 0:
            return missing
        since = lap(product.times, OPERATION_TIMES + operation, since)
        step.place += 1
    return 0


class LayerStack:
    """All layers of a model, on their KV pages.

    k_pages, v_pages : (layers, num_pages, kv_heads, page_size, head_dim), or int8 rows of head_dim + 4 bytes
    cascade : as in `paged_attention`
    by_row : use products whose bits do not depend on the number of rows, as `linear` with `by_row`
    int8 : use products that may round x to int8, as `linear` with `int8`, and `rounded` attention
    """

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        k_pages: Tensor,
        v_pages: Tensor,
        *,
        heads: int,
        cascade: bool = True,
        by_row: bool = False,
        int8: bool = False,
    ) -> None:
        self._kept = (list(layers), k_pages, v_pages)  # the records below have addresses of their memory
        self._pages = (k_pages[0], v_pages[0])
        self._by_row, self._int8 = by_row, int8
        self._lora = [layer.lora for layer in layers if layer.lora is not None]
        self._heads, self._kv_heads, self._dim = heads, k_pages.shape[2], head_dim_of(k_pages)
        self._gated = max((layer.gate_up.results for layer in layers if layer.gate_up is not None), default=0)
        self._hidden, self._dtype = layers[0].output.results, layers[0].attention_norm[0].dtype
        self._experts: list[PackedExperts] = []
        self._records = np.zeros(len(layers), LAYER)
        for index, layer in enumerate(layers):
            self._fill(index, layer)
        self._ways = np.zeros(len(FORMATS), np.int64)
        self._cascade = cascade

    def _fill(self, index: int, layer: LayerWeights) -> None:
        if not 0 < len(layer.qkv) <= MOST_PARTS:
            raise ValueError(
                f"queries, keys and values lie in {len(layer.qkv)} matrices; 1 to 3 are allowed."
            )
        wanted = (self._heads + 2 * self._kv_heads) * self._dim
        if sum(part.results for part in layer.qkv) != wanted:
            raise ValueError(f"layer {index} differs from the first in its heads.")
        record = self._records[index]

        def put(norm: Norm | None, name: str, eps: str) -> None:
            if norm is not None:
                record[name], record[eps] = norm[0].data_ptr(), norm[1]

        def layout(weight: PackedWeight) -> int:
            return weight.layout[0]

        put(layer.attention_norm, "attention_norm", "attention_eps")
        put(layer.q_norm, "q_norm", "q_eps")
        put(layer.k_norm, "k_norm", "k_eps")
        put(layer.mlp_norm, "mlp_norm", "mlp_eps")
        first, *others = layer.qkv
        record["qkv"], start = layout(first), first.results
        for name, weight in zip(("key", "value"), others, strict=False):
            record[f"{name}_layout"], record[f"{name}_from"] = layout(weight), start
            start += weight.results
        if layer.q_norm is not None and layer.k_norm is not None:
            record["whole_norms"] = len(layer.q_norm[0]) > self._dim
        record["output"] = layout(layer.output)
        if layer.gate_up is not None and layer.down is not None:
            record["gate_up"], record["down"] = layout(layer.gate_up), layout(layer.down)
        elif layer.experts is not None:
            self._experts.append(layer.experts)
            record["experts"] = layer.experts.layout[0]
        else:
            raise ValueError(f"layer {index} has neither gate_up and down nor experts.")
        k_pages, v_pages = self._kept[1:]
        record["k_pages"], record["v_pages"] = k_pages[index].data_ptr(), v_pages[index].data_ptr()
        record["window"] = layer.window
        if layer.sinks is not None:
            record["sinks"] = layer.sinks.data_ptr()
        if layer.lora is not None:
            for name, table in zip(("qkv", "output", "gate_up", "down"), layer.lora, strict=True):
                record[f"{name}_lora"] = table.addresses.ctypes.data

    def __call__(
        self,
        x: Tensor,
        rotation: Tensor,
        slots: Tensor,
        page_table: Tensor,
        query_starts: Tensor,
        kv_lens: Tensor,
        *,
        scale: float,
        lora: LoraRows | None = None,
    ) -> None:
        """Run x through all layers, in place, and store keys and values.

        x : (T, hidden), dtype of the norms, contiguous
        rotation : (T, head_dim / 2) complex64
        slots : (T,) int64
        page_table, query_starts, kv_lens : as in `paged_attention`
        lora : the adapters of the rows

        Raises ValueError for arguments that the single operations refuse.
        """
        tokens, dim = len(x), self._dim
        if x.dim() != 2 or x.shape[1] != self._hidden or x.dtype != self._dtype:
            raise ValueError(
                f"x is {tuple(x.shape)} {x.dtype}; it must be (T, {self._hidden}) {self._dtype}."
            )
        qkv = x.new_empty((tokens, self._heads + 2 * self._kv_heads, dim))
        attended = x.new_empty((tokens, self._heads, dim))
        gated = x.new_empty((tokens, self._gated))
        q, k, v = qkv.split((self._heads, self._kv_heads, self._kv_heads), dim=1)
        check_rope(q, k, rotation)
        int8 = (torch.int8,)
        check_store(k, v, *self._pages, slots, page_dtypes=int8)
        lengths = page_table, query_starts, kv_lens
        check_attention(q, *self._pages, *lengths, 0, 0.0, attended, page_dtypes=int8)
        if not x.is_contiguous():
            raise ValueError("x must be contiguous.")
        for place, form in enumerate(FORMATS):
            self._ways[place] = linear.way_for(tokens, form, x.dtype, by_row=self._by_row, int8=self._int8)
        step, size = new_record(STEP), x.element_size()
        step.layers, step.layer_count, step.bf16 = self._records.ctypes.data, len(self._records), size == 2
        step.x, step.x_row = x.data_ptr(), x.stride(0) * size
        step.qkv, step.attended = qkv.data_ptr(), attended.data_ptr()
        step.gated, step.gated_row = gated.data_ptr(), self._gated * size
        step.ways = self._ways.ctypes.data
        linear.fill_call(x, x, tokens)
        rope.fill_call(q, k, v, rotation, self._pages[0], slots)
        attend = attention.fill_call(q, self._pages[0], page_table, query_starts, kv_lens, attended)
        attend.capped, attend.cascade, attend.may_round = False, self._cascade, self._int8
        attend.query_factor, attend.score_factor = scale * LOG2_E, 1.0
        step.product, step.rope = linear.arena.call_at, rope.arena.call_at
        step.attention, step.experts = attention.arena.call_at, experts.arena.call_at
        expert_ways = self._prepare_experts(x)  # noqa: F841 - the call has the address of its memory
        kept = self._adapt(step, lora)  # noqa: F841 - `step` has addresses of its memory
        while (result := _run_layers(ctypes.addressof(step))) > 0:
            layer, operation = divmod(step.place, OPERATIONS)
            arena: Arena = attention.arena if operation == ATTEND else linear.arena
            if operation == GATE_UP and self._records[layer]["experts"]:
                arena = experts.arena
            arena.grow(2 * result)
        if result < 0:
            raise wrong_lengths(-1 - result, tokens, page_table.shape[1] * self._pages[0].shape[2])

    def _prepare_experts(self, x: Tensor) -> object:
        """Fill the fields that the calls of all sparse layers of a step share. Returns an object that must be
        kept during the step; None without sparse layers."""
        if not self._experts:
            return None
        rows = min(each.rows_of_expert(len(x)) for each in self._experts)
        expert_ways = experts.ways_of(rows, x.dtype, by_row=self._by_row, int8=self._int8)
        call = experts.fill_call(x, x, self._ways, expert_ways)
        call.add = True
        return expert_ways

    def _adapt(self, step: Any, rows: LoraRows | None) -> object:
        """Fill the step's fields for adapters. Returns an object that must be kept during the call; None
        without adapters."""
        if rows is None or not rows.present:
            return None
        weights = [
            table.weights[slot]
            for tables in self._lora
            for table in tables
            for slot in rows.present
            if slot in table.weights
        ]
        if not weights:
            return None
        adapters.fill_call(rows, weights)
        qkv = (self._heads + 2 * self._kv_heads) * self._dim
        terms = torch.empty(len(rows.slots), max(qkv, self._hidden, 2 * self._gated))
        extra = Extra(terms, rows).addresses()
        step.lora, step.terms, step.extra = adapters.arena.call_at, terms.data_ptr(), extra.ctypes.data
        step.terms_row = 4 * terms.shape[1]
        return terms, extra
