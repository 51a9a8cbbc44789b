"""One request's constrained output: its matcher, the mask for the sampler, jump-forward, and token healing.

Token healing (Lundberg, "The Art of Prompt Design", 2023) repairs a prompt that ends inside a token. The
prompt ``"http:"`` ends with the token ``":"``. The model has never seen ``"//"`` after that token, because
its training text has the one token ``"://"``. So the last tokens of a prompt that ends in plain text are only
proposed to the model. If the model prefers a longer token that begins with their text, the longer token
replaces the proposed tokens. Otherwise these are kept.
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
"""The characters of ordinary ASCII text, by which free text is recognised."""

MOST_MISSED = 12
"""The most characters of `PROSE` that may be impossible inside free text, because they would complete a
trigger or an excluded text."""


class Jump(NamedTuple):
    """Forced tokens, already accepted by the matcher.

    `tokens` replace the last `replaced` tokens of the output. `draft` is the probable next token, or None.
    The forced text continues with the text of `draft`, but longer tokens that begin with this text are
    allowed too, so the model must choose.
    """

    replaced: int
    tokens: tuple[int, ...]
    draft: int | None


class ConstrainedOutput:
    """The constrained output of one request. `stop_ids` end an output; the matcher allows all of them where
    the text may end.

    `mask` is the (ceil(vocab / 32),) int32 bitmask of the tokens that may come next, or None if all may.
    `mask` is valid after `fill`, until the next `accept`. `fill` with the same budget does not compute the
    mask anew, because the end of a step and the start of the next step need the same mask.
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
        """The token budget that `mask` was computed for; None while `mask` is stale."""

    @property
    def complete(self) -> bool:
        """True if the output may end here."""
        return self._matcher.complete

    @property
    def whole(self) -> bool:
        """True if the output is complete and does not stop inside free text, which is whole only if the model
        itself ends it.

        The output is inside free text if nearly every character of `PROSE`, all but at most `MOST_MISSED`,
        may come next and leaves the output complete.
        """
        if not self._matcher.complete:
            return False
        matcher = self._matcher.fork()
        missed = sum(not _goes_on(matcher, char) for char in PROSE)
        return missed > MOST_MISSED

    @property
    def needed(self) -> int:
        """An upper bound on the number of tokens that complete the output, without a stop token; 0 if the
        grammar engine gives no bound."""
        return self._matcher.completion_tokens or 0

    @property
    def answer_tokens(self) -> int | None:
        """The number of output tokens after the `apart` preambles; None before these preambles have ended,
        and for a request without preambles."""
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
        """Compute `mask`: the next tokens after which the output can be completed within `budget` tokens in
        all.

        Raises `EngineError` if the mask allows no token, unless `may_be_empty` is set.
        """
        if self._restricts(budget) and not may_be_empty and not self._row.any():
            raise EngineError("The grammar allows no token here.")

    def _restricts(self, budget: int) -> bool:
        """True if not all tokens may come next. Computes `mask` unless it is valid for `budget`."""
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
        """The jump over the tokens that are forced after `before`, the last output tokens; None if no token
        is forced.

        The last `loose` tokens of `before` may be replaced. At most `room` tokens may follow `before`, and
        they must suffice to complete the output.
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
        # A token in place of the last output token cannot be a draft: the logits that would choose it have
        # been used already.
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
        """A jump over the only token that the mask allows; None if there are several, or it is a stop
        token."""
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
    """True if `data` may come next and the text is complete after it. Leaves the matcher as it was."""
    if not matcher.accept_bytes(data):
        return False
    complete = matcher.complete
    matcher.rollback(1)
    return complete


MAX_TOKENS = 4
"""The most tokens at the end of a prompt that token healing may replace."""
MAX_MASKS = 256


class OpenEnd(NamedTuple):
    """The end of a prompt that is to be healed: the last `tokens` tokens spell `text`, and some longer token
    begins with `text`."""

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
        """The longest end of `prompt`, at most `MAX_TOKENS` tokens, with whose text a longer token begins;
        None if there is none. The first token of `prompt` is never part of the end."""
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
        """The mask of the tokens that begin with `text`: (ceil(vocab / 32),) int32. Callers must not write to
        it."""
        row = np.zeros(self._words, np.int32)
        allow(row, [token for _, token in tokens_beginning_with(text, self._vocabulary, whole=True)])
        return row

    def spelling(self, token: int) -> bytes:
        return self._tokens[token]


class Healing:
    """The state of token healing of one prompt. `rest` is the text of the tokens that are proposed and not
    yet chosen."""

    def __init__(self, healer: Healer, rest: bytes) -> None:
        self._healer = healer
        self.rest = rest

    def mask(self, proposed: int, grammar: np.ndarray | None) -> np.ndarray:
        """The mask of the token `proposed`, and of all tokens that begin with `rest` and that the mask
        `grammar` allows. If `grammar` is None, all tokens are allowed."""
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
