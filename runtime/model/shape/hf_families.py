"""Families of models: the differences of each one's `config.json` from Llama's. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ramify.kernels.weights.routing import ClampedGate, Routing
from ramify.runtime.model.shape.config import (
    Experts,
    Family,
    Rope,
    delta_shape,
    gemma_shape,
    granite_shape,
    unsupported,
)
from ramify.runtime.model.shape.hf_rope import Config, need, rope_from_hf

Fields = dict[str, Any]
"""Arguments of `ModelConfig`."""


def _no_windows(config: Config, num_layers: int) -> tuple[int, ...]:
    return (0,) * num_layers


def _one_window(config: Config, num_layers: int) -> tuple[int, ...]:
    if config.get("layer_types"):
        raise unsupported("layer_types", config["layer_types"], f"absent for {config['model_type']}")
    return (config.get("sliding_window") or 0,) * num_layers


def _windows_by_type(config: Config, num_layers: int) -> tuple[int, ...] | None:
    """Windows for the layers that `layer_types` calls sliding; None without `layer_types`."""
    kinds: Sequence[str] | None = config.get("layer_types")
    if kinds is None:
        return None
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown:
        raise unsupported("layer_types", unknown.pop(), "full_attention or sliding_attention")
    window = config.get("sliding_window") or 0
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _optional_windows(config: Config, num_layers: int) -> tuple[int, ...]:
    """Windows of Qwen models. With `use_sliding_window`, the layers from `max_window_layers` on have one."""
    if not config.get("use_sliding_window"):
        config = {**config, "sliding_window": 0}
    window, first = config.get("sliding_window") or 0, config.get("max_window_layers", 28)
    by_type = _windows_by_type(config, num_layers)
    return by_type or tuple(window if layer >= first else 0 for layer in range(num_layers))


def _smollm3_windows(config: Config, num_layers: int) -> tuple[int, ...]:
    windows = config.get("use_sliding_window") and config.get("sliding_window")
    if windows and config.get("layer_types") is None:
        raise unsupported("use_sliding_window", True, "false, or whose layer_types say where")
    return _optional_windows(config, num_layers)


def _gemma_windows(config: Config, num_layers: int) -> tuple[int, ...]:
    by_type = _windows_by_type(config, num_layers)
    if by_type is not None:
        return by_type
    every, window = need(config, "sliding_window_pattern"), config.get("sliding_window") or 0
    return tuple(window if (layer + 1) % every else 0 for layer in range(num_layers))


def _one_rope(config: Config, fields: Fields) -> Fields:
    return {"rope": rope_from_hf(config)}


def _smollm3_ropes(config: Config, fields: Fields) -> Fields:
    """SmolLM3's rotary embeddings: none in every fourth layer."""
    rope = rope_from_hf(config)
    every, rotated = config["no_rope_layer_interval"], config.get("no_rope_layers")
    if rotated is None:
        rotated = [(layer + 1) % every for layer in range(fields["num_layers"])]
    still = Rope(share=0.0)
    return {
        "rope": rope,
        "layer_ropes": tuple(rope if rotates else still for rotates in rotated[: fields["num_layers"]]),
    }


def _gemma3_ropes(config: Config, fields: Fields) -> Fields:
    """Gemma 3's rotary embeddings: layers with windows have a second one."""
    given = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    local = dict(given.pop("sliding_attention", None) or {})
    local.setdefault("rope_theta", config.get("rope_local_base_freq") or 1e4)
    given = dict(given.pop("full_attention", None) or given)
    given.setdefault("rope_theta", config.get("rope_theta") or 1e6)
    full, near = rope_from_hf(config, given), rope_from_hf(config, local)
    return {"rope": full, "layer_ropes": tuple(near if window else full for window in fields["windows"])}


def _partial_rope(config: Config, fields: Fields) -> Fields:
    return {"rope": rope_from_hf(config, partial=True)}


def _nothing_more(config: Config, fields: Fields) -> Fields:
    return {}


def _qkv_bias(config: Config, fields: Fields) -> Fields:
    return {"qkv_bias": True}


def _gemma_more(config: Config, fields: Fields) -> Fields:
    return {
        **gemma_shape(fields["hidden_size"], need(config, "query_pre_attn_scalar")),
        "attention_soft_cap": config.get("attn_logit_softcapping") or 0.0,
        "logit_soft_cap": config.get("final_logit_softcapping") or 0.0,
    }


def _hybrid_ropes(config: Config, fields: Fields) -> Fields:
    """The rotary embedding of hybrids. `mrope_section` is ignored: its three positions are equal for text."""
    given = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    given = {name: value for name, value in given.items() if not name.startswith("mrope_")}
    return {"rope": rope_from_hf(config, given or {"rope_type": "default"}, partial=True)}


def _hybrid_more(config: Config, fields: Fields) -> Fields:
    kinds: Sequence[str] | None = config.get("layer_types")
    if kinds is None:
        every = need(config, "full_attention_interval")
        linear = [bool((layer + 1) % every) for layer in range(fields["num_layers"])]
    else:
        unknown = set(kinds) - {"full_attention", "linear_attention"}
        if unknown:
            raise unsupported("layer_types", unknown.pop(), "full_attention or linear_attention")
        linear = [kind == "linear_attention" for kind in kinds]
    shape = delta_shape(
        linear,
        key_heads=need(config, "linear_num_key_heads"),
        heads=need(config, "linear_num_value_heads"),
        key_dim=need(config, "linear_key_head_dim"),
        value_dim=need(config, "linear_value_head_dim"),
        width=need(config, "linear_conv_kernel_dim"),
    )
    return {**shape, "norm_offset": 1.0}


def _hybrid_moe_more(config: Config, fields: Fields) -> Fields:
    experts = {}
    if config.get("num_experts"):
        experts["experts"] = _qwen2_moe_more(config, fields)["experts"]
    return _hybrid_more(config, fields) | experts


def _granite_more(config: Config, fields: Fields) -> Fields:
    return granite_shape(
        fields["norm_eps"],
        residual=config.get("residual_multiplier", 1.0),
        attention=config.get("attention_multiplier", 1.0),
        embedding=config.get("embedding_multiplier", 1.0),
        logits=config.get("logits_scaling", 1.0),
    )


def _routing(config: Config, **options: Any) -> Routing:
    return Routing(top_k=need(config, "num_experts_per_tok"), **options)


def _expert_count(config: Config) -> int:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return need(config, next((name for name in names if config.get(name)), names[0]))


def _mixtral_more(config: Config, fields: Fields) -> Fields:
    experts = Experts(
        count=_expert_count(config),
        size=fields["intermediate_size"],
        routing=_routing(config),
        sparse=(True,) * fields["num_layers"],
        shared_size=config.get("shared_intermediate_size") or 0,
    )
    return {"experts": experts}


def _granite_moe_more(config: Config, fields: Fields) -> Fields:
    return _granite_more(config, fields) | _mixtral_more(config, fields)


def _olmoe_more(config: Config, fields: Fields) -> Fields:
    routing = _routing(config, normalised=bool(config.get("norm_topk_prob")))
    return {"experts": replace(_mixtral_more(config, fields)["experts"], routing=routing)}


def _qwen_moe_more(config: Config, fields: Fields) -> Fields:
    """Qwen's experts: every `decoder_sparse_step`th layer is sparse, except those in `mlp_only_layers`."""
    step, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
    layers = range(fields["num_layers"])
    experts = Experts(
        count=_expert_count(config),
        size=need(config, "moe_intermediate_size"),
        routing=_routing(config, normalised=bool(config.get("norm_topk_prob"))),
        sparse=tuple(layer not in dense and (layer + 1) % step == 0 for layer in layers),
    )
    return {"experts": experts}


def _qwen2_moe_more(config: Config, fields: Fields) -> Fields:
    size = need(config, "shared_expert_intermediate_size")
    experts = replace(_qwen_moe_more(config, fields)["experts"], shared_size=size, shared_gate=True)
    return {"qkv_bias": config.get("qkv_bias", True), "experts": experts}


def _glm4_moe_more(config: Config, fields: Fields) -> Fields:
    """GLM-4.5's experts, which use DeepSeek-V3's router, and the norms over heads of its larger models."""
    size, dense = need(config, "moe_intermediate_size"), need(config, "first_k_dense_replace")
    routing = _routing(
        config,
        scores="sigmoid",
        normalised=bool(config["norm_topk_prob"]),
        scale=config["routed_scaling_factor"],
        groups=need(config, "n_group"),
        top_groups=need(config, "topk_group"),
    )
    experts = Experts(
        count=_expert_count(config),
        size=size,
        routing=routing,
        sparse=tuple(layer >= dense for layer in range(fields["num_layers"])),
        shared_size=size * need(config, "n_shared_experts"),
        correction=True,
    )
    return {"output_bias": False, "head_norms": bool(config.get("use_qk_norm")), "experts": experts}


def _gpt_oss_windows(config: Config, num_layers: int) -> tuple[int, ...]:
    """gpt-oss's windows: in every other layer, beginning with the first."""
    kinds = config.get("layer_types")
    kinds = kinds or ["full_attention" if layer % 2 else "sliding_attention" for layer in range(num_layers)]
    return _windows_by_type({**config, "layer_types": kinds}, num_layers) or ()


def _gpt_oss_more(config: Config, fields: Fields) -> Fields:
    experts = replace(
        _mixtral_more(config, fields)["experts"],
        router_bias=True,
        bias=True,
        clamp=ClampedGate(config["swiglu_alpha"], config["swiglu_limit"]),
    )
    return {"experts": experts, "sinks": (True,) * fields["num_layers"]}


@dataclass(frozen=True, kw_only=True)
class Reader:
    """Differences of a family's `config.json` from Llama's."""

    defaults: Config = field(default_factory=dict)
    """Values that transformers gives to absent fields, where they differ from Llama's."""
    values: Mapping[str, tuple[Any, ...] | None] = field(default_factory=dict)
    """Supported values of fields, instead of those in `_NEUTRAL`; None: every value is supported."""
    attention_bias: bool = False
    """Whether the family has the field `attention_bias`."""
    mlp_bias: bool = False
    windows: Callable[[Config, int], tuple[int, ...]] = _no_windows
    """Function that returns `ModelConfig.windows`, from the file and the number of layers."""
    ropes: Callable[[Config, Fields], Fields] = _one_rope
    """Function that returns the fields `rope` and `layer_ropes`, from the file and the fields read before."""
    more: Callable[[Config, Fields], Fields] = _nothing_more
    """Function that returns further fields, or overrides of fields read before."""


_GEMMA = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256}
_GEMMA |= {"tie_word_embeddings": True, "sliding_window": 4096}
_GEMMA2_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_GEMMA_VALUES = dict.fromkeys(("hidden_act", "hidden_activation"), (None, "gelu_pytorch_tanh"))

_GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
_EXPERTS = dict.fromkeys(("num_experts", "num_local_experts"))
_QWEN_MOE = {**_EXPERTS, "use_sliding_window": (None, False)}
_GLM4_MOE = {"first_k_dense_replace": 1, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "n_group": 1}
_GLM4_MOE |= {"n_shared_experts": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True}
_HYBRID: Config = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_HYBRID_VALUES = {"partial_rotary_factor": None}
_HYBRID_SIZES = dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 512)
_HYBRID_EXPERTS = {**_HYBRID_SIZES, "norm_topk_prob": True}
_HYBRID_READER = Reader(
    defaults=_HYBRID, values=_HYBRID_VALUES, attention_bias=True, ropes=_hybrid_ropes, more=_hybrid_more
)

READERS: dict[Family, Reader] = {
    "llama": Reader(attention_bias=True, mlp_bias=True),
    "mistral": Reader(windows=_one_window),
    "qwen2": Reader(windows=_optional_windows, more=_qkv_bias),
    "qwen3": Reader(defaults={"head_dim": 128}, attention_bias=True, windows=_optional_windows),
    "gemma2": Reader(
        defaults={**_GEMMA, **_GEMMA2_CAPS, "sliding_window_pattern": 2},
        values={**_GEMMA_VALUES, **dict.fromkeys(_GEMMA2_CAPS)},
        attention_bias=True,
        windows=_gemma_windows,
        more=_gemma_more,
    ),
    "gemma3": Reader(
        defaults={
            **_GEMMA,
            "sliding_window_pattern": 6,
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
        },
        values={**_GEMMA_VALUES, "final_logit_softcapping": None},
        attention_bias=True,
        windows=_gemma_windows,
        ropes=_gemma3_ropes,
        more=_gemma_more,
    ),
    "phi3": Reader(
        defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
        values={"partial_rotary_factor": None},
        windows=_one_window,
        ropes=_partial_rope,
    ),
    "smollm3": Reader(
        defaults={"tie_word_embeddings": True, "no_rope_layer_interval": 4},
        attention_bias=True,
        mlp_bias=True,
        windows=_smollm3_windows,
        ropes=_smollm3_ropes,
    ),
    "olmo2": Reader(defaults={"rms_norm_eps": 1e-5}, attention_bias=True),
    "granite": Reader(attention_bias=True, mlp_bias=True, more=_granite_more),
    "mixtral": Reader(
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6},
        values=_EXPERTS,
        windows=_one_window,
        more=_mixtral_more,
    ),
    "qwen2_moe": Reader(
        defaults={"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
        values=_QWEN_MOE,
        more=_qwen2_moe_more,
    ),
    "qwen3_moe": Reader(
        defaults={"moe_intermediate_size": 768}, values=_QWEN_MOE, attention_bias=True, more=_qwen_moe_more
    ),
    "olmoe": Reader(
        defaults={"rms_norm_eps": 1e-5},
        values={**_EXPERTS, "clip_qkv": (None,)},
        attention_bias=True,
        more=_olmoe_more,
    ),
    "granitemoe": Reader(values=_EXPERTS, attention_bias=True, more=_granite_moe_more),
    "granitemoeshared": Reader(values=_EXPERTS, attention_bias=True, more=_granite_moe_more),
    "glm4_moe": Reader(
        defaults=_GLM4_MOE,
        values={**_EXPERTS, "partial_rotary_factor": None},
        attention_bias=True,
        ropes=_partial_rope,
        more=_glm4_moe_more,
    ),
    "gpt_oss": Reader(
        defaults={
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "sliding_window": 128,
            "rope_theta": 150000.0,
            "rope_scaling": {**_GPT_OSS_ROPE, "truncate": False},
            "attention_bias": True,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        values=_EXPERTS,
        attention_bias=True,
        windows=_gpt_oss_windows,
        more=_gpt_oss_more,
    ),
    "qwen3_5": _HYBRID_READER,
    "qwen3_next": replace(
        _HYBRID_READER,
        defaults={**_HYBRID, **_HYBRID_EXPERTS, "num_experts_per_tok": 10},
        values={**_HYBRID_VALUES, **_EXPERTS},
        more=_hybrid_moe_more,
    ),
    "qwen3_5_moe": replace(
        _HYBRID_READER,
        # Every layer is sparse, so there is no intermediate_size.
        defaults={**_HYBRID, **_HYBRID_EXPERTS, "num_experts_per_tok": 8, "intermediate_size": 0},
        values={**_HYBRID_VALUES, **_EXPERTS},
        more=_hybrid_moe_more,
    ),
}
