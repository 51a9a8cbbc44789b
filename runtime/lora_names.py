"""Names of LoRA adapters. This module needs no torch: the frontend imports it."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ramify.errors import InvalidRequest, NotFound

_NAME = re.compile(r"[\w][\w.@/+-]{0,127}")


def checked_name(name: str, field: str = "lora") -> str:
    """`name`; raises `InvalidRequest` for one that "base:name" could not spell."""
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise InvalidRequest(
            f"{field} is {name!r}; the name of an adapter has 1 to 128 letters, digits, and . _ @ / + -.",
            field=field,
        )
    return name


def tree_scope(scope: str, revision: str | None) -> str:
    """The prefix tree's scope for a request's cache scope and the revision of its adapter, None without one:
    requests share KV only where both the cache scope and the weights that they are computed with are the
    same."""
    return f"{revision or ''}:{scope}" if scope or revision is not None else ""


def same_model(base: str, model: str) -> bool:
    """True where an adapter of the model `base` is one of `model`, by the last parts of their names or paths.

    Files and repositories of GGUF have more behind the name. An empty `base` is any model.
    """
    ours, theirs = (name.rstrip("/").rpartition("/")[2].lower() for name in (model, base))
    return ours.startswith(theirs) if "gguf" in ours else theirs in ("", ours)


def unknown(name: str, loaded: Iterable[str], field: str = "lora") -> NotFound:
    """The error for a name of no adapter."""
    names = ", ".join(sorted(loaded))
    return NotFound(
        f"There is no LoRA adapter {name!r} here.",
        field=field,
        remedy=f"Loaded are: {names}." if names else "None is loaded.",
    )
