"""Small random hybrids made by transformers: gated delta-net layers and attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from .checkpoints import Case, build

LINEAR = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "initializer_range": 0.2,
    "vocab_size": 320,
    "max_position_embeddings": 256,
}
ROPE = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.25}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
EXPERTS |= {"shared_expert_intermediate_size": 16}
NEXT = Case(
    "qwen3_next", "qwen3_next", {**LINEAR, **EXPERTS, "rope_parameters": ROPE, "mlp_only_layers": [1]}
)
"""Qwen3-Next: an MLP in the layer with attention, mixtures in those with states."""
MOE = Case("qwen3_5_moe", "qwen3_5_moe_text", {**LINEAR, **EXPERTS, "rope_parameters": ROPE})
DENSE = Case(
    "qwen3_5",
    "qwen3_5_text",
    {
        **LINEAR,
        "rope_parameters": {**ROPE, "mrope_section": [2, 1, 1], "mrope_interleaved": True},
        "layer_types": None,
        "full_attention_interval": 3,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
)


def build_hybrid(case: Case, **options: Any) -> Any:
    """A hybrid model with further options: decays differ between heads, and states last for tens of
    tokens."""
    model = build(replace(case, options=case.options | options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(torch.linspace(-4.0, 0.0, len(parameter)))
            elif name.endswith("conv1d.weight"):
                parameter.normal_(0.0, 0.5)
            elif "norm" in name and not name.endswith("linear_attn.norm.weight"):
                parameter.sub_(1.0)  # around zero
    return model
