"""Qwen2."""

from __future__ import annotations

from ramify.runtime.model.families.llama import Llama


class Qwen2(Llama):
    """Llama with a bias on queries, keys and values, `ModelConfig.qkv_bias` (arXiv 2407.10671).

    Where a checkpoint asks for it, its upper layers see a sliding window, `ModelConfig.windows`.
    """
