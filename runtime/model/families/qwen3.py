"""Qwen3 (arXiv 2505.09388): Llama with a norm over each query and key head before the rotation."""

from __future__ import annotations

import re

import torch

from ramify.runtime.model.decoder import Layer, Model
from ramify.runtime.model.families.llama import LlamaLayer, NormedHeadsLayer
from ramify.runtime.model.layers import HeadNorms, RMSNorm, Rotary
from ramify.runtime.model.shape.config import ModelConfig


class Qwen3Layer(NormedHeadsLayer):
    def __init__(self, config: ModelConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__(config, index, dtype)
        self.q_norm, self.k_norm = (self.head_norm(config, dtype) for _ in range(2))

    @staticmethod
    def head_norm(config: ModelConfig, dtype: torch.dtype) -> RMSNorm:
        size = config.head_dim
        rotary = Rotary(1, size, config.rope.rotated(size))
        return RMSNorm(size, config.norm_eps, dtype=dtype, rotary=rotary, offset=config.norm_offset)

    def head_norms(self) -> HeadNorms:
        return HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)


class Glm4Moe(Model):
    """GLM-4.5 (arXiv 2508.06471): half of each head rotates; only larger models have norms over heads."""

    def layer(self, index: int, dtype: torch.dtype) -> Layer:
        return (Qwen3Layer if self.config.head_norms else LlamaLayer)(self.config, index, dtype)

    def name_of(self, stored: str) -> str | None:
        """The tensor's name; None for the unused layers of multi-token prediction, from `num_layers` on."""
        found = re.match(r"model\.layers\.(\d+)\.", stored)
        return None if found and int(found[1]) >= self.config.num_layers else super().name_of(stored)


class Qwen3(Model):
    layer_type = Qwen3Layer
