"""All layers of a step in one compiled call.

With one row a kernel takes 10 to 60 us, and Python 15 us to reach the next one. In a model of 30 layers, with
150 calls, a token then takes half as long again. Here Python is left once a step. The kernels are the
functions that the single operations run, in the same order, so the results have the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numba import types
from torch import Tensor

from ramify.kernels.arguments.checks import check_attention, check_rope, check_store, wrong_lengths
from ramify.kernels.cpu import attention, experts, linear, rope
from ramify.kernels.cpu import lora as adapters
from ramify.kernels.cpu.codegen import simd as vl
from ramify.kernels.cpu.codegen.compiler import carray, compiled, part
from ramify.kernels.cpu.codegen.records import record
from ramify.kernels.cpu.codegen.simd import LOG2_E
from ramify.kernels.cpu.experts import CALL
from ramify.kernels.machine.threads import team_entry
from ramify.kernels.weights.lora import Extra, LoraRows
from ramify.kernels.weights.packed import LAYOUT, PackedWeight
from ramify.kernels.weights.rows import FORMATS
from ramify.kernels.weights.stack import LayerWeights, Norm

MOST_PARTS = 3
"""Most matrices that the projections of queries, keys and values are stored in."""
OPERATIONS = 6
"""Operations of a layer: q, k and v projections; rotation and store; attention; output; gate and up; down."""

LAYER = record(
    "attention_norm", "qkv", "key_layout", "value_layout", "key_from", "value_from", "q_norm", "k_norm",
    "k_pages", "v_pages", "window", "sinks", "output", "mlp_norm", "gate_up", "down",
    "qkv_lora", "output_lora", "gate_up_lora", "down_lora",
    "experts", "whole_norms",
    floats=("attention_eps", "q_eps", "k_eps", "mlp_eps"),
)  # fmt: skip
"""The arguments of a layer: addresses, window, epsilons. `key_layout` and `value_layout` are 0 unless keys
and values have matrices of their own; `key_from` and `value_from` are their byte offsets in a row of qkv.
`qkv_lora` and the others are addresses of `LoraTable.addresses`. `experts` is a record of `experts.EXPERTS`,
or 0; `whole_norms` says that q_norm and k_norm are over all heads."""

STEP = record(
    "layers", "layer_count", "heads", "kv_heads", "dim", "bf16",
    "page_bytes", "head_bytes", "row_bytes", "page_size", "cascade", "rounded",
    "x", "x_row", "qkv", "attended", "gated", "gated_row", "tokens",
    "sequences", "starts", "lens", "table", "table_width", "order", "ways", "threads", "team",
    "linear_body", "linear_arena", "linear_bytes", "attention_body", "attention_arena", "attention_bytes",
    "rope", "rope_body", "lora", "lora_body", "lora_arena", "lora_bytes", "terms", "terms_row", "extra",
    "experts_call", "place",
)  # fmt: skip
"""The arguments of a step. `place` is the next operation to run, counted through all layers. `lora` is the
address of a `lora.STEP`, or 0; `extra` that of the addresses of the rows of `terms` (`linear.run`).
`experts_call` is a record of `experts.CALL`, and `rope` one of `rope.FRAME`."""

_linear_run, _attention_run, _experts_run = linear.run, attention.run, experts.run
_rope_run, ROPE = rope.run, rope.FRAME
_lora_run, LORA_STEP = adapters.run, adapters.STEP


@part
def _adapt(step, table, layout, outputs, x, x_row, norm, eps):  # type: ignore[no-untyped-def]
    """Write what adapters add to a product to `step.terms`. Returns the `extra` of `_linear`: 0 where no
    adapter of the step changes this matrix."""
    if not step.lora:
        return 0
    rows = carray(vl.as_pointer(step.lora), 1, LORA_STEP)[0]
    found = 0
    for segment in range(rows.segment_count):
        found |= vl.read_i64(table + 8 * vl.read_i64(rows.segments + 24 * segment))
    if not found:
        return 0
    _lora_run(
        step.lora, table, x, x_row, step.bf16, carray(vl.as_pointer(layout), 1, LAYOUT)[0].inputs,
        step.terms, step.terms_row, 0, outputs, 1,
        step.threads, step.team, step.lora_body, step.lora_arena, step.lora_bytes, norm, eps,
    )  # fmt: skip
    return step.extra


@part
def _linear(step, layout, x, x_row, out, out_row, adds, norm, eps, extra, extra_from):  # type: ignore[no-untyped-def]
    """Returns 0 when done, else the bytes that the arena must have."""
    way = vl.read_i64(step.ways + 8 * carray(vl.as_pointer(layout), 1, LAYOUT)[0].form)
    return _linear_run(
        layout, x, x_row, step.bf16, step.tokens, out, out_row, step.bf16, adds, way,
        step.threads, step.team, step.linear_body, step.linear_arena, step.linear_bytes,
        norm, eps, 0, 0, 0, extra, extra_from,
    )  # fmt: skip


@compiled(types.int64(types.int64, types.float64))
def _run(step_at, query_factor):  # type: ignore[no-untyped-def]
    """Run the operations from `step.place` on.

    Returns 0 when done; n > 0 if the operation at `place` needs an arena of n bytes (call again to go
    on); -1 - i if the lengths of sequence i are wrong.
    """
    step = carray(vl.as_pointer(step_at), 1, STEP)[0]
    layers = carray(vl.as_pointer(step.layers), step.layer_count, LAYER)
    size = 2 if step.bf16 else 4
    head = step.dim * size
    qkv_row, attended_row = (step.heads + 2 * step.kv_heads) * head, step.heads * head
    while step.place < OPERATIONS * step.layer_count:
        layer = layers[step.place // OPERATIONS]
        operation = step.place % OPERATIONS
        missing = 0
        if operation == 0:
            x, norm, eps = step.x, layer.attention_norm, layer.attention_eps
            extra = _adapt(step, layer.qkv_lora, layer.qkv, qkv_row // size, x, step.x_row, norm, eps)
            missing = _linear(step, layer.qkv, x, step.x_row, step.qkv, qkv_row, 0, norm, eps, extra, 0)
            if layer.key_layout and missing == 0:
                to = step.qkv + layer.key_from
                missing = _linear(
                    step, layer.key_layout, x, step.x_row, to, qkv_row, 0, norm, eps, extra,
                    layer.key_from // size * 4,
                )  # fmt: skip
            if layer.value_layout and missing == 0:
                to = step.qkv + layer.value_from
                missing = _linear(
                    step, layer.value_layout, x, step.x_row, to, qkv_row, 0, norm, eps, extra,
                    layer.value_from // size * 4,
                )  # fmt: skip
        elif operation == 1:
            turn = carray(vl.as_pointer(step.rope), 1, ROPE)[0]
            turn.k_pages, turn.v_pages, turn.whole_norms = layer.k_pages, layer.v_pages, layer.whole_norms
            turn.q_norm, turn.k_norm = layer.q_norm, layer.k_norm
            turn.q_eps, turn.k_eps = layer.q_eps, layer.k_eps
            _rope_run(step.rope, step.threads, step.team, step.rope_body)
        elif operation == 2:
            missing = _attention_run(
                step.qkv, qkv_row, layer.k_pages, layer.v_pages,
                step.page_bytes, step.head_bytes, step.row_bytes, step.page_size,
                step.attended, attended_row, step.heads // step.kv_heads, step.dim, step.bf16,
                step.kv_heads, step.sequences, step.starts, step.lens, step.table, step.table_width,
                layer.window, 0, layer.sinks, step.tokens, step.order, step.cascade, step.rounded,
                query_factor, 1.0,
                step.threads, step.team, step.attention_body, step.attention_arena, step.attention_bytes,
            )  # fmt: skip
        elif operation == 3:
            x = step.attended
            hidden = step.x_row // size
            extra = _adapt(step, layer.output_lora, layer.output, hidden, x, attended_row, 0, 0.0)
            missing = _linear(step, layer.output, x, attended_row, step.x, step.x_row, 1, 0, 0.0, extra, 0)
        elif layer.experts:
            if operation == 4:
                call = carray(vl.as_pointer(step.experts_call), 1, CALL)[0]
                call.experts, call.norm, call.eps = layer.experts, layer.mlp_norm, layer.mlp_eps
                missing = _experts_run(step.experts_call)
        elif operation == 4:
            norm, eps = layer.mlp_norm, layer.mlp_eps
            to, to_row = step.gated, step.gated_row
            inner = 2 * to_row // size
            extra = _adapt(step, layer.gate_up_lora, layer.gate_up, inner, step.x, step.x_row, norm, eps)
            missing = _linear(step, layer.gate_up, step.x, step.x_row, to, to_row, 0, norm, eps, extra, 0)
        else:
            x, x_row = step.gated, step.gated_row
            extra = _adapt(step, layer.down_lora, layer.down, step.x_row // size, x, x_row, 0, 0.0)
            missing = _linear(step, layer.down, x, x_row, step.x, step.x_row, 1, 0, 0.0, extra, 0)
        if missing != 0:
            return missing
        step.place += 1
    return 0


class LayerStack:
    """All layers of a model, on their KV pages.

    k_pages, v_pages : (layers, num_pages, kv_heads, page_size, head_dim)
    cascade : as in `paged_attention`
    by_row : use products whose bits do not depend on the number of rows, as `row_linear`
    int8 : use products that may round x to int8, as `int8_linear`, and `rounded` attention
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
        _, _, kv_heads, page_size, dim = k_pages.shape
        size = k_pages.element_size()
        self._heads, self._kv_heads, self._dim = heads, kv_heads, dim
        self._gated = max((layer.gate_up.results for layer in layers if layer.gate_up is not None), default=0)
        self._hidden = layers[0].output.results
        self._experts: list[experts.Record] = []
        self._experts_call = np.zeros(1, CALL)
        self._records = np.zeros(len(layers), LAYER)
        for index, layer in enumerate(layers):
            self._fill(index, layer, size)
        self._ways = np.zeros(len(FORMATS), np.int64)
        self._expert_ways = self._ways
        self._step = np.zeros(1, STEP)
        step = self._step[0]
        step["layers"], step["layer_count"] = self._records.ctypes.data, len(layers)
        step["heads"], step["kv_heads"], step["dim"] = heads, kv_heads, dim
        step["bf16"], step["cascade"], step["page_size"] = size == 2, cascade, page_size
        step["rounded"] = int8
        step["page_bytes"], step["head_bytes"], step["row_bytes"] = (
            stride * size for stride in self._pages[0].stride()[:3]
        )
        step["ways"], step["experts_call"] = self._ways.ctypes.data, self._experts_call.ctypes.data
        step["linear_body"], step["attention_body"] = linear.body_address, attention.body_address
        step["lora_body"], step["rope_body"] = adapters.body_address, rope.body_address

    def _fill(self, index: int, layer: LayerWeights, size: int) -> None:
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
            record[f"{name}_layout"], record[f"{name}_from"] = layout(weight), start * size
            start += weight.results
        if layer.q_norm is not None and layer.k_norm is not None:
            record["whole_norms"] = len(layer.q_norm[0]) > self._dim
        record["output"] = layout(layer.output)
        if layer.gate_up is not None and layer.down is not None:
            record["gate_up"], record["down"] = layout(layer.gate_up), layout(layer.down)
        elif layer.experts is not None:
            self._experts.append(experts.Record(layer.experts))
            record["experts"] = self._experts[-1].address
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

        x : (T, hidden), dtype of the pages, contiguous
        rotation : (T, head_dim / 2) complex64
        slots : (T,) int64
        page_table, query_starts, kv_lens : as in `paged_attention`
        lora : the adapters of the rows

        Raises ValueError for arguments that the single operations refuse.
        """
        tokens, dim = len(x), self._dim
        if x.dim() != 2 or x.shape[1] != self._hidden:
            raise ValueError(f"x is {tuple(x.shape)}; it must be (T, {self._hidden}).")
        qkv = x.new_empty((tokens, self._heads + 2 * self._kv_heads, dim))
        attended = x.new_empty((tokens, self._heads, dim))
        gated = x.new_empty((tokens, self._gated))
        q, k, v = qkv.split((self._heads, self._kv_heads, self._kv_heads), dim=1)
        check_rope(q, k, rotation)
        check_store(k, v, *self._pages, slots)
        check_attention(q, *self._pages, page_table, query_starts, kv_lens, 0, 0.0, attended)
        if not x.is_contiguous() or x.dtype != self._pages[0].dtype:
            raise ValueError(f"x must be contiguous and of {self._pages[0].dtype}.")
        sequences, table_width = page_table.shape
        for place, form in enumerate(FORMATS):
            self._ways[place] = linear.way_for(tokens, form, x.dtype, by_row=self._by_row, int8=self._int8)
        step = self._step[0]
        step["x"], step["x_row"] = x.data_ptr(), x.stride(0) * x.element_size()
        step["qkv"], step["attended"], step["gated"] = qkv.data_ptr(), attended.data_ptr(), gated.data_ptr()
        step["gated_row"], step["tokens"] = self._gated * x.element_size(), tokens
        rope.fill(q, k, v, rotation, self._pages[0], slots)
        step["rope"] = rope.arena.address
        step["sequences"], step["starts"] = sequences, query_starts.data_ptr()
        step["lens"], step["table"] = kv_lens.data_ptr(), page_table.data_ptr()
        step["table_width"], step["order"] = table_width, attention.arena.order(sequences)
        step["threads"], step["team"] = torch.get_num_threads(), team_entry()
        step["place"] = 0
        if self._experts:
            self._prepare_experts(x)
        kept = self._adapt(lora)  # noqa: F841 - `step` has addresses of its memory
        while True:
            step["linear_arena"], step["linear_bytes"] = linear.arena.address, linear.arena.size
            step["attention_arena"], step["attention_bytes"] = attention.arena.address, attention.arena.size
            self._experts_call[0]["arena"] = experts.arena.address
            self._experts_call[0]["arena_bytes"] = experts.arena.size
            result = _run(self._step.ctypes.data, scale * LOG2_E)
            if result == 0:
                return
            if result < 0:
                raise wrong_lengths(-1 - result, tokens, table_width * self._pages[0].shape[2])
            layer, operation = divmod(step["place"], OPERATIONS)
            if operation == 4 and self._records[layer]["experts"]:
                experts.arena.grow(2 * result)
                continue
            (attention.arena if operation == 2 else linear.arena).grow(2 * result)

    def _prepare_experts(self, x: Tensor) -> None:
        """The arguments that all sparse layers of a step share."""
        step, call = self._step[0], self._experts_call[0]
        rows = min(record.rows_of_expert(len(x)) for record in self._experts)
        self._expert_ways = experts.ways_of(rows, x.dtype, by_row=self._by_row, int8=self._int8)
        call["x"] = call["out"] = step["x"]
        call["x_row"] = call["out_row"] = step["x_row"]
        call["bf16"], call["tokens"], call["add"] = step["bf16"], step["tokens"], 1
        call["ways"], call["expert_ways"] = step["ways"], self._expert_ways.ctypes.data
        call["threads"], call["team"], call["body"] = step["threads"], step["team"], step["linear_body"]

    def _adapt(self, rows: LoraRows | None) -> object:
        """Fill the fields of the step that are about adapters. Returns what must be kept during the call."""
        step = self._step[0]
        step["lora"] = 0
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
        record = adapters.step_record(rows, max(len(weight.a) for weight in weights))
        adapters.reserve(rows, max(weight.a.shape[1] for weight in weights), record)
        qkv = (self._heads + 2 * self._kv_heads) * self._dim
        terms = torch.empty(len(rows.slots), max(qkv, self._hidden, 2 * self._gated))
        extra = Extra(terms, rows).addresses()
        step["lora"], step["terms"], step["extra"] = record.ctypes.data, terms.data_ptr(), extra.ctypes.data
        step["terms_row"] = 4 * terms.shape[1]
        step["lora_arena"], step["lora_bytes"] = adapters.arena.address, adapters.arena.size
        return record, terms, extra
