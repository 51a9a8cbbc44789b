"""The folder of a model without weights: a shape's config.json, and the default model's tokenizer.

A visit's machine has no network, so the kit carries the folder. ``ramify serve FOLDER --load-format dummy``
serves it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from benchmarks.engine import CONFIGS
from ramify.runtime.config import DEFAULT_MODEL
from ramify.runtime.inspect.resolve import resolve

SHAPE = CONFIGS / "llama-3.1-8b.json"


def write_model(folder: Path, config: Path = SHAPE) -> Path:
    """Write config.json and the tokenizer into `folder`, which may exist. Returns `folder`.

    config : a config.json; its vocabulary may be larger than the tokenizer's

    Raises NotFound where the default model is not on this machine: ``ramify pull`` fetches it.
    """
    files = resolve(DEFAULT_MODEL, download=False, progress=False)
    folder.mkdir(parents=True, exist_ok=True)
    for path in files.tokenizer.iterdir():
        if path.is_file() and path.suffix in (".json", ".jinja") and path.name != "config.json":
            shutil.copyfile(path, folder / path.name)
    shutil.copyfile(config, folder / "config.json")
    return folder
