"""A request inside the scheduler. Lengths are named by tense and derived where they can be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ramify.constraint import Constraint
from ramify.messages import ProgramHint, Submit, Unenforced, Usage
from ramify.radix.evicted import Lost
from ramify.runtime.scheduler.programs.programs import Program
from ramify.runtime.scheduler.speculation.acceptance import Track
from ramify.sampling_params import SamplingParams

if TYPE_CHECKING:
    from ramify.radix.lock import PrefixLock
    from ramify.runtime.scheduler.constraints.constrained import ConstrainedOutput
    from ramify.runtime.scheduler.constraints.healing import Healing
    from ramify.runtime.scheduler.scoring import Scoring, Stretch
    from ramify.runtime.scheduler.speculation.drafter import Guess

CONTEXT_IDS = 6
"""Prompt ids that the detokenizer is given as context: more than any tokenizer's spelling depends on."""


class Speculation:
    """What the drafter knows of a request."""

    __slots__ = ("guess", "next_pause", "pause", "track")

    def __init__(self) -> None:
        self.guess: Guess | None = None
        """The last one, until it has been seen how it came out."""
        self.track = Track()
        self.pause = 0
        """Steps until the next look, after looks that found nothing worth its row."""
        self.next_pause = 1


class Request:
    """One generation from its arrival to its last token.

    Tokens ``[0, length)`` are known: first the prompt, then the output. Of these the KV of
    ``[0, computed_len)`` is in pages; ``[computed_len, length)`` is to be computed, and a token is
    sampled when a step reaches `length`. Decoding is the case where one token is to be computed,
    prefill (and resumption after a retraction) where there are more.

    Pages: `pages[i]` holds tokens ``[i * page_size, (i + 1) * page_size)``. Pages of
    ``[0, hold.length)`` belong to the tree; those from `private_from` on are this request's own.
    """

    def __init__(self, submit: Submit, *, arrival: float, max_tokens: int, default_seed: int) -> None:
        self.rid = submit.rid
        self.sampling: SamplingParams = submit.sampling
        self.constraint: Constraint | None = submit.constraint
        self.preambles = submit.preambles
        self.hint: ProgramHint | None = submit.hint
        self.scope = submit.scope
        self.every_s = submit.every_s
        self.arrival = arrival
        self.max_tokens = max_tokens

        self.prompt_len = len(submit.ids)
        self.length = self.prompt_len
        self._ids = np.empty(self.prompt_len + min(max_tokens, 256) + 1, dtype=np.int32)
        self._ids[: self.prompt_len] = submit.ids

        self.computed_len = 0
        self.committed_len = 0
        self.pages: list[int] = []
        self.private_from = 0
        self.lock: PrefixLock | None = None
        self.copy: tuple[int, int] | None = None
        """(source, destination) of a partial page to be copied before the next forward pass."""

        self.constrained: ConstrainedOutput | None = None
        self.unenforced: tuple[Unenforced, ...] = ()
        self.seed = self.sampling.seed if self.sampling.seed is not None else default_seed
        self.draft_len = 0
        """Tokens after the known ones that are likely to come: computed with them, and kept one by one as
        they are chosen."""
        self.guessed_len = 0
        """How many of these, at the end, were looked up; those before are the grammar's or the prompt's."""
        self.speculation = Speculation()
        self.healing: Healing | None = None
        """While the draft is the end of the prompt."""
        self.overlap = b""
        """The end of the prompt that the first output token begins with."""
        self.scoring: Scoring | None = None
        """Its choices, where it has some."""
        self.stretch: Stretch | None = None
        """What of its tokens, or of those of its head, scores choices."""
        self.head = self
        """The request whose choices it scores."""
        self.reported_len = self.prompt_len
        """Tokens that the detokenizer has heard of, the prompt's included. Forced tokens whose
        log-probabilities are asked for are reported when they have been computed."""

        self.program = Program(arrival)
        """Its own, unless the scheduler finds the one that it belongs to."""
        self.served_before = 0.0
        """Service that the engine had given when this request arrived."""
        self.due: int | None = None
        """How many requests may have been admitted, ever, before this one goes before others."""
        self.distinct_len = 0
        """Prompt tokens that no earlier request of the program held."""
        self.cached_len: int | None = None
        """Prompt tokens found in the tree at the first admission."""
        self.lost = Lost(0, "")
        """Prompt tokens that would have been found had they not been evicted."""
        self.forced_tokens = 0
        self.forced_places: set[int] = set()
        """Which tokens these are."""
        self.retractions = 0
        self.first_pass: float | None = None
        self.first_token: float | None = None
        self.announced = False
        """Its first chunk went out."""
        self.prompt_logprobs: list[tuple[int, float | None, tuple[tuple[int, float], ...]]] = []

    @property
    def owner(self) -> str:
        """Who has its leases."""
        return self.rid if self.hint is None else self.hint.program

    @property
    def taker(self) -> str:
        """Who takes the pages that it needs, for people to read."""
        return self.rid if self.hint is None else f"{self.hint.name} {self.hint.program}".strip()

    @property
    def ids(self) -> np.ndarray:
        """(length,) int32: prompt and output."""
        return self._ids[: self.length]

    @property
    def output_len(self) -> int:
        return max(0, self.length - self.prompt_len)

    @property
    def extend_len(self) -> int:
        """Tokens to be computed before the next one can be sampled."""
        return self.length - self.computed_len

    @property
    def prompt_tokens(self) -> int:
        """Those of the prompt, and of choices that are computed."""
        return self.prompt_len if self.scoring is None else self.scoring.tokens

    @property
    def target_len(self) -> int:
        """Tokens with a place in the pages: the known ones and the draft."""
        return self.length + self.draft_len

    @property
    def budget_left(self) -> int:
        return self.max_tokens - self.output_len

    @property
    def prefilling(self) -> bool:
        return self.computed_len < self.prompt_len

    @property
    def match_limit(self) -> int:
        """Most tokens that may come from the tree: at least one must be computed to get logits."""
        if self.stretch is not None:
            return self.stretch.first_state
        if self.wants_prompt_logprobs:
            assert self.sampling.prompt_logprobs_start is not None
            return min(self.length - 1, max(self.sampling.prompt_logprobs_start - 1, 0))
        if self.max_tokens == 0:
            return self.length
        # What predicts a token that has not been reported must be computed as well.
        return self.reported_len - 1

    @property
    def in_free_text(self) -> bool:
        """A structural tag's text may stand anywhere between its tags: the matcher does not say where."""
        wanted = self.constraint
        if wanted is None or wanted.kind != "structural_tag":
            return False
        return any(word in wanted.source for word in ("any_text", "trigger"))

    @property
    def wants_logprobs(self) -> bool:
        """Of known tokens, the prompt's or forced ones."""
        return self.sampling.logprobs is not None or self.wants_prompt_logprobs

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Until the first chunk has carried them away."""
        return self.sampling.prompt_logprobs_start is not None and not self.announced

    @property
    def known_and_draft(self) -> np.ndarray:
        """(target_len,) int32."""
        return self._ids[: self.target_len]

    @property
    def output(self) -> np.ndarray:
        """(output_len,) int32."""
        return self._ids[self.prompt_len : self.length]

    def append(self, token: int) -> None:
        if self.healing is not None:
            # A longer token comes instead of what is left of the prompt.
            self.prompt_len = self.length
            self.overlap = self.healing.rest
            self.healing = None
        self._place(self.length, token)
        self.length += 1
        self.draft_len = self.guessed_len = 0

    def heal(self, healing: Healing, tokens: int) -> None:
        """Take the last `tokens` of the prompt for a draft."""
        self.healing = healing
        self.length = self.reported_len = self.prompt_len - tokens
        self.draft_len = tokens

    def propose(self, token: int) -> None:
        """Make `token` the draft."""
        self._place(self.length, token)
        self.draft_len = 1

    @property
    def may_guess(self) -> bool:
        """Log-probabilities of forced tokens are read off the step that computes them: no guesses there."""
        told = self.sampling.logprobs is not None and self.constrained is not None
        return (
            self.budget_left > 1
            and self.stretch is None
            and self.healing is None
            and not (self.guessed_len or told or self.wants_prompt_logprobs)
        )

    def guess(self, tokens: Sequence[int]) -> None:
        """Add `tokens` to the draft."""
        for token in tokens:
            self._place(self.target_len, token)
            self.draft_len += 1
        self.guessed_len += len(tokens)

    def drop_guesses(self) -> int:
        """Take them back, and say how many there were."""
        dropped, self.guessed_len = self.guessed_len, 0
        self.draft_len -= dropped
        return dropped

    @property
    def next_draft(self) -> int | None:
        """The token that is likely to come next."""
        return int(self._ids[self.length]) if self.draft_len else None

    @property
    def next_is_guess(self) -> bool:
        return 0 < self.draft_len == self.guessed_len

    def follow(self, start: int, guesses: np.ndarray) -> int:
        """Tokens from `start` on have become known, and `guesses` (n,) were computed in their place.

        Returns how many of them were guessed, where all of them were: the guesses behind them are the draft
        again. 0 where some are still to be computed.
        """
        added = self.length - start
        right = common_prefix(self.ids[start:], guesses)
        self.computed_len = start + right
        if right < added:
            return 0
        forced, rest = self.next_draft, guesses[added:].tolist()
        self.draft_len = 0
        if rest and rest[0] == forced:
            self.propose(rest.pop(0))
        self.guess(rest)
        return added

    def keep_draft(self) -> None:
        """The next draft token was chosen: it is known now, and computed."""
        self.length += 1
        self.computed_len = self.length
        self.draft_len -= 1
        if self.healing is not None:
            self.reported_len = self.length
            self.healing = self.healing.after(int(self._ids[self.length - 1])) if self.draft_len else None

    def _place(self, position: int, token: int) -> None:
        if position == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty(len(self._ids), dtype=np.int32)])
        self._ids[position] = token

    def usage(self, now: float) -> Usage:
        def since_arrival(moment: float | None) -> float:
            return 0.0 if moment is None else moment - self.arrival

        return Usage(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_len or 0,
            distinct_tokens=self.distinct_len,
            evicted_tokens=self.lost.tokens,
            evicted_by=self.lost.taker,
            completion_tokens=self.output_len,
            forced_tokens=self.forced_tokens,
            retractions=self.retractions,
            queue_s=since_arrival(self.first_pass),
            first_token_s=since_arrival(self.first_token),
            total_s=now - self.arrival,
        )


def common_prefix(left: np.ndarray, right: np.ndarray) -> int:
    """Tokens that two sequences share from the start."""
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length
