"""The parts of a request: pages, report, statistics, and what is kept for speculation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from ramify.messages import Enforcement, Pooling
from ramify.radix.evicted import Lost

if TYPE_CHECKING:
    from ramify.radix.lock import PrefixLock


Logprob = tuple[int, float | None, tuple[tuple[int, float], ...]]
"""Token id, its log-probability, and the most likely (id, log-probability) pairs."""


@dataclasses.dataclass(slots=True)
class PageTable:
    """The KV pages of one request: `ids[i]` holds tokens ``[i * page_size, (i + 1) * page_size)``.

    `ids` is int32: a step copies it into its batch without a Python object for each page. Pages
    ``ids[:private_from]`` belong to the prefix tree, where `lock` keeps them. The others are this request's
    own.
    """

    ids: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, np.int32))
    private_from: int = 0
    lock: PrefixLock | None = None
    """None while the request has no pages: before its admission, after a retraction, and at its end."""
    committed_len: int = 0
    """Tokens whose KV the tree has been handed."""
    copy: tuple[int, int] | None = None
    """(source, destination): a page to be copied before the next forward pass (copy-on-write)."""
    state: int | None = None
    """The slot of its state, where the model has states."""
    state_len: int = 0
    """Tokens that the state has seen; after a failed pass not `computed_len`."""
    kept_len: int = 0
    """Tokens up to the last place where the tree holds a state, or had none to spare."""

    def extend(self, pages: Sequence[int]) -> None:
        """Add pages of the request's own."""
        self.ids = np.concatenate([self.ids, np.array(pages, np.int32)])


@dataclasses.dataclass(slots=True)
class Report:
    """The report of one request to the detokenizer: the state of what was sent, and parts of the first
    chunk."""

    announced: bool = False
    """The first chunk has been sent."""
    prompt_logprobs: list[Logprob] = dataclasses.field(default_factory=list)
    enforcement: Enforcement | None = None
    overlap: bytes = b""
    """The end of the prompt that the first output token replaces and begins with (token healing)."""
    replaced: int = 0
    """Tokens of the prompt that spelled `overlap`."""
    forced: set[int] = dataclasses.field(default_factory=set)
    """Positions of the tokens that the grammar forced."""


@dataclasses.dataclass(slots=True)
class RequestStats:
    """The cost of one request; moments are those of the scheduler's clock, in seconds."""

    distinct_tokens: int = 0
    """Prompt tokens that no earlier request of the program held."""
    cached_tokens: int | None = None
    """Prompt tokens found in the tree at the first admission; None before it."""
    reached: int = 0
    """Most tokens whose KV was in its pages, as of the last time that it gave them back."""
    lost: Lost = dataclasses.field(default_factory=lambda: Lost(0, ""))
    """Prompt tokens that would have been found in the tree had they not been evicted."""
    forced_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    model_draft_tokens: int = 0
    model_accepted_tokens: int = 0
    retractions: int = 0
    first_pass: float | None = None
    first_token: float | None = None


class Draft(NamedTuple):
    """`tokens`, proposed for the positions from `position` on.

    grades : for each token the number of tokens before it that match, or a draft model's confidence in
        eighths
    """

    source: str
    grades: list[int]
    position: int
    tokens: list[int]


class RequestAcceptance:
    """Acceptance of one request's draft tokens, by fading counts of about the last ten."""

    __slots__ = ("_accepted", "_verified")
    FADE = 0.9
    PRIOR_WEIGHT = 4.0
    """The rate of all requests weighs as much as this number of the request's own draft tokens."""

    def __init__(self) -> None:
        self._accepted = self._verified = 0.0

    def learn(self, *, accepted: bool) -> None:
        self._accepted = self._accepted * self.FADE + accepted
        self._verified = self._verified * self.FADE + 1.0

    def rate(self, general: float) -> float:
        """The probability of acceptance for this request, where it is `general` for all."""
        return (general * self.PRIOR_WEIGHT + self._accepted) / (self.PRIOR_WEIGHT + self._verified)


@dataclasses.dataclass(slots=True)
class SpeculationState:
    """The drafter's state of one request."""

    draft: Draft | None = None
    """The last draft by prompt lookup, until its outcome has been learned from."""
    model_draft: Draft | None = None
    """The last draft by the draft model, until its outcome has been learned from."""
    by_model: bool = False
    """True where the request's draft tokens come from the draft model."""
    acceptance: RequestAcceptance = dataclasses.field(default_factory=RequestAcceptance)
    """Acceptance of looked-up tokens."""
    model_acceptance: RequestAcceptance = dataclasses.field(default_factory=RequestAcceptance)
    """Acceptance of the draft model's tokens."""
    kv: DraftKv | None = None
    """KV that the draft model has computed."""
    pause: int = 0
    """Steps to go until the next lookup."""
    next_pause: int = 1
    """Steps of the next pause: doubled after each lookup that found no draft worth its rows."""


NONE = np.zeros(0, dtype=np.int32)


@dataclasses.dataclass(slots=True)
class DraftKv:
    """KV that the draft model has computed of one request; void once the request has other pages than
    `table`."""

    table: PageTable
    computed: int
    """Tokens of the sequence."""
    ahead: np.ndarray = dataclasses.field(default_factory=lambda: NONE)
    """(n,) int32: known and draft tokens behind them. They count once the sequence has them."""


class PooledStates:
    """Takes the states of the prompt chunk by chunk, in order.

    Sums are in float64, in the order of the positions, so that the sizes of the chunks do not show.
    """

    def __init__(self, pooling: Pooling) -> None:
        self._mean = pooling == "mean"
        self._count = 0
        """States that were taken."""
        self._pooled: torch.Tensor | None = None
        """(hidden size,) float64: the sum of all states, or the last one."""

    @property
    def reusable(self) -> int:
        """The most tokens whose states are not needed any more, so that their KV may come from the tree."""
        return self._count if self._mean else 1 << 62

    def take(self, states: torch.Tensor, start: int) -> None:
        """Take `states`, (n, hidden size), of the positions from `start` on. States taken before a retraction
        do not count again."""
        new = states[max(0, self._count - start) :]
        if not len(new):
            return
        self._count = start + len(states)
        if not self._mean:
            self._pooled = new[-1].double()
        else:
            rows = new.double()
            if self._pooled is not None:
                rows = torch.cat([self._pooled[None], rows])
            self._pooled = rows.cumsum(0)[-1]  # row after row, where `sum` would add blocks of rows

    def embedding(self) -> bytes:
        """(hidden size,) float32, little-endian."""
        assert self._pooled is not None
        pooled = self._pooled / self._count if self._mean else self._pooled
        return pooled.cpu().numpy().astype("<f4").tobytes()
