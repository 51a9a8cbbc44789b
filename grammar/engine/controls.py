"""Control tokens in grammars, which are about text: each stands there as a private character.

Example, a turn of gpt-oss whose grammar is ``S assistant C final M`` and then a JSON schema, S, C and M being
the stand-ins for ``<|start|>``, ``<|channel|>`` and ``<|message|>``:

    the grammar allows      4 bytes of S; "assistant"; 4 bytes of C; "final"; 4 bytes of M; JSON
    this matcher allows     <|start|>;    "assistant"; <|channel|>;  "final"; <|message|>;  JSON

A control token is allowed where nothing but its stand-in may come next. So the same characters remain text
inside a JSON string, and a grammar must not leave the choice between a control token and text.
"""

from __future__ import annotations

import numpy as np

from ramify.grammar.matcher import Matcher, allow, allowed_among
from ramify.grammar.vocabulary import Vocabulary, tokens_beginning_with

_LEAD = b"\xf4"
"""The first byte of the stand-ins, U+10F000 and on, in UTF-8."""


def with_controls(matcher: Matcher, vocabulary: Vocabulary) -> Matcher:
    """`matcher`, whose text may have stand-ins; as it is where the vocabulary has no such tokens."""
    return ControlMatcher(matcher, vocabulary) if vocabulary.controls else matcher


class ControlMatcher:
    """`inner` with control tokens in place of their stand-ins."""

    def __init__(self, inner: Matcher, vocabulary: Vocabulary) -> None:
        self._inner, self._vocabulary = inner, vocabulary
        self._stand_ins = dict(vocabulary.controls)
        self._leads = [token for _, token in tokens_beginning_with(_LEAD, vocabulary, whole=True)]

    def accept(self, token: int) -> bool:
        stand_in = self._stand_ins.get(token)
        return self._inner.accept(token) if stand_in is None else self._inner.accept_bytes(stand_in)

    def accept_bytes(self, data: bytes) -> bool:
        return self._inner.accept_bytes(data)

    def fill_mask(self, row: np.ndarray, budget: int | None = None) -> bool:
        if not self._inner.fill_mask(row, budget):
            return False
        if allowed_among(row, self._leads):
            stand_ins = self._stand_ins.items()
            fitting = [token for token, data in stand_ins if self._inner.fork().accept_bytes(data)]
            if fitting:
                row[:] = 0
                allow(row, fitting)
        return True

    def forced_bytes(self) -> bytes:
        return self._inner.forced_bytes().partition(_LEAD)[0]

    @property
    def completion_tokens(self) -> int | None:
        return self._inner.completion_tokens

    def rollback(self, count: int) -> None:
        self._inner.rollback(count)

    def fork(self) -> Matcher:
        return ControlMatcher(self._inner.fork(), self._vocabulary)

    @property
    def finished(self) -> bool:
        return self._inner.finished

    @property
    def complete(self) -> bool:
        return self._inner.complete
