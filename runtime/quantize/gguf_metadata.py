"""The metadata of a GGUF file for a model's shape: the inverse of `config`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass, replace
from typing import Any

from torch import Tensor

from ramify.errors import UnsupportedField
from ramify.runtime.model.gguf.config import ARCHITECTURES, SAME_ARCHITECTURE, config_from_gguf
from ramify.runtime.model.rope import frequencies
from ramify.runtime.model.shape.config import ModelConfig, Rope

ROPE_FREQUENCIES = "rope_freqs.weight"
"""The tensor with a divisor for each rotary frequency."""

Metadata = dict[str, Any]
"""Key → a bool, a whole number, a float, a text, or a list of these."""

_NOT_COMPARED = ("family", "rope", "layer_ropes", "attention_scale", "quantised", "shard")
_SIGMOID = 2
"""llama.cpp's number for a router with sigmoid scores (`LLAMA_EXPERT_GATING_FUNC_TYPE_SIGMOID`)."""


def architecture_of(config: ModelConfig) -> str:
    """`general.architecture` of the family. Raises `UnsupportedField` if its GGUF files are not read."""
    architectures = {family: name for name, (family, _) in ARCHITECTURES.items()} | SAME_ARCHITECTURE
    if config.family not in architectures:
        raise UnsupportedField(
            f"The model is of the family {config.family}, whose GGUF files are not read here.",
            field="model",
            remedy="Write a folder: --to int8 or int4, and an out without .gguf.",
        )
    return architectures[config.family]


def metadata_of(config: ModelConfig, text_config: Mapping[str, Any]) -> Metadata:
    """The metadata of the model, without its tokenizer.

    `text_config` is the text model's part of `config.json`, for the two values that `ModelConfig` has merged
    into others: Granite's `residual_multiplier`, and `mrope_section`.
    """
    architecture = architecture_of(config)
    residual = text_config.get("residual_multiplier") or 1.0 if architecture.startswith("granite") else 1.0
    found: Metadata = {
        "vocab_size": config.vocab_size,
        "context_length": config.context_length,
        "embedding_length": config.hidden_size,
        "block_count": config.depth,
        "feed_forward_length": config.intermediate_size or None,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.norm_eps * residual**2,
        "attention.sliding_window": max(config.windows) or None,
        "attn_logit_softcapping": config.attention_soft_cap or None,
        "final_logit_softcapping": config.logit_soft_cap or None,
        **_rope(config),
        **_experts(config),
        **_states(config, architecture, text_config),
    }
    if architecture.startswith("granite"):
        found |= {
            "residual_scale": float(residual),
            "embedding_scale": config.embedding_scale * residual,
            "attention.scale": config.score_scale,
            "logit_scale": 1.0 / config.logit_scale,
        }
    named = {f"{architecture}.{key}": value for key, value in found.items() if value is not None}
    return {"general.architecture": architecture, **named}


def rope_factors(config: ModelConfig) -> Tensor | None:
    """The tensor `ROPE_FREQUENCIES`, which says a llama3 extension in GGUF files; None without one."""
    if config.rope.kind != "llama3":
        return None
    rotated = config.rope.rotated(config.head_dim)
    plain = frequencies(Rope(theta=config.rope.theta), rotated, 1)[0]
    return plain / frequencies(config.rope, rotated, 1)[0]


def check_metadata(config: ModelConfig, metadata: Metadata, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise `UnsupportedField`, with the field's name, if a reader of the file would not get `config`: for
    the values that GGUF files have no key for."""
    architecture = metadata["general.architecture"]
    read = config_from_gguf(metadata, shapes)
    wanted = {**vars(config), "attention_scale": config.score_scale, "rope": _turning(config)}
    factors = rope_factors(config)
    if factors is not None:
        read = replace(read, rope=replace(read.rope, factors=tuple(factors.tolist())))
    found = {**vars(read), "attention_scale": read.score_scale, "rope": _turning(read)}
    wanted["eos_token_ids"], found["eos_token_ids"] = set(wanted["eos_token_ids"]), set(read.eos_token_ids)
    compared = [name for name in wanted if name not in _NOT_COMPARED] + ["attention_scale", "rope"]
    for name in compared:
        if not _alike(wanted[name], found[name]):
            values = "" if name == "rope" else f" = {getattr(config, name)!r:.200}"
            raise UnsupportedField(
                f"The model has {name}{values}, which GGUF files of the architecture {architecture} do not "
                "say.",
                field="model",
                remedy="Write a folder: --to int8 or int4, and an out without .gguf.",
            )


def _turning(config: ModelConfig) -> list[tuple[list[float], float]]:
    """Each layer's rotary frequencies, and its factor of cos and sin."""
    found = [
        frequencies(rope, rope.rotated(config.head_dim), config.context_length)
        for rope in ([config.rope, *config.layer_ropes])
    ]
    return [(radians.tolist(), scale) for radians, scale in found]


def _alike(wanted: Any, found: Any) -> bool:
    """Equality in which floats have the precision of float32."""
    if is_dataclass(wanted) and is_dataclass(found):
        return _alike(asdict(wanted), asdict(found))  # type: ignore[arg-type]
    if isinstance(wanted, float) and isinstance(found, float):
        return math.isclose(wanted, found, rel_tol=1e-5)
    if isinstance(wanted, dict) and isinstance(found, dict):
        return wanted.keys() == found.keys() and all(_alike(wanted[key], found[key]) for key in wanted)
    if isinstance(wanted, list | tuple) and isinstance(found, list | tuple):
        return len(wanted) == len(found) and all(map(_alike, wanted, found))
    return bool(wanted == found)


def _rope(config: ModelConfig) -> Metadata:
    rope = config.rope
    found: Metadata = {
        "rope.freq_base": float(rope.theta),
        "rope.dimension_count": rope.rotated(config.head_dim),
    }
    near = {layer.theta for layer, window in zip(config.layer_ropes, config.windows, strict=False) if window}
    if near:
        found["rope.freq_base_swa"] = float(min(near))
    if rope.kind in ("linear", "yarn"):
        found |= {
            "rope.scaling.type": rope.kind,
            "rope.scaling.factor": float(rope.factor),
            "rope.scaling.original_context_length": rope.original_context_length,
        }
    if rope.kind == "yarn":
        found |= {
            "rope.scaling.yarn_beta_fast": float(rope.beta_fast),
            "rope.scaling.yarn_beta_slow": float(rope.beta_slow),
        }
    return found


def _experts(config: ModelConfig) -> Metadata:
    experts = config.experts
    if experts is None:
        return {}
    routing = experts.routing
    found: Metadata = {
        "expert_count": experts.count,
        "expert_used_count": routing.top_k,
        "expert_feed_forward_length": experts.size,
        "expert_shared_feed_forward_length": experts.shared_size or None,
    }
    if routing.scores == "sigmoid":
        found |= {
            "expert_gating_func": _SIGMOID,
            "expert_weights_norm": routing.normalised,
            "expert_weights_scale": float(routing.scale),
            "expert_group_count": routing.groups,
            "expert_group_used_count": routing.top_groups,
            "expert_shared_count": experts.shared_size // experts.size,
            "leading_dense_block_count": experts.sparse.index(True),
        }
    return found


def _states(config: ModelConfig, architecture: str, text_config: Mapping[str, Any]) -> Metadata:
    states = config.states
    if states is None:
        return {}
    interval = config.linear.index(False) + 1
    if any(linear != bool((layer + 1) % interval) for layer, linear in enumerate(config.linear)):
        raise UnsupportedField(
            f"The model has linear = {config.linear}, not attention in each n-th layer, as GGUF files have.",
            field="model",
        )
    found: Metadata = {
        "full_attention_interval": interval,
        "ssm.conv_kernel": states.width,
        "ssm.state_size": states.key_dim,
        "ssm.group_count": states.key_heads,
        "ssm.time_step_rank": states.heads,
        "ssm.inner_size": states.heads * states.value_dim,
    }
    if architecture.startswith("qwen35"):  # llama.cpp needs them; text has three equal positions
        ropes = text_config.get("rope_parameters") or text_config.get("rope_scaling") or {}
        pairs = config.rope.rotated(config.head_dim) // 2
        thirds = [(pairs + 2 - place) // 3 for place in range(3)]
        found["rope.dimension_sections"] = [*(ropes.get("mrope_section") or thirds), 0]
    return found
