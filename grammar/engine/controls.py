"""Control tokens in grammars: in a grammar's text, a private-use character stands for each control token.

An example is a turn of gpt-oss. The grammar is ``S assistant C final M`` and then a JSON schema. S, C and M
are the stand-ins for ``<|start|>``, ``<|channel|>`` and ``<|message|>``:

    the grammar allows      4 bytes of S; "assistant"; 4 bytes of C; "final"; 4 bytes of M; JSON
    this matcher allows     <|start|>;    "assistant"; <|channel|>;  "final"; <|message|>;  JSON

`NO_CONTROL` is a private-use character that stands for no token. A control token is allowed if its stand-in
may come next and `NO_CONTROL` may not. So inside a JSON string, where any character may come, the stand-ins
remain ordinary text, and free text that excludes `NO_CONTROL` may end in a control token.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ramify.constraint import NO_CONTROL
from ramify.grammar.matcher import Matcher, allow, allows
from ramify.grammar.vocabulary import Vocabulary

_LEAD = b"\xf4"
"""The first byte of each stand-in (U+10F000 and following) in UTF-8."""

_NO_CONTROL = NO_CONTROL.encode()


def with_controls(matcher: Matcher, vocabulary: Vocabulary) -> Matcher:
    """Wrap `matcher`, whose text may have stand-ins, in a `ControlMatcher`. Returns `matcher` itself if the
    vocabulary has no control tokens with stand-ins."""
    return ControlMatcher(matcher, vocabulary) if vocabulary.controls else matcher


class ControlMatcher:
    """A matcher that wraps `inner` and reads control tokens in place of their stand-ins."""

    def __init__(self, inner: Matcher, vocabulary: Vocabulary) -> None:
        self._inner, self._vocabulary = inner, vocabulary
        self._stand_ins = dict(vocabulary.controls)
        self._leads = _leading(vocabulary)

    def accept(self, token: int) -> bool:
        stand_in = self._stand_ins.get(token)
        return self._inner.accept(token) if stand_in is None else self._inner.accept_bytes(stand_in)

    def accept_bytes(self, data: bytes) -> bool:
        return self._inner.accept_bytes(data)

    def fill_mask(self, row: np.ndarray, budget: int | None = None) -> bool:
        if not self._inner.fill_mask(row, budget):
            return False
        if allows(row, self._leads).any() and not self._inner.fork().accept_bytes(_NO_CONTROL):
            fitting = [token for token, data in self._stand_ins.items() if self._takes(data, budget)]
            if fitting:
                allow(row, self._leads, allowed=False)
                allow(row, fitting)
        return True

    def _takes(self, data: bytes, budget: int | None) -> bool:
        """Whether the text may continue with `data`, the bytes of one token, and can be completed within
        `budget` tokens, this one included."""
        after = self._inner.fork()
        return after.accept_bytes(data) and (budget is None or (after.completion_tokens or 0) < budget)

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


@lru_cache(maxsize=8)
def _leading(vocabulary: Vocabulary) -> np.ndarray:
    """The text tokens that contain `_LEAD`, so that a stand-in may begin in them."""
    return np.array([token for token, data in enumerate(vocabulary.tokens) if _LEAD in data], np.int64)
