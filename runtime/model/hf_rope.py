"""The rotary embedding in a checkpoint's `config.json`. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ramify.runtime.model.config import Rope, RopeKind, invalid, one_of, unsupported

Config = Mapping[str, Any]
"""The content of a `config.json`."""

_NAMES = {
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


def rope_from_hf(
    config: Config,
    given: Config | None = None,
    *,
    kinds: tuple[RopeKind, ...] = ("default", "linear", "llama3", "yarn"),
    partial: bool = False,
) -> Rope:
    """One rotary embedding of one of the `kinds`.

    `given` are its fields if the config has several; else they are found under the names of transformers 4 or
    5. With `partial`, a share of a head's numbers may rotate. Raises `UnsupportedField` or `InvalidRequest`.
    """
    # transformers 5 writes `rope_parameters`; 4 wrote `rope_theta` and `rope_scaling`.
    scaling = dict(given or config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = scaling.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    old_name = scaling.pop("type", None)
    found = scaling.pop("rope_type", None) or old_name or "default"
    kind = one_of(kinds, "rope_type", {"su": "longrope"}.get(found, found))
    share = scaling.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
    if share != 1.0 and not partial:
        raise unsupported("partial_rotary_factor", share, "1")
    if kind == "default":
        return Rope(theta=theta, share=share)
    context_length = need(config, "max_position_embeddings")
    if kind == "longrope":
        head_dim = config.get("head_dim") or need(config, "hidden_size") // need(
            config, "num_attention_heads"
        )
        original: int = config.get("original_max_position_embeddings") or context_length
        original = scaling.setdefault("original_max_position_embeddings", original)
        scaling.setdefault("factor", context_length / original)
        for name in ("short_factor", "long_factor"):
            if len(scaling.get(name) or ()) * 2 != int(head_dim * share):
                raise invalid(f"{name} needs one number a pair of rotating numbers of a head")
            scaling[name] = tuple(scaling[name])
    unknown = [name for name, value in scaling.items() if name not in _NAMES and value is not None]
    if unknown:
        raise unsupported(f"rope_scaling.{unknown[0]}", scaling[unknown[0]], "absent")
    if "factor" not in scaling:
        raise invalid(f"rope_type {kind} without a factor")
    values = {_NAMES[name]: value for name, value in scaling.items() if value is not None}
    values.setdefault("original_context_length", context_length)
    return Rope(kind=kind, theta=theta, share=share, **values)


def need(config: Config, name: str) -> int:
    """A whole number that the file must give."""
    value = config.get(name)
    if not isinstance(value, int):
        raise invalid(f"config.json gives {value!r} for {name}; a number is needed")
    return value
