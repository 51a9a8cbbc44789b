"""OLMo 2 (arXiv 2501.00656) and OLMoE (arXiv 2409.02060): Llama with norms over whole queries and keys.

In OLMo 2 the norms of the residual stream come after the sublayers. OLMoE has a mixture of experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ramify.kernels.weights.stack import LayerWeights
from ramify.runtime.model.causal_lm import Attend
from ramify.runtime.model.decoder import Model
from ramify.runtime.model.families.llama import NormedHeadsLayer
from ramify.runtime.model.layers import Reduce, Residual, RMSNorm, Rotary
from ramify.runtime.model.shape.config import ModelConfig


class WholeNormsLayer(NormedHeadsLayer):
    """A Llama layer with norms over whole queries and keys, all heads together."""

    def __init__(self, config: ModelConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__(config, index, dtype)
        size = self.head_dim
        self.q_norm, self.k_norm = (
            RMSNorm(heads * size, config.norm_eps, dtype=dtype, rotary=Rotary(heads, size, size))
            for heads in (self.heads, self.kv_heads)
        )


class OlmoeLayer(WholeNormsLayer):
    """x += attention(norm(x)); x += experts(norm(x))."""

    def attended(self, x: Residual, rotation: Tensor, attend: Attend) -> Tensor:
        sizes = [heads * self.head_dim for heads in (self.heads, self.kv_heads, self.kv_heads)]
        q, k, v = self.qkv.forward_normed(x, self.attention_norm).split(sizes, dim=1)
        q, k, v = (each.unflatten(1, (-1, self.head_dim)) for each in (self.q_norm(q), self.k_norm(k), v))
        return attend(self.index, q, k, v, rotation, window=self.window).flatten(1)


class Olmo2Layer(WholeNormsLayer):
    """x += norm(attention(x)); x += norm(mlp(x))."""

    def __init__(self, config: ModelConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__(config, index, dtype)
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
        """q and k normalised over the heads of all ranks. `reduce` adds up the sums of squares, (T, 2)."""
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


class Olmo2(Model):
    layer_type = Olmo2Layer


class Olmoe(Model):
    layer_type = OlmoeLayer
