"""The shape of a model, read from a checkpoint's `config.json`. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from ramify.errors import InvalidRequest, NotFound, UnsupportedField
from ramify.runtime.model.state_shape import StateShape

Family = Literal[
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "smollm3", "olmo2", "granite"
]
RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope", "factors"]
Activation = Literal["silu", "gelu"]
"""gelu: by its approximation with tanh (arXiv 1606.08415)."""

Name = TypeVar("Name", bound=str)


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding (RoFormer, arXiv 2104.09864) and its extension to long contexts.

    default: no extension. linear: positions divided by `factor` (arXiv 2306.15595). llama3: low frequencies
    divided by `factor`, with a ramp to the high ones (Llama 3.1 reference code). yarn: arXiv 2309.00071.
    factors: a divisor for each frequency, in `factors` (the `rope_freqs` tensor of GGUF files). longrope: the
    same, with `long_factors` where the context is longer than the original one (arXiv 2402.13753).
    """

    kind: RopeKind = "default"
    theta: float = 10000.0
    share: float = 1.0
    """The share of a head's numbers that rotate, from the first on; 0: no positions are embedded."""
    factor: float = 1.0
    original_context_length: int = 0
    """llama3, yarn, longrope: the context length of the training before the extension, in tokens."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """yarn: round the borders of the ramp to whole dimensions."""
    attention_factor: float | None = None
    """yarn, longrope: multiplies cos and sin; None takes 0.1 ln(factor) + 1, and of longrope
    sqrt(1 + ln(factor) / ln(original_context_length))."""
    factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def rotated(self, head_dim: int) -> int:
        """How many numbers of a head rotate."""
        return int(head_dim * self.share)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What the executor and the scheduler need to know of a model. Sizes are in elements, lengths in
    tokens."""

    family: str
    vocab_size: int
    num_layers: int
    """Layers that keep keys and values."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    windows: tuple[int, ...]
    """Sliding window of each layer: the number of visible tokens, the current one included; 0: all."""
    attention_scale: float | None = None
    """Multiplies scores; None takes 1 / sqrt(head_dim)."""
    attention_soft_cap: float = 0.0
    """Scores become cap · tanh(score / cap); 0: no cap."""
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    states: StateShape | None = None
    """The state of layers that keep one instead of keys and values; None without such layers."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise invalid(f"{self.num_heads} heads cannot share {self.num_kv_heads} key-value heads")
        if self.head_dim % 2:
            raise invalid(f"head_dim is {self.head_dim}; rotary embedding needs an even number")
        if len(self.windows) != self.num_layers:
            raise invalid(f"{len(self.windows)} attention windows for {self.num_layers} layers")

    @property
    def score_scale(self) -> float:
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def sliding_window(self) -> int:
        """The widest window of all layers: no layer needs older keys. 0 if a layer sees all tokens."""
        return 0 if 0 in self.windows else max(self.windows)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ModelShape):
    """The shape of a decoder-only transformer of one of our families."""

    family: Family
    hidden_size: int
    intermediate_size: int
    norm_eps: float
    rope: Rope = Rope()
    layer_ropes: tuple[Rope, ...] = ()
    """The rotary embedding of each layer, if they differ; else empty."""
    logit_soft_cap: float = 0.0
    logit_scale: float = 1.0
    embedding_scale: float = 1.0
    activation: Activation = "silu"
    norm_offset: float = 0.0
    """Added to the weights of norms."""
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.layer_ropes) not in (0, self.num_layers):
            raise invalid(f"{len(self.layer_ropes)} rotary embeddings for {self.num_layers} layers")
        if self.rope.rotated(self.head_dim) % 2:
            raise invalid(f"{self.rope.rotated(self.head_dim)} numbers of a head rotate; they must be pairs")

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The rotary embedding of each layer."""
        return self.layer_ropes or (self.rope,) * self.num_layers


def config_from_folder(folder: Path) -> ModelConfig:
    """Read `config.json`, and the end tokens of `generation_config.json` if it has some.

    Raises `NotFound` without a `config.json`, `UnsupportedField` for what Ramify does not implement.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise NotFound(f"{folder} holds no config.json.", field="model")
    generation = folder / "generation_config.json"
    return config_from_hf(_read_json(path), _read_json(generation) if generation.is_file() else {})


def config_from_hf(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """The config of a Hugging Face checkpoint, in the spelling of transformers 4 or 5."""
    config = _text_part(config)
    family = one_of(_FAMILIES, "model_type", config.get("model_type"))
    config = _DEFAULTS.get(family, {}) | config
    _check_hf(config, family)

    hidden_size, num_heads = _need(config, "hidden_size"), _need(config, "num_attention_heads")
    num_layers = _need(config, "num_hidden_layers")
    context_length = _need(config, "max_position_embeddings")
    windows = _windows_from_hf(config, family, num_layers)
    rope, layer_ropes = _ropes_from_hf(config, family, windows)
    attention_bias = bool(config.get("attention_bias")) and family in _WITH_ATTENTION_BIAS
    # As in transformers, the end tokens of generation_config.json override those of config.json.
    eos = (generation or {}).get("eos_token_id")
    shape: dict[str, Any] = {
        "family": family,
        "vocab_size": _need(config, "vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": _need(config, "intermediate_size"),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": config.get("num_key_value_heads") or num_heads,
        "head_dim": _head_dim(config),
        "context_length": context_length,
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "rope": rope,
        "layer_ropes": layer_ropes,
        "windows": windows,
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
        "qkv_bias": attention_bias or family == "qwen2",
        "output_bias": attention_bias,
        "mlp_bias": bool(config.get("mlp_bias")) and family in ("llama", "smollm3", "granite"),
        "eos_token_ids": token_ids(config.get("eos_token_id") if eos is None else eos),
        "bos_token_id": config.get("bos_token_id"),
    }
    if family in ("gemma2", "gemma3"):
        shape |= gemma_shape(hidden_size, _need(config, "query_pre_attn_scalar"))
        shape["attention_soft_cap"] = config.get("attn_logit_softcapping") or 0.0
        shape["logit_soft_cap"] = config.get("final_logit_softcapping") or 0.0
    if family == "granite":
        shape |= _granite_shape(config, shape["norm_eps"])
    return ModelConfig(**shape)


_FAMILIES: tuple[Family, ...] = get_args(Family)
_WITH_ATTENTION_BIAS = ("llama", "qwen3", "gemma2", "gemma3", "smollm3", "olmo2", "granite")
_GEMMA = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256}
_GEMMA |= {"tie_word_embeddings": True, "sliding_window": 4096}

# Defaults of transformers that differ from Llama's, for fields that a config.json may leave out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 128},
    "gemma2": _GEMMA
    | {"sliding_window_pattern": 2, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3": _GEMMA | {"sliding_window_pattern": 6, "vocab_size": 262208, "max_position_embeddings": 131072},
    "phi3": {"rms_norm_eps": 1e-5},
    "smollm3": {"tie_word_embeddings": True, "no_rope_layer_interval": 4},
    "olmo2": {"rms_norm_eps": 1e-5},
}

# Fields with their supported values. Others would change the computation in ways that are not implemented.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": (None, "silu"),
    "partial_rotary_factor": (None, 1, 1.0),
    "quantization_config": (None,),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "logit_scale": (None, 1, 1.0),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "use_bidirectional_attention": (None, False),
}
_GEMMA_NEUTRAL = dict.fromkeys(("hidden_act", "hidden_activation"), (None, "gelu_pytorch_tanh"))
_NEUTRAL_BY_FAMILY: dict[str, dict[str, tuple[Any, ...] | None]] = {
    "gemma2": _GEMMA_NEUTRAL | dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping")),
    "gemma3": _GEMMA_NEUTRAL | {"final_logit_softcapping": None},
    "phi3": {"partial_rotary_factor": None},
}
"""Supported values for a family, instead of those in `_NEUTRAL`; None: every value is supported."""


def _text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """The text model's config of a multimodal Gemma 3; any other config as it is."""
    if config.get("model_type") == "gemma3_text":
        return {**config, "model_type": "gemma3"}
    if config.get("model_type") != "gemma3":
        return dict(config)
    shared = ("eos_token_id", "bos_token_id", "quantization_config")
    outer = {name: config[name] for name in shared if name in config}
    return {**(config.get("text_config") or {}), **outer, "model_type": "gemma3", "architectures": None}


def gemma_shape(hidden_size: int, query_scalar: float) -> dict[str, Any]:
    """The fields that all Gemma models share."""
    return {
        "attention_scale": query_scalar**-0.5,
        "embedding_scale": hidden_size**0.5,
        "activation": "gelu",
        "norm_offset": 1.0,
    }


def _granite_shape(config: Mapping[str, Any], eps: float) -> dict[str, Any]:
    """Granite's multipliers.

    A layer adds m · f(norm(x)) to the residual stream x. Here the stream is x / m, so that a layer adds
    f(norm(x)). norm(x / m) equals norm(x) if the norm's epsilon is divided by m².
    """
    share = config.get("residual_multiplier", 1.0)
    return {
        "attention_scale": config.get("attention_multiplier", 1.0),
        "embedding_scale": config.get("embedding_multiplier", 1.0) / share,
        "norm_eps": eps / share**2,
        "logit_scale": 1.0 / config.get("logits_scaling", 1.0),
    }


def _check_hf(config: Mapping[str, Any], family: Family) -> None:
    for field, neutral in (_NEUTRAL | _NEUTRAL_BY_FAMILY.get(family, {})).items():
        if neutral is not None and config.get(field) not in neutral:
            raise unsupported(field, config[field], " or ".join(map(repr, neutral[1:])) or "absent")
    for architecture in config.get("architectures") or ():
        if not architecture.endswith("ForCausalLM"):
            raise unsupported("architectures", architecture, "a …ForCausalLM")
    if family in ("mistral", "phi3") and config.get("layer_types"):
        raise unsupported("layer_types", config["layer_types"], f"absent for {family}")


def _windows_from_hf(config: Mapping[str, Any], family: Family, num_layers: int) -> tuple[int, ...]:
    window = config.get("sliding_window") or 0
    kinds: Sequence[str] | None = config.get("layer_types")
    if family in ("llama", "olmo2", "granite"):
        return (0,) * num_layers
    if family in ("mistral", "phi3"):
        return (window,) * num_layers
    gemma = family in ("gemma2", "gemma3")
    if not gemma and not config.get("use_sliding_window"):
        window = 0
    if kinds is not None:
        unknown = set(kinds) - {"full_attention", "sliding_attention"}
        if unknown:
            raise unsupported("layer_types", unknown.pop(), "full_attention or sliding_attention")
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    if gemma:
        every = _need(config, "sliding_window_pattern")
        return tuple(window if (layer + 1) % every else 0 for layer in range(num_layers))
    if family == "smollm3" and window:
        raise unsupported("use_sliding_window", True, "false, or whose layer_types say where")
    first = config.get("max_window_layers", 28)
    return tuple(window if layer >= first else 0 for layer in range(num_layers))


def _ropes_from_hf(
    config: Mapping[str, Any], family: Family, windows: Sequence[int]
) -> tuple[Rope, tuple[Rope, ...]]:
    """The rotary embedding of most layers, and the one of each layer if they differ."""
    # transformers 5 writes `rope_parameters`; 4 wrote `rope_theta` and `rope_scaling`.
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if family == "gemma3":
        local = dict(scaling.pop("sliding_attention", None) or {})
        local.setdefault("rope_theta", config.get("rope_local_base_freq") or 1e4)
        scaling = dict(scaling.pop("full_attention", None) or scaling)
        scaling.setdefault("rope_theta", config.get("rope_theta") or 1e6)
        full, near = _rope(scaling, config, family), _rope(local, config, family)
        return full, tuple(near if window else full for window in windows)
    rope = _rope(scaling, config, family)
    if family != "smollm3":
        return rope, ()
    every, rotated = config["no_rope_layer_interval"], config.get("no_rope_layers")
    if rotated is None:
        rotated = [(layer + 1) % every for layer in range(len(windows))]
    return rope, tuple(rope if rotates else Rope(share=0.0) for rotates in rotated[: len(windows)])


_ROPE_NAMES = {
    "factor": "factor",
    "original_max_position_embeddings": "original_context_length",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "truncate": "truncate",
    "attention_factor": "attention_factor",
    "short_factor": "factors",
    "long_factor": "long_factors",
}


def _rope(scaling: dict[str, Any], config: Mapping[str, Any], family: Family) -> Rope:
    """One rotary embedding, from its fields in the config (`scaling`) under the names of transformers 4 or
    5."""
    theta = scaling.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    old_name = scaling.pop("type", None)
    found = scaling.pop("rope_type", None) or old_name or "default"
    kinds: tuple[RopeKind, ...] = ("default", "linear", "llama3", "yarn")
    if family == "phi3":
        kinds, found = ("default", "longrope"), {"su": "longrope"}.get(found, found)
    kind = one_of(kinds, "rope_type", found)
    share = scaling.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
    if share != 1.0 and family != "phi3":
        raise unsupported("partial_rotary_factor", share, "1")
    if kind == "default":
        return Rope(theta=theta, share=share)
    context_length = _need(config, "max_position_embeddings")
    if kind == "longrope":
        original = config.get("original_max_position_embeddings")
        original = scaling.setdefault("original_max_position_embeddings", original or context_length)
        scaling.setdefault("factor", context_length / original)
        for name in ("short_factor", "long_factor"):
            if len(scaling.get(name) or ()) * 2 != int(_head_dim(config) * share):
                raise invalid(f"{name} needs one number a pair of rotating numbers of a head")
            scaling[name] = tuple(scaling[name])
    unknown = [name for name, value in scaling.items() if name not in _ROPE_NAMES and value is not None]
    if unknown:
        raise unsupported(f"rope_scaling.{unknown[0]}", scaling[unknown[0]], "absent")
    if "factor" not in scaling:
        raise invalid(f"rope_type {kind} without a factor")
    given = {_ROPE_NAMES[name]: value for name, value in scaling.items() if value is not None}
    given.setdefault("original_context_length", context_length)
    return Rope(kind=kind, theta=theta, share=share, **given)


def _head_dim(config: Mapping[str, Any]) -> int:
    return config.get("head_dim") or _need(config, "hidden_size") // _need(config, "num_attention_heads")


def token_ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(dict.fromkeys(value))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidRequest(f"{path} is not JSON: {error}.", field="model") from None
    if not isinstance(content, dict):
        raise InvalidRequest(f"{path} is not a JSON object.", field="model")
    return content


def _need(config: Mapping[str, Any], field: str) -> int:
    value = config.get(field)
    if not isinstance(value, int):
        raise invalid(f"config.json gives {value!r} for {field}; a number is needed")
    return value


def one_of(names: Sequence[Name], field: str, found: object) -> Name:
    for name in names:
        if name == found:
            return name
    raise unsupported(field, found, f"one of {', '.join(names)}")


def invalid(reason: str) -> InvalidRequest:
    return InvalidRequest(f"This model's configuration is inconsistent: {reason}.", field="model")


def unsupported(field: str, value: object, wanted: str) -> UnsupportedField:
    return UnsupportedField(
        f"This model needs {field} = {value!r}, which is not implemented.",
        field=field,
        remedy=f"Choose a model whose {field} is {wanted}.",
    )
