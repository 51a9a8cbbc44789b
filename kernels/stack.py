"""What a stack of decoder layers is made of, for kernels that run all of it in one call."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from ramify.kernels.packed import PackedWeight

Norm = tuple[Tensor, float]
"""The weight of an RMS norm, in the dtype of what it normalises, and its epsilon."""


@dataclasses.dataclass(frozen=True)
class LayerWeights:
    """One layer: x += output(attention(qkv(norm(x)))), x += down(gate_up(norm(x))).

    qkv : matrices below each other: queries, keys and values of all heads, rotary pairs side by side
    q_norm, k_norm : over each query and key head before the rotation, where the model has them
    gate_up : packed as `gated`
    window : a token sees so many tokens, itself included; 0 means all
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
