"""Token healing: a prompt that ends inside a token goes on as the tokenizer would have it.

``"http:"`` is spelled with a token for ``":"``, after which the model has never seen ``"//"``: in all its
training text that is one token with the colon. So the last tokens of a prompt that ends in plain text
are only proposed: where the model prefers a token that begins like them and goes further, that one takes
their place. Where it does not, nothing has changed (Lundberg, "The Art of Prompt Design", 2023).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ramify.grammar.matcher import mask_words
from ramify.grammar.vocabulary import Vocabulary, tokens_beginning_with

MAX_TOKENS = 4
"""Tokens at the end of a prompt that may be replaced."""
MAX_MASKS = 256


class OpenEnd(NamedTuple):
    """The last `tokens` of a prompt; some longer token begins with what they spell, `text`."""

    tokens: int
    text: bytes


class Healer:
    """Knows which tokens begin with which text."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokens = vocabulary.tokens
        self._words = mask_words(vocabulary.size)
        self._masks: OrderedDict[bytes, np.ndarray] = OrderedDict()

    def open_end(self, prompt: Sequence[int]) -> OpenEnd | None:
        """The longest end of `prompt` that a longer token begins with; at least one token stays before it."""
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

    def beginning_with(self, text: bytes) -> np.ndarray:
        """(ceil(vocab / 32),) int32, not to be written to: the tokens that begin with `text`."""
        row = self._masks.get(text)
        if row is None:
            row = self._masks[text] = np.zeros(self._words, np.int32)
            bits = row.view(np.uint32)
            for _, token in tokens_beginning_with(text, self._vocabulary, whole=True):
                bits[token >> 5] |= np.uint32(1 << (token & 31))
            if len(self._masks) > MAX_MASKS:
                self._masks.popitem(last=False)
        return row

    def spelling(self, token: int) -> bytes:
        return self._tokens[token]


class Healing:
    """The end of one prompt while it is being settled: `rest` is the text of its tokens that are still
    only proposed."""

    def __init__(self, healer: Healer, rest: bytes) -> None:
        self._healer = healer
        self.rest = rest

    def mask(self, draft: int, grammar: np.ndarray | None) -> np.ndarray:
        """The draft, and what goes on from `rest`, if `grammar`, the mask of a grammar, allows it."""
        row = self._healer.beginning_with(self.rest).copy()
        if grammar is not None:
            row &= grammar
        row.view(np.uint32)[draft >> 5] |= np.uint32(1 << (draft & 31))
        return row

    def after(self, token: int) -> Healing:
        """When `token`, the first of the draft, has been kept."""
        return Healing(self._healer, self.rest[len(self._healer.spelling(token)) :])


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
