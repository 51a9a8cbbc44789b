"""The vocabulary of a tokenizer as grammars need it, cached on disk for large tokenizers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ramify import cache
from ramify.grammar.vocabulary import Vocabulary, from_tokenizer
from ramify.runtime.model.tokenizer.tokenizer import load_backend, tokenizer_file

CACHED_FROM = 1 << 20
"""Bytes of a tokenizer.json from which on its vocabulary is cached. Smaller files are parsed within
milliseconds."""
VOCABULARY_FILE = "vocabulary"
FORMAT_VERSION = 1
"""Part of the cache's key. Increase it whenever `from_tokenizer` returns something else."""


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
