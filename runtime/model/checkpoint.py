"""The files of a model, and a fingerprint of the model with the options that change its outputs.

Imports no torch, because the frontend checks the files before workers load.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from ramify.errors import InvalidRequest, NotFound
from ramify.model_info import ModelInfo
from ramify.runtime.config import EngineConfig

TOKENIZER_FILE = "tokenizer.json"

SPLIT = re.compile(r"(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})")
"""Name, without the suffix, of a file that holds a part of a model's tensors."""


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


@contextmanager
def open_shard(path: Path, framework: Literal["pt", "numpy"] = "pt") -> Iterator[Any]:
    """A safetensors file. Raises `InvalidRequest` where it cannot be read."""
    try:
        with safe_open(path, framework) as shard:
            yield shard
    except SafetensorError as error:
        raise InvalidRequest(
            f"{path} is not a readable safetensors file: {error}.", field="model", remedy="Fetch it again."
        ) from None


def tensor_names(folder: Path) -> set[str]:
    """The names of all tensors of a checkpoint folder."""
    names: set[str] = set()
    for path in weight_files(folder):
        with open_shard(path, "numpy") as shard:
            names.update(shard.keys())
    return names


def splits_of(path: Path) -> list[Path]:
    """The files of the model of which `path` is a split, in order; `[path]` if the name is not that of a
    split in llama.cpp."""
    found = SPLIT.fullmatch(path.stem)
    if found is None:
        return [path]
    stem, count = found["stem"], int(found["count"])
    return [path.with_name(f"{stem}-{index:05}-of-{count:05}{path.suffix}") for index in range(1, count + 1)]


def has_tokenizer(folder: Path) -> bool:
    return (folder / TOKENIZER_FILE).is_file()


def is_eagle3(folder: Path) -> bool:
    """Whether `folder` holds an EAGLE-3 head, by the architecture in its `config.json`. Such a head has no
    tokenizer of its own."""
    path = folder / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    found = content.get("architectures") if isinstance(content, dict) else None
    return any("eagle3" in str(name).lower() for name in found or ())


def missing_file(folder: Path, *, weights: bool = True) -> str | None:
    """The first required file that `folder` lacks; None if it is complete."""
    if not (folder / "config.json").is_file():
        return "config.json"
    if not has_tokenizer(folder) and not is_eagle3(folder):
        return TOKENIZER_FILE
    if not weights:
        return None
    return next((path.name for path in _weight_paths(folder) if not path.is_file()), None)


OPTIONS = (
    "load_format",
    "quantization",
    "exact_activations",
    "attention_backend",
    "trial",
    "deterministic",
    "tensor_parallel",
    "jump_forward",
    "rope_scaling",
    "seed",
)
"""Options of the engine that can change answers: by the arithmetic, or by the way forced text is split into
tokens. `seed` is among them because it determines the weights of a dummy model."""


def fingerprint(files: ModelFiles, config: EngineConfig, info: ModelInfo) -> str:
    """A digest of the files' paths, sizes and modification times, and of the options with which the model is
    computed."""
    paths = sorted({path for folder in (files.weights, files.tokenizer) for path in _files(folder)})
    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    options = [getattr(config, name) for name in OPTIONS]
    identity = (stats, options, info.dtype, info.device, info.context_length, info.model_impl)
    return hashlib.sha256(repr(identity).encode()).hexdigest()[:32]


WEIGHTS = frozenset((".safetensors", ".gguf"))
CONTENT = frozenset((".json", ".jinja", ".model"))
"""Suffixes of the files that `digest` reads beside the weights."""
CONTENT_OPTIONS = ("load_format", "quantization", "rope_scaling")
"""Options of the engine that change the model itself, and not only the rounding of its numbers. Dummy weights
are drawn by `seed`, too."""
BLOCK, BLOCKS = 64 << 10, 64
"""Bytes of a block, and about the most blocks of a file that `digest` reads: 4 MiB, in a few milliseconds."""


def digest(files: ModelFiles, config: EngineConfig) -> str:
    """A digest of the model's content, the same for copies of the files on other machines.

    Of a large file it reads blocks at equal distances, so it tells a fine-tuned checkpoint from its base.
    """
    options = [getattr(config, name) for name in CONTENT_OPTIONS]
    seed = config.seed if config.load_format == "dummy" else None
    found = hashlib.sha256(repr([*options, seed]).encode())
    beside = [path for path in _files(files.tokenizer) if path.suffix in CONTENT]
    paths = {path for path in _files(files.weights) if path.suffix in CONTENT | WEIGHTS}.union(beside)
    for path in sorted(paths, key=lambda path: path.name):
        size = path.stat().st_size
        found.update(f"{path.suffix} {size} ".encode())
        with path.open("rb") as file:
            for start in range(0, size, max(BLOCK, size // BLOCKS)):
                file.seek(start)
                found.update(file.read(BLOCK))
    return found.hexdigest()[:32]


def _files(place: Path) -> list[Path]:
    return [path for path in place.iterdir() if path.is_file()] if place.is_dir() else splits_of(place)
