"""OLMo 2 (arXiv 2501.00656): Llama with norms after the sublayers, and norms over whole queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor

from ramify.kernels.stack import LayerWeights
from ramify.runtime.model.causal_lm import Attend
from ramify.runtime.model.config import ModelConfig
from ramify.runtime.model.decoder import Layer, Model
from ramify.runtime.model.families.llama import LlamaLayer
from ramify.runtime.model.layers import Residual, RMSNorm, Rotary, Slots, under


class Olmo2Layer(LlamaLayer):
    """x += norm(attention(x)); x += norm(mlp(x))."""

    def __init__(self, config: ModelConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__(config, index, dtype)
        size = self.head_dim
        self.q_norm, self.k_norm = (
            RMSNorm(heads * size, config.norm_eps, dtype=dtype, rotary=Rotary(heads, size, size))
            for heads in (self.heads, self.kv_heads)
        )

    def forward(self, x: Residual, rotation: Tensor, attend: Attend) -> None:
        x.add(self.attention_norm.forward(self.output.forward(self.attended(x, rotation, attend))))
        x.add(self.mlp_norm.forward(self.mlp.forward(x.value())))

    def attended(self, x: Residual, rotation: Tensor, attend: Attend) -> Tensor:
        heads = (self.heads, self.kv_heads, self.kv_heads)
        q, k, v = self.qkv.forward(x.value()).split([count * self.head_dim for count in heads], dim=1)
        q, k, v = (each.unflatten(1, (-1, self.head_dim)) for each in (self.q_norm(q), self.k_norm(k), v))
        return attend(self.index, q, k, v, rotation).flatten(1)

    def weights(self) -> LayerWeights | None:
        return None

    def norms(self) -> dict[str, RMSNorm]:
        return {"post_attention_layernorm": self.attention_norm, "post_feedforward_layernorm": self.mlp_norm}

    def slots(self) -> Slots:
        yield from super().slots()
        yield from under("self_attn.q_norm.", self.q_norm.slots())
        yield from under("self_attn.k_norm.", self.k_norm.slots())


class Olmo2(Model):
    def layer(self, index: int, dtype: torch.dtype) -> Layer:
        return Olmo2Layer(self.config, index, dtype)
