"""The fields of a `rope_scaling`, as in a `config.json`, and the values that they may have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

ROPE_TYPES = ("default", "linear", "yarn", "llama3", "longrope")
"""Values of rope_type with which a user can extend a context."""

_NUMBERS = (
    *("factor", "original_max_position_embeddings", "rope_theta", "attention_factor", "beta_fast"),
    *("beta_slow", "mscale", "mscale_all_dim", "low_freq_factor", "high_freq_factor"),
)
_LISTS = ("short_factor", "long_factor")
ROPE_FIELDS = ("rope_type", "type", "truncate", *_NUMBERS, *_LISTS)

NEEDED = {"linear": ("factor",), "llama3": ("factor",), "longrope": _LISTS}
"""rope_type → its required fields."""


def wrong_field(scaling: Mapping[str, Any]) -> tuple[str, str] | None:
    """(field, description of its valid values) for the first field with a wrong value; None if all are right.
    A field that is null counts as missing."""
    for name, value in scaling.items():
        if value is None:
            continue
        if name in _NUMBERS and not _positive(value):
            return name, "a number above 0"
        if name in _LISTS and not (isinstance(value, list | tuple) and all(map(_positive, value))):
            return name, "a list of numbers above 0"
        if name == "truncate" and not isinstance(value, bool):
            return name, "true or false"
    return None


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
