"""Small random checkpoints made by transformers, for comparing with what it computes itself."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ramify.runtime.model.checkpoint import ModelFiles

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclass
class Case:
    name: str
    model_type: str
    options: dict[str, Any] = field(default_factory=dict)


LONG_ROPE = {
    "hidden_size": 96,  # heads of 24, of which 18 rotate
    "num_attention_heads": 4,
    "initializer_range": 0.2,
    "original_max_position_embeddings": 32,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e3,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0 + 0.1 * index for index in range(9)],
        "long_factor": [2.0 + 0.5 * index for index in range(9)],
    },
}
GEMMA2 = Case(
    "gemma2",
    "gemma2",
    {
        "head_dim": 16,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
        "sliding_window": 6,
    },
)

CASES = [
    Case("llama", "llama"),
    Case("llama tied", "llama", {"tie_word_embeddings": True}),
    Case("llama no groups", "llama", {"num_key_value_heads": 6}),
    Case("llama biases", "llama", {"attention_bias": True, "mlp_bias": True}),
    Case("llama head_dim", "llama", {"head_dim": 20}),
    Case("mistral", "mistral", {"sliding_window": None}),
    Case("mistral window", "mistral", {"sliding_window": 7, "head_dim": 12}),
    Case("qwen2", "qwen2", {"tie_word_embeddings": True}),
    Case("qwen2 window", "qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    Case("qwen3", "qwen3", {"head_dim": 16}),
    Case("qwen3 tied biases", "qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    Case(
        "gemma3",
        "gemma3_text",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    Case("gemma3 cap", "gemma3_text", {"head_dim": 16, "sliding_window": 5, "final_logit_softcapping": 20.0}),
    GEMMA2,
    Case("gemma2 no caps", "gemma2", {"head_dim": 12, "attn_logit_softcapping": None, "sliding_window": 64}),
    Case("phi3", "phi3", {"sliding_window": 9}),
    Case("phi3 partial", "phi3", {"tie_word_embeddings": True, **LONG_ROPE}),
    Case(
        "smollm3",
        "smollm3",
        {"no_rope_layers": [1, 0, 1], "rope_parameters": {"rope_type": "default", "rope_theta": 5e3}},
    ),
    Case(
        "smollm3 window",
        "smollm3",
        {
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 6,
            "attention_bias": True,
        },
    ),
    Case("olmo2", "olmo2"),
    Case("olmo2 biases", "olmo2", {"attention_bias": True, "tie_word_embeddings": True}),
    Case(
        "granite",
        "granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.35,
            "attention_multiplier": 0.2,
            "logits_scaling": 1.7,
            "rms_norm_eps": 1e-2,
        },
    ),
]


def build(case: Case, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model whose every parameter, norms and biases included, is random."""
    torch.manual_seed(11)
    config = AutoConfig.for_model(case.model_type, **copy.deepcopy({**SHAPE, **case.options}))
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model.eval()


def save(model: PreTrainedModel, folder: Path, **options: Any) -> ModelFiles:
    model.save_pretrained(folder, **options)
    return ModelFiles(name="tiny", weights=folder, tokenizer=folder)


def change(folder: Path, **fields: Any) -> None:
    """Change fields of config.json; `...` removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


def change_tensors(folder: Path, file: str = "model.safetensors", **changes: Tensor | None) -> None:
    """Change tensors of a file; None removes one."""
    tensors = load_file(folder / file) | changes
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / file, {"format": "pt"})


@torch.inference_mode()
def expected(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """The logits that transformers computes: (T, vocab) float32."""
    return model(ids[None]).logits[0].float()


def prompt(length: int = 40) -> Tensor:
    return torch.randint(0, SHAPE["vocab_size"], (length,), generator=torch.Generator().manual_seed(5))
