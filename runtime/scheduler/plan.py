"""The plan of a step: the requests that take part in it, and the number of tokens of each.

`StepPlanner.schedule` plans the step that runs now. `StepPlanner.ahead` plans the step after it, for the pass
that overlap scheduling launches ahead. Both ask `Precedence` for the requests that take part, `ChunkSize` for
the number of prompt tokens, and `StepPlanner._share_out` for each request's part.

A request's rank is three times its priority, less one while its flow yields to others, and less one while its
API key yields to others (`requests.flows`). Requests below the highest rank sit out steps. They are then owed
a share of the following time, in proportion to the time that they sat out.

Example, with a chat of priority 0 beside 128 requests of priority -1:

    chat alone            7 ms a step      the others keep their pages and sit out
    after 0.5 s of that   the others are owed 0.25 s: half of the time that they sat out
    step of all           90 ms            owed 0.16 s
    chat alone            0.18 s, until 0.25 s are owed again: the others have a third of the time

Decoding requests of lower rank still take part while their rows lengthen a step by at most the factor
`Tuning.ride`, by the measured times of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ramify.runtime.config import EngineConfig
from ramify.runtime.scheduler.admission import POLICIES, Admission
from ramify.runtime.scheduler.lifecycle import Lifecycle
from ramify.runtime.scheduler.requests.decisions import Part
from ramify.runtime.scheduler.requests.limits import TUNED, Tuning
from ramify.runtime.scheduler.requests.request import LEAST_RANK, MOST_RANK, Request, ScheduledRequest
from ramify.runtime.scheduler.speculation.acceptance import StepCost

SHARE = 1 / 3
"""Requests below the highest rank get at least this share of the time of all steps, once they have sat out
for `Tuning.patience_s`. If more than this share of the flows of the highest priority yield, the share of
yielding flows is used instead."""

PATIENCE_STEPS = 3
"""Requests are paid back only after they have sat out for as long as this number of steps of all requests
takes. On a slow machine this may be longer than `Tuning.patience_s`."""


class Rule(NamedTuple):
    """The ranks that take part in a step."""

    least: int = LEAST_RANK
    most: int = MOST_RANK
    """Waiting requests may join if their rank is from `least` to `most`."""
    share: float = SHARE
    """The share of the time that is owed to requests below the highest rank."""

    @property
    def leaves_out(self) -> bool:
        """True if requests below the highest rank sit out."""
        return self.least > LEAST_RANK

    @property
    def shared(self) -> bool:
        """True if the step is given to a lower rank: requests of that rank prefill and join before others."""
        return self.most < MOST_RANK


class Turn(NamedTuple):
    """The requests of one step, in order: running requests `first`, waiting requests that join, running
    requests `last`."""

    rule: Rule
    first: list[Request]
    last: Sequence[Request] = ()


class Precedence:
    """Chooses the requests that take part in each step, and counts the time that is owed to the others.

    Lists of requests are in the order of `Request.order`: highest rank first. Seconds are those of the
    scheduler's clock. Only the time inside steps counts.
    """

    def __init__(self, cost: StepCost, tuning: Tuning = TUNED) -> None:
        self._cost = cost
        self._tuning = tuning
        self._sat_out_s = 0.0
        """Seconds that requests have sat out and that have not been paid back yet."""
        self._put_off = False
        """True if a shared step was due, and the current step is a newcomer's instead."""
        self._steps_shared = 0
        self._served: dict[int, int] = {}
        """By rank, the number of the last shared step that was given to that rank."""
        self._usual_s = {False: 0.0, True: 0.0}
        """The average seconds of recent steps: False for steps of all requests, True for steps that some sat
        out."""
        self.rule = Rule()
        """The rule of the current step."""

    def begin_turn(
        self, running: Sequence[Request], waiting: Sequence[Request], yielding: float = 0.0
    ) -> Turn:
        """Begin a step, and return its turn.

        yielding : the share of the flows of the highest priority that yield
        """
        turn = self._turn(running, waiting, yielding, self._sat_out_s)
        self.rule = turn.rule
        self._put_off = turn.rule.leaves_out and self._is_due(turn.rule.share, self._sat_out_s)
        if self.rule.shared:
            self._steps_shared += 1
            self._served[self.rule.most] = self._steps_shared
        return turn

    def begin_all(self, running: Sequence[Request]) -> Turn:
        """Begin a step of all running requests, because the turn of the highest rank has nothing to
        compute."""
        self.rule = Rule(share=self.rule.share)
        return Turn(self.rule, list(running))

    def next_turn(
        self, running: Sequence[Request], waiting: Sequence[Request], yielding: float = 0.0
    ) -> Turn:
        """The turn that `begin_turn` will return next, if the current step takes as long as usual."""
        return self._turn(
            running, waiting, yielding, self._sat_out_after(self._usual_s[self.rule.leaves_out])
        )

    def end_turn(self, seconds: float) -> None:
        """End the current step, which took `seconds`, and count its time."""
        self._sat_out_s = self._sat_out_after(seconds)
        kind = self.rule.leaves_out
        self._usual_s[kind] += (seconds - self._usual_s[kind]) / 4

    def _turn(
        self, running: Sequence[Request], waiting: Sequence[Request], yielding: float, sat_out_s: float
    ) -> Turn:
        ends = [requests[end].rank for requests in (running, waiting) if requests for end in (0, -1)]
        top = max(ends, default=0)
        if top == min(ends, default=0):
            return Turn(Rule(share=self.rule.share), list(running))
        share = max(SHARE, yielding)
        # A shared step is long, and no request of the highest rank joins in it. So the first step of one that
        # has not run goes before it, once.
        comes = bool(waiting) and waiting[0].rank == top and waiting[0].stats.first_pass is None
        if self._is_due(share, sat_out_s) and (self._put_off or not comes):
            rank = self._next_rank({request.rank for each in (running, waiting) for request in each} - {top})
            first = [request for request in running if request.decoding or request.rank == rank]
            last = [request for request in running if not request.decoding and request.rank != rank]
            return Turn(Rule(most=rank, share=share), first, last)
        high = [request for request in running if request.rank == top]
        if high:
            row = self._cost.share_of_a_row(len(high), bounded=False)
            places = int((self._tuning.ride - 1) / max(row, 1e-9))
            high += [request for request in running[len(high) :] if request.decoding][:places]
        return Turn(Rule(least=top, share=share), high)

    def _is_due(self, share: float, sat_out_s: float) -> bool:
        """Whether requests that sat out for `sat_out_s` are to be paid back.

        If few flows go before many that yield, the many sit out for a shorter time: otherwise each of the few
        would delay all of the many.
        """
        patience_s = max(self._tuning.patience_s, PATIENCE_STEPS * self._usual_s[False])
        return sat_out_s >= patience_s * min(1.0, 2 * (1 - share))

    def _next_rank(self, lower: set[int]) -> int:
        """The rank in `lower` that was served longest ago: the rank whose prefills and admissions go first.

        Ranks take turns, because the prefills of one rank could fill the chunk of every shared step.
        """
        return min(lower, key=lambda rank: (self._served.get(rank, 0), rank))

    def _sat_out_after(self, seconds: float) -> float:
        if self.rule.leaves_out:
            return self._sat_out_s + seconds
        left = self._sat_out_s - seconds * (1 - self.rule.share) / self.rule.share
        return left if self.rule.shared else max(0.0, left)


LEAST = 16
"""The least number of prompt tokens of a step, whatever the target, so that prefills always make progress."""
FADE = 0.9
"""The weight of a step in the measured time of a prompt token, relative to the step after it."""
MULTIPLE = 2
"""A chunk is at most this multiple of the longest chunk that was measured beside decoding requests."""


class ChunkSize:
    """Chooses the number of prompt tokens of a step, so that decoding requests get their next token in time.

    Example with a target of 50 ms: a step of 8 decoding requests takes 14 ms, and a prompt token took 0.45 ms
    in recent steps. So (50 - 14) / 0.45 = 80 prompt tokens are computed beside them. A step without decoding
    requests computes up to `chunk_tokens`. A short chunk takes more time for each token than a long one. But
    the time is measured with the chosen sizes, so the size settles where a step takes the target time.

    most : the most prompt tokens of any step
    target : seconds that a step with decoding requests should take; None for no target
    cost : the time of steps of decoding requests alone
    """

    def __init__(self, most: int, target: float | None, cost: StepCost) -> None:
        self.target = target
        self._most, self._cost = most, cost
        self._measured_tokens = self._measured_s = 0.0
        self._longest = 0
        self._launched: int | None = None

    def tokens_ahead(self, decoding: int) -> int:
        """The number of prompt tokens of a pass that is launched ahead, beside `decoding` rows.
        `tokens_beside` then returns the same number for the next step: with another number, the launched
        chunks would be void."""
        self._launched = self._tokens_beside(decoding)
        return self._launched

    def tokens_beside(self, decoding: int) -> int:
        """The number of prompt tokens of a step beside `decoding` rows of decoding requests."""
        launched, self._launched = self._launched, None
        return self._tokens_beside(decoding) if launched is None else launched

    def _tokens_beside(self, decoding: int) -> int:
        if self.target is None or not decoding:
            return self._most
        least = min(LEAST, self._most)
        if not self._measured_tokens:
            return least
        longest = min(self._most, MULTIPLE * self._longest)
        room = (self.target - self._cost.seconds_of(decoding)) * self._measured_tokens / self._measured_s
        return max(least, min(int(room), longest))

    def learn(self, decoding: int, prompt_tokens: int, seconds: float) -> None:
        """Learn from a step of `decoding` rows and `prompt_tokens` prompt tokens that took `seconds`."""
        if self.target is None or not prompt_tokens or not decoding:
            return
        # The cost of decoding alone may not be measured yet, or may be estimated above the time of this step.
        spent = max(seconds - self._cost.seconds_of(decoding), seconds / 4)
        self._measured_tokens = self._measured_tokens * FADE + prompt_tokens
        self._measured_s = self._measured_s * FADE + spent
        self._longest = max(prompt_tokens, self._longest)


LONGEST_HOLD = 1024
"""The most steps between two trials. This number of steps doubles after each trial that the present way
wins."""


class Alternation:
    """Decides whether steps draft or launch passes ahead, if both speculation and overlap scheduling are on.

    A pass that is launched ahead computes one token of each request. Draft tokens are proposed later, when
    that token is known. They would make the launched rows void, and a second pass would have to read the
    weights again. So a step either drafts or takes the pass launched ahead, for all requests alike. Both ways
    are measured, and the faster way is kept. The first steps draft:

        drafting     32 steps   3.1 tokens a request in 6.0 ms: 0.52 a ms
        launching     8 steps   1.0 tokens a request in 4.1 ms: 0.24 a ms    drafting goes on, 64 steps
        drafting     64 steps   ...
    """

    def __init__(self, tuning: Tuning = TUNED) -> None:
        self._first, self._trial = tuning.draft_steps, tuning.trial_steps
        self.drafts = True
        """True if the current step drafts; False if it takes the hidden states of the pass launched ahead."""
        self.next_drafts = True
        """True if the next step drafts. This is decided before the current step launches a pass."""
        self.best = True
        """True if drafting was the faster way in the last trial."""
        self._hold = self._left = self._first
        self._tokens = {True: 0.0, False: 0.0}
        self._seconds = {True: 0.0, False: 0.0}

    def learn(self, tokens: float, seconds: float) -> None:
        """Count a step in which all requests decoded: `tokens` tokens per request in `seconds`."""
        self._tokens[self.drafts] += tokens
        self._seconds[self.drafts] += seconds

    def end_step(self) -> None:
        """Move to the next step."""
        self.drafts = self.next_drafts
        self._left -= 1
        if self._left > 0:
            return
        if self.next_drafts is self.best:
            self.next_drafts, self._left = not self.best, self._trial
        else:
            self._compare()

    def _compare(self) -> None:
        rates = {each: self._rate(each) for each in (True, False)}
        other = not self.best
        if rates[other] > rates[self.best]:
            self.best, self._hold = other, self._first
        else:
            self._hold = min(2 * self._hold, LONGEST_HOLD)
        self.next_drafts, self._left = self.best, self._hold
        for each in (True, False):
            self._tokens[each] = self._seconds[each] = 0.0

    def _rate(self, drafts: bool) -> float:
        return self._tokens[drafts] / self._seconds[drafts] if self._seconds[drafts] > 0 else 0.0


class StepPlanner:
    """Plans the steps of one scheduler.

    give_way : aborts the transfer of pages in progress; returns False if there is none
    advance : called with an admitted request that has nothing to compute, and the present time
    """

    def __init__(
        self,
        config: EngineConfig,
        tuning: Tuning,
        requests: Lifecycle,
        give_way: Callable[[], bool],
        advance: Callable[[Request, float], None],
    ) -> None:
        assert config.max_running is not None
        assert config.chunk_tokens is not None
        target = None if config.itl_target_ms is None else config.itl_target_ms / 1e3
        self._requests = requests
        self._pages = requests.pages
        self._max_running = config.max_running
        self._drafter = drafter = requests.drafter
        self._give_way = give_way
        self._advance = advance
        self._precedence = Precedence(drafter.cost, tuning)
        self._chunks = ChunkSize(config.chunk_tokens, target, drafter.cost)
        policy = POLICIES[config.policy](requests.programs)
        self._admission = Admission(
            requests.pages, policy, config.max_running, requests.retract, give_way, tuning.window
        )
        self._alternation = Alternation(tuning) if config.overlap and config.speculation else None

    @property
    def rule(self) -> Rule:
        """The rule of the current step."""
        return self._precedence.rule

    def schedule(self, now: float) -> list[ScheduledRequest]:
        """Plan the step that runs now, and take the pages that it needs. Running requests come first, by rank
        and then by age. Then waiting requests are admitted."""
        requests, precedence = self._requests, self._precedence
        requests.judge_flows()
        turn = precedence.begin_turn(requests.running, requests.waiting, requests.flows.share)
        plan = self._schedule(turn, now)
        if not plan and turn.rule.leaves_out:
            plan = self._schedule(precedence.begin_all(requests.running), now)
        return plan

    def ahead(self, requests: Sequence[Request]) -> list[ScheduledRequest] | None:
        """The prompt chunks of the next step, in which each of `requests` computes one more token. None if
        nothing is to be launched: the next step will have draft tokens or branches, or some of `requests`
        will sit out."""
        if self._alternation is not None and self._alternation.next_drafts:
            return None
        lists = self._requests
        if any(request.decisions is not None and request.branching for request in lists.running):
            return None
        turn = self._precedence.next_turn(lists.running, lists.waiting, lists.flows.share)
        if turn.rule.leaves_out and not set(requests).issubset(turn.first):
            return None
        prefilling = [request for request in turn.first if request.computed_len < request.prompt_len]
        chunks: list[ScheduledRequest] = []
        self._share_out(prefilling, self._chunks.tokens_ahead(len(requests)), chunks, lambda request: True)
        return chunks

    def learn(self, requests: int, rows: int, prompt_tokens: int, accepted: int, seconds: float) -> None:
        """Learn from a step of `requests` requests that took `seconds`.

        rows : tokens of decoding requests
        accepted : draft tokens that were accepted
        """
        if prompt_tokens:
            self._chunks.learn(rows, prompt_tokens, seconds)
            return
        self._drafter.learn_cost(rows, seconds)
        if self._alternation is not None:
            self._alternation.learn(1 + accepted / requests, seconds)

    def end_step(self, seconds: float, *, empty: bool) -> None:
        """End a step that took `seconds`. `empty` says that the step computed nothing."""
        if self._alternation is not None and not empty:
            self._alternation.end_step()
        self._precedence.end_turn(seconds)

    def _schedule(self, turn: Turn, now: float) -> list[ScheduledRequest]:
        plan: list[ScheduledRequest] = []
        requests, retractions = self._requests, self._requests.counters.retractions
        drafting = self._alternation is None or self._alternation.drafts
        self._drafter.propose_drafts(turn.first if drafting else ())
        decoding = (*turn.first, *turn.last) if self._chunks.target is not None else ()
        budget = self._chunks.tokens_beside(
            sum(request.extend_len + request.computed_ahead for request in decoding if request.decoding)
        )
        budget, short_of_pages = self._share_out(turn.first, budget, plan, self._make_room)
        if not short_of_pages:
            joining = (turn.rule.least, turn.rule.most)
            for request in self._admission.admit(requests.waiting, requests.running, budget, now, joining):
                requests.start(request, now)
                if request.branching:
                    budget -= self._take_wave(request, budget, plan)
                elif request.extend_len == 0:
                    self._advance(request, now)
                elif budget > 0:
                    budget -= self._take(request, budget, plan)
        self._share_out(turn.last, budget, plan, self._make_room)
        if self._pages.states.present:
            plan = [self._after_admission(one) for one in plan]
        if requests.counters.retractions > retractions:
            return [scheduled for scheduled in plan if scheduled.request.pages.lock is not None]
        return plan

    def _after_admission(self, planned: ScheduledRequest) -> ScheduledRequest:
        """`planned`, for a model with states. An admission may have added a mark to its request. Its draft
        tokens need a second slot, which is taken after all admissions, so that no request waits for it; they
        are dropped if no slot is free."""
        request, stop, states = planned.request, planned.stop, self._pages.states
        if request.draft_len and not states.save(request):
            request.drop_draft()
            stop = min(stop, request.length + request.computed_ahead)
        return ScheduledRequest.up_to(states.cut(request, stop), request, planned.wave)

    def _share_out(
        self,
        running: Sequence[Request],
        budget: int,
        plan: list[ScheduledRequest],
        make_room: Callable[[Request], bool],
    ) -> tuple[int, bool]:
        """Add the part of each of `running` to `plan`: all tokens of a decoding request, a chunk out of
        `budget` of a prefilling request. Returns the budget that is left, and whether a request got no pages.

        make_room : finds pages for all tokens of a request; returns False if it has retracted the request
        """
        short_of_pages, page_size = False, self._pages.page_size
        for request in running:
            pages = request.pages
            if pages.lock is None:
                continue  # retracted in this step, so that another request gets its pages
            length, start, ahead = request.length, request.computed_len, request.known_len + request.draft_len
            if length + ahead > pages.count * page_size and not make_room(request):
                short_of_pages = True
            elif request.plain and not ahead and length - start == 1 and start >= request.prompt_len:
                plan.append(ScheduledRequest(request, start, length, 1))
            elif request.branching:
                budget -= self._take_wave(request, budget, plan)
                short_of_pages |= pages.lock is None
            elif request.decoding:
                plan.append(ScheduledRequest.up_to(request.length + request.computed_ahead, request))
            elif budget > 0:
                budget -= self._take(request, budget, plan)
        return budget, short_of_pages

    def _take(self, request: Request, budget: int, plan: list[ScheduledRequest]) -> int:
        """Add a chunk of `request`, at most `budget` tokens, to `plan`. Returns the number of tokens."""
        stop = self._pages.states.cut(request, request.chunk_stop(budget))
        plan.append(ScheduledRequest.up_to(stop, request))
        return plan[-1].tokens

    def _take_wave(self, request: Request, budget: int, plan: list[ScheduledRequest]) -> int:
        """Add a wave of branches of `request`, at most `budget` tokens, to `plan`. Returns the number of
        tokens. If there are no pages for a single branch, makes room for it."""
        if budget <= 0:
            return 0
        running = len(self._requests.running) + sum(len(other.wave) - 1 for other in plan if other.wave)
        rows = max(1, self._max_running - running + 1)
        wave: list[Part] = []

        def take() -> bool:
            wave[:] = self._pages.branches.take_wave(request, budget, rows)
            return bool(wave)

        if not self._make_room(request, take):
            return 0
        plan.append(ScheduledRequest.up_to(request.computed_len, request, wave))
        return plan[-1].tokens

    def _make_room(self, request: Request, take: Callable[[], bool] | None = None) -> bool:
        """Find pages for all tokens of `request`, or let `take` take pages for it. If too few are available,
        drop its draft tokens, abort a transfer, then retract the newest requests of the lowest rank; pins
        give way to a request that runs alone. Returns False if `request` is retracted."""
        while not (self._pages.grow(request) if take is None else take()):
            if request.drop_draft() or self._give_way():
                continue
            last = self._requests.running[-1]
            if len(self._requests.running) == 1 and self._pages.unpin(request):
                continue
            self._requests.retract(last)
            if last is request:
                return False
        return True
