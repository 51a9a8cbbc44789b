"""The default model's vocabulary, for the tests that need a real one."""

from __future__ import annotations

import pytest

from ramify.grammar.vocabulary import Vocabulary
from ramify.runtime.config import DEFAULT_MODEL
from ramify.runtime.inspect.resolve import resolve
from ramify.runtime.model.checkpoint import ModelFiles
from ramify.runtime.model.tokenizer.tokenizer import load_vocabulary


@pytest.fixture(scope="session")
def model_files() -> ModelFiles:
    return resolve(DEFAULT_MODEL, progress=False)


@pytest.fixture(scope="session")
def smollm2(model_files: ModelFiles) -> Vocabulary:
    return load_vocabulary(model_files.tokenizer, vocab_size=49152, stop_ids=[2])
