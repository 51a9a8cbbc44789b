from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.runtime.tiny import write_tiny


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_model(tiny_folder: Path) -> Any:
    """The tiny model, as the engine loads it, in float32."""
    import torch

    from ramify.runtime.model.checkpoint import ModelFiles
    from ramify.runtime.model.loading.load import load_model

    return load_model(
        ModelFiles(name="tiny", weights=tiny_folder, tokenizer=tiny_folder), dtype=torch.float32
    )


@pytest.fixture(scope="session")
def tiny_oracle(tiny_folder: Path) -> Any:
    """The tiny model, as transformers loads it, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()
