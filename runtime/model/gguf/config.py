"""The shape of a model, read from the metadata of a GGUF file. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Metadata:
    """The metadata of one architecture, without its prefix, and its tensors' shapes (row-major)."""

    architecture: str
    all: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]

    def value(self, key: str, default: Value) -> Value:
        found = self.all.get(f"{self.architecture}.{key}", default)
        if isinstance(found, list):
            raise unsupported(f"{self.architecture}.{key}", found, "one number for all layers")
        return found

    def need(self, key: str) -> int:
        if f"{self.architecture}.{key}" not in self.all:
            raise invalid(f"the GGUF metadata has no {self.architecture}.{key}")
        return self.value(key, 0)


Fields = dict[str, Any]
"""Arguments of `ModelConfig`."""


def config_from_gguf(metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> ModelConfig:
    """The config of a GGUF file, from its metadata and its tensors' shapes (row-major).

    `rope.factors` is left empty: the values are in a tensor, which the caller reads.
    Keys are those of the GGUF specification (ggml, docs/gguf.md).
    """
    architecture = one_of(tuple(ARCHITECTURES), "general.architecture", metadata.get("general.architecture"))
    given, (family, more) = Metadata(architecture, metadata, shapes), ARCHITECTURES[architecture]
    if given.value("expert_count", 0):
        raise unsupported(
            f"{architecture}.expert_count",
            given.value("expert_count", 0),
            "absent: experts are not implemented",
        )
    if "token_embd.weight" not in shapes:
        raise invalid("the GGUF file has no token_embd.weight")
    hidden_size, num_heads = given.need("embedding_length"), given.need("attention.head_count")
    head_dim = given.value("attention.key_length", hidden_size // num_heads)
    for key in ("rope.dimension_count", "attention.value_length"):
        if given.value(key, head_dim) != head_dim:
            raise unsupported(f"{architecture}.{key}", given.value(key, 0), f"the head size, {head_dim}")
    if given.value("attention.sliding_window_pattern", None) is not None:
        raise unsupported(f"{architecture}.attention.sliding_window_pattern", "given", "absent")
    num_layers, context_length = given.need("block_count"), given.need("context_length")
    eos = [metadata.get(f"tokenizer.ggml.{token}_token_id") for token in ("eos", "eot", "eom")]
    fields: Fields = {
        "family": family,
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": hidden_size,
        "intermediate_size": given.need("feed_forward_length"),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": given.value("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "context_length": context_length,
        "norm_eps": given.value("attention.layer_norm_rms_epsilon", 1e-6),
        "rope": _rope(given, context_length),
        "windows": (given.value("attention.sliding_window", 0),) * num_layers,
        "tie_embeddings": "output.weight" not in shapes,
        "qkv_bias": "blk.0.attn_q.bias" in shapes,
        "output_bias": "blk.0.attn_output.bias" in shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in shapes,
        "eos_token_ids": token_ids([token for token in eos if token is not None]),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
    }
    return ModelConfig(**(fields | more(given, fields)))


def _rope(given: Metadata, context_length: int, theta: float = 1e4) -> Rope:
    scaling = given.value("rope.scaling.type", "none")
    kinds: tuple[RopeKind, ...] = ("default", "linear", "yarn")
    name = f"{given.architecture}.rope.scaling.type"
    kind = one_of(kinds, name, "default" if scaling == "none" else scaling)
    return Rope(
        kind="factors" if "rope_freqs.weight" in given.shapes else kind,
        theta=given.value("rope.freq_base", theta),
        factor=given.value("rope.scaling.factor", 1.0),
        original_context_length=given.value("rope.scaling.original_context_length", context_length),
        beta_fast=given.value("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=given.value("rope.scaling.yarn_beta_slow", 1.0),
    )


def _nothing_more(given: Metadata, fields: Fields) -> Fields:
    return {}


def _gemma2(given: Metadata, fields: Fields) -> Fields:
    # The metadata lacks the scale of attention scores, which differs in the 27B models.
    hidden_size, large = fields["hidden_size"], fields["num_layers"] == 46
    return {
        **gemma_shape(hidden_size, hidden_size // fields["num_heads"] if large else fields["head_dim"]),
        "windows": _but_every(2, given.value("attention.sliding_window", 4096), fields["num_layers"]),
        "attention_soft_cap": given.value("attn_logit_softcapping", 50.0),
        "logit_soft_cap": given.value("final_logit_softcapping", 30.0),
    }


def _gemma3(given: Metadata, fields: Fields) -> Fields:
    hidden_size, large = fields["hidden_size"], fields["num_layers"] == 62
    windows = _but_every(6, given.value("attention.sliding_window", 0), fields["num_layers"])
    rope, near = (
        _rope(given, fields["context_length"], 1e6),
        Rope(theta=given.value("rope.freq_base_swa", 1e4)),
    )
    return {
        **gemma_shape(hidden_size, hidden_size // fields["num_heads"] if large else fields["head_dim"]),
        "windows": windows,
        "attention_soft_cap": given.value("attn_logit_softcapping", 0.0),
        "logit_soft_cap": given.value("final_logit_softcapping", 0.0),
        "rope": rope,
        "layer_ropes": tuple(near if window else rope for window in windows),
    }


def _but_every(every: int, window: int, num_layers: int) -> tuple[int, ...]:
    """A window for each layer but every second, third, …"""
    return tuple(window if (layer + 1) % every else 0 for layer in range(num_layers))


ARCHITECTURES: dict[str, tuple[Family, Callable[[Metadata, Fields], Fields]]] = {
    "llama": ("llama", _nothing_more),
    "qwen2": ("qwen2", _nothing_more),
    "qwen3": ("qwen3", _nothing_more),
    "gemma2": ("gemma2", _gemma2),
    "gemma3": ("gemma3", _gemma3),
}
"""The family of a file's `general.architecture`, and a function that gives further fields, or other values of
those that it is given."""
