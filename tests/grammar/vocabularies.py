"""Vocabularies for the tests, and helpers that feed texts to matchers token by token."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from random import Random

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from ramify.constraint import Constraint
from ramify.grammar.compile.policy import compile_constraint
from ramify.grammar.engine.load import load_grammar
from ramify.grammar.matcher import Grammar, Matcher, mask_words, tokens_of
from ramify.grammar.schema.document.json_values import parse_json
from ramify.grammar.schema.values.json_text import spelled
from ramify.grammar.vocabulary import Vocabulary, from_tokenizer

CORPUS = [
    '{"name": "Ada Lovelace", "age": 36, "tags": ["a", "b"], "ok": true, "none": null, "score": 0.25}',
    '{"city": "Zürich", "país": "España", "日本": "東京", "items": [1, 22, 333], "when": "2024-02-29"}',
    "The quick brown fox jumps over the lazy dog. ja nein yes no maybe true false",
    '[-1, 10, 100, 1000, 1e5, 0.5, 3.14159] {"a": {"b": {"c": []}}} "\\n\\t\\"\\\\ \\u00e9"',
]
STOP, CONTROL = 0, 1


@cache
def tiny_tokenizer() -> Tokenizer:
    """Byte-level BPE: two special tokens, the 256 bytes, and some merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=480,
        min_frequency=1,
        show_progress=False,
        special_tokens=["<stop>", "<control>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@cache
def tiny() -> Vocabulary:
    """A vocabulary whose logits have more columns than there are tokens, as those of many models."""
    return from_tokenizer(tiny_tokenizer(), vocab_size=500, stop_ids=[STOP])


def compiled(constraint: Constraint, vocabulary: Vocabulary | None = None, backend: str = "auto") -> Grammar:
    vocabulary = vocabulary or tiny()
    return load_grammar(*compile_constraint(constraint, vocabulary, backend), vocabulary)


def tokenise(text: str | bytes, vocabulary: Vocabulary) -> list[int]:
    """`text` in tokens, greedily the longest first."""
    data = text.encode() if isinstance(text, str) else text
    by_bytes = {spelling: token for token, spelling in enumerate(vocabulary.tokens) if spelling}
    tokens = []
    while data:
        length = next(n for n in range(min(len(data), 32), 0, -1) if data[:n] in by_bytes)
        tokens.append(by_bytes[data[:length]])
        data = data[length:]
    return tokens


def mask_of(matcher: Matcher, vocabulary: Vocabulary, budget: int | None = None) -> np.ndarray:
    """(vocab,) bool."""
    row = np.zeros(mask_words(vocabulary.size), np.int32)
    if not matcher.fill_mask(row, budget):
        return np.ones(vocabulary.size, bool)
    return np.unpackbits(row.view(np.uint8), bitorder="little")[: vocabulary.size].astype(bool)


def accept_some(matcher: Matcher, mask: np.ndarray, vocabulary: Vocabulary, chooser: Random) -> bytes:
    """Accept a random token with bytes that `mask` allows; its bytes, or b"" where there is none."""
    going_on = [token for token in np.flatnonzero(mask).tolist() if vocabulary.tokens[token]]
    if not going_on:
        return b""
    token = chooser.choice(going_on)
    assert matcher.accept(token)
    return vocabulary.tokens[token]


def completion_of(matcher: Matcher, vocabulary: Vocabulary) -> list[int]:
    """A completion of the text: each token is one that a budget of `completion_tokens` allows."""
    twin = matcher.fork()
    tokens: list[int] = []
    while not twin.complete:
        row = np.zeros(mask_words(vocabulary.size), np.int32)
        assert twin.fill_mask(row, twin.completion_tokens)
        tokens.append(tokens_of(row)[0])
        assert twin.accept(tokens[-1])
    return tokens


def takes(matcher: Matcher, tokens: list[int], vocabulary: Vocabulary) -> bool:
    """Whether the matcher accepts all `tokens`; before each, its mask must agree with `accept`."""
    for token in tokens:
        allowed = bool(mask_of(matcher, vocabulary)[token])
        assert matcher.accept(token) == allowed
        if not allowed:
            return False
    return True


def accepts(grammar: Grammar, text: str, vocabulary: Vocabulary | None = None) -> bool:
    """Whether `text` is a sentence: its tokens and then the stop token are accepted."""
    vocabulary = vocabulary or tiny()
    matcher = grammar.matcher()
    if not takes(matcher, tokenise(text, vocabulary), vocabulary):
        return False
    mask = mask_of(matcher, vocabulary)
    assert [bool(mask[stop]) for stop in vocabulary.stop_ids] == [matcher.complete] * len(vocabulary.stop_ids)
    return takes(matcher, [vocabulary.stop_ids[0]], vocabulary) and matcher.finished


def taken_back(make: Callable[[], Matcher], chooser: Random, steps: int = 12) -> Matcher:
    """Check forks and `rollback` on a random walk of a matcher that `make` makes. Returns a fresh matcher
    that took the tokens that were not taken back."""
    matcher = make()
    taken: list[int] = []
    while len(taken) < steps and not matcher.finished:
        taken.append(int(chooser.choice(np.flatnonzero(mask_of(matcher, tiny())))))
        assert matcher.accept(taken[-1])
    twin = matcher.fork()
    kept = chooser.randint(0, len(taken))
    matcher.rollback(len(taken) - kept)
    fresh = make()
    assert all(map(fresh.accept, taken[:kept]))
    assert (mask_of(matcher, tiny()) == mask_of(fresh, tiny())).all()
    for attribute in ("finished", "complete", "completion_tokens"):
        assert getattr(matcher, attribute) == getattr(fresh, attribute)
    assert matcher.forced_bytes() == fresh.forced_bytes()
    assert all(map(matcher.accept, taken[kept:]))
    assert (mask_of(matcher, tiny()) == mask_of(twin, tiny())).all()
    with pytest.raises(ValueError, match="take back"):
        matcher.rollback(len(taken) + 1)
    return fresh


def goes_through(grammar: Grammar, text: str) -> bool:
    """Whether the tokens of `text` are accepted and the text may end. The masks are not looked at: llguidance
    accepts other tokens than its mask allows where text is forced."""
    matcher = grammar.matcher()
    return all(map(matcher.accept, tokenise(text, tiny()))) and matcher.complete


def json_text(value: object) -> str:
    """`value` as Ramify writes it."""
    return spelled(parse_json(json.dumps(value)))
