"""Models whose config names no end-of-sequence token."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ramify.constraint import json_schema
from ramify.errors import UnsupportedField
from ramify.runtime.engine.engine import Engine
from ramify.runtime.inspect.machine import Machine
from ramify.runtime.inspect.report import inspected
from ramify.runtime.model.checkpoint import ModelFiles
from ramify.runtime.model.loading.load import load_model, read_shape
from ramify.runtime.model.tokenizer.end_tokens import with_end_tokens
from tests.runtime.local import LocalScheduler

from .tiny import END_ID

SCHEMA = json_schema({"type": "object", "properties": {"a": {"enum": ["yes", "no"]}}, "required": ["a"]})


def copied(tiny_folder: Path, folder: Path, eos: Any, **tokenizer: Any) -> Path:
    """The tiny model with the end token `eos`. Fields of the tokenizer's config with None are removed."""
    shutil.copytree(tiny_folder, folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    for name, fields in (("config.json", {"eos_token_id": eos}), ("tokenizer_config.json", tokenizer)):
        config = json.loads((folder / name).read_text()) | fields
        kept = {key: value for key, value in config.items() if value is not None or key == "eos_token_id"}
        (folder / name).write_text(json.dumps(kept))
    return folder


@pytest.mark.parametrize("eos", [None, -1, [], 100_000])
@pytest.mark.parametrize("left_out", [{"eos_token": None}, {"chat_template": None}])
def test_the_tokenizer_and_the_chat_template_name_it(
    eos: Any, left_out: dict[str, None], tiny_folder: Path, tmp_path: Path
) -> None:
    folder = copied(tiny_folder, tmp_path / "tiny", eos, **left_out)
    shape, said = with_end_tokens(read_shape(folder), folder)
    assert shape.eos_token_ids == (END_ID,)
    assert said is not None
    assert "256 ('<|end|>')" in said


def test_the_models_own_come_first(tiny_folder: Path, tmp_path: Path) -> None:
    folder = copied(tiny_folder, tmp_path / "tiny", [7, -1])
    shape, said = with_end_tokens(read_shape(folder), folder)
    assert (shape.eos_token_ids, said) == ((7,), None)


def test_without_any_constraints_are_refused_by_name(tiny_folder: Path, tmp_path: Path) -> None:
    folder = copied(tiny_folder, tmp_path / "tiny", None, eos_token=None, chat_template=None)
    files = ModelFiles("tiny", folder, folder)
    shape, said = with_end_tokens(read_shape(folder), folder)
    assert shape.eos_token_ids == ()
    assert "Write the token's id as eos_token_id into generation_config.json" in (said or "")
    found = inspected(files, Machine("cpu", "the CPU", 1 << 34, "float32"))
    assert found.notes == [said]
    local = LocalScheduler(load_model(files, shape=shape, dtype=torch.float32))
    (free,) = local.complete([[5, 6]], max_tokens=4)
    assert len(free.ids) == 4
    (held,) = local.complete([[5, 6]], max_tokens=40, constraint=SCHEMA)
    assert isinstance(held.error, UnsupportedField)
    assert "no end token" in held.error.message


@pytest.mark.slow
def test_schemas_hold_in_an_engine(tiny_folder: Path, tmp_path: Path) -> None:
    """Regression: the grammar compiler got no stop tokens, and its process died twice."""
    folder = copied(tiny_folder, tmp_path / "tiny", None)
    with Engine(str(folder), dtype="float32", num_pages=64, threads=1) as engine:
        done = engine.complete("x", constraint=SCHEMA, max_tokens=40)
    assert done.finish.reason == "stop"
    assert json.loads(done.text)["a"] in ("yes", "no")
