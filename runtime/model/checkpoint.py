"""The files of a model. Imports no torch: the frontend checks them before workers load."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ramify.errors import InvalidRequest, NotFound

TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model on this machine."""

    name: str
    """The model's name for clients."""
    weights: Path
    """A folder with config.json and safetensors files, or a .gguf file."""
    tokenizer: Path
    """A folder with tokenizer.json."""


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder. Raises `NotFound` if a shard is missing."""
    paths = _weight_paths(folder)
    for path in paths:
        if not path.is_file():
            raise NotFound(
                f"{folder} lacks {path.name}.", field="model", remedy="Fetch the checkpoint again."
            )
    return paths


def _weight_paths(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            content: dict[str, Any] = json.loads(index.read_text(encoding="utf-8"))
            return [folder / name for name in sorted(set(content["weight_map"].values()))]
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise InvalidRequest(f"{index} is not a shard index: {error!r}.", field="model") from None
    return [folder / "model.safetensors"]


def has_tokenizer(folder: Path) -> bool:
    return (folder / TOKENIZER_FILE).is_file()


def missing_file(folder: Path, *, weights: bool = True) -> str | None:
    """The first required file that `folder` lacks; None if it is complete."""
    if not (folder / "config.json").is_file():
        return "config.json"
    if not has_tokenizer(folder):
        return TOKENIZER_FILE
    if not weights:
        return None
    return next((path.name for path in _weight_paths(folder) if not path.is_file()), None)
