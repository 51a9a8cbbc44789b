"""The weights of decoder layers, for kernels that run all layers in one call."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from ramify.kernels.machine.records import new_record, record
from ramify.kernels.weights.lora import LoraTable
from ramify.kernels.weights.packed import PackedWeight, form_of
from ramify.kernels.weights.routing import ClampedGate, Routing

Norm = tuple[Tensor, float]
"""The weight of an RMS norm, in the dtype of its input, and its epsilon."""

EXPERTS = record(
    "count", "top_k", "sigmoid", "normalised", "groups", "top_groups", "correction", "hidden", "size",
    "router", "gate_up", "down", "shared_gate_up", "shared_down", "shared_size", "shared_gate",
    floats=("scale",),
)  # fmt: skip
"""The record of a mixture of experts: counts, flags and addresses of layouts. `gate_up` and `down` are arrays
of `count` layouts."""


@dataclasses.dataclass(frozen=True)
class ExpertMatrices:
    """The unpacked matrices of E experts, all in one dtype.

    gate_up : (E, 2 size, hidden), the rows of the gate, then those of the up projection
    down : (E, hidden, size)
    gate_up_bias, down_bias : (E, 2 size) and (E, hidden), or None
    clamp : None for SwiGLU
    """

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    clamp: ClampedGate | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class PackedExperts:
    """A mixture of E experts with its router: y = Σ weight · down(gate_up(x)) over the chosen experts, plus
    the shared expert's down(gate_up(x)), which every token uses.

    router : (E, hidden) float32; an optional further row gives the logit whose sigmoid weighs the shared
        expert
    correction : (E,) float32, added to the scores that experts are chosen by, not to their weights; or None
    gate_up, down : one matrix for each expert, all of one form and size; `gate_up` is packed with `gated`
    shared : gate_up and down of the shared expert, or None
    """

    routing: Routing
    router: PackedWeight
    gate_up: Sequence[PackedWeight]
    down: Sequence[PackedWeight]
    correction: Tensor | None = None
    shared: tuple[PackedWeight, PackedWeight] | None = None

    @functools.cached_property
    def layout(self) -> tuple[int, Any]:
        """The address of a record of `EXPERTS`, and the objects that must live while this address is used.
        Raises ValueError if the matrices of the experts differ in form or size."""
        routing, gate_up, down = self.routing, self.gate_up, self.down
        for each in (gate_up, down):
            if any(form_of(one) != form_of(each[0]) for one in each):
                raise ValueError("the matrices of the experts differ in form or size.")
        layouts = [np.concatenate([weight.layout[1][0] for weight in each]) for each in (gate_up, down)]
        one = new_record(EXPERTS)
        one.count, one.top_k, one.sigmoid = len(gate_up), routing.top_k, routing.scores == "sigmoid"
        one.normalised, one.scale = routing.normalised, routing.scale
        one.groups, one.top_groups = routing.groups, routing.top_groups
        one.correction = 0 if self.correction is None else self.correction.data_ptr()
        one.hidden, one.size = gate_up[0].inputs, gate_up[0].results
        one.router = self.router.layout[0]
        one.gate_up, one.down = (each.ctypes.data for each in layouts)
        if self.shared is not None:
            shared_gate_up, shared_down = self.shared
            one.shared_gate_up, one.shared_down = shared_gate_up.layout[0], shared_down.layout[0]
            one.shared_size = shared_gate_up.results
            one.shared_gate = self.router.outputs > len(gate_up)
        return ctypes.addressof(one), (one, layouts)

    def rows_of_expert(self, rows: int) -> int:
        """The number of rows that one expert gets of `rows` rows if all experts are chosen equally often; at
        least 1."""
        return max(1, rows * self.routing.top_k // len(self.gate_up))


@dataclasses.dataclass(frozen=True)
class LayerWeights:
    """One layer: x += output(attention(qkv(norm(x)))), x += down(gate_up(norm(x))), or experts(norm(x)).

    qkv : one to three matrices whose rows are the queries, keys and values of all heads, in this order, with
        rotary pairs side by side
    q_norm, k_norm : the norms before the rotation, if the model has any: of each head if the weights are
        (head_dim,), else of all heads of a token together
    gate_up, down : `gate_up` is packed with `gated`; both are None if there are `experts`
    window : tokens that a token sees, itself included; 0 means all
    sinks : (heads,) float32, as in `paged_attention`
    lora : the adapters of qkv, output, gate_up and down
    """

    attention_norm: Norm
    qkv: Sequence[PackedWeight]
    output: PackedWeight
    mlp_norm: Norm
    gate_up: PackedWeight | None
    down: PackedWeight | None
    experts: PackedExperts | None = None
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    window: int = 0
    sinks: Tensor | None = None
    lora: tuple[LoraTable, LoraTable, LoraTable, LoraTable] | None = None
