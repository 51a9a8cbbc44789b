"""Phi-3 (arXiv 2404.14219) and Phi-4: Llama with fused projections. In some of these models only a part of
each head rotates."""

from __future__ import annotations

import torch

from ramify.runtime.model.decoder import Model
from ramify.runtime.model.families.llama import LlamaLayer
from ramify.runtime.model.layers import GatedMLP, Linear, Rotary
from ramify.runtime.model.shape.config import ModelConfig


class Phi3Layer(LlamaLayer):
    """Llama's layer, stored with queries, keys and values as one tensor, and gate and up as another."""

    def __init__(self, config: ModelConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__(config, index, dtype)
        hidden, inner = config.hidden_size, config.intermediate_size
        rotary = Rotary(self.heads + self.kv_heads, self.head_dim, config.rope.rotated(self.head_dim))
        outputs = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.qkv = Linear(hidden, {"qkv_proj": outputs}, bias=False, dtype=dtype, rotary={"qkv_proj": rotary})
        self.mlp = GatedMLP(hidden, inner, bias=False, dtype=dtype, parts={"gate_up_proj": 2 * inner})


class Phi3(Model):
    layer_type = Phi3Layer
