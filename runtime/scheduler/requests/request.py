"""A request inside the scheduler, from its arrival to its last token.

    tokens   | prompt               | output      | known | draft |
             0             prompt_len        length        target_len
    KV       | in the tree     | private   |
             0     committed_len  computed_len

In the figure, the prompt and some of the output are computed. `extend_len` is the number of tokens from
`computed_len` to `length`, which must be computed before the next token can be sampled. It is 1 while the
request decodes, and larger in a prefill and after a retraction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ramify.constraint import Constraint
from ramify.engine_messages import Submit, flow_key
from ramify.kernels.arguments.sampling_inputs import TokenCounts
from ramify.messages import ProgramHint, Usage
from ramify.priority import MOST
from ramify.runtime.lora_names import tree_scope
from ramify.runtime.scheduler.requests.flows import Flow
from ramify.runtime.scheduler.requests.parts import (
    PageTable,
    PooledStates,
    Report,
    RequestStats,
    SpeculationState,
)
from ramify.runtime.scheduler.requests.programs import Program
from ramify.sampling_params import SamplingParams

if TYPE_CHECKING:
    from ramify.grammar.matcher import Grammar
    from ramify.runtime.model.lora.adapters import Adapter
    from ramify.runtime.scheduler.requests.choices import ScoringState
    from ramify.runtime.scheduler.requests.constrained import ConstrainedOutput, Healing
    from ramify.runtime.scheduler.requests.decisions import Decisions, Part

FORCED_RUN = 16
"""A request whose prompt is computed counts as decoding while it has at most this number of tokens to
compute. So the tokens that a grammar forces do not wait for the budget of prefills."""

LEAST_RANK, MOST_RANK = -3 * MOST - 2, 3 * MOST
"""The range of `Request.rank`."""


class Request:
    """One generation, or one span of choices to be scored.

    Tokens ``[0, length)`` are the sequence: the prompt, then the output. After the sequence there may be
    `known_len` known tokens and `draft_len` draft tokens, which are computed together with the sequence. A
    known or draft token joins the sequence if the same token is chosen in its place. Known tokens come from
    text that the grammar forces, or are the end of the prompt (token healing). Only a longer token that
    begins with the same text can be chosen in place of a known token. Draft tokens are speculative.
    """

    def __init__(
        self,
        submit: Submit,
        *,
        arrival: float,
        max_tokens: int,
        adapter: Adapter | None = None,
        decisions: Decisions | None = None,
    ) -> None:
        self.rid = submit.rid
        self.sampling: SamplingParams = submit.sampling
        self.constraint: Constraint | None = submit.constraint
        self.preambles = submit.preambles
        self.hint: ProgramHint | None = submit.hint
        self.run_hint = None if submit.hint is None or submit.hint.session else submit.hint
        """The hint of a program that ends; None for a request without a program, and for one of a session."""
        self.adapter = adapter
        """The LoRA adapter of the request. The adapter keeps its slot until the request ends."""
        self.key = submit.key
        """Name of the API key; "" without keys."""
        self.scope = tree_scope(submit.scope, None if adapter is None else adapter.revision)
        self.every_s = submit.every_s
        self.continues = submit.continues
        """The output that the request had on an engine that has died; None once it has been replayed."""
        self.arrival = arrival
        self.prompt_len = len(submit.ids)
        self.priority = submit.priority
        program = "" if submit.hint is None else submit.hint.program
        self.flow_key = (
            *(submit.priority, submit.key, submit.scope),
            *flow_key(program, submit.flow, submit.rid),
        )
        self.flow = Flow(submit.priority)
        """The request's flow: one of its own until `Flows.join` sets another."""
        self.decisions = decisions
        """The questions about the prompt; None for other requests."""
        self.uncached = self.prompt_len + self.behind
        """The number of tokens of the prompt and of questions that were not cached when the request was
        enqueued."""
        self.rank = self.flow.rank
        """`Flow.rank` of the request's flow. Requests of higher rank go first."""
        self.order = (-self.rank, arrival)
        """The sort key of running and of waiting requests: highest rank first; of equal ranks, the oldest."""
        self.max_tokens = max_tokens
        own_limit = any(one.uncounted for one in submit.preambles)
        self.answer_tokens = self.sampling.max_tokens if own_limit else None
        """The most tokens of the answer, which begins after the `apart` preambles. None once the answer has
        begun, and if `max_tokens` counts the preambles too."""
        self.answer_start = None if any(one.apart for one in submit.preambles) else 0
        """The number of output tokens before the answer; None before the answer begins. `min_tokens` and stop
        tokens apply to the answer only."""
        self.seed = self.sampling.seed or 0

        self.length = self.prompt_len
        self.computed_len = 0
        """The number of tokens whose KV is in pages."""
        self.reported_len = self.prompt_len
        """The number of tokens already reported, the prompt included. With logprobs a forced token is
        reported one step late: its log-probability needs the hidden state before it."""
        self.known_len = 0
        self.draft_len = 0
        self.plain = False
        """True if the request only generates text: no choices or questions, no embedding, no
        log-probabilities, no output held back. It may have a grammar, penalties, healing, and known or draft
        tokens. So each part of the short way tests more: `StepPlanner` and `StepResults` that the step
        computes one token and no known or draft one, `OutputAppender.accept_plain` that no grammar, report or
        end of the output hangs on the token."""
        self.computes_ahead = True
        """True if known tokens are computed before they are chosen. False in models with states: a state
        cannot be rolled back to an earlier token, unless it was saved there."""
        self.forks = submit.forks
        self.marks: list[int] = []
        """Sorted positions at which a pass is to end, so that the state there can be kept."""
        self.buffer = np.empty(self.prompt_len + min(max_tokens, 256) + 1, dtype=np.int32)
        """`target_ids`, and room for more tokens."""
        self.buffer[: self.prompt_len] = submit.ids

        self._counts: TokenCounts | None = None

        self.pages = PageTable()
        self.report = Report()
        self.stats = RequestStats(queued=arrival)
        self.speculation = SpeculationState()
        self.pooled = None if submit.pooling is None else PooledStates(submit.pooling)
        """The pooled states of the prompt; None unless the request asks for an embedding."""
        self.scoring: ScoringState | None = None
        """The span of choices that the request computes; None unless choices are scored."""
        self.constrained: ConstrainedOutput | None = None
        self.grammar: Grammar | None = None
        """The grammar of `constrained`, whose cache of masks its matchers share. None for free text."""
        self.healing: Healing | None = None
        """The state of token healing; None unless the known tokens are the end of the prompt."""
        self.program = Program(arrival)
        """The request's program: one of its own until `Programs.join` sets another."""
        self.served_before = 0.0
        """`Programs.served` when the request arrived."""
        self.deadline: int | None = None
        """Once the scheduler has made this number of admissions since its start, the request goes first. None
        until the policy has looked at the request."""
        self.expired = False
        """True if the `deadline` had passed when the request was admitted. The request is then not retracted
        to admit others."""

    def find_plain(self) -> None:
        """Set `plain`. Called when the request starts to run."""
        parts = (self.scoring, self.decisions, self.pooled)
        params = self.sampling
        asked = (params.logprobs, params.prompt_logprobs_start)
        self.plain = all(each is None for each in parts + asked) and not self.every_s

    def count_uncached(self, found: int) -> None:
        """Set `uncached` by the first `found` tokens, which need not be computed. If a prefill of the request
        has been broken off, `uncached` does not decrease."""
        uncached = max(0, self.prompt_len + self.behind - found)
        begun = 0 < self.stats.reached < self.prompt_len
        self.uncached = max(self.uncached, uncached) if begun else uncached

    def share_prefix(self) -> int:
        """The number of tokens that this request shares with the newest request of its flow, if the newest is
        still prefilling; else 0. This request becomes the newest."""
        newest, self.flow.newest = self.flow.newest, self
        if newest is None or not newest.prefilling or newest.scope != self.scope:
            return 0
        return min(common_prefix(self.ids, newest.ids), self.match_limit)

    def take_rank(self) -> None:
        """Set `rank` and `order` by the flow. The caller must sort lists by `order` anew."""
        self.rank = self.flow.rank
        self.order = (-self.rank, self.arrival)

    @property
    def head(self) -> Request:
        """The request that was submitted: this one, unless it computes a span for the choices of another
        request."""
        return self if self.scoring is None else self.scoring.head

    @property
    def lora(self) -> int:
        """The slot of the request's LoRA adapter; -1 without an adapter."""
        return -1 if self.adapter is None else self.adapter.slot

    @property
    def owner(self) -> str:
        """The owner of the request's leases: the program's id, or the request's id if it has no program."""
        return self.rid if self.hint is None else self.hint.program

    @property
    def taker(self) -> str:
        """The name for display under which the request takes pages: name and id of its program, or the
        request's id if it has no program."""
        return self.rid if self.hint is None else f"{self.hint.name} {self.hint.program}".strip()

    @property
    def ids(self) -> np.ndarray:
        """Prompt and output, (length,) int32."""
        return self.buffer[: self.length]

    @property
    def target_ids(self) -> np.ndarray:
        """Prompt, output, known tokens and draft tokens, (target_len,) int32."""
        return self.buffer[: self.target_len]

    @property
    def last(self) -> int:
        """The last token of the sequence."""
        return int(self.buffer[self.length - 1])

    def token_counts(self) -> TokenCounts:
        """Counts of the tokens in `ids`, for the penalties. The same object is updated and returned by the
        next call."""
        if self._counts is None:
            self._counts = TokenCounts(prompt=self.sampling.repetition_penalty != 1.0)
        self._counts.extend(self.ids, self.prompt_len)
        return self._counts

    @property
    def output(self) -> np.ndarray:
        """Output tokens, (output_len,) int32."""
        return self.buffer[self.prompt_len : self.length]

    @property
    def output_len(self) -> int:
        return max(0, self.length - self.prompt_len)

    @property
    def extend_len(self) -> int:
        """The number of tokens to be computed before the next token can be sampled."""
        return self.length - self.computed_len

    @property
    def ahead_len(self) -> int:
        """The number of known and draft tokens."""
        return self.known_len + self.draft_len

    @property
    def computed_ahead(self) -> int:
        """The number of known and draft tokens that are computed together with the sequence."""
        return self.known_len + self.draft_len if self.computes_ahead or self.draft_len else 0

    @property
    def target_len(self) -> int:
        """The number of tokens that need a place in the pages: sequence, known and draft tokens."""
        return self.length + self.known_len + self.draft_len

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of the prompt and, if choices or questions are scored, of all their tokens
        that must be computed."""
        if self.decisions is not None:
            return self.decisions.tokens
        return self.prompt_len if self.scoring is None else self.scoring.choices.tokens

    @property
    def reached(self) -> int:
        """The number of tokens of the sequence that were found in the tree or computed so far."""
        return max(self.stats.reached, self.computed_len)

    @property
    def reached_prompt_tokens(self) -> int:
        """The part of `prompt_tokens` that was found in the tree or computed so far."""
        reached = min(self.reached, self.prompt_len)
        if self.decisions is not None:
            return reached + self.decisions.reached
        return reached if self.scoring is None else reached + self.scoring.choices.reached(self)

    @property
    def budget_left(self) -> int:
        return self.max_tokens - max(0, self.length - self.prompt_len)

    def begin_answer(self, output_len: int) -> None:
        """If the `apart` preambles have ended, set `answer_start`, and limit `max_tokens` by `answer_tokens`.

        output_len : the number of output tokens that the grammar has read
        """
        if self.answer_start is not None or self.constrained is None:
            return
        begun = self.constrained.answer_tokens
        if begun is None:
            return
        self.answer_start = output_len - begun
        if self.answer_tokens is not None:
            # A jump may have spelled forced text in more tokens than needed, so more may be needed in all.
            needed = output_len + self.constrained.needed
            self.max_tokens = max(min(self.answer_start + self.answer_tokens, self.max_tokens), needed)
            self.answer_tokens = None

    @property
    def answer_len(self) -> int:
        """The number of tokens of the answer, to which `min_tokens` and stop tokens apply."""
        return 0 if self.answer_start is None else self.output_len - self.answer_start

    @property
    def prefilling(self) -> bool:
        return self.computed_len < self.prompt_len

    @property
    def behind(self) -> int:
        """The number of tokens of questions behind the prompt that have not been computed."""
        return 0 if self.decisions is None else self.decisions.left

    @property
    def branching(self) -> bool:
        """True if the prompt is computed, and its questions are not."""
        return self.decisions is not None and self.computed_len == self.length

    @property
    def decoding(self) -> bool:
        return (
            self.computed_len >= self.prompt_len
            and self.length - self.computed_len <= FORCED_RUN
            and self.decisions is None
        )

    def chunk_stop(self, budget: int) -> int:
        """The end of the next chunk of at most `budget` tokens."""
        end = self.length + self.computed_ahead
        stop = min(end, self.computed_len + budget)
        # Known and draft tokens are verified in the step that reaches them.
        return end if self.length <= stop < end else stop

    @property
    def match_limit(self) -> int:
        """The most tokens that may be taken from the tree. The tree has no hidden states, so the hidden
        states that predict tokens must be computed."""
        if self.scoring is not None:
            return self.scoring.span.first_state
        if self.wants_prompt_logprobs:
            assert self.sampling.prompt_logprobs_start is not None
            return min(self.length - 1, max(self.sampling.prompt_logprobs_start - 1, 0))
        if self.pooled is not None:
            return min(self.length - 1, self.pooled.reusable)
        if self.max_tokens == 0:
            return self.length
        # The state before a token that has not been reported gives its log-probability.
        return self.reported_len - 1

    @property
    def wants_logprobs(self) -> bool:
        """True if log-probabilities are asked for that sampling does not give: of prompt tokens, or of forced
        tokens."""
        params = self.sampling
        return params.logprobs is not None or (
            params.prompt_logprobs_start is not None and not self.report.announced
        )

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True if log-probabilities of the prompt are asked for and have not been sent."""
        return self.sampling.prompt_logprobs_start is not None and not self.report.announced

    @property
    def may_speculate(self) -> bool:
        """True if draft tokens may be added.

        No draft tokens are added if log-probabilities are asked for under a grammar: the log-probabilities of
        forced tokens are taken from the step that computes these tokens.
        """
        forced_logprobs = self.sampling.logprobs is not None and self.constrained is not None
        return (
            self.budget_left > 1
            and self.scoring is None
            and self.healing is None
            and (self.computes_ahead or not self.known_len)
            and not (self.draft_len or forced_logprobs or self.wants_prompt_logprobs)
        )

    @property
    def next_ahead(self) -> int | None:
        """The known or draft token right after the sequence; None if there is none."""
        return int(self.buffer[self.length]) if self.known_len or self.draft_len else None

    def append(self, token: int) -> None:
        """Add `token` to the sequence, and drop all known and draft tokens."""
        if self.healing is not None:
            # A longer token replaces the end of the prompt.
            self.report.replaced = self.known_len
            self.report.overlap = self.healing.rest
            self.prompt_len = self.length
            self.healing = self._counts = None
        if self.length == len(self.buffer):
            self._lengthen()
        self.buffer[self.length] = token
        self.length += 1
        self.known_len = self.draft_len = 0

    def take_back(self, tokens: int) -> None:
        """Remove the last `tokens` tokens of the sequence."""
        if tokens:
            self.length -= tokens
            self._counts = None

    def heal(self, healing: Healing, tokens: int) -> None:
        """Turn the last `tokens` tokens of the prompt into known tokens."""
        self.healing = healing
        self.length = self.reported_len = self.prompt_len - tokens
        self.known_len = tokens

    def add_known(self, token: int) -> None:
        """Make `token` the only known token."""
        self._place(self.length, token)
        self.known_len = 1

    def add_draft(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._place(self.target_len, token)
            self.draft_len += 1

    def drop_draft(self) -> int:
        """Drop the draft tokens, and return their number."""
        dropped, self.draft_len = self.draft_len, 0
        return dropped

    def keep_known(self) -> None:
        """Add the first known token, which was chosen, to the sequence."""
        self.length += 1
        if self.computes_ahead:
            self.computed_len = self.length
        self.known_len -= 1
        if self.healing is not None:
            self.reported_len = self.length
            self.healing = self.healing.after(int(self.buffer[self.length - 1])) if self.known_len else None

    def verify_draft(self, start: int, draft: np.ndarray) -> int:
        """Compare the tokens that were appended from position `start` on with `draft`, (n,) int32, which was
        computed for these positions. If they all agree, keep the rest of `draft` as draft tokens.

        Example: the draft 5 6 7 was computed, and 5 6 were appended (6 was forced). Then both are computed, 7
        stays a draft token, and the result is 2. If 5 9 had been appended, 9 would still have to be computed,
        and the result would be 0.

        Returns the number of tokens appended, if all of them were in the draft, else 0.
        """
        added = self.length - start
        right = common_prefix(self.ids[start:], draft)
        self.computed_len = start + right
        if right < added:
            return 0
        known, rest = self.next_ahead, draft[added:].tolist()
        self.known_len = 0
        if rest and rest[0] == known:
            self.add_known(rest.pop(0))
        self.add_draft(rest)
        return added

    def usage(self, now: float, *, aborted: bool = False) -> Usage:
        """The cost of the request so far. With `aborted`, prompt tokens that were neither found in the tree
        nor computed are left out."""
        stats = self.stats
        queued = now if stats.queued is None else stats.queued
        prompt_tokens = self.reached_prompt_tokens if aborted else self.prompt_tokens
        cached_tokens = min(stats.cached_tokens or 0, prompt_tokens)
        return Usage(
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            distinct_tokens=stats.distinct_tokens,
            evicted_tokens=min(stats.lost.tokens, prompt_tokens - cached_tokens),
            evicted_by=stats.lost.taker,
            completion_tokens=self.output_len,
            forced_tokens=stats.forced_tokens,
            draft_tokens=stats.draft_tokens,
            accepted_tokens=stats.accepted_tokens,
            model_draft_tokens=stats.model_draft_tokens,
            model_accepted_tokens=stats.model_accepted_tokens,
            retractions=stats.retractions,
            grammar_s=queued - self.arrival,
            queue_s=(now if stats.first_pass is None else stats.first_pass) - queued,
            first_token_s=0.0 if stats.first_token is None else stats.first_token - self.arrival,
            total_s=now - self.arrival,
        )

    def _place(self, position: int, token: int) -> None:
        if position == len(self.buffer):
            self._lengthen()
        self.buffer[position] = token

    def _lengthen(self) -> None:
        self.buffer = np.concatenate([self.buffer, np.empty(len(self.buffer), dtype=np.int32)])


class ScheduledRequest(NamedTuple):
    """One request's share of a step: positions ``[start, stop)``, then a wave of its branches.

    tokens : the number of tokens that the step computes
    """

    request: Request
    start: int
    stop: int
    tokens: int
    wave: Sequence[Part] = ()

    @staticmethod
    def up_to(stop: int, request: Request, wave: Sequence[Part] = ()) -> ScheduledRequest:
        """The positions of `request` that are not computed, up to `stop`, and `wave`."""
        start = request.computed_len
        return ScheduledRequest(
            request, start, stop, stop - start + sum([part.stop - part.start for part in wave]), wave
        )

    @property
    def samples(self) -> bool:
        """True if the step computes all tokens of the request and samples its next token."""
        request = self.request
        return self.stop == request.length + request.computed_ahead and request.budget_left > 0


def common_prefix(left: np.ndarray, right: np.ndarray) -> int:
    """The number of tokens that two sequences share from the start."""
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length
