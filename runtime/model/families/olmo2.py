"""OLMo 2 (arXiv 2501.00656): Llama with norms after the sublayers, and norms over whole queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor

from ramify.kernels.weights.stack import LayerWeights
from ramify.runtime.model.causal_lm import Attend
from ramify.runtime.model.config import ModelConfig
from ramify.runtime.model.decoder import Layer, Model
from ramify.runtime.model.families.llama import LlamaLayer
from ramify.runtime.model.layers import Reduce, Residual, RMSNorm, Rotary, Slots, under


class Olmo2Layer(LlamaLayer):
    """x += norm(attention(x)); x += norm(mlp(x))."""

    def __init__(self, config: ModelConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__(config, index, dtype)
        size = self.head_dim
        self.q_norm, self.k_norm = (
            RMSNorm(heads * size, config.norm_eps, dtype=dtype, rotary=Rotary(heads, size, size))
            for heads in (self.heads, self.kv_heads)
        )
        self.ranks = config.shard.count
        self.reduce: Reduce | None = None

    def forward(self, x: Residual, rotation: Tensor, attend: Attend) -> None:
        x.add(self.attention_norm.forward(self.output.forward(self.attended(x, rotation, attend))))
        x.add(self.mlp_norm.forward(self.mlp.forward(x.value())))

    def attended(self, x: Residual, rotation: Tensor, attend: Attend) -> Tensor:
        heads = (self.heads, self.kv_heads, self.kv_heads)
        q, k, v = self.qkv.forward(x.value()).split([count * self.head_dim for count in heads], dim=1)
        q, k = (self.q_norm(q), self.k_norm(k)) if self.reduce is None else self._normed(q, k, self.reduce)
        q, k, v = (each.unflatten(1, (-1, self.head_dim)) for each in (q, k, v))
        return attend(self.index, q, k, v, rotation).flatten(1)

    def _normed(self, q: Tensor, k: Tensor, reduce: Reduce) -> tuple[Tensor, Tensor]:
        """Norms over the heads of all ranks: their sums of squares are summed, (T, 2)."""
        wide = q.float(), k.float()
        squares = reduce(torch.stack([each.square().sum(1) for each in wide], 1))
        normed = []
        for index, (x, norm) in enumerate(zip(wide, (self.q_norm, self.k_norm), strict=True)):
            mean = squares[:, index : index + 1] / (x.shape[1] * self.ranks)
            normed.append((x * torch.rsqrt(mean + norm.eps) * norm.weight.float()).to(q.dtype))
        return normed[0], normed[1]

    def join(self, reduce: Reduce) -> None:
        super().join(reduce)
        self.reduce = reduce

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
