"""One request's constrained output: its matcher, the mask for the sampler, jump-forward, and token healing.

``"http:"`` ends with the token ``":"``. The model has never seen ``"//"`` after that token, because its
training text has the one token ``"://"``. So the last tokens of a prompt that ends in plain text are only
proposed: if the model prefers a longer token that begins with their text, that token replaces them. Otherwise
nothing changes (Lundberg, "The Art of Prompt Design", 2023).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ramify.errors import EngineError
from ramify.grammar.matcher import allow, allowed_among, mask_words, single_token
from ramify.grammar.vocabulary import Vocabulary, tokens_beginning_with

if TYPE_CHECKING:
    from ramify.grammar.matcher import Matcher
    from ramify.grammar.retokenize import Retokenizer


PROSE = [bytes([byte]) for byte in (0x0A, *range(0x20, 0x7F))]
"""The characters of ordinary text, in ASCII."""

MOST_MISSED = 12
"""Characters of `PROSE` that free text may lack: those that end a trigger, or an excluded text."""


class Jump(NamedTuple):
    """Forced tokens, already accepted by the matcher.

    `tokens` replace the last `replaced` tokens of the output. `draft` is the probable next token: forced text
    spells it, but longer tokens that begin like it are allowed as well, so the model must choose.
    """

    replaced: int
    tokens: tuple[int, ...]
    draft: int | None


class ConstrainedOutput:
    """`stop_ids` end an output; the matcher allows all of them where the text may end.

    `mask` is the (ceil(vocab / 32),) int32 bitmask of the tokens that may come next, or None where all may.
    It is valid after `fill`, until the next `accept`. It is computed once for each budget: the end of a step
    and the start of the next ask for the same.
    """

    def __init__(
        self, matcher: Matcher, vocab_size: int, stop_ids: Sequence[int], retokenizer: Retokenizer | None
    ) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._stop_ids = frozenset(stop_ids)
        self._retokenizer = retokenizer
        self._row = np.zeros(mask_words(vocab_size), dtype=np.int32)
        self.mask: np.ndarray | None = None
        self._budget: int | None = None
        """Token budget that `mask` was computed for; None while it is stale."""

    @property
    def complete(self) -> bool:
        """True where the output may end here."""
        return self._matcher.complete

    @property
    def whole(self) -> bool:
        """True where the output is complete, and not cut inside free text: there the model itself has to end
        it.

        In free text nearly any character of `PROSE` may come next, all but `MOST_MISSED`, and the output is
        complete after each of them as well.
        """
        if not self._matcher.complete:
            return False
        matcher = self._matcher.fork()
        missed = sum(not _goes_on(matcher, char) for char in PROSE)
        return missed > MOST_MISSED

    @property
    def needed(self) -> int:
        """Upper bound of the tokens that complete the output, without a stop token; 0 if the engine cannot
        say."""
        return self._matcher.completion_tokens or 0

    @property
    def answer_tokens(self) -> int | None:
        """The number of tokens behind the preambles that are `apart`; None while one of these is open."""
        found: int | None = getattr(self._matcher, "answer_tokens", None)  # of a PreambleMatcher
        return found

    def fork(self) -> ConstrainedOutput:
        """An independent output in the same state."""
        return ConstrainedOutput(
            self._matcher.fork(), self._vocab_size, tuple(self._stop_ids), self._retokenizer
        )

    def accept(self, token: int) -> None:
        """Advance over a token that the mask allowed."""
        self._budget = None
        if not self._matcher.accept(token):
            raise EngineError(f"The grammar refused token {token}, which its mask had allowed.")

    def fill(self, budget: int, *, may_be_empty: bool = False) -> None:
        """Compute `mask`: the tokens after which the output can be completed within `budget` tokens in all.

        Raises `EngineError` if the mask allows nothing, unless it `may_be_empty`.
        """
        if self._restricts(budget) and not may_be_empty and not self._row.any():
            raise EngineError("The grammar allows no token here.")

    def _restricts(self, budget: int) -> bool:
        """True where only some tokens may come. Computes `mask`, if need be."""
        if self._budget != budget:
            self.mask = self._row if self._matcher.fill_mask(self._row, budget) else None
            self._budget = budget
        return self.mask is not None

    def only_end(self, budget: int) -> int | None:
        """The lowest stop token if only stop tokens are allowed, else None."""
        if not self.complete or not self._restricts(budget):
            return None
        stops = allowed_among(self._row, self._stop_ids)
        return min(stops) if stops else None

    def jump(self, before: Sequence[int], loose: int, room: int) -> Jump | None:
        """The forced tokens after the output tokens `before`, of which the last `loose` may be replaced.

        At most `room` tokens may follow `before`, and the output must be completed within them.
        """
        if self._retokenizer is None:
            return self._single(room)
        data = self._matcher.forced_bytes()
        if not data:
            return None
        found = self._retokenizer.extend(before, loose, data)
        if found is None:
            return self._single(room)
        replaced, tokens = found
        kept = tuple(before[len(before) - replaced :])
        if kept == tokens[:replaced]:
            replaced, tokens = 0, tokens[len(kept) :]
        self._rollback(replaced)
        self._accept_all(tokens)
        draft = None
        # A token that replaces the last one cannot be a draft: the logits that predict it are consumed
        # already.
        if len(tokens) > replaced and self._retokenizer.continues(tokens[-1]):
            self._rollback(1)
            tokens, draft = tokens[:-1], tokens[-1]
        if len(tokens) - replaced + self.needed > room:
            # The tokenizer's own spelling is not the shortest, and does not fit into `room`.
            self._rollback(len(tokens))
            self._accept_all(kept[len(kept) - replaced :])
            return None
        return Jump(replaced, tokens, draft) if tokens or draft is not None else None

    def _single(self, room: int) -> Jump | None:
        """A jump over the only token that the mask allows, if it allows one that is no stop token."""
        if room < 1 or (self.complete and self._stop_ids) or not self._restricts(room):
            return None
        token = single_token(self._row)
        if token is None or token in self._stop_ids:
            return None
        self.accept(token)
        return Jump(0, (token,), None)

    def _rollback(self, tokens: int) -> None:
        self._budget = None
        self._matcher.rollback(tokens)

    def _accept_all(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.accept(token)


def _goes_on(matcher: Matcher, data: bytes) -> bool:
    """True where `data` may come here and the text is complete after it. Leaves the matcher as it is."""
    if not matcher.accept_bytes(data):
        return False
    complete = matcher.complete
    matcher.rollback(1)
    return complete


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
