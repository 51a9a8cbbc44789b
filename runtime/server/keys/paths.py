"""The paths that any key may use. All others need a key with ``admin = true``, so a new path is closed."""

from __future__ import annotations

from fnmatch import fnmatchcase

CLIENT_PATHS = (
    *("/v1/*", "/generate", "/get_model_info", "/model_info", "/health_generate"),
    *("/abort_request", "/await_tools", "/end_program", "/cache", "/cache/*"),
    *("/tokenize", "/detokenize", "/tokenizer_info", "/infill", "/rerank", "/v2/rerank", "/score"),
    *("/api/chat", "/api/generate", "/api/embed", "/api/embeddings"),
    *("/api/show", "/api/tags", "/api/ps", "/api/version"),
)
OPERATOR_PATHS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
"""Exceptions of `CLIENT_PATHS`."""


def for_operators(path: str) -> bool:
    """Whether `path` needs a key with ``admin = true``."""
    return path in OPERATOR_PATHS or not matches(path, CLIENT_PATHS)


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether `name` matches one of `patterns`, in which * stands for any characters."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
