"""Writes a random checkpoint as llama.cpp's converter would, so that reading it back can be tested."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.quants import quantize
from transformers import PreTrainedModel


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
    turning = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(turning["rope_theta"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(3)
    # A vocabulary, longer than the arrays that the header reader keeps, and another array of its length.
    writer.add_token_list([f"token{index}" for index in range(5000)])
    writer.add_token_types([1] * 5000)
    for key, value in (metadata or {}).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"{architecture}.{key}", value)  # type: ignore[operator]

    named = get_tensor_name_map(MODEL_ARCH[architecture.upper()], config.num_hidden_layers).get_name
    gemma = architecture.startswith("gemma")
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, parameter in model.named_parameters():
        stem, _, suffix = name.rpartition(".")
        place = named(stem)
        assert place is not None
        short = place.rpartition(".")[2]
        array = parameter.detach().float().numpy() + (1.0 if gemma and short.endswith("_norm") else 0.0)
        if architecture == "llama" and short in heads:
            # The two halves of a head are interleaved: rows 0, d/2, 1, d/2 + 1, …
            halves = array.reshape(heads[short], 2, head_dim // 2, *array.shape[1:])
            array = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)
        full = f"{place}.{suffix}"
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
