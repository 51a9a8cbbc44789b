"""The default model's vocabulary, for the tests that need a real one."""

from __future__ import annotations

import pytest

from ramify.runtime.config import DEFAULT_MODEL
from ramify.runtime.grammar.vocabulary import Vocabulary, load_vocabulary
from ramify.runtime.model.resolve import ModelFiles, resolve


@pytest.fixture(scope="session")
def model_files() -> ModelFiles:
    return resolve(DEFAULT_MODEL, progress=False)


@pytest.fixture(scope="session")
def smollm2(model_files: ModelFiles) -> Vocabulary:
    return load_vocabulary(model_files.tokenizer, vocab_size=49152, stop_ids=[2])
