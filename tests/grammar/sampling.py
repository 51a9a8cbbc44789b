"""Random texts of a constraint: walks of its matcher with a budget, so that every text ends whole."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import numpy as np

from ramify.constraint import Constraint
from ramify.grammar.matcher import Grammar, mask_words, tokens_of
from ramify.grammar.vocabulary import Vocabulary
from tests.grammar.vocabularies import compiled, tiny


def samples(
    constraint: Constraint,
    count: int,
    *,
    budget: int = 120,
    seed: int = 0,
    vocabulary: Vocabulary | None = None,
) -> Iterator[str]:
    """`count` texts of random allowed tokens, of `budget` or the fewest possible tokens at most."""
    vocabulary = vocabulary or tiny()
    grammar = compiled(constraint, vocabulary)
    chooser = Random(seed)
    for _ in range(count):
        yield walk(grammar, vocabulary, chooser, chooser.randint(1, budget))


def _kind(spelled: bytes) -> int:
    """Digits, letters, and each other byte for itself: chosen one as often as the other, so that numbers and
    names stay short."""
    if spelled[:1].isdigit():
        return -1
    return -2 if spelled[:1].isalpha() or spelled[:1] > b"\x7f" else (spelled or b"\0")[0]


def walk(grammar: Grammar, vocabulary: Vocabulary, chooser: Random, budget: int) -> str:
    matcher = grammar.matcher()
    fewest = matcher.completion_tokens
    assert fewest is not None
    budget = max(budget, fewest)
    text = b""
    row = np.zeros(mask_words(vocabulary.size), np.int32)
    while True:
        assert matcher.fill_mask(row, budget)
        kinds: dict[int, list[int]] = {}
        for token in tokens_of(row):
            kinds.setdefault(_kind(vocabulary.tokens[token]), []).append(token)
        token = chooser.choice(kinds[chooser.choice(list(kinds))])
        assert matcher.accept(token)
        if matcher.finished:
            return text.decode()
        text += vocabulary.tokens[token]
        budget -= 1
