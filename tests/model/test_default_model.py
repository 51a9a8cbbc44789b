"""The default model's real weights and tokenizer; `runtime/test_default_greedy.py` has the logits."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ramify.runtime.config import DEFAULT_MODEL
from ramify.runtime.inspect.resolve import resolve
from ramify.runtime.model.checkpoint import ModelFiles
from ramify.runtime.model.loading.load import Model, load_model
from ramify.runtime.model.tokenizer.chat_format import chat_format, compose
from ramify.runtime.model.tokenizer.tokenizer import load_tokenizer

from .dense import logits

pytestmark = [pytest.mark.slow, pytest.mark.weights]

TEXTS = [
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
]


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    found = resolve(DEFAULT_MODEL)
    if found.weights.suffix != ".gguf":
        pytest.skip("the hub's safetensors are in use here, not the GGUF file")
    return found


@pytest.fixture(scope="module")
def tokenizer(files: ModelFiles) -> PreTrainedTokenizerFast:
    return load_tokenizer(files.tokenizer)


@pytest.fixture(scope="module")
def model(files: ModelFiles) -> Model:
    return load_model(files, dtype=torch.float32)


def test_it_knows_something(model: Model, tokenizer: PreTrainedTokenizerFast) -> None:
    ids = torch.tensor(tokenizer(TEXTS[0]).input_ids)
    assert tokenizer.decode(logits(model, ids)[-1].argmax()) == " Paris"


def test_the_cached_tokenizer_is_the_files_own(files: ModelFiles, tokenizer: PreTrainedTokenizerFast) -> None:
    direct = AutoTokenizer.from_pretrained(files.weights.parent, gguf_file=files.weights.name)
    for text in (*TEXTS, "  two  spaces\t\r\n", "naïve — 日本語 🙂", "<|im_end|>", "1234567 it's"):
        ids = tokenizer(text).input_ids
        assert ids == direct(text).input_ids
        assert tokenizer.decode(ids) == text


def test_special_tokens(model: Model, tokenizer: PreTrainedTokenizerFast) -> None:
    assert model.config.eos_token_ids == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    assert model.config.vocab_size == len(tokenizer) == 49152


def test_chat_pieces_tokenize_like_the_template(tokenizer: PreTrainedTokenizerFast) -> None:
    pieces = chat_format(tokenizer)
    assert pieces.exact
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = compose(pieces, [(turn["role"], turn["content"]) for turn in chat], generation=True)
    assert text is not None
    assert tokenizer(text).input_ids == tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_dict=False
    )
