"""The default model as transformers loads it: the oracle for tests with real weights."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

from ramify.runtime.model.checkpoint import ModelFiles


def load_reference(files: ModelFiles, dtype: Any = None) -> Any:
    """Load the default GGUF file into transformers' model, in float32 or `dtype`, with transformers' code
    alone.

    Its `from_pretrained(gguf_file=…)` would need accelerate.
    """
    import gguf
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    with mock.patch.object(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)):
        # transformers makes the map anew for each of 400 modules: half of the time.
        tensors = load_gguf_checkpoint(files.weights, return_tensors=True, model_to_load=model)["tensors"]
    left = model.load_state_dict(tensors, strict=False)
    assert left.missing_keys == ["lm_head.weight"]  # tied to the embedding
    assert not left.unexpected_keys
    model.tie_weights()
    return model.to(dtype or torch.float32).eval()
