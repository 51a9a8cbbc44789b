"""A matcher whose first tokens must spell given bytes, for prompts that end inside a token.

The prompt ``Answer: "ye`` before a JSON string is cut to ``Answer: `` and the prefix ``"ye``. The first token
may then be `"`, `"ye` or `"yes"`: a beginning of the prefix, the whole prefix, or the prefix and further text
that the grammar allows.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ramify.grammar.automaton.masks.token_trie import token_trie
from ramify.grammar.engine.configurations import ConfigurationMatcher
from ramify.grammar.matcher import Matcher, allow, allows, check_rollback
from ramify.grammar.vocabulary import Vocabulary, tokens_beginning_with


def fewest_tokens(data: bytes, vocabulary: Vocabulary) -> list[list[int]]:
    """For each position in `data`, the end included, the shortest list of tokens that spells `data` from
    there to the end. The list is empty at the end, and where no tokens spell the rest."""
    ids = token_trie(vocabulary).ids
    longest = token_trie(vocabulary).longest
    found: list[list[int]] = [[] for _ in range(len(data) + 1)]
    for begin in reversed(range(len(data))):
        ends = [
            end
            for end in range(begin + 1, min(begin + longest, len(data)) + 1)
            if data[begin:end] in ids and (found[end] or end == len(data))
        ]
        if ends:
            end = min(ends, key=lambda end: len(found[end]))
            found[begin] = [ids[data[begin:end]], *found[end]]
    return found


def with_prefix(inner: Matcher, prefix: bytes, vocabulary: Vocabulary) -> Matcher:
    """A matcher for `prefix` followed by the text of `inner`; `inner` itself if `prefix` is empty. `inner`
    must be at the beginning of its text."""
    return PrefixMatcher(inner, prefix, vocabulary) if prefix else inner


class _Beyond(NamedTuple):
    """The tokens that begin with given bytes and are longer. The *remainder* of a token is its text after
    those bytes. `tokens` are the tokens with a remainder that some token spells, and `alone` has the lowest
    token that spells each remainder. `others` has all other tokens, as pairs (remainder, token)."""

    tokens: np.ndarray
    alone: np.ndarray
    others: list[tuple[bytes, int]]


@lru_cache(maxsize=64)
def _beyond(data: bytes, vocabulary: Vocabulary) -> _Beyond:
    ids = token_trie(vocabulary).ids
    found = [(text, token, ids.get(text, -1)) for text, token in tokens_beginning_with(data, vocabulary)]
    return _Beyond(
        np.array([token for _, token, alone in found if alone >= 0], np.int64),
        np.array([alone for _, _, alone in found if alone >= 0], np.int64),
        [(text, token) for text, token, alone in found if alone < 0],
    )


class _Step(NamedTuple):
    """State after a token: `rest` is the part of the prefix that is still to be spelled, and `inner_steps`
    the number of tokens that the inner matcher has accepted."""

    rest: bytes
    inner_steps: int


class PrefixMatcher:
    """A matcher for the bytes `prefix`, followed by the text of `inner`. `inner` must be at its beginning,
    and only this matcher may use it."""

    def __init__(self, inner: Matcher, prefix: bytes, vocabulary: Vocabulary) -> None:
        self._inner = inner
        self._vocabulary = vocabulary
        self._steps = [_Step(prefix, 0)]

    def accept(self, token: int) -> bool:
        step = self._steps[-1]
        if not step.rest:
            taken = self._inner.accept(token)
            if taken:
                self._steps.append(_Step(b"", step.inner_steps + 1))
            return taken
        data = self._vocabulary.tokens[token] if 0 <= token < self._vocabulary.size else b""
        return bool(data) and self.accept_bytes(data)

    def accept_bytes(self, data: bytes) -> bool:
        rest, inner_steps = self._steps[-1]
        shared = min(len(rest), len(data))
        if rest[:shared] != data[:shared]:
            return False
        if len(data) > shared:
            if not self._inner.accept_bytes(data[shared:]):
                return False
            inner_steps += 1
        self._steps.append(_Step(rest[shared:], inner_steps))
        return True

    def fill_mask(self, row: np.ndarray, budget: int | None = None) -> bool:
        rest = self._steps[-1].rest
        if not rest:
            return self._inner.fill_mask(row, budget)
        needed = self._inner.completion_tokens or 0
        costs = [len(tokens) + needed for tokens in fewest_tokens(rest, self._vocabulary)]
        row[:] = 0
        ids = token_trie(self._vocabulary).ids_of
        for end in range(1, len(rest) + 1):
            if budget is None or costs[end] < budget:
                allow(row, ids.get(rest[:end], ()))
        if isinstance(self._inner, ConfigurationMatcher) and self._inner.allow_beyond(rest, row, budget):
            return True
        inside = np.empty_like(row)
        if not self._inner.fill_mask(inside, budget):
            inside[:] = -1
        # The remainder of a token after the prefix is mostly a token itself, and the inner mask then tells
        # whether the remainder may come.
        beyond = _beyond(rest, self._vocabulary)
        allow(row, beyond.tokens[allows(inside, beyond.alone)])
        allow(row, [token for text, token in beyond.others if self._takes(text, budget)])
        return True

    def _takes(self, data: bytes, budget: int | None) -> bool:
        if not self._inner.accept_bytes(data):
            return False
        needed = self._inner.completion_tokens or 0
        self._inner.rollback(1)
        return budget is None or needed < budget

    def forced_bytes(self) -> bytes:
        return self._steps[-1].rest + self._inner.forced_bytes()

    @property
    def completion_tokens(self) -> int | None:
        needed = self._inner.completion_tokens
        rest = self._steps[-1].rest
        return None if needed is None else needed + len(fewest_tokens(rest, self._vocabulary)[0])

    def rollback(self, count: int) -> None:
        accepted = len(self._steps) - 1
        check_rollback(count, accepted)
        if count:
            before = self._steps[-1].inner_steps
            del self._steps[-count:]
            self._inner.rollback(before - self._steps[-1].inner_steps)

    def fork(self) -> PrefixMatcher:
        twin = PrefixMatcher(self._inner.fork(), b"", self._vocabulary)
        twin._steps = self._steps.copy()
        return twin

    @property
    def finished(self) -> bool:
        return self._inner.finished

    @property
    def complete(self) -> bool:
        return not self._steps[-1].rest and self._inner.complete
