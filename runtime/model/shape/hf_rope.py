"""The rotary embedding in a checkpoint's `config.json`. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, get_args

from ramify.errors import InvalidRequest
from ramify.runtime.model.shape.config import INCONSISTENT, Rope, RopeKind, invalid, one_of, unsupported
from ramify.runtime.rope_fields import wrong_field

Config = Mapping[str, Any]
"""The content of a `config.json`."""

_ORIGINAL = "original_max_position_embeddings"
_SAME = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "truncate",
)
_NAMES = {name: name for name in _SAME} | {
    _ORIGINAL: "original_context_length",
    "short_factor": "factors",
    "long_factor": "long_factors",
}
_LISTS = ("short_factor", "long_factor")
_KINDS: tuple[RopeKind, ...] = tuple(kind for kind in get_args(RopeKind) if kind != "factors")
"""Kinds of rotary embedding in transformers. Each of our families supports all of them."""
_NO_EXTENSION = "rope_scaling (--rope-scaling) does not go with this model: "
_STRETCHED = ("linear", "yarn")
"""Kinds whose context is `factor` times the original one."""


def rope_from_hf(config: Config, given: Config | None = None, *, partial: bool = False) -> Rope:
    """A rotary embedding of `config`.

    `given`: the fields of this rotary embedding, if `config` has several; None: the fields are read from
    `config`, under the names of transformers 4 or 5. With `partial`, only a share of a head's elements may
    rotate. Raises `UnsupportedField` or `InvalidRequest`.
    """
    scaling = dict(given or _given(config))
    theta = scaling.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    old_name = scaling.pop("type", None)
    found = scaling.pop("rope_type", None) or old_name or "default"
    kind = one_of(_KINDS, "rope_type", {"su": "longrope"}.get(found, found))
    share = scaling.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
    if share != 1.0 and not partial:
        raise unsupported("partial_rotary_factor", share, "1")
    if kind == "default":
        return Rope(theta=theta, share=share)
    context_length = need(config, "max_position_embeddings")
    if kind == "dynamic":  # transformers takes no other length for the original one
        return Rope(kind=kind, theta=theta, share=share, original_context_length=context_length)
    scaling = {name: value for name, value in scaling.items() if value is not None}
    mscales = [scaling.pop(name, None) for name in ("mscale", "mscale_all_dim")]
    # As in transformers, Phi-3's field at the top level of the config has precedence.
    original: int = config.get(_ORIGINAL) or scaling.get(_ORIGINAL) or context_length
    scaling[_ORIGINAL] = original
    _check_values({**scaling, "mscale": mscales[0], "mscale_all_dim": mscales[1]})
    if kind in ("yarn", "longrope"):
        scaling.setdefault("factor", context_length / original)
    if "factor" not in scaling:
        raise invalid(f"rope_type {kind} without a factor")
    if kind == "longrope":
        head_dim = config.get("head_dim") or need(config, "hidden_size") // need(
            config, "num_attention_heads"
        )
        for name in _LISTS:
            if len(scaling.get(name) or ()) * 2 != int(head_dim * share):
                raise invalid(f"{name} needs one number a pair of rotating numbers of a head")
    if kind == "yarn" and all(mscales):
        scaling.setdefault("attention_factor", _scale(scaling["factor"], *mscales))
    unknown = [name for name in scaling if name not in _NAMES]
    if unknown:
        raise unsupported(f"rope_scaling.{unknown[0]}", scaling[unknown[0]], "absent")
    scaling |= {name: tuple(scaling[name]) for name in _LISTS if name in scaling}
    return Rope(kind=kind, theta=theta, share=share, **{_NAMES[name]: scaling[name] for name in scaling})


def with_rope_scaling(config: Config, scaling: Config | None) -> dict[str, Any]:
    """`config` with the extension `scaling` (`EngineConfig.rope_scaling`) instead of its own.

    For linear and yarn, the context length becomes the factor times the original context, if this is longer.
    The base, the share that rotates, and the rotary embedding of layers with windows stay as they are. Raises
    `InvalidRequest` if `scaling` does not fit the model.
    """
    if scaling is None:
        return dict(config)
    context_length = need(config, "max_position_embeddings")
    given = {name: value for name, value in scaling.items() if value is not None}
    scaling = {_ORIGINAL: context_length, **given}
    before = dict(_given(config))
    inner = before.get("full_attention")
    kept = ("rope_theta", "partial_rotary_factor")
    new = {name: (inner or before)[name] for name in kept if name in (inner or before)} | scaling
    changed = {**config, "rope_parameters": {**before, "full_attention": new} if inner else new}
    for name in ("rope_scaling", _ORIGINAL):
        changed.pop(name, None)
    try:
        rope_from_hf(changed, new, partial=True)
    except InvalidRequest as error:
        error.field = "rope_scaling"
        error.message = error.message.replace(INCONSISTENT, _NO_EXTENSION)
        raise
    if new.get("rope_type", new.get("type")) in _STRETCHED and new.get("factor"):
        reached = int(scaling["factor"] * scaling[_ORIGINAL])
        changed["max_position_embeddings"] = max(context_length, reached)
    return changed


def need(config: Config, name: str) -> int:
    """The whole number in the field `name`. Raises `InvalidRequest` if there is none."""
    value = config.get(name)
    if not isinstance(value, int):
        raise invalid(f"config.json gives {value!r} for {name}; a number is needed")
    return value


def _given(config: Config) -> Config:
    """The file's rotary fields: `rope_parameters` of transformers 5, `rope_scaling` of transformers 4."""
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def _scale(factor: float, mscale: float, mscale_all_dim: float) -> float:
    """The factor of cos and sin by DeepSeek's parameters of YaRN, as transformers computes it."""

    def one(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    return one(mscale) / one(mscale_all_dim)


def _check_values(scaling: Config) -> None:
    if (wrong := wrong_field(scaling)) is not None:
        name, values = wrong
        raise invalid(f"rope_scaling.{name} is {scaling[name]!r:.80}; it must be {values}")
