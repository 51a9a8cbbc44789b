"""Writes a random checkpoint as llama.cpp's converter would, so that reading it back can be tested."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from transformers import PreTrainedModel

STEMS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    architecture: str,
    *,
    matrices: GGMLQuantizationType = GGMLQuantizationType.F32,
    others: dict[str, GGMLQuantizationType] | None = None,
    metadata: dict[str, int | float | str] | None = None,
    rope_factors: np.ndarray | None = None,
    drop: str | None = None,
) -> None:
    """Mistral checkpoints have the architecture "llama". `drop` leaves out one tensor, by its GGUF name.

    `others` are the types of single kinds of matrices, such as "attn_v".
    """
    config: Any = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(3)
    # A vocabulary, longer than the arrays that the header reader keeps, and another array of its length.
    writer.add_token_list([f"token{index}" for index in range(5000)])
    writer.add_token_types([1] * 5000)
    for key, value in (metadata or {}).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"{architecture}.{key}", value)  # type: ignore[operator]

    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, parameter in model.named_parameters():
        stem, _, suffix = name.rpartition(".")
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
        short = STEMS[layer[2] if layer else stem]
        array = parameter.detach().float().numpy()
        if architecture == "llama" and short in heads:
            # The two halves of a head are interleaved: rows 0, d/2, 1, d/2 + 1, …
            halves = array.reshape(heads[short], 2, head_dim // 2, *array.shape[1:])
            array = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)
        full = f"blk.{layer[1]}.{short}.{suffix}" if layer else f"{short}.{suffix}"
        if full == drop:
            continue
        if array.ndim == 2:
            type_ = (others or {}).get(short, matrices)
            writer.add_tensor(full, quantize(array, type_), raw_dtype=type_)
        else:
            writer.add_tensor(full, array.astype(np.float32))
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
