"""Gemma 2 (arXiv 2408.00118) and 3 (arXiv 2503.19786): norms before and after, a GELU gate, windows.

All other differences from Llama are fields of `ModelConfig`: soft caps, the scales of scores and of the
embedding, windows and rotary embeddings by layer, and the offset 1 of the weights of norms.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ramify.kernels.weights.stack import LayerWeights
from ramify.runtime.model.causal_lm import Attend
from ramify.runtime.model.decoder import Model
from ramify.runtime.model.families.llama import LlamaLayer
from ramify.runtime.model.families.qwen3 import Qwen3Layer
from ramify.runtime.model.layers import Residual, RMSNorm
from ramify.runtime.model.shape.config import ModelConfig


class Gemma2Layer(LlamaLayer):
    """x += norm(attention(norm(x))); x += norm(mlp(norm(x)))."""

    def __init__(self, config: ModelConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__(config, index, dtype)
        self.attended_norm, self.mlp_out_norm = self.norm(config, dtype), self.norm(config, dtype)

    def forward(self, x: Residual, rotation: Tensor, attend: Attend) -> None:
        x.add(self.attended_norm.forward(self.output.forward(self.attended(x, rotation, attend))))
        x.add(self.mlp_out_norm.forward(self.mlp.forward_normed(x, self.mlp_norm)))

    def weights(self) -> LayerWeights | None:
        return None

    def norms(self) -> dict[str, RMSNorm]:
        return {
            "input_layernorm": self.attention_norm,
            "post_attention_layernorm": self.attended_norm,
            "pre_feedforward_layernorm": self.mlp_norm,
            "post_feedforward_layernorm": self.mlp_out_norm,
        }


class Gemma3Layer(Qwen3Layer, Gemma2Layer):
    """A Gemma 2 layer with Qwen 3's norms over heads."""


class Gemma2(Model):
    layer_type = Gemma2Layer

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__(config, dtype)
        # The model was trained with the scale rounded to its dtype: 34 instead of 33.94 in bfloat16.
        self.embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype, device="cpu").item()


class Gemma3(Gemma2):
    """Gemma 3's text model, alone or taken out of a multimodal checkpoint."""

    layer_type = Gemma3Layer

    def name_of(self, stored: str) -> str | None:
        """The tensor's name in a text-only model. In multimodal files names begin with "language_model." or,
        since transformers 5, with "model.language_model."."""
        if "vision_tower." in stored or "multi_modal_projector." in stored:
            return None
        if stored.startswith("model.language_model."):
            stored = stored.replace("language_model.", "", 1)
        return super().name_of(stored.removeprefix("language_model."))
