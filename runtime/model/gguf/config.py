"""The shape of a model, read from the metadata of a GGUF file. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ramify.kernels.weights.routing import ClampedGate, Routing
from ramify.runtime.model.shape.config import (
    Experts,
    Family,
    ModelConfig,
    Rope,
    RopeKind,
    delta_shape,
    gemma_shape,
    granite_shape,
    invalid,
    one_of,
    token_ids,
    unsupported,
)
from ramify.runtime.model.shape.hf_rope import rope_from_hf, with_rope_scaling

Value = TypeVar("Value")


@dataclass(frozen=True)
class Metadata:
    """The metadata of one architecture, with the architecture's prefix removed from the keys, and the shapes
    of the tensors (row-major)."""

    architecture: str
    all: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    rope_scaling: Mapping[str, Any] | None = None
    """`rope_scaling` as in a `config.json`, in place of the file's own extension of the context."""

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


def config_from_gguf(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    rope_scaling: Mapping[str, Any] | None = None,
) -> ModelConfig:
    """The config of a GGUF file, from its metadata and its tensors' shapes (row-major).

    `rope.factors` is left empty: the values are in a tensor, which the caller reads. `rope_scaling` replaces
    the file's own. The keys of `metadata` are those of the GGUF specification (ggml, docs/gguf.md).
    """
    architecture = one_of(tuple(ARCHITECTURES), "general.architecture", metadata.get("general.architecture"))
    given = Metadata(architecture, metadata, shapes, rope_scaling)
    family, more = ARCHITECTURES[architecture]
    if "token_embd.weight" not in shapes:
        raise invalid("the GGUF file has no token_embd.weight")
    hidden_size, num_heads = given.need("embedding_length"), given.need("attention.head_count")
    head_dim = given.value("attention.key_length", hidden_size // num_heads)
    for key in ("rope.dimension_count", "attention.value_length"):
        partial = key == "rope.dimension_count" and architecture in _PARTLY_ROTATED
        if given.value(key, head_dim) != head_dim and not partial:
            raise unsupported(f"{architecture}.{key}", given.value(key, 0), f"the head size, {head_dim}")
    if given.value("attention.sliding_window_pattern", None) is not None:
        raise unsupported(f"{architecture}.attention.sliding_window_pattern", "given", "absent")
    # The last layers may be for multi-token prediction. They are not used.
    num_layers = given.need("block_count") - given.value("nextn_predict_layers", 0)
    kinds = {name.split(".", 2)[-1] for name in shapes if name.startswith("blk.")}
    eos = [metadata.get(f"tokenizer.ggml.{token}_token_id") for token in ("eos", "eot", "eom")]
    fields: Fields = {
        "family": family,
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": hidden_size,
        # Absent where all layers have experts.
        "intermediate_size": given.value("feed_forward_length", 0)
        if given.value("expert_count", 0)
        else given.need("feed_forward_length"),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": given.value("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "context_length": given.need("context_length"),
        "norm_eps": given.value("attention.layer_norm_rms_epsilon", 1e-6),
        "windows": (given.value("attention.sliding_window", 0),) * num_layers,
        "tie_embeddings": "output.weight" not in shapes,
        "qkv_bias": "attn_q.bias" in kinds,
        "output_bias": "attn_output.bias" in kinds,
        "mlp_bias": "ffn_gate.bias" in kinds,
        "eos_token_ids": token_ids([token for token in eos if token is not None]),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
    }
    fields |= _ropes(given, fields)
    fields |= more(given, fields)
    if given.value("expert_count", 0) and "experts" not in fields:
        raise unsupported(f"{architecture}.expert_count", given.value("expert_count", 0), "absent")
    return ModelConfig(**fields)


def _ropes(given: Metadata, fields: Fields) -> Fields:
    """The field `rope`, and `context_length` if `given.rope_scaling` extends the context."""
    share = 1.0
    if given.architecture in _PARTLY_ROTATED:
        share = given.value("rope.dimension_count", fields["head_dim"]) / fields["head_dim"]
    theta = given.value("rope.freq_base", 1e6 if given.architecture == "gemma3" else 1e4)
    if given.rope_scaling is not None:
        config = with_rope_scaling(
            {
                "max_position_embeddings": fields["context_length"],
                "head_dim": fields["head_dim"],
                "rope_parameters": {"rope_theta": theta, "partial_rotary_factor": share},
            },
            given.rope_scaling,
        )
        rope = rope_from_hf(config, partial=True)
        return {"rope": rope, "context_length": config["max_position_embeddings"]}
    scaling = given.value("rope.scaling.type", "none")
    kinds: tuple[RopeKind, ...] = ("default", "linear", "yarn")
    name = f"{given.architecture}.rope.scaling.type"
    kind = one_of(kinds, name, "default" if scaling == "none" else scaling)
    rope = Rope(
        kind="factors" if "rope_freqs.weight" in given.shapes else kind,
        theta=theta,
        share=share,
        factor=given.value("rope.scaling.factor", 1.0),
        original_context_length=given.value("rope.scaling.original_context_length", fields["context_length"]),
        beta_fast=given.value("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=given.value("rope.scaling.yarn_beta_slow", 1.0),
    )
    return {"rope": rope}


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
    near = Rope(theta=given.value("rope.freq_base_swa", 1e4))
    return {
        **gemma_shape(hidden_size, hidden_size // fields["num_heads"] if large else fields["head_dim"]),
        "windows": windows,
        "attention_soft_cap": given.value("attn_logit_softcapping", 0.0),
        "logit_soft_cap": given.value("final_logit_softcapping", 0.0),
        "layer_ropes": tuple(near if window else fields["rope"] for window in windows),
    }


def _but_every(every: int, window: int, num_layers: int) -> tuple[int, ...]:
    """`window` for all layers except each `every`-th one, which sees all tokens (0)."""
    return tuple(window if (layer + 1) % every else 0 for layer in range(num_layers))


def _experts(given: Metadata, fields: Fields, **routing: Any) -> Fields:
    """The mixture of experts. Its sizes and layers are read from the tensors' names and shapes."""
    shapes, layers = given.shapes, range(fields["num_layers"])
    sparse = tuple(f"blk.{layer}.ffn_gate_inp.weight" in shapes for layer in layers)
    block = f"blk.{sparse.index(True) if True in sparse else 0}"
    if f"{block}.ffn_down_exps.weight" not in shapes:  # files of 2023 have a tensor for each expert
        key = f"{given.architecture}.expert_count"
        raise unsupported(key, given.need("expert_count"), f"that of a tensor {block}.ffn_down_exps")
    routing.setdefault("normalised", True)
    experts = Experts(
        count=given.need("expert_count"),
        size=shapes[f"{block}.ffn_down_exps.weight"][2],
        routing=Routing(top_k=given.need("expert_used_count"), **routing),
        sparse=sparse,
        shared_size=shapes.get(f"{block}.ffn_down_shexp.weight", (0, 0))[1],
        shared_gate=f"{block}.ffn_gate_inp_shexp.weight" in shapes,
        correction=f"{block}.exp_probs_b.bias" in shapes,
    )
    return {"experts": experts}


def _llama(given: Metadata, fields: Fields) -> Fields:
    """Fields of Llama's architecture. Mixtral's files name the same architecture."""
    return _experts(given, fields) | {"family": "mixtral"} if given.value("expert_count", 0) else {}


def _unnormalised(given: Metadata, fields: Fields) -> Fields:
    return _experts(given, fields, normalised=False)


def _granite(given: Metadata, fields: Fields) -> Fields:
    shape = granite_shape(
        fields["norm_eps"],
        residual=given.value("residual_scale", 1.0),
        attention=given.value("attention.scale", fields["head_dim"] ** -0.5),
        embedding=given.value("embedding_scale", 1.0),
        logits=given.value("logit_scale", 1.0),
    )
    return shape | (_experts(given, fields) if given.value("expert_count", 0) else {})


def _glm4_moe(given: Metadata, fields: Fields) -> Fields:
    experts = _experts(
        given,
        fields,
        scores="sigmoid",
        normalised=given.value("expert_weights_norm", True),
        scale=given.value("expert_weights_scale", 1.0),
        groups=given.value("expert_group_count", 1),
        top_groups=given.value("expert_group_used_count", 1),
    )
    norms = "blk.0.attn_q_norm.weight" in given.shapes
    return experts | {"head_norms": norms}


def _hybrid(given: Metadata, fields: Fields) -> Fields:
    """Fields of a hybrid. The layers with the tensor `ssm_conv1d` are the linear ones."""
    heads = given.need("ssm.time_step_rank")
    shape = delta_shape(
        [f"blk.{layer}.ssm_conv1d.weight" in given.shapes for layer in range(fields["num_layers"])],
        key_heads=given.need("ssm.group_count"),
        heads=heads,
        key_dim=given.need("ssm.state_size"),
        value_dim=given.need("ssm.inner_size") // heads,
        width=given.need("ssm.conv_kernel"),
    )
    return {**shape, "norm_offset": 1.0}


def _hybrid_moe(given: Metadata, fields: Fields) -> Fields:
    return _experts(given, fields) | _hybrid(given, fields)


def _gpt_oss(given: Metadata, fields: Fields) -> Fields:
    """Fields of gpt-oss. GGUF files omit two of them: that the ends of YaRN's ramp are not rounded
    (`truncate`), and the gate of the experts (`clamp`)."""
    experts = replace(
        _experts(given, fields)["experts"], router_bias=True, bias=True, clamp=ClampedGate(1.702, 7.0)
    )
    num_layers = fields["num_layers"]
    return {
        "experts": experts,
        "sinks": (True,) * num_layers,
        "windows": _but_every(2, given.value("attention.sliding_window", 128), num_layers),
        "rope": replace(fields["rope"], truncate=False),
    }


ARCHITECTURES: dict[str, tuple[Family, Callable[[Metadata, Fields], Fields]]] = {
    "llama": ("llama", _llama),
    "qwen2": ("qwen2", _nothing_more),
    "qwen3": ("qwen3", _nothing_more),
    "gemma2": ("gemma2", _gemma2),
    "gemma3": ("gemma3", _gemma3),
    "granite": ("granite", _granite),
    "qwen2moe": ("qwen2_moe", _unnormalised),
    "qwen3moe": ("qwen3_moe", _experts),
    "olmoe": ("olmoe", _unnormalised),
    "granitemoe": ("granitemoe", _granite),
    "glm4moe": ("glm4_moe", _glm4_moe),
    "gpt-oss": ("gpt_oss", _gpt_oss),
    # Qwen3-Next differs from Qwen3.5 in its fused projections alone, which GGUF files store as Qwen3.5's.
    "qwen3next": ("qwen3_5_moe", _hybrid_moe),
    "qwen35": ("qwen3_5", _hybrid),
    "qwen35moe": ("qwen3_5_moe", _hybrid_moe),
}
"""`general.architecture` → (family, function that returns further fields and overrides of earlier fields)."""
SAME_ARCHITECTURE: dict[Family, str] = {
    "mistral": "llama",
    "mixtral": "llama",
    "granitemoeshared": "granitemoe",
    "qwen3_next": "qwen3next",
}
"""Families whose GGUF files name the architecture of another family → that architecture."""
_PARTLY_ROTATED = ("glm4moe", "qwen3next", "qwen35", "qwen35moe")
"""Architectures in which only a part of each head may rotate."""
PAIRED: tuple[Family, ...] = ("llama", "mixtral", "granite", "granitemoe")
"""Families in whose GGUF files the two elements of a rotary pair are neighbours."""
