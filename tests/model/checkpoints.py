"""Small random checkpoints made by transformers, for comparing with what it computes itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ramify.runtime.model.resolve import ModelFiles

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


CASES = [
    Case("llama", "llama"),
    Case("llama tied", "llama", {"tie_word_embeddings": True}),
    Case("llama no groups", "llama", {"num_key_value_heads": 6}),
    Case("llama biases", "llama", {"attention_bias": True, "mlp_bias": True}),
    Case("llama head_dim", "llama", {"head_dim": 20}),
    Case(
        "llama linear",
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}},
    ),
    Case(
        "llama llama3",
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 100.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    Case("mistral", "mistral", {"sliding_window": None}),
    Case("mistral window", "mistral", {"sliding_window": 7, "head_dim": 12}),
    Case("qwen2", "qwen2", {"tie_word_embeddings": True}),
    Case(
        "qwen2 yarn",
        "qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    Case("qwen2 window", "qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    Case("qwen3", "qwen3", {"head_dim": 16}),
    Case("qwen3 tied biases", "qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
]


def build(case: Case, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model whose every parameter, norms and biases included, is random."""
    torch.manual_seed(11)
    config = AutoConfig.for_model(case.model_type, **{**SHAPE, **case.options})
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


@torch.inference_mode()
def expected(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """(T, vocab) float32."""
    return model(ids[None]).logits[0].float()


def prompt(length: int = 40) -> Tensor:
    return torch.randint(0, SHAPE["vocab_size"], (length,), generator=torch.Generator().manual_seed(5))
