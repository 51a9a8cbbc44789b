"""The pooling of a model's embeddings, by the files of sentence-transformers in its folder.

`modules.json` lists the steps from a text to its embedding, and `1_Pooling/config.json` tells how hidden
states are pooled (sentence-transformers, "Creating Custom Models").
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SERVED = ("Transformer", "Pooling", "Normalize")
"""Supported modules: the model, its pooling, and the division by the L2 norm."""
SPELLING = {"lasttoken": "last", "mean_tokens": "mean", "mean": "mean", "last": "last"}
"""Name of a pooling in sentence-transformers → `ramify.messages.Pooling`."""


def pooling_of(folder: Path) -> str:
    """The folder's pooling mode (a `Pooling`), "last" if the folder names none. If the folder asks for
    something unsupported, the name of the first such module or pooling mode."""
    modules = _read(folder / "modules.json")
    if not isinstance(modules, list):
        return "last"
    found = "last"
    for module in modules:
        name = str(module.get("type", "")).rpartition(".")[2]
        if name not in SERVED:
            return name
        if name == "Pooling":
            found = _pooling(_read(folder / str(module.get("path", "")) / "config.json") or {})
    return found


def _pooling(config: dict[str, Any]) -> str:
    named = config.get("pooling_mode")
    flags = [name.removeprefix("pooling_mode_") for name, on in config.items() if on is True]
    modes = [named] if isinstance(named, str) else [name for name in flags if name != "include_prompt"]
    if len(modes) != 1:
        return " and ".join(modes) or "last"
    return SPELLING.get(modes[0], modes[0])


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None
