"""The weights of decoder layers, for kernels that run all layers in one call."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from ramify.kernels.lora import LoraTable
from ramify.kernels.packed import PackedWeight

Norm = tuple[Tensor, float]
"""The weight of an RMS norm, in the dtype of its input, and its epsilon."""


@dataclasses.dataclass(frozen=True)
class LayerWeights:
    """One layer: x += output(attention(qkv(norm(x)))), x += down(gate_up(norm(x))).

    qkv : one to three matrices whose rows are the queries, keys and values of all heads, in this order, with
        rotary pairs side by side
    q_norm, k_norm : over each query and key head before the rotation, if the model has them
    gate_up : packed with `gated`
    window : tokens that a token sees, itself included; 0 means all
    sinks : (heads,) float32, as in `paged_attention`
    lora : the adapters of qkv, output, gate_up and down
    """

    attention_norm: Norm
    qkv: Sequence[PackedWeight]
    output: PackedWeight
    mlp_norm: Norm
    gate_up: PackedWeight
    down: PackedWeight
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    window: int = 0
    sinks: Tensor | None = None
    lora: tuple[LoraTable, LoraTable, LoraTable, LoraTable] | None = None
