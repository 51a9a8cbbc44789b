"""What a checkpoint says about its model, read from `config.json` or from GGUF metadata. No torch here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from ramify.errors import InvalidRequest, NotFound, UnsupportedField

Family = Literal["llama", "mistral", "qwen2", "qwen3"]
RopeKind = Literal["default", "linear", "llama3", "yarn", "factors"]

Value = TypeVar("Value")
Name = TypeVar("Name", bound=str)


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding (RoFormer, arXiv 2104.09864) and how it is stretched to long contexts.

    default: none. linear: positions divided by `factor` (arXiv 2306.15595). llama3: slow frequencies
    divided by `factor`, a ramp between (Llama 3.1 reference code). yarn: arXiv 2309.00071.
    factors: one divisor a frequency, in `factors` (the `rope_freqs` tensor of GGUF files).
    """

    kind: RopeKind = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_context_length: int = 0
    """llama3, yarn: the context that the model was trained on before stretching, in tokens."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """yarn: round the borders of the ramp to whole dimensions."""
    attention_factor: float | None = None
    """yarn: multiplies cos and sin; None takes 0.1 ln(factor) + 1."""
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder-only transformer. Sizes are in elements, lengths in tokens."""

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    norm_eps: float
    rope: Rope = Rope()
    windows: tuple[int, ...]
    """For each layer how many tokens it sees, the current one included; 0: all of them."""
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise _invalid(f"{self.num_heads} heads cannot share {self.num_kv_heads} key-value heads")
        if self.head_dim % 2:
            raise _invalid(f"head_dim is {self.head_dim}; rotary embedding needs an even number")
        if len(self.windows) != self.num_layers:
            raise _invalid(f"{len(self.windows)} attention windows for {self.num_layers} layers")

    @property
    def sliding_window(self) -> int:
        """Keys further back than this are needed by no layer; 0 when some layer sees everything."""
        return 0 if 0 in self.windows else max(self.windows)


def config_from_folder(folder: Path) -> ModelConfig:
    """Read `config.json`, and the end tokens from `generation_config.json` where it has them.

    Raises `NotFound` without a `config.json`, `UnsupportedField` for what Ramify does not implement.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise NotFound(f"{folder} holds no config.json.", field="model")
    generation = folder / "generation_config.json"
    return config_from_hf(_read_json(path), _read_json(generation) if generation.is_file() else {})


def config_from_hf(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """The config of a Hugging Face checkpoint, in the spelling of transformers 4 or 5."""
    families: tuple[Family, ...] = ("llama", "mistral", "qwen2", "qwen3")
    family = _one_of(families, "model_type", config.get("model_type"))
    _check_hf(config, family)

    hidden_size, num_heads = _need(config, "hidden_size"), _need(config, "num_attention_heads")
    num_layers = _need(config, "num_hidden_layers")
    # Qwen3Config alone has a fixed default; the others divide.
    head_dim = config.get("head_dim") or (128 if family == "qwen3" else hidden_size // num_heads)
    context_length = _need(config, "max_position_embeddings")
    attention_bias = bool(config.get("attention_bias")) and family in ("llama", "qwen3")
    # `generate` of transformers ends on generation_config's tokens where it names any.
    eos = (generation or {}).get("eos_token_id")
    return ModelConfig(
        family=family,
        vocab_size=_need(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_need(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=head_dim,
        context_length=context_length,
        norm_eps=config.get("rms_norm_eps", 1e-6),
        rope=_rope_from_hf(config, context_length),
        windows=_windows_from_hf(config, family, num_layers),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias or family == "qwen2",
        output_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias")) and family == "llama",
        eos_token_ids=_token_ids(config.get("eos_token_id") if eos is None else eos),
        bos_token_id=config.get("bos_token_id"),
    )


# A value other than these changes what the model computes, in ways that are not implemented.
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
}


def _check_hf(config: Mapping[str, Any], family: Family) -> None:
    for field, neutral in _NEUTRAL.items():
        if config.get(field) not in neutral:
            raise _unsupported(field, config[field], " or ".join(map(repr, neutral[1:])) or "absent")
    for architecture in config.get("architectures") or ():
        if not architecture.endswith("ForCausalLM"):
            raise _unsupported("architectures", architecture, "a …ForCausalLM")
    if family == "mistral" and config.get("layer_types"):
        raise _unsupported("layer_types", config["layer_types"], "absent for Mistral")


def _windows_from_hf(config: Mapping[str, Any], family: Family, num_layers: int) -> tuple[int, ...]:
    window = config.get("sliding_window") or 0
    if family == "llama":
        return (0,) * num_layers
    if family == "mistral":
        return (window,) * num_layers
    if not config.get("use_sliding_window"):
        window = 0
    kinds: Sequence[str] | None = config.get("layer_types")
    if kinds is None:
        first = config.get("max_window_layers", 28)
        return tuple(window if layer >= first else 0 for layer in range(num_layers))
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown:
        raise _unsupported("layer_types", unknown.pop(), "full_attention or sliding_attention")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


_ROPE_NAMES = {
    "factor": "factor",
    "original_max_position_embeddings": "original_context_length",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "truncate": "truncate",
    "attention_factor": "attention_factor",
}


def _rope_from_hf(config: Mapping[str, Any], context_length: int) -> Rope:
    # transformers 5 writes `rope_parameters`; 4 wrote `rope_theta` and `rope_scaling`.
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = scaling.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    old_name = scaling.pop("type", None)
    kinds: tuple[RopeKind, ...] = ("default", "linear", "llama3", "yarn")
    kind = _one_of(kinds, "rope_type", scaling.pop("rope_type", None) or old_name or "default")
    rotated = scaling.pop("partial_rotary_factor", None) or 1.0
    if rotated != 1.0:
        raise _unsupported("partial_rotary_factor", rotated, "1")
    if kind == "default":
        return Rope(theta=theta)
    unknown = [name for name, value in scaling.items() if name not in _ROPE_NAMES and value is not None]
    if unknown:
        raise _unsupported(f"rope_scaling.{unknown[0]}", scaling[unknown[0]], "absent")
    if "factor" not in scaling:
        raise _invalid(f"rope_type {kind} without a factor")
    given = {_ROPE_NAMES[name]: value for name, value in scaling.items() if value is not None}
    given.setdefault("original_context_length", context_length)
    return Rope(kind=kind, theta=theta, **given)


def config_from_gguf(metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> ModelConfig:
    """The config of a GGUF file, from its metadata and its tensors' shapes (row-major).

    `rope.factors` is left empty: the values are in a tensor, which the caller reads.
    Keys are those of the GGUF specification (ggml, docs/gguf.md).
    """
    architectures: tuple[Family, ...] = ("llama", "qwen2", "qwen3")
    family = _one_of(architectures, "general.architecture", metadata.get("general.architecture"))

    def value(key: str, default: Value) -> Value:
        found = metadata.get(f"{family}.{key}", default)
        if isinstance(found, list):
            raise _unsupported(f"{family}.{key}", found, "one number for all layers")
        return found

    def need(key: str) -> int:
        if f"{family}.{key}" not in metadata:
            raise _invalid(f"the GGUF metadata has no {family}.{key}")
        return value(key, 0)

    if value("expert_count", 0):
        raise _unsupported(
            f"{family}.expert_count", value("expert_count", 0), "absent: experts are not implemented"
        )
    if "token_embd.weight" not in shapes:
        raise _invalid("the GGUF file has no token_embd.weight")
    hidden_size, num_heads = need("embedding_length"), need("attention.head_count")
    head_dim = value("attention.key_length", hidden_size // num_heads)
    for key in ("rope.dimension_count", "attention.value_length"):
        if value(key, head_dim) != head_dim:
            raise _unsupported(f"{family}.{key}", value(key, 0), f"the head size, {head_dim}")
    if value("attention.sliding_window_pattern", None) is not None:
        raise _unsupported(f"{family}.attention.sliding_window_pattern", "given", "absent")
    num_layers, context_length = need("block_count"), need("context_length")
    stretch = value("rope.scaling.type", "none")
    kinds: tuple[RopeKind, ...] = ("default", "linear", "yarn")
    kind = _one_of(kinds, f"{family}.rope.scaling.type", "default" if stretch == "none" else stretch)
    eos = [metadata.get(f"tokenizer.ggml.{token}_token_id") for token in ("eos", "eot", "eom")]
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
        rope=Rope(
            kind="factors" if "rope_freqs.weight" in shapes else kind,
            theta=value("rope.freq_base", 10000.0),
            factor=value("rope.scaling.factor", 1.0),
            original_context_length=value("rope.scaling.original_context_length", context_length),
            beta_fast=value("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=value("rope.scaling.yarn_beta_slow", 1.0),
        ),
        windows=(value("attention.sliding_window", 0),) * num_layers,
        tie_embeddings="output.weight" not in shapes,
        qkv_bias="blk.0.attn_q.bias" in shapes,
        output_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_gate.bias" in shapes,
        eos_token_ids=_token_ids([token for token in eos if token is not None]),
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
    )


def _token_ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
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
        raise _invalid(f"config.json gives {value!r} for {field}; a number is needed")
    return value


def _one_of(names: Sequence[Name], field: str, found: object) -> Name:
    for name in names:
        if name == found:
            return name
    raise _unsupported(field, found, f"one of {', '.join(names)}")


def _invalid(reason: str) -> InvalidRequest:
    return InvalidRequest(f"This model's configuration is inconsistent: {reason}.", field="model")


def _unsupported(field: str, value: object, wanted: str) -> UnsupportedField:
    return UnsupportedField(
        f"This model needs {field} = {value!r}, which is not implemented.",
        field=field,
        remedy=f"Choose a model whose {field} is {wanted}.",
    )
