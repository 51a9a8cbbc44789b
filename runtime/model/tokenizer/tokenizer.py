"""Loads a tokenizer, and the vocabulary that grammars need, without torch: the tokenizer and detokenizer
processes stay small and start fast."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from ramify import cache
from ramify.errors import NotFound
from ramify.grammar.vocabulary import Vocabulary, from_tokenizer
from ramify.runtime.model.checkpoint import TOKENIZER_FILE, has_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CACHED_FROM = 1 << 20
"""Bytes of a tokenizer.json from which on its vocabulary is cached. Smaller files are parsed within
milliseconds."""
VOCABULARY_FILE = "vocabulary"
FORMAT_VERSION = 1
"""Part of the cache's key. Increase it whenever `from_tokenizer` returns something else."""


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


def load_vocabulary(folder: Path, *, vocab_size: int, stop_ids: Iterable[int]) -> Vocabulary:
    """The vocabulary of the tokenizer in `folder` for a model with `vocab_size` logits.

    The vocabulary of a large tokenizer is cached: reading the cache takes a hundredth of the time.
    """
    stops = sorted(stop_ids)

    def made() -> Vocabulary:
        return from_tokenizer(load_backend(folder), vocab_size=vocab_size, stop_ids=stops)

    source = tokenizer_file(folder)
    if source.stat().st_size < CACHED_FROM:
        return made()
    entry = cache.entry_of([source], "vocabularies", str(vocab_size), FORMAT_VERSION, stops)
    try:
        cache.ensure(entry, lambda folder: _write(made(), folder))
        cache.remove_outdated(entry)
    except (OSError, cache.NotWritable):
        return made()
    return Vocabulary.from_bytes((entry / VOCABULARY_FILE).read_bytes())


def _write(vocabulary: Vocabulary, folder: Path) -> None:
    (folder / VOCABULARY_FILE).write_bytes(vocabulary.to_bytes())
