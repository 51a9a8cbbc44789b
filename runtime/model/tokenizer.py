"""Loading a tokenizer without torch: the tokenizer and detokenizer processes stay small and start fast."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ramify.errors import NotFound
from ramify.runtime.model.checkpoint import has_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def load_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """The tokenizer in folder `path`, chat template included. Raises `NotFound` without tokenizer.json."""
    if not has_tokenizer(path):
        raise NotFound(
            f"{path} holds no tokenizer.json.",
            field="model",
            remedy="Write one: transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder).",
        )
    from transformers import PreTrainedTokenizerFast

    # Not AutoTokenizer: it imports torch and seven times as much besides. tokenizer.json says it all.
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(path)
    return tokenizer
