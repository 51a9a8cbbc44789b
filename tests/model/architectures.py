"""Tiny random models of any architecture of transformers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank"), 16),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "n_inner"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 512),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts"), 1),
    **dict.fromkeys(("layer_types", "mlp_layer_types"), None),
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,  # where embeddings are scaled up, a tied head repeats the last token
    "vocab_size": 320,
    "q_lora_rank": 32,
    "sliding_window": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 256,
}
"""Sizes by the names that configs have for them; those that a config lacks are left out."""

BOTH = {"layer_types": ["sliding_attention", "full_attention"]}
LATENT = {"num_key_value_heads": 4}
GEMMA4 = {"global_head_dim": 32, "vocab_size_per_layer_input": 320}
GEMMA3N = {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0, 0.0], "laurel_rank": 8}
GEMMA3N |= {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 320}
OPTIONS: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 8},  # of 16 in a head
    "gptj": {"rotary_dim": 8},
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu", "axk1", "minicpm3", "dots3_note"), LATENT
    ),
    **dict.fromkeys(("gemma2", "gemma3", "cohere2", "exaone4", "olmo3", "afmoe", "exaone_moe"), BOTH),
    **dict.fromkeys(("gemma4", "gemma4_text"), BOTH | GEMMA4),
    "deepseek_v3": LATENT | {"first_k_dense_replace": 1},
    "glm4_moe": {"first_k_dense_replace": 1, "partial_rotary_factor": 0.5},
    **dict.fromkeys(("gemma3n", "gemma3n_text"), BOTH | GEMMA3N),
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}, "max_seq_len": 512},
    "dots1": {"first_k_dense_replace": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "cohere": {"tie_word_embeddings": True},
    "zaya": {"num_experts_per_tok": 1},
    "phi": {"partial_rotary_factor": 0.5},
}
"""Further fields of a config."""


def tiny_config(model_type: str, **fields: Any) -> Any:
    """A small config of the text model of `model_type`; `fields` replace its own."""
    text = CONFIG_MAPPING[model_type]().get_text_config(decoder=True)
    known = text.to_dict()
    chosen = {name: value for name, value in SMALL.items() if name in known}
    return type(text)(**chosen | OPTIONS.get(model_type, {}) | fields)


def tiny_model(config: Any, *, spread: float = 0.2) -> Any:
    """The library's own model, float32: matrices N(0, spread²), vectors shifted by N(0, 0.1²)."""
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model = architecture._from_config(copy.deepcopy(config), dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * spread if parameter.dim() > 1 else parameter + noise * 0.1)
    return model


def save_tiny(config: Any, folder: Path) -> Any:
    """Write a checkpoint of `tiny_model`, and return the model."""
    model = tiny_model(config)
    model.save_pretrained(folder)
    return model
