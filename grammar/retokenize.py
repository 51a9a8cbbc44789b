"""Forced text as tokens (jump-forward decoding): the tokens that the tokenizer itself would choose.

After the output ``{"na`` (tokens ``{"`` and ``na``) the grammar forces ``me": ``. The tokenizer spells the
whole text as ``{"``, ``name``, ``":`` and a space, so the token ``na`` is replaced.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tokenizers import Tokenizer

from ramify.grammar.vocabulary import Vocabulary, tokens_beginning_with

CONTEXT_TOKENS = 8
"""Number of output tokens that are encoded again together with the new text. Merges reach no further back."""
MAX_REMEMBERED = 4096


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """The token ids of `text` without special tokens."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


class Extension(NamedTuple):
    """An extension of the output: `tokens` replace its last `replaced` tokens."""

    replaced: int
    tokens: tuple[int, ...]


class Retokenizer:
    """Retokenization by `encode`, which returns the tokenizer's tokens of a text, without special tokens. The
    tokens of ``a + b`` are not always the tokens of ``a`` followed by those of ``b``. So the end of the
    output is encoded again together with the forced text."""

    def __init__(self, encode: Callable[[str], Sequence[int]], vocabulary: Vocabulary) -> None:
        self._encode = encode
        self._vocabulary = vocabulary
        self._tokens = vocabulary.tokens
        self._known: OrderedDict[tuple[tuple[int, ...], int, bytes], Extension | None] = OrderedDict()

    def extend(self, before: Sequence[int], loose: int, data: bytes) -> Extension | None:
        """The tokens for `data` after the output tokens `before`, of which the last `loose` may be replaced.
        An incomplete character at the end of `data` is left out. Returns None if the tokenizer would have
        spelled the fixed tokens at the end of `before` differently, or if its tokens do not spell the
        text."""
        context = tuple(before[-CONTEXT_TOKENS - loose :])
        # No text crosses a control token.
        border = max((i for i, token in enumerate(context, 1) if not self._tokens[token]), default=0)
        context = context[border:]
        loose = min(loose, len(context))
        key = (context, loose, data)
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        found = self._known[key] = self._extend(context, loose, data)
        if len(self._known) > MAX_REMEMBERED:
            self._known.popitem(last=False)
        return found

    def continues(self, token: int) -> bool:
        """Whether another token begins with the spelling of `token`."""
        return any(tokens_beginning_with(self._tokens[token], self._vocabulary))

    def _extend(self, context: tuple[int, ...], loose: int, data: bytes) -> Extension | None:
        # The longest context comes first, because it gives the most reliable token borders. If a context
        # begins inside a word, its encoding may differ from the output's tokens, even in `fixed`.
        for skipped in range(len(context) - loose + 1):
            kept = context[skipped:]
            fixed = kept[: len(kept) - loose]
            try:
                text = self._spelled(kept).decode() + _whole_characters(data)
            except UnicodeDecodeError:
                continue  # the context begins or ends inside a character
            tokens = tuple(self._encode(text))
            if tokens[: len(fixed)] != fixed or len(tokens) == len(fixed):
                continue
            if self._spelled(tokens) != text.encode():
                return None
            return Extension(loose, tokens[len(fixed) :])
        return None

    def _spelled(self, tokens: Sequence[int]) -> bytes:
        return b"".join(self._tokens[token] for token in tokens)


def _whole_characters(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        return data[: error.start].decode()
