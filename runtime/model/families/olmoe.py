"""OLMoE (arXiv 2409.02060): Llama with a mixture of experts, and norms over whole queries and keys."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ramify.kernels.weights.stack import LayerWeights
from ramify.runtime.model.causal_lm import Attend
from ramify.runtime.model.config import ModelConfig
from ramify.runtime.model.decoder import Layer, Model
from ramify.runtime.model.families.llama import LlamaLayer
from ramify.runtime.model.layers import Residual, RMSNorm, Rotary, Slots, under


class OlmoeLayer(LlamaLayer):
    def __init__(self, config: ModelConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__(config, index, dtype)
        size = self.head_dim
        self.q_norm, self.k_norm = (
            RMSNorm(heads * size, config.norm_eps, dtype=dtype, rotary=Rotary(heads, size, size))
            for heads in (self.heads, self.kv_heads)
        )

    def attended(self, x: Residual, rotation: Tensor, attend: Attend) -> Tensor:
        sizes = [heads * self.head_dim for heads in (self.heads, self.kv_heads, self.kv_heads)]
        q, k, v = self.qkv.of(x, self.attention_norm).split(sizes, dim=1)
        q, k, v = (each.unflatten(1, (-1, self.head_dim)) for each in (self.q_norm(q), self.k_norm(k), v))
        return attend(self.index, q, k, v, rotation, window=self.window).flatten(1)

    def weights(self) -> LayerWeights | None:
        weights = super().weights()
        if weights is None:
            return None
        return dataclasses.replace(weights, q_norm=self.q_norm.fused, k_norm=self.k_norm.fused)

    def slots(self) -> Slots:
        yield from super().slots()
        yield from under("self_attn.q_norm.", self.q_norm.slots())
        yield from under("self_attn.k_norm.", self.k_norm.slots())


class Olmoe(Model):
    def layer(self, index: int, dtype: torch.dtype) -> Layer:
        return OlmoeLayer(self.config, index, dtype)
