"""The weights of decoder layers, for kernels that run all layers in one call."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from ramify.kernels.weights.lora import LoraTable
from ramify.kernels.weights.packed import PackedWeight
from ramify.kernels.weights.routing import ClampedGate, Routing

Norm = tuple[Tensor, float]
"""The weight of an RMS norm, in the dtype of its input, and its epsilon."""


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


@dataclasses.dataclass(frozen=True)
class LayerWeights:
    """One layer: x += output(attention(qkv(norm(x)))), x += down(gate_up(norm(x))), or experts(norm(x)).

    qkv : one to three matrices whose rows are the queries, keys and values of all heads, in this order, with
        rotary pairs side by side
    q_norm, k_norm : before the rotation, if the model has them: over each head, or over all heads of a token
        if the weights have as many numbers as these
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
