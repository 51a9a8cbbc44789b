"""Loads a tokenizer without torch: the tokenizer and detokenizer processes stay small and start fast."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from ramify.errors import NotFound
from ramify.runtime.model.checkpoint import TOKENIZER_FILE, has_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def load_backend(path: Path) -> Tokenizer:
    """The tokenizer in folder `path`, without the wrapper of transformers, which takes 0.5 s to import.

    Raises `NotFound` without tokenizer.json.
    """
    return Tokenizer.from_file(str(tokenizer_file(path)))


def load_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """The tokenizer in folder `path`, chat template included. Raises `NotFound` without tokenizer.json."""
    tokenizer_file(path)
    from transformers import PreTrainedTokenizerFast

    # Not AutoTokenizer, which imports torch and more. tokenizer.json is complete.
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(path)
    return tokenizer


def tokenizer_file(folder: Path) -> Path:
    """tokenizer.json in `folder`. Raises `NotFound` without one."""
    if not has_tokenizer(folder):
        raise NotFound(
            f"{folder} holds no tokenizer.json.",
            field="model",
            remedy="Write one: transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder).",
        )
    return folder / TOKENIZER_FILE
