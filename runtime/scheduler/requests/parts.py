"""The parts of a request: page table, report, statistics, state of speculation, and pooled states."""

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
    from ramify.runtime.scheduler.requests.slots import RunningSlots


Logprob = tuple[int, float | None, tuple[tuple[int, float], ...]]
"""(token id, log-probability, the most likely tokens in that place as (id, log-probability) pairs)."""


NONE = np.zeros(0, dtype=np.int32)


@dataclasses.dataclass(slots=True, eq=False)
class PageTable:
    """The KV pages of one request, in its slot of `RunningSlots.pages`.

    The pages ``ids[:lock.private_from]`` belong to the prefix tree, in which `lock` keeps them. The request
    owns the others.
    """

    slots: RunningSlots | None = None
    slot: int = -1
    """The request's slot; -1 while it has no pages."""
    count: int = 0
    """The number of pages."""
    lock: PrefixLock | None = None
    """None while the request has no pages: before its admission, after a retraction, and after its end."""
    committed_len: int = 0
    """The number of tokens whose KV has been put into the tree."""
    copy: tuple[int, int] | None = None
    """(source, destination): a page to be copied before the next forward pass (copy-on-write)."""
    state: int | None = None
    """The slot of the request's state; None if the model has no states."""
    state_len: int = 0
    """The number of tokens that the state has seen. After a failed pass it differs from `computed_len`."""
    saved: int | None = None
    """The slot of the state before draft tokens, until these are verified; else None."""
    saved_len: int = 0
    """The number of tokens that the saved state has seen."""
    kept_len: int = 0
    """The last position of the request at which the tree holds a state, or at which the tree gave no slot."""

    @property
    def ids(self) -> np.ndarray:
        """(count,) int32: ``ids[i]`` holds tokens ``[i * page_size, (i + 1) * page_size)``. A view, valid
        until the next `extend` of any request."""
        if self.slots is None:
            return NONE
        found: np.ndarray = self.slots.pages[self.slot, : self.count]
        return found

    def extend(self, pages: Sequence[int]) -> None:
        """Add `pages`, which the request owns."""
        assert self.slots is not None
        self.slots.add_pages(self.slot, self.count, pages)
        self.count += len(pages)


@dataclasses.dataclass(slots=True)
class Report:
    """The report of one request to the detokenizer: whether its first chunk has been sent, and the data for
    that chunk."""

    announced: bool = False
    """True if the first chunk has been sent."""
    prompt_logprobs: list[Logprob] = dataclasses.field(default_factory=list)
    enforcement: Enforcement | None = None
    overlap: bytes = b""
    """The text at the end of the prompt with which the first output token begins (token healing)."""
    replaced: int = 0
    """The number of prompt tokens that spelled `overlap` and were replaced."""
    forced: set[int] = dataclasses.field(default_factory=set)
    """Positions of the tokens that the grammar forced."""


@dataclasses.dataclass(slots=True)
class RequestStats:
    """The cost of one request. `queued`, `first_pass` and `first_token` are readings of the scheduler's
    clock, in seconds."""

    queued: float | None
    """The arrival, or the moment when the request's grammar was compiled; None before that moment."""

    distinct_tokens: int = 0
    """The number of prompt tokens that no earlier request of the program had."""
    cached_tokens: int | None = None
    """The number of prompt tokens found in the tree at the first admission; None before the first
    admission."""
    reached: int = 0
    """The most tokens whose KV the request has had in its pages. Updated whenever the request gives its pages
    back."""
    lost: Lost = dataclasses.field(default_factory=lambda: Lost(0, ""))
    """The number of prompt tokens that would have been found in the tree if they had not been evicted, and
    the taker of most of them."""
    forced_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    model_draft_tokens: int = 0
    model_accepted_tokens: int = 0
    retractions: int = 0
    first_pass: float | None = None
    first_token: float | None = None


class Draft(NamedTuple):
    """Draft tokens, proposed for the positions from `position` on.

    grades : for each token, the number of tokens before it that match (prompt lookup), or the draft model's
        confidence on a scale from 1 to `LONGEST_MATCH`
    """

    source: str
    grades: list[int]
    position: int
    tokens: list[int]


class RequestAcceptance:
    """The acceptance rate of one request's draft tokens, from fading counts of about the last ten."""

    __slots__ = ("_accepted", "_verified")
    FADE = 0.9
    PRIOR_WEIGHT = 4.0
    """Weight of the prior: the acceptance rate over all requests counts as much as this number of draft
    tokens of the request itself."""

    def __init__(self) -> None:
        self._accepted = self._verified = 0.0

    def learn(self, *, accepted: bool) -> None:
        self._accepted = self._accepted * self.FADE + accepted
        self._verified = self._verified * self.FADE + 1.0

    def rate(self, general: float) -> float:
        """The probability that a draft token of this request is accepted. `general` is the rate of all
        requests."""
        return (general * self.PRIOR_WEIGHT + self._accepted) / (self.PRIOR_WEIGHT + self._verified)


@dataclasses.dataclass(slots=True)
class SpeculationState:
    """The drafter's state of one request."""

    draft: Draft | None = None
    """The last draft by prompt lookup, until its outcome has been learned from."""
    model_draft: Draft | None = None
    """The last draft by the draft model, until its outcome has been learned from."""
    by_model: bool = False
    """True if the request's draft tokens come from the draft model."""
    recomputed_len: int = 0
    """The number of tokens that the next step computes again, because the request's state went back to before
    draft tokens."""
    acceptance: RequestAcceptance = dataclasses.field(default_factory=RequestAcceptance)
    """Acceptance of draft tokens by prompt lookup."""
    model_acceptance: RequestAcceptance = dataclasses.field(default_factory=RequestAcceptance)
    """Acceptance of the draft model's tokens."""
    kv: DraftKv | None = None
    """KV that the draft model has computed."""
    pause: int = 0
    """Steps to go until the next lookup."""
    next_pause: int = 1
    """The length of the next pause in steps. The length doubles after each lookup that found no draft worth
    its rows."""


@dataclasses.dataclass(slots=True)
class DraftKv:
    """The KV that the draft model has computed for one request. The KV is void once the request has another
    page table than `table`."""

    table: PageTable
    computed: int
    """The number of tokens of the sequence whose KV is computed."""
    ahead: np.ndarray = dataclasses.field(default_factory=lambda: NONE)
    """The known and draft tokens after the first `computed` tokens whose KV is computed too, (n,) int32. This
    KV can be used only if the same tokens have joined the sequence."""


class PooledStates:
    """Pools the hidden states of a prompt, taken chunk by chunk, in order.

    Sums are in float64, in the order of the positions, so that the result does not depend on the sizes of the
    chunks.
    """

    def __init__(self, pooling: Pooling) -> None:
        self._mean = pooling == "mean"
        self._count = 0
        """The number of hidden states that have been taken."""
        self._pooled: torch.Tensor | None = None
        """(hidden size,) float64: the sum of all hidden states, or the last hidden state."""

    @property
    def reusable(self) -> int:
        """The number of tokens, from the first on, whose hidden states are not needed any more, so that their
        KV may come from the tree."""
        return self._count if self._mean else 1 << 62

    def take(self, states: torch.Tensor, start: int) -> None:
        """Take `states`, (n, hidden size), the hidden states of the positions from `start` on. Positions that
        were taken before a retraction do not count twice."""
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
            self._pooled = rows.cumsum(0)[-1]  # adds row after row; `sum` would add blocks of rows

    def embedding(self) -> bytes:
        """The pooled state as bytes: (hidden size,) float32, little-endian."""
        assert self._pooled is not None
        pooled = self._pooled / self._count if self._mean else self._pooled
        return pooled.cpu().numpy().astype("<f4").tobytes()
