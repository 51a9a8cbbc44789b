"""Free text before the constrained text: reasoning up to its end, or prose up to a tool call.

A `PreambleMatcher` has two phases. In the free phase every text token may come until the end of the preamble,
say ``</think>``, has been written. The end is forced when the preamble's own `max_tokens` are spent, or when
the rest of the token budget just suffices for the end and the shortest answer. In the answer phase the
wrapped matcher decides.

Tokens may split the end anywhere. With the end ``</think>`` and the text ``so.</``, the free phase has
matched 2 bytes of the end. The token ``think>{"`` would complete the end, and is allowed only if the answer
may begin with ``{"``.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np

from ramify.grammar.automaton.masks.token_trie import token_trie
from ramify.grammar.engine.prefix_matcher import fewest_tokens, with_prefix
from ramify.grammar.matcher import Matcher, allow, check_rollback, mask_words
from ramify.grammar.vocabulary import Vocabulary, tokens_beginning_with
from ramify.messages import Preamble


def with_preambles(matcher: Matcher, preambles: Sequence[Preamble], vocabulary: Vocabulary) -> Matcher:
    """A matcher for the `preambles` in order, followed by the text of `matcher`. The `end_ids` of the
    preambles must be set."""
    for preamble in reversed(preambles):
        matcher = PreambleMatcher(preamble, _end_of(preamble, vocabulary), matcher)
    return matcher


class FreeGrammar:
    """The grammar of any text, for an answer without a constraint after a preamble."""

    nbytes = 0

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def matcher(self, prefix: bytes = b"") -> Matcher:
        return with_prefix(FreeMatcher(self._vocabulary), prefix, self._vocabulary)


class FreeMatcher:
    """A matcher that allows every token until a stop token."""

    completion_tokens = 0

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
    """A matcher for free text up to and including `end`, followed by the text of `answer`. If the end is
    forced, the mask allows only the tokens by which the tokenizer itself would spell the end; `accept`
    accepts any tokens that spell the end."""

    def __init__(self, preamble: Preamble, end: _End, answer: Matcher) -> None:
        self._preamble = preamble
        self._end = end
        self._answer = answer  # stays at its beginning; the answer phase uses a fork
        self._needed_after: dict[bytes, int | None] = {}
        self._matched = [0]  # the value of `matched` (see `_End`) after each token of the free text
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
        """Read text in the free phase; bytes after the end are read by the answer. Returns False, and changes
        nothing, if the answer may not begin with these bytes."""
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
            allow(row, end.forced_tokens(matched))
            return True
        row[:] = end.ordinary
        for rest, tokens in end.completing(matched).items():
            allow(row, tokens, self._takes(rest, None if budget is None else budget - 1))
        if self.complete:
            allow(row, end.vocabulary.stop_ids)
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
    def answer_tokens(self) -> int | None:
        """Number of accepted tokens of the answer; None if the answer has not begun. The answer begins after
        this preamble and all `apart` preambles that follow it."""
        inner = self._inner
        if isinstance(inner, PreambleMatcher) and inner._preamble.apart:
            return inner.answer_tokens
        return None if inner is None else self._inner_tokens

    @property
    def _forced(self) -> bool:
        """Whether the preamble's own `max_tokens` are spent."""
        limit = self._preamble.max_tokens
        return limit is not None and len(self._matched) > limit

    def _takes(self, rest: bytes, budget: int | None) -> bool:
        """Whether the answer may begin with `rest` and can then be completed within `budget` more tokens."""
        if rest not in self._needed_after:
            answer = self._answer.fork()
            fits = not rest or answer.accept_bytes(rest)
            self._needed_after[rest] = (answer.completion_tokens or 0) if fits else None
        needed = self._needed_after[rest]
        return needed is not None and (budget is None or needed <= budget)


class _End:
    """The end of a preamble, prepared for a vocabulary and shared by all requests with that end. In all
    methods, `matched` is the length of the longest prefix of the end that is a suffix of the text so far, as
    in the algorithm of Knuth, Morris and Pratt."""

    def __init__(self, text: bytes, ids: Sequence[int], vocabulary: Vocabulary) -> None:
        self.text = text
        self.vocabulary = vocabulary
        self.is_control = len(ids) == 1 and not vocabulary.tokens[ids[0]]
        self._control = ids[0] if self.is_control else -1
        self._ids = token_trie(vocabulary).ids
        self._borders = _borders(text)
        self._completing: dict[int, dict[bytes, list[int]]] = {}
        self.ordinary = _mask_of_text(vocabulary)
        self.next_id: dict[int, int] = {}
        """The next token of the end as the tokenizer itself would spell it, by `matched`."""
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
        """`matched` after `data`, and the bytes of `data` after the end, or None if the end is not
        complete."""
        for i, byte in enumerate(data):
            while matched and self.text[matched] != byte:
                matched = self._borders[matched]
            if self.text[matched] == byte:
                matched += 1
            if matched == len(self.text):
                return matched, data[i + 1 :]
        return matched, None

    def completing(self, matched: int) -> dict[bytes, list[int]]:
        """The tokens that complete the end, by the bytes that each has after the end."""
        known = self._completing.get(matched)
        if known is None:
            known = self._completing[matched] = {}
            for token, spelling in self._may_complete(matched).items():
                _, rest = self.advance(matched, spelling)
                if rest is not None:
                    known.setdefault(rest, []).append(token)
        return known

    def _may_complete(self, matched: int) -> dict[int, bytes]:
        """Candidates for `completing`: tokens that contain the whole end, and, for each prefix of the end
        that is a suffix of the text so far, tokens that begin with the missing bytes."""
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
        """Whether `data` continues the end or completes it, perhaps with more bytes after it. Any spelling
        counts."""
        rest = self.text[matched:]
        return token == self.next_id.get(matched) or rest.startswith(data) or data.startswith(rest)

    def forced_tokens(self, matched: int) -> list[int]:
        """The tokens that may continue the end. If the matched part was spelled as the tokenizer itself
        would, only the tokenizer's next token; else, for each beginning of the missing part, the lowest token
        that spells this beginning, if any."""
        if matched in self.next_id:
            return [self.next_id[matched]]
        rest = self.text[matched:]
        beginnings = (rest[:length] for length in range(1, len(rest) + 1))
        return [self._ids[each] for each in beginnings if each in self._ids]

    def remaining(self, matched: int) -> int:
        """Number of tokens that complete the end: those of the tokenizer's own spelling if the matched part
        follows it, else the fewest possible."""
        if matched not in self._left:
            self._left[matched] = len(fewest_tokens(self.text[matched:], self.vocabulary)[0])
        return self._left[matched]


_ends: weakref.WeakKeyDictionary[Vocabulary, dict[tuple[str, tuple[int, ...]], _End]] = (
    weakref.WeakKeyDictionary()
)

MAX_ENDS = 256
"""Most different ends that are cached for a vocabulary, since clients may send any end."""


def _end_of(preamble: Preamble, vocabulary: Vocabulary) -> _End:
    known = _ends.setdefault(vocabulary, {})
    key = preamble.end, preamble.end_ids
    if key not in known:
        if len(known) >= MAX_ENDS:
            known.clear()
        known[key] = _End(preamble.end.encode(), preamble.end_ids, vocabulary)
    return known[key]


def _borders(text: bytes) -> list[int]:
    """Length, for each n, of the longest proper prefix of ``text[:n]`` that is also its suffix."""
    borders = [0, 0]
    for byte in text[1:]:
        length = borders[-1]
        while length and text[length] != byte:
            length = borders[length]
        borders.append(length + (text[length] == byte))
    return borders


def _mask_of_text(vocabulary: Vocabulary) -> np.ndarray:
    """The mask of all tokens that have bytes."""
    allowed = np.zeros(mask_words(vocabulary.size) * 32, bool)
    allowed[: vocabulary.size] = [bool(spelling) for spelling in vocabulary.tokens]
    return np.packbits(allowed, bitorder="little").view(np.int32)
