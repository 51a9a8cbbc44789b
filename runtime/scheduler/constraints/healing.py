"""Token healing: a prompt that ends inside a token continues as the tokenizer would have spelled it.

``"http:"`` ends with the token ``":"``. The model has never seen ``"//"`` after that token, because its
training text has the one token ``"://"``. So the last tokens of a prompt that ends in plain text are only
proposed: if the model prefers a longer token that begins with their text, that token replaces them. Otherwise
nothing changes (Lundberg, "The Art of Prompt Design", 2023).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ramify.grammar.matcher import allow, mask_words
from ramify.grammar.vocabulary import Vocabulary, tokens_beginning_with

MAX_TOKENS = 4
"""Most tokens at the end of a prompt that may be replaced."""
MAX_MASKS = 256


class OpenEnd(NamedTuple):
    """The number of `tokens` at the end of a prompt that spell `text`, with which some longer token
    begins."""

    tokens: int
    text: bytes


class Healer:
    """Masks of the tokens that begin with a text, for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokens = vocabulary.tokens
        self._words = mask_words(vocabulary.size)
        self.beginning_with = functools.lru_cache(MAX_MASKS)(self._beginning_with)

    def open_end(self, prompt: Sequence[int]) -> OpenEnd | None:
        """The longest end of `prompt` with which a longer token begins; it never contains the first token."""
        found = None
        text = b""
        for count in range(1, min(MAX_TOKENS, len(prompt) - 1) + 1):
            spelled = self._tokens[prompt[-count]]
            if not spelled:
                break
            text = spelled + text
            if any(tokens_beginning_with(text, self._vocabulary)) and _is_text(text):
                found = OpenEnd(count, text)
        return found

    def _beginning_with(self, text: bytes) -> np.ndarray:
        """(ceil(vocab / 32),) int32, read-only by convention: the tokens that begin with `text`."""
        row = np.zeros(self._words, np.int32)
        allow(row, [token for _, token in tokens_beginning_with(text, self._vocabulary, whole=True)])
        return row

    def spelling(self, token: int) -> bytes:
        return self._tokens[token]


class Healing:
    """The end of one prompt during healing. `rest` is the text of the tokens that are still only proposed."""

    def __init__(self, healer: Healer, rest: bytes) -> None:
        self._healer = healer
        self.rest = rest

    def mask(self, proposed: int, grammar: np.ndarray | None) -> np.ndarray:
        """The proposed token `proposed`, and the tokens that begin with `rest` and that the mask `grammar`
        allows."""
        row = self._healer.beginning_with(self.rest).copy()
        if grammar is not None:
            row &= grammar
        allow(row, [proposed])
        return row

    def after(self, token: int) -> Healing:
        """The healing that remains after `token`, the first proposed token, has been kept."""
        return Healing(self._healer, self.rest[len(self._healer.spelling(token)) :])


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
