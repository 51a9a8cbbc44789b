"""Qwen3-Next and Qwen3.5: three of four layers are Gated DeltaNet (arXiv 2412.06464), the fourth is attention
whose output has a gate (arXiv 2505.06708)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ramify.kernels import registry
from ramify.kernels.arguments.gated_delta import DeltaWeights
from ramify.kernels.reference import gated_delta as reference
from ramify.kernels.weights.stack import LayerWeights
from ramify.runtime.model.causal_lm import Attend
from ramify.runtime.model.decoder import Layer, Model
from ramify.runtime.model.experts import mlp_of
from ramify.runtime.model.families.llama import LlamaLayer
from ramify.runtime.model.families.qwen3 import Qwen3Layer
from ramify.runtime.model.layers import Linear, Residual, RMSNorm, Rotary, Slot, Slots, under
from ramify.runtime.model.shape.config import ModelConfig


class GatedAttentionLayer(Qwen3Layer):
    """A Qwen3 layer whose `q_proj` stores for each head its query, followed by its gate."""

    def __init__(self, config: ModelConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__(config, index, dtype)
        size, queries, keys = self.head_dim, self.heads * self.head_dim, self.kv_heads * self.head_dim
        rotated = config.rope.rotated(size)
        self.qkv = Linear(
            config.hidden_size,
            {"q_proj": 2 * queries, "k_proj": keys, "v_proj": keys},
            bias=config.qkv_bias,
            dtype=dtype,
            rotary={
                "q_proj": Rotary(self.heads, size, rotated),
                "k_proj": Rotary(self.kv_heads, size, rotated),
            },
            order={"q_proj": ungrouped(self.heads, (size, size))},
        )
        self.output_gate: registry.OutputGate = reference.output_gate

    def use_kernels(self, ops: registry.Ops) -> None:
        self.output_gate = ops.output_gate

    def attended(self, x: Residual, rotation: Tensor, attend: Attend) -> Tensor:
        parts = self.qkv.forward_normed(x, self.attention_norm).unflatten(1, (-1, self.head_dim))
        heads = (self.heads, self.heads, self.kv_heads, self.kv_heads)
        q, gate, k, v = parts.split(heads, dim=1)
        out = attend(self.index, q, k, v, rotation, window=self.window, norms=self.head_norms())
        return self.output_gate(out, gate, out=out).flatten(1)

    def weights(self) -> LayerWeights | None:
        return None


class DeltaLayer(Layer):
    """x += output(norm(rule(x)) · silu(z)), z being a projection of x; x += mlp(norm(x))."""

    def __init__(self, config: ModelConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        states = config.states
        assert states is not None
        self.index = index - config.layers_with_pages(index)
        self.heads, self.channels = states.heads, states.channels
        self.values = states.heads * states.value_dim
        self.attention_norm, self.mlp_norm = (LlamaLayer.norm(config, dtype) for _ in range(2))
        self.projection = self.projections(config, dtype)
        self.output = Linear(self.values, {"out_proj": config.hidden_size}, bias=False, dtype=dtype)
        self.conv, self.a_log, self.dt_bias = (
            nn.Parameter(torch.empty(shape, dtype=torch.float32), requires_grad=False)
            for shape in ((states.width, states.channels), (states.heads,), (states.heads,))
        )
        self.norm = RMSNorm(states.value_dim, config.norm_eps, dtype=dtype)
        self.mlp = mlp_of(config, index, dtype)
        self.output_gate: registry.OutputGate = reference.output_gate

    def use_kernels(self, ops: registry.Ops) -> None:
        self.output_gate = ops.output_gate

    @abstractmethod
    def projections(self, config: ModelConfig, dtype: torch.dtype) -> Linear:
        """One matrix that projects x to the convolution's channels, z, b and a, in this order."""

    def forward(self, x: Residual, rotation: Tensor, attend: Attend) -> None:
        mixed = self.projection.forward_normed(x, self.attention_norm)
        qkv, z, b, a = mixed.split((self.channels, self.values, self.heads, self.heads), dim=1)
        weights = DeltaWeights(self.conv, self.a_log, self.dt_bias)
        out = attend.gated_delta_rule(self.index, qkv, b, a, weights)
        z = z.unflatten(1, (self.heads, -1))
        self.output.add_to(x, self.output_gate(out, z, norm=self.norm.fused, out=out).flatten(1))
        self.mlp.add_to(x, self.mlp_norm)

    def slots(self) -> Slots:
        yield from under("input_layernorm.", self.attention_norm.slots())
        yield from under("post_attention_layernorm.", self.mlp_norm.slots())
        yield from under("mlp.", self.mlp.slots())
        yield "linear_attn.conv1d.weight", Slot(self.conv.t()[:, None])
        yield "linear_attn.A_log", Slot(self.a_log)
        yield "linear_attn.dt_bias", Slot(self.dt_bias)
        for part in (self.projection, self.output):
            yield from under("linear_attn.", part.slots())
        yield from under("linear_attn.norm.", self.norm.slots())


class Qwen3NextDeltaLayer(DeltaLayer):
    """A delta layer whose projections are stored as two matrices, with rows grouped by key head."""

    def projections(self, config: ModelConfig, dtype: torch.dtype) -> Linear:
        states = config.states
        assert states is not None
        groups, share = states.key_heads, states.heads // states.key_heads
        sizes = (states.key_dim, states.key_dim, share * states.value_dim, share * states.value_dim)
        return Linear(
            config.hidden_size,
            {"in_proj_qkvz": self.channels + self.values, "in_proj_ba": 2 * self.heads},
            bias=False,
            dtype=dtype,
            order={
                "in_proj_qkvz": ungrouped(groups, sizes),
                "in_proj_ba": ungrouped(groups, (share, share)),
            },
        )


class Qwen35DeltaLayer(DeltaLayer):
    """A delta layer whose projections are stored as one matrix each."""

    def projections(self, config: ModelConfig, dtype: torch.dtype) -> Linear:
        parts = {"in_proj_qkv": self.channels, "in_proj_z": self.values}
        parts |= {"in_proj_b": self.heads, "in_proj_a": self.heads}
        return Linear(config.hidden_size, parts, bias=False, dtype=dtype)


def ungrouped(groups: int, sizes: Sequence[int]) -> Tensor:
    """The permutation of rows that brings equal parts of all groups together: the first `sizes[0]` rows of
    every group, then the next `sizes[1]` rows of every group, and so on."""
    rows = torch.arange(groups * sum(sizes), device="cpu").view(groups, -1)
    return torch.cat([part.flatten() for part in rows.split(list(sizes), dim=1)])


class Qwen3Next(Model):
    delta_layer: type[DeltaLayer] = Qwen3NextDeltaLayer

    def layer(self, index: int, dtype: torch.dtype) -> Layer:
        kind = self.delta_layer if self.config.linear[index] else GatedAttentionLayer
        return kind(self.config, index, dtype)

    def name_of(self, stored: str) -> str | None:
        """The tensor's name in a text-only model; None for the vision tower and multi-token prediction
        (`mtp`)."""
        if stored.startswith(("mtp.", "model.visual.")):
            return None
        return super().name_of(stored.replace("model.language_model.", "model.", 1))


class Qwen35(Qwen3Next):
    """Qwen3.5's text model, alone or taken out of a multimodal checkpoint."""

    delta_layer = Qwen35DeltaLayer
