"""The shape of a model, read from a checkpoint's `config.json`. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ramify.errors import InvalidRequest, NotFound
from ramify.runtime.model.shape.config import ModelConfig, one_of, token_ids, unsupported
from ramify.runtime.model.shape.hf_families import READERS, Fields, Reader
from ramify.runtime.model.shape.hf_rope import Config, need, with_rope_scaling
from ramify.runtime.model.shape.quantised_config import quantised_of


def config_from_folder(folder: Path, rope_scaling: Config | None = None) -> ModelConfig:
    """Read `config.json`, and the end tokens of `generation_config.json` if it has some.

    `rope_scaling` replaces the file's own. Raises `NotFound` if there is no `config.json`, and
    `UnsupportedField` for features that Ramify does not implement.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise NotFound(f"{folder} holds no config.json.", field="model")
    generation = folder / "generation_config.json"
    ends = read_json(generation) if generation.is_file() else {}
    return config_from_hf(read_json(path), ends, rope_scaling)


def text_config_of(folder: Path) -> dict[str, Any]:
    """The text model's part of `config.json`."""
    return _text_part(read_json(folder / "config.json"))


def config_from_hf(
    config: Config, generation: Config | None = None, rope_scaling: Config | None = None
) -> ModelConfig:
    """The config of a Hugging Face checkpoint, in the spelling of transformers 4 or 5."""
    config = _text_part(config)
    family = one_of(tuple(READERS), "model_type", config.get("model_type"))
    reader = READERS[family]
    config = with_rope_scaling({**reader.defaults, **config}, rope_scaling)
    _check(config, reader)

    num_heads, num_layers = need(config, "num_attention_heads"), need(config, "num_hidden_layers")
    # As in transformers, the end tokens of generation_config.json override those of config.json.
    eos = (generation or {}).get("eos_token_id")
    attention_bias = reader.attention_bias and bool(config.get("attention_bias"))
    fields: Fields = {
        "family": family,
        "vocab_size": need(config, "vocab_size"),
        "hidden_size": need(config, "hidden_size"),
        "intermediate_size": need(config, "intermediate_size"),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": config.get("num_key_value_heads") or num_heads,
        "head_dim": config.get("head_dim") or need(config, "hidden_size") // num_heads,
        "context_length": need(config, "max_position_embeddings"),
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "windows": reader.windows(config, num_layers),
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
        "qkv_bias": attention_bias,
        "output_bias": attention_bias,
        "mlp_bias": reader.mlp_bias and bool(config.get("mlp_bias")),
        "eos_token_ids": token_ids(config.get("eos_token_id") if eos is None else eos),
        "bos_token_id": config.get("bos_token_id"),
        "quantised": quantised_of(config),
    }
    fields |= reader.ropes(config, fields)
    fields |= reader.more(config, fields)
    return ModelConfig(**fields)


# Fields with their supported values. Other values would need computations that are not implemented.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": (None, "silu"),
    "partial_rotary_factor": (None, 1, 1.0),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "logit_scale": (None, 1, 1.0),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "use_bidirectional_attention": (None, False),
}


_MULTIMODAL = ("gemma3", "qwen3_5", "qwen3_5_moe")


def _text_part(config: Config) -> dict[str, Any]:
    """The config of the text model, if `config` is that of a multimodal model with a supported text model;
    else `config`."""
    kind = str(config.get("model_type"))
    if kind.removesuffix("_text") not in _MULTIMODAL:
        return dict(config)
    if kind.endswith("_text"):
        return {**config, "model_type": kind.removesuffix("_text")}
    shared = ("eos_token_id", "bos_token_id", "quantization_config", "tie_word_embeddings")
    outer = {name: config[name] for name in shared if name in config}
    return {**(config.get("text_config") or {}), **outer, "model_type": kind, "architectures": None}


def _check(config: Config, reader: Reader) -> None:
    for name, neutral in {**_NEUTRAL, **reader.values}.items():
        if neutral is not None and config.get(name) not in neutral:
            raise unsupported(name, config[name], " or ".join(map(repr, neutral[1:])) or "absent")
    for architecture in config.get("architectures") or ():
        if not architecture.endswith("ForCausalLM"):
            raise unsupported("architectures", architecture, "a …ForCausalLM")


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidRequest(f"{path} is not JSON: {error}.", field="model") from None
    if not isinstance(content, dict):
        raise InvalidRequest(f"{path} is not a JSON object.", field="model")
    return content
