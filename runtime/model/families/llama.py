"""Llama (arXiv 2302.13971, 2407.21783): pre-norm, rotary positions, grouped queries, SwiGLU."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from ramify.kernels.weights.lora import LoraTable
from ramify.kernels.weights.stack import LayerWeights
from ramify.runtime.model.causal_lm import Attend
from ramify.runtime.model.decoder import Layer, Model
from ramify.runtime.model.experts import mlp_of
from ramify.runtime.model.layers import (
    GatedMLP,
    HeadNorms,
    Linear,
    Reduce,
    Residual,
    RMSNorm,
    Rotary,
    Slot,
    Slots,
    under,
)
from ramify.runtime.model.shape.config import ModelConfig


class LlamaLayer(Layer):
    """x += attention(norm(x)); x += mlp(norm(x))."""

    def __init__(self, config: ModelConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.index = config.layers_with_pages(index)
        self.window = config.windows[self.index]
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        hidden, queries, keys = config.hidden_size, self.heads * self.head_dim, self.kv_heads * self.head_dim
        rotated = config.rope.rotated(self.head_dim)
        self.attention_norm = self.norm(config, dtype)
        self.qkv = Linear(
            hidden,
            {"q_proj": queries, "k_proj": keys, "v_proj": keys},
            bias=config.qkv_bias,
            dtype=dtype,
            rotary={
                "q_proj": Rotary(self.heads, self.head_dim, rotated),
                "k_proj": Rotary(self.kv_heads, self.head_dim, rotated),
            },
        )
        self.sinks: Tensor | None = None
        if config.sinks and config.sinks[self.index]:
            self.sinks = nn.Parameter(torch.zeros(self.heads, dtype=torch.float32), requires_grad=False)
        self.output = Linear(queries, {"o_proj": hidden}, bias=config.output_bias, dtype=dtype)
        self.mlp_norm = self.norm(config, dtype)
        self.mlp = mlp_of(config, index, dtype)

    @staticmethod
    def norm(config: ModelConfig, dtype: torch.dtype) -> RMSNorm:
        return RMSNorm(config.hidden_size, config.norm_eps, dtype=dtype, offset=config.norm_offset)

    def forward(self, x: Residual, rotation: Tensor, attend: Attend) -> None:
        self.output.add_to(x, self.attended(x, rotation, attend))
        self.mlp.add_to(x, self.mlp_norm)

    def attended(self, x: Residual, rotation: Tensor, attend: Attend) -> Tensor:
        """Attention of norm(x), before the output projection: (T, heads · head_dim)."""
        return self.mixed(self.qkv.forward_normed(x, self.attention_norm), rotation, attend)

    def mixed(self, qkv: Tensor, rotation: Tensor, attend: Attend) -> Tensor:
        """Attention by queries, keys and values, (T, (heads + 2 kv_heads) · head_dim)."""
        heads = qkv.unflatten(1, (-1, self.head_dim))
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        window, norms = self.window, self.head_norms()
        mixed = attend(self.index, q, k, v, rotation, window=window, norms=norms, sinks=self.sinks)
        return mixed.flatten(1)

    def head_norms(self) -> HeadNorms | None:
        return None

    def join(self, reduce: Reduce) -> None:
        assert isinstance(self.mlp, GatedMLP)
        self.output.reduce = self.mlp.down.reduce = reduce

    def weights(self) -> LayerWeights | None:
        output, mlp = self.output.packed, self.mlp.weights()
        if self.output.reduce is not None:  # sums over ranks go between the parts of a layer
            return None
        if not self.qkv.packed or len(output) != 1 or mlp is None:
            return None
        gate_up, down = mlp if isinstance(mlp, tuple) else (None, None)
        tables = LoraTable(), LoraTable()
        if isinstance(self.mlp, GatedMLP):
            tables = self.mlp.gate_up.lora, self.mlp.down.lora
        return LayerWeights(
            attention_norm=self.attention_norm.fused,
            qkv=self.qkv.packed,
            output=output[0],
            mlp_norm=self.mlp_norm.fused,
            gate_up=gate_up,
            down=down,
            experts=None if isinstance(mlp, tuple) else mlp,
            window=self.window,
            sinks=self.sinks,
            lora=(self.qkv.lora, self.output.lora, *tables),
        )

    def norms(self) -> dict[str, RMSNorm]:
        """The norms of the residual stream, by their names in checkpoints."""
        return {"input_layernorm": self.attention_norm, "post_attention_layernorm": self.mlp_norm}

    def slots(self) -> Slots:
        for name, norm in self.norms().items():
            yield from under(f"{name}.", norm.slots())
        yield from under("self_attn.", self.qkv.slots())
        yield from under("self_attn.", self.output.slots())
        if self.sinks is not None:
            yield "self_attn.sinks", Slot(self.sinks)
        yield from under("mlp.", self.mlp.slots())


class NormedHeadsLayer(LlamaLayer):
    """A Llama layer with norms over queries and keys. Subclasses create the norms."""

    q_norm: RMSNorm
    k_norm: RMSNorm

    def weights(self) -> LayerWeights | None:
        weights = super().weights()
        if weights is None:
            return None
        return dataclasses.replace(weights, q_norm=self.q_norm.fused, k_norm=self.k_norm.fused)

    def slots(self) -> Slots:
        yield from super().slots()
        yield from under("self_attn.q_norm.", self.q_norm.slots())
        yield from under("self_attn.k_norm.", self.k_norm.slots())


class Llama(Model):
    layer_type = LlamaLayer
