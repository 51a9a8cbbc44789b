"""Text that a grammar forces, as the tokens that the tokenizer itself would make of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tokenizers import Tokenizer

from ramify.grammar.vocabulary import Vocabulary, tokens_beginning_with

CONTEXT_TOKENS = 8
"""Output tokens that are encoded again together with the new text: merges reach no further back."""
MAX_REMEMBERED = 4096


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """The token ids of `text` in the middle of a text."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


class Extension(NamedTuple):
    """`tokens` come instead of the last `replaced` tokens before them."""

    replaced: int
    tokens: tuple[int, ...]


class Retokenizer:
    """`encode` is the tokenizer's own, without special tokens.

    A tokenizer joins text across the borders of separate calls: the tokens of ``a + b`` are not those of
    ``a`` followed by those of ``b``. So the end of the output is encoded again with what follows it.
    """

    def __init__(self, encode: Callable[[str], Sequence[int]], vocabulary: Vocabulary) -> None:
        self._encode = encode
        self._vocabulary = vocabulary
        self._tokens = vocabulary.tokens
        self._known: OrderedDict[tuple[tuple[int, ...], int, bytes], Extension | None] = OrderedDict()

    def extend(self, before: Sequence[int], loose: int, data: bytes) -> Extension | None:
        """The tokens for `data` after the output tokens `before`, of which the last `loose` may change.

        An unfinished character at the end of `data` is left out. None where nothing can be said: the
        tokenizer would have made other tokens of `before` itself, or does not give back the text.
        """
        context = tuple(before[-CONTEXT_TOKENS - loose :])
        # A control token is a border that no text crosses.
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
        """Some other token is spelled like `token` with more after it."""
        return any(tokens_beginning_with(self._tokens[token], self._vocabulary))

    def _extend(self, context: tuple[int, ...], loose: int, data: bytes) -> Extension | None:
        # Further back first: the more context, the surer the borders. A context that begins inside a
        # word is encoded in another way than it was in its place, and shows it by not coming out again.
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
