"""Names of LoRA adapters. This module needs no torch: the frontend imports it."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ramify.errors import InvalidRequest, NotFound

_NAME = re.compile(r"[\w][\w.@/+-]{0,127}")


def checked_name(name: str, field: str = "lora") -> str:
    """Return `name`. Raises `InvalidRequest` for a name that could not be used in "base:name"."""
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise InvalidRequest(
            f"{field} is {name!r}; the name of an adapter has 1 to 128 letters, digits, and . _ @ / + -.",
            field=field,
        )
    return name


def tree_scope(scope: str, revision: str | None) -> str:
    """The prefix tree's scope, made from a request's cache scope and the revision of its adapter (None
    without an adapter). Requests share KV only if both are equal, as an adapter changes keys and values."""
    return f"{revision or ''}:{scope}" if scope or revision is not None else ""


def same_model(base: str, model: str) -> bool:
    """True if an adapter made for the model `base` fits `model`, by the last parts of the two names or paths.

    Names of GGUF files and repositories may have more after the model's name. An empty `base` fits any model.
    """
    ours, theirs = (name.rstrip("/").rpartition("/")[2].lower() for name in (model, base))
    return ours.startswith(theirs) if "gguf" in ours else theirs in ("", ours)


def unknown(name: str, loaded: Iterable[str], field: str = "lora") -> NotFound:
    """The error for an unknown adapter name."""
    names = ", ".join(sorted(loaded))
    return NotFound(
        f"There is no LoRA adapter {name!r} here.",
        field=field,
        remedy=f"Loaded are: {names}." if names else "None is loaded.",
    )
