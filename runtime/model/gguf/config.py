"""The shape of a model, read from the metadata of a GGUF file. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from ramify.runtime.model.config import (
    Family,
    ModelConfig,
    Rope,
    RopeKind,
    gemma_shape,
    invalid,
    one_of,
    token_ids,
    unsupported,
)

Value = TypeVar("Value")


def config_from_gguf(metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> ModelConfig:
    """The config of a GGUF file, from its metadata and its tensors' shapes (row-major).

    `rope.factors` is left empty: the values are in a tensor, which the caller reads.
    Keys are those of the GGUF specification (ggml, docs/gguf.md).
    """
    architectures: tuple[Family, ...] = ("llama", "qwen2", "qwen3", "gemma2", "gemma3")
    family = one_of(architectures, "general.architecture", metadata.get("general.architecture"))

    def value(key: str, default: Value) -> Value:
        found = metadata.get(f"{family}.{key}", default)
        if isinstance(found, list):
            raise unsupported(f"{family}.{key}", found, "one number for all layers")
        return found

    def need(key: str) -> int:
        if f"{family}.{key}" not in metadata:
            raise invalid(f"the GGUF metadata has no {family}.{key}")
        return value(key, 0)

    if value("expert_count", 0):
        raise unsupported(
            f"{family}.expert_count", value("expert_count", 0), "absent: experts are not implemented"
        )
    if "token_embd.weight" not in shapes:
        raise invalid("the GGUF file has no token_embd.weight")
    hidden_size, num_heads = need("embedding_length"), need("attention.head_count")
    head_dim = value("attention.key_length", hidden_size // num_heads)
    for key in ("rope.dimension_count", "attention.value_length"):
        if value(key, head_dim) != head_dim:
            raise unsupported(f"{family}.{key}", value(key, 0), f"the head size, {head_dim}")
    if value("attention.sliding_window_pattern", None) is not None:
        raise unsupported(f"{family}.attention.sliding_window_pattern", "given", "absent")
    num_layers, context_length = need("block_count"), need("context_length")
    scaling = value("rope.scaling.type", "none")
    kinds: tuple[RopeKind, ...] = ("default", "linear", "yarn")
    kind = one_of(kinds, f"{family}.rope.scaling.type", "default" if scaling == "none" else scaling)
    eos = [metadata.get(f"tokenizer.ggml.{token}_token_id") for token in ("eos", "eot", "eom")]
    rope = Rope(
        kind="factors" if "rope_freqs.weight" in shapes else kind,
        theta=value("rope.freq_base", 1e6 if family == "gemma3" else 1e4),
        factor=value("rope.scaling.factor", 1.0),
        original_context_length=value("rope.scaling.original_context_length", context_length),
        beta_fast=value("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=value("rope.scaling.yarn_beta_slow", 1.0),
    )
    window = value("attention.sliding_window", 4096 if family == "gemma2" else 0)
    windows = (window,) * num_layers
    more: dict[str, Any] = {}
    if family in ("gemma2", "gemma3"):
        every = 2 if family == "gemma2" else 6
        windows = tuple(window if (layer + 1) % every else 0 for layer in range(num_layers))
        # The metadata lacks the scale of attention scores, which differs in the 27B models.
        large = (family, num_layers) in (("gemma2", 46), ("gemma3", 62))
        more = gemma_shape(hidden_size, hidden_size // num_heads if large else head_dim)
        caps = (50.0, 30.0) if family == "gemma2" else (0.0, 0.0)
        more["attention_soft_cap"] = value("attn_logit_softcapping", caps[0])
        more["logit_soft_cap"] = value("final_logit_softcapping", caps[1])
    if family == "gemma3":
        near = Rope(theta=value("rope.freq_base_swa", 1e4))
        more["layer_ropes"] = tuple(near if each else rope for each in windows)
    return ModelConfig(
        family=family,
        vocab_size=shapes["token_embd.weight"][0],
        hidden_size=hidden_size,
        intermediate_size=need("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=value("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        context_length=context_length,
        norm_eps=value("attention.layer_norm_rms_epsilon", 1e-6),
        rope=rope,
        windows=windows,
        tie_embeddings="output.weight" not in shapes,
        qkv_bias="blk.0.attn_q.bias" in shapes,
        output_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_gate.bias" in shapes,
        eos_token_ids=token_ids([token for token in eos if token is not None]),
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        **more,
    )
