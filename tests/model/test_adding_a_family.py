"""A model family needs an entry in two tables, and the files that name families are those of
contributing.md."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from ramify.runtime.model.families.llama import Llama
from ramify.runtime.model.loading.load import FAMILIES, dummy_model, read_shape
from ramify.runtime.model.shape.config import Family
from ramify.runtime.model.shape.hf_families import READERS, Reader

ROOT = Path(__file__).parents[2]
SIZES = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 64}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


def test_a_family_runs_by_its_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new: Any = "herd"
    monkeypatch.setitem(READERS, new, Reader(defaults={"rms_norm_eps": 1e-3}))
    monkeypatch.setitem(FAMILIES, new, Llama)
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, "model_type": new}))
    shape = read_shape(tmp_path, "native")
    assert shape.family == new
    model = dummy_model(shape, dtype=torch.float32)
    assert isinstance(model, Llama)
    assert model.config.norm_eps == 1e-3


def test_each_family_is_in_each_table() -> None:
    assert set(READERS) == set(FAMILIES) == set(get_args(Family))


def test_families_are_named_in_the_files_of_the_walk_alone() -> None:
    """Search for families whose names mean nothing else in the code."""
    text = (ROOT / "docs" / "contributing.md").read_text()
    walk = text[text.index("## Walk: add a model family") : text.index("## Words")]
    paths = re.findall(r"\(\.\./([\w/]+\.py)\)", walk)
    allowed = {path for path in paths if path.startswith("runtime/")}
    named = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "runtime").rglob("*.py")
        if re.search(r'"(smollm3|olmo2|olmoe|granitemoe|glm4_moe)"', path.read_text())
    }
    assert named <= allowed
    assert len(named) == 5
