"""Free text before the constrained text: reasoning up to its end, or prose up to a tool call.

A `PreambleMatcher` has two phases. In the first every ordinary token may come, until the end of the
preamble (say ``</think>``) has been written; where its tokens are spent, or where the token budget is
running out, that end is forced. The second phase is the matcher that it wraps.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import numpy as np

from ramify.grammar.automaton.token_trie import token_trie
from ramify.grammar.engine.prefix_matcher import PrefixMatcher, fewest_tokens
from ramify.grammar.matcher import Matcher, check_rollback, mask_words
from ramify.grammar.vocabulary import Vocabulary, tokens_beginning_with
from ramify.messages import Preamble


def with_preambles(matcher: Matcher, preambles: Sequence[Preamble], vocabulary: Vocabulary) -> Matcher:
    """`matcher` after `preambles`, whose `end_ids` are known."""
    for preamble in reversed(preambles):
        matcher = PreambleMatcher(preamble, _end_of(preamble, vocabulary), matcher)
    return matcher


class FreeGrammar:
    """Any text: what follows a preamble where there is no constraint."""

    nbytes = 0

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def matcher(self, prefix: bytes = b"") -> Matcher:
        inner = FreeMatcher(self._vocabulary)
        return PrefixMatcher(inner, prefix, self._vocabulary) if prefix else inner


class FreeMatcher:
    """Allows everything until a stop token."""

    completion_tokens = 0
    free = True

    def __init__(self, vocabulary: Vocabulary, accepted: int = 0, finished: bool = False) -> None:
        self._vocabulary = vocabulary
        self._accepted = accepted
        self._finished = finished

    def accept(self, token: int) -> bool:
        if self._finished or not 0 <= token < self._vocabulary.size:
            return False
        self._accepted += 1
        self._finished = token in self._vocabulary.stop_ids
        return True

    def accept_bytes(self, data: bytes) -> bool:
        self._accepted += not self._finished
        return not self._finished

    def fill_mask(self, row: np.ndarray, budget: int | None = None) -> bool:
        if self._finished:
            row[:] = 0
        return self._finished

    def completion(self) -> list[int]:
        return []

    def forced_bytes(self) -> bytes:
        return b""

    def rollback(self, count: int) -> None:
        check_rollback(count, self._accepted)
        self._accepted -= count
        self._finished = self._finished and not count

    def fork(self) -> Matcher:
        return FreeMatcher(self._vocabulary, self._accepted, self._finished)

    @property
    def finished(self) -> bool:
        return self._finished

    @property
    def complete(self) -> bool:
        return True


class PreambleMatcher:
    """`answer` after free text that ends in `end`. `accept` takes every spelling of a forced end, the mask
    offers the tokenizer's own."""

    def __init__(self, preamble: Preamble, end: _End, answer: Matcher) -> None:
        self._preamble = preamble
        self._end = end
        self._answer = answer  # at its beginning; never driven
        self._needed_after: dict[bytes, int | None] = {}
        self._matched = [0]  # after each token of the free text, how many bytes of the end stand there
        self._inner: Matcher | None = None
        self._inner_tokens = 0
        self._stopped = False

    def accept(self, token: int) -> bool:
        if self._inner is not None:
            taken = self._inner.accept(token)
            self._inner_tokens += taken
            return taken
        end, matched = self._end, self._matched[-1]
        if self._stopped or not 0 <= token < end.vocabulary.size:
            return False
        if token in end.vocabulary.stop_ids:
            self._stopped = self.complete
            if self._stopped:
                self._matched.append(matched)
            return self._stopped
        spelling = end.spelling(token)
        if not spelling or (self._forced and not end.leads_on(matched, spelling, token)):
            return False
        return self._advance(spelling)

    def accept_bytes(self, data: bytes) -> bool:
        if self._inner is not None:
            taken = self._inner.accept_bytes(data)
            self._inner_tokens += taken
            return taken
        if self._stopped or (self._forced and not self._end.leads_on(self._matched[-1], data)):
            return False
        return self._advance(data)

    def _advance(self, data: bytes) -> bool:
        """Go on over text in the first phase, and into the second one."""
        matched, rest = self._end.advance(self._matched[-1], data)
        if rest is not None:
            inner = self._answer.fork()
            if rest and not inner.accept_bytes(rest):
                return False
            self._inner = inner
        self._matched.append(matched)
        return True

    def fill_mask(self, row: np.ndarray, budget: int | None = None) -> bool:
        if self._inner is not None:
            return self._inner.fill_mask(row, budget)
        if self._stopped:
            row[:] = 0
            return True
        end, matched = self._end, self._matched[-1]
        needed = self._answer.completion_tokens or 0
        short = budget is not None and budget <= end.remaining(matched) + needed
        if self._forced or (short and not self._preamble.optional):
            row[:] = 0
            _set(row, end.forced_tokens(matched), True)
            return True
        row[:] = end.ordinary
        for rest, tokens in end.completing(matched).items():
            _set(row, tokens, self._takes(rest, None if budget is None else budget - 1))
        if self.complete:
            _set(row, end.vocabulary.stop_ids, True)
        return True

    def forced_bytes(self) -> bytes:
        if self._inner is not None:
            return self._inner.forced_bytes()
        if self._stopped or not self._forced or self._end.is_control:
            return b""
        return self._end.text[self._matched[-1] :] + self._answer.forced_bytes()

    @property
    def completion_tokens(self) -> int | None:
        if self._inner is not None:
            return self._inner.completion_tokens
        if self._stopped or self.complete:
            return 0
        answer = self._answer.completion_tokens
        return None if answer is None else self._end.remaining(self._matched[-1]) + answer

    def completion(self) -> list[int] | None:
        if self._inner is not None:
            return self._inner.completion()
        if self._stopped or self.complete:
            return []
        answer = self._answer.completion()
        return None if answer is None else self._end.path(self._matched[-1]) + answer

    def rollback(self, count: int) -> None:
        accepted = len(self._matched) - 1 + self._inner_tokens
        check_rollback(count, accepted)
        if self._inner is not None:
            if count <= self._inner_tokens:
                self._inner.rollback(count)
                self._inner_tokens -= count
                return
            count -= self._inner_tokens
            self._inner, self._inner_tokens = None, 0
        if count:
            del self._matched[-count:]
            self._stopped = False

    def fork(self) -> Matcher:
        twin = PreambleMatcher(self._preamble, self._end, self._answer)
        twin._needed_after = self._needed_after
        twin._matched = list(self._matched)
        twin._inner = None if self._inner is None else self._inner.fork()
        twin._inner_tokens = self._inner_tokens
        twin._stopped = self._stopped
        return twin

    @property
    def finished(self) -> bool:
        return self._stopped if self._inner is None else self._inner.finished

    @property
    def complete(self) -> bool:
        if self._inner is not None:
            return self._inner.complete
        return self._preamble.optional and not self._stopped and not self._forced

    @property
    def free(self) -> bool:
        return self._inner is None or self._inner.free

    @property
    def _forced(self) -> bool:
        """The preamble's own tokens are spent."""
        limit = self._preamble.max_tokens
        return limit is not None and len(self._matched) > limit

    def _takes(self, rest: bytes, budget: int | None) -> bool:
        """The answer may begin with `rest` and be completed within `budget` tokens more."""
        if rest not in self._needed_after:
            answer = self._answer.fork()
            fits = not rest or answer.accept_bytes(rest)
            self._needed_after[rest] = (answer.completion_tokens or 0) if fits else None
        needed = self._needed_after[rest]
        return needed is not None and (budget is None or needed <= budget)


class _End:
    """The end of a preamble against a vocabulary: shared by all requests that have it.

    A number `matched` says how many bytes of the end stand at the end of the text so far, as in the
    algorithm of Knuth, Morris and Pratt.
    """

    def __init__(self, text: bytes, ids: Sequence[int], vocabulary: Vocabulary) -> None:
        self.text = text
        self.vocabulary = vocabulary
        self.is_control = len(ids) == 1 and not vocabulary.tokens[ids[0]]
        self._control = ids[0] if self.is_control else -1
        self._own = list(ids)
        self._ids = token_trie(vocabulary).ids
        self._borders = _borders(text)
        self._completing: dict[int, dict[bytes, list[int]]] = {}
        self.ordinary = _mask_of_text(vocabulary)
        self.next_id: dict[int, int] = {}
        """By `matched`: how the tokenizer itself goes on with the end."""
        self._left: dict[int, int] = {}
        matched = 0
        for i, token in enumerate(ids):
            self.next_id[matched] = token
            self._left[matched] = len(ids) - i
            matched, rest = self.advance(matched, self.spelling(token))
            if rest is not None:
                break
        self._containing = [
            (token, spelling) for token, spelling in enumerate(vocabulary.tokens) if text in spelling
        ]
        if self.is_control:
            self._containing.append((self._control, text))

    def spelling(self, token: int) -> bytes:
        return self.text if token == self._control else self.vocabulary.tokens[token]

    def advance(self, matched: int, data: bytes) -> tuple[int, bytes | None]:
        """`matched` after `data`, and where the end was completed, what followed it."""
        for i, byte in enumerate(data):
            while matched and self.text[matched] != byte:
                matched = self._borders[matched]
            if self.text[matched] == byte:
                matched += 1
            if matched == len(self.text):
                return matched, data[i + 1 :]
        return matched, None

    def completing(self, matched: int) -> dict[bytes, list[int]]:
        """The tokens that complete the end, by what they hold beyond it."""
        known = self._completing.get(matched)
        if known is None:
            known = self._completing[matched] = {}
            for token, spelling in self._may_complete(matched).items():
                _, rest = self.advance(matched, spelling)
                if rest is not None:
                    known.setdefault(rest, []).append(token)
        return known

    def _may_complete(self, matched: int) -> dict[int, bytes]:
        """The tokens that hold the whole end, or begin with what some border of the text so far lacks."""
        found = dict(self._containing)
        while matched:
            missing = self.text[matched:]
            exact = self._ids.get(missing)
            if exact is not None:
                found[exact] = missing
            found.update(
                (token, missing + more) for more, token in tokens_beginning_with(missing, self.vocabulary)
            )
            matched = self._borders[matched]
        return found

    def leads_on(self, matched: int, data: bytes, token: int = -1) -> bool:
        """`data` goes on with the end, as the tokenizer spells it or otherwise, or runs past it."""
        rest = self.text[matched:]
        return token == self.next_id.get(matched) or rest.startswith(data) or data.startswith(rest)

    def forced_tokens(self, matched: int) -> list[int]:
        """The tokens that lead straight on: the tokenizer's own, or where the text has left its way all
        that the rest begins with."""
        if matched in self.next_id:
            return [self.next_id[matched]]
        rest = self.text[matched:]
        beginnings = (rest[:length] for length in range(1, len(rest) + 1))
        return [self._ids[each] for each in beginnings if each in self._ids]

    def remaining(self, matched: int) -> int:
        """Tokens that suffice to complete the end."""
        if matched not in self._left:
            self._left[matched] = len(self.path(matched))
        return self._left[matched]

    def path(self, matched: int) -> list[int]:
        """Tokens that complete the end: the tokenizer's own where the text stands on its way."""
        if matched in self.next_id:
            return self._own[-self._left[matched] :]
        return fewest_tokens(self.text[matched:], self.vocabulary)[0]


_ends: weakref.WeakKeyDictionary[Vocabulary, dict[tuple[str, tuple[int, ...]], _End]] = (
    weakref.WeakKeyDictionary()
)

MAX_ENDS = 256
"""Ends kept; clients may choose their own."""


def _end_of(preamble: Preamble, vocabulary: Vocabulary) -> _End:
    known = _ends.setdefault(vocabulary, {})
    key = preamble.end, preamble.end_ids
    if key not in known:
        if len(known) >= MAX_ENDS:
            known.clear()
        known[key] = _End(preamble.end.encode(), preamble.end_ids, vocabulary)
    return known[key]


def _borders(text: bytes) -> list[int]:
    """By length, the longest proper beginning of that part of `text` that is also its end."""
    borders = [0, 0]
    for byte in text[1:]:
        length = borders[-1]
        while length and text[length] != byte:
            length = borders[length]
        borders.append(length + (text[length] == byte))
    return borders


def _mask_of_text(vocabulary: Vocabulary) -> np.ndarray:
    """The mask of all tokens that stand for text."""
    allowed = np.zeros(mask_words(vocabulary.size) * 32, bool)
    allowed[: vocabulary.size] = [bool(spelling) for spelling in vocabulary.tokens]
    return np.packbits(allowed, bitorder="little").view(np.int32)


def _set(row: np.ndarray, tokens: Iterable[int], allowed: bool) -> None:
    words = row.view(np.uint32)
    for token in tokens:
        bit = np.uint32(1 << (token & 31))
        if allowed:
            words[token >> 5] |= bit
        else:
            words[token >> 5] &= ~bit
