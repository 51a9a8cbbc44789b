"""`load_format="dummy"`: a config and a tokenizer are enough to run an engine."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ramify.errors import NotFound
from ramify.runtime.engine.engine import Engine
from ramify.runtime.inspect.resolve import resolve

pytestmark = pytest.mark.slow


def test_an_engine_without_weights(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "shape"
    shutil.copytree(tiny_folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(NotFound, match="no complete checkpoint"):
        resolve(str(folder))
    options = {"load_format": "dummy", "num_pages": 16, "threads": 1, "context_length": 100}
    with Engine(str(folder), **options) as engine:
        answers = [engine.complete("some text", max_tokens=5, temperature=0.0, ignore_eos=True) for _ in "ab"]
        assert len(answers[0].ids) == 5
        assert answers[0].ids == answers[1].ids
