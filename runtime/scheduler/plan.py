"""The plan of a step: who takes part in it, and with how many tokens.

`StepPlanner.schedule` plans the step that runs now. `StepPlanner.ahead` plans the step after it, for the pass
that overlap scheduling launches ahead. Both ask `Precedence` for the requests that take part, `ChunkSize` for
the number of prompt tokens, and `StepPlanner._share_out` for each request's part.

A request's rank is its priority, less a half while its flow yields to others (`requests.flows`).

Example, with a chat of priority 0 beside 128 requests of priority -1:

    chat alone            7 ms a step      the others keep their pages and sit out
    after 0.5 s of that   the others are owed 0.25 s: half of the time that they sat out
    step of all           90 ms            owed 0.16 s
    chat alone            0.18 s, until 0.25 s are owed again: the others have a third of the time

A step of many rows takes several times as long as a step of one (on the CPU), and that is what a request of
high rank would wait for at each of its tokens. Where rows cost next to nothing, by measurement, requests that
decode sit out no step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ramify.runtime.config import EngineConfig
from ramify.runtime.scheduler.admission import POLICIES, Admission
from ramify.runtime.scheduler.lifecycle import Lifecycle
from ramify.runtime.scheduler.requests.limits import TUNED, Tuning
from ramify.runtime.scheduler.requests.request import LEAST_RANK, MOST_RANK, Request, ScheduledRequest
from ramify.runtime.scheduler.speculation.acceptance import StepCost
from ramify.runtime.scheduler.speculation.drafter import Drafter

SHARE = 1 / 3
"""Requests that sit out have at least this share of the time of all steps, beyond `Tuning.patience_s`. Where
flows yield, it is their share of all flows, if that is more."""

PATIENCE_STEPS = 3
"""Requests sit out at least as long as this number of steps in which all take part: on a slow machine each of
these may take longer than a chat does alone."""


class Turn(NamedTuple):
    """The requests of one step: running ones `first`, then waiting ones as they join, then `last`."""

    first: list[Request]
    last: Sequence[Request] = ()
    least: int = LEAST_RANK
    most: int = MOST_RANK
    """The range of the ranks of waiting requests that may join."""
    share: float = SHARE
    """The share of the time that requests of lower rank are owed."""

    @property
    def leaves_out(self) -> bool:
        """True where requests of lower rank sit out."""
        return self.least > LEAST_RANK

    @property
    def shared(self) -> bool:
        """True where the step is given to a lower rank: its requests prefill and join before others."""
        return self.most < MOST_RANK


class Precedence:
    """Chooses who takes part in each step, and counts the time that the others are owed.

    Lists of requests are in the order of `Request.order`: highest rank first. Seconds are those of the
    scheduler's clock, in steps alone.
    """

    def __init__(self, cost: StepCost, tuning: Tuning = TUNED) -> None:
        self._cost = cost
        self._tuning = tuning
        self._sat_out_s = 0.0
        """Seconds of sitting out that are not paid back."""
        self._steps_shared = 0
        self._served: dict[int, int] = {}
        """Number of the last shared step that was given to a rank, by rank."""
        self._usual_s = {False: 0.0, True: 0.0}
        """Average time of recent steps in which all took part (False), and of those that left some out."""
        self.turn = Turn([])
        """The turn of the current step, without its requests: they may end, and hold an adapter's slot."""

    def begin_turn(
        self, running: Sequence[Request], waiting: Sequence[Request], yielding: float = 0.0
    ) -> Turn:
        """Begin a step.

        yielding : the share of the flows of the highest priority that yield
        """
        turn = self._turn(running, waiting, yielding, self._sat_out_s)
        if turn.shared:
            self._steps_shared += 1
            self._served[turn.most] = self._steps_shared
        self.turn = turn._replace(first=[], last=())
        return turn

    def begin_all(self, running: Sequence[Request]) -> Turn:
        """Begin a step of all requests, because nobody of the highest rank can go on."""
        self.turn = Turn([], share=self.turn.share)
        return self.turn._replace(first=list(running))

    def next_turn(
        self, running: Sequence[Request], waiting: Sequence[Request], yielding: float = 0.0
    ) -> Turn:
        """The turn that `begin_turn` will give after the current step, if that takes as long as usual."""
        return self._turn(
            running, waiting, yielding, self._sat_out_after(self._usual_s[self.turn.leaves_out])
        )

    def end_turn(self, seconds: float) -> None:
        """Account for the step, which took `seconds`."""
        self._sat_out_s = self._sat_out_after(seconds)
        kind = self.turn.leaves_out
        self._usual_s[kind] += (seconds - self._usual_s[kind]) / 4

    def _turn(
        self, running: Sequence[Request], waiting: Sequence[Request], yielding: float, sat_out_s: float
    ) -> Turn:
        ends = [requests[end].rank for requests in (running, waiting) if requests for end in (0, -1)]
        top = max(ends, default=0)
        if top == min(ends, default=0):
            return Turn(list(running), share=self.turn.share)
        share = max(SHARE, yielding)
        # Few flows that go before many wait for less: else each would delay the many.
        patience_s = max(self._tuning.patience_s, PATIENCE_STEPS * self._usual_s[False]) * min(
            1.0, 2 * (1 - share)
        )
        if sat_out_s >= patience_s:
            rank = self._next_rank({request.rank for each in (running, waiting) for request in each} - {top})
            first = [request for request in running if request.decoding or request.rank == rank]
            last = [request for request in running if not request.decoding and request.rank != rank]
            return Turn(first, last, most=rank, share=share)
        high = [request for request in running if request.rank == top]
        if high:
            row = self._cost.share_of_a_row(len(high), bounded=False)
            places = int((self._tuning.ride - 1) / max(row, 1e-9))
            high += [request for request in running[len(high) :] if request.decoding][:places]
        return Turn(high, least=top, share=share)

    def _next_rank(self, lower: set[int]) -> int:
        """The rank of `lower` that was served longest ago: its prefills and admissions go first in the step.

        Ranks take turns, because the prefills of one rank could fill the chunk of every shared step.
        """
        return min(lower, key=lambda rank: (self._served.get(rank, 0), rank))

    def _sat_out_after(self, seconds: float) -> float:
        """`_sat_out_s` once the current step has taken `seconds`."""
        if self.turn.leaves_out:
            return self._sat_out_s + seconds
        left = self._sat_out_s - seconds * (1 - self.turn.share) / self.turn.share
        return left if self.turn.shared else max(0.0, left)


LEAST = 16
"""Prompt tokens of a step at least, whatever the target: prompts go on."""
FADE = 0.9
"""The weight of a step in the time of a prompt token, against the step after it."""
MULTIPLE = 2
"""A chunk is at most this multiple of the longest that was measured beside decoding requests."""


class ChunkSize:
    """Prompt tokens of a step, so that decoding requests get their next token in time.

    Example with a target of 50 ms: a step of 8 decoding requests takes 14 ms, and a prompt token took 0.45 ms
    in recent steps. So (50 - 14) / 0.45 = 80 prompt tokens are computed beside them, and in a step without
    decoding requests all `chunk_tokens`. Short chunks take longer for a token than long ones. The time is
    measured in steps of the sizes that were chosen, so the size settles where the steps end in time.

    most : prompt tokens of any step
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
        """Prompt tokens of a pass that is launched before the next step. That step has the same number: with
        another one the chunks of the pass would be computed in vain."""
        self._launched = self._tokens_beside(decoding)
        return self._launched

    def tokens_beside(self, decoding: int) -> int:
        """Prompt tokens beside `decoding` rows of decoding requests."""
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
        # Steps of decoding requests alone may be unmeasured as yet, or slower than this one.
        spent = max(seconds - self._cost.seconds_of(decoding), seconds / 4)
        self._measured_tokens = self._measured_tokens * FADE + prompt_tokens
        self._measured_s = self._measured_s * FADE + spent
        self._longest = max(prompt_tokens, self._longest)


LONGEST_HOLD = 1024
"""Steps between two trials at the most: they double while the same one stays the faster."""


class Alternation:
    """Draft or launch ahead: which of both the steps do, where speculation and overlap scheduling are on.

    A pass that is launched ahead has one token a request. Draft tokens come after the last token is known, so
    a request that gets some would find its row void, and the weights would be read once more. So a step
    either drafts or takes what was launched ahead, all requests alike, and the faster of both by measurement
    goes on. The first steps draft:

        drafting     32 steps   3.1 tokens a request in 6.0 ms: 0.52 a ms
        launching     8 steps   1.0 tokens a request in 4.1 ms: 0.24 a ms    drafting goes on, 64 steps
        drafting     64 steps   ...
    """

    def __init__(self, tuning: Tuning = TUNED) -> None:
        self._first, self._trial = tuning.draft_steps, tuning.trial_steps
        self.drafts = True
        """This step has draft tokens, if any are worth their rows; else it takes what was launched ahead."""
        self.next_drafts = True
        """The next step has draft tokens. It is decided before this one has launched anything."""
        self.best = True
        """Drafting was the faster one in the last trial."""
        self._hold = self._left = self._first
        self._tokens = {True: 0.0, False: 0.0}
        self._seconds = {True: 0.0, False: 0.0}

    def learn(self, tokens: float, seconds: float) -> None:
        """Learn from a step of decoding requests alone, which gave `tokens` tokens a request in `seconds`."""
        self._tokens[self.drafts] += tokens
        self._seconds[self.drafts] += seconds

    def end_step(self) -> None:
        """Go on to the next step."""
        self.drafts = self.next_drafts
        self._left -= 1
        if self._left > 0:
            return
        if self.next_drafts is self.best:
            self._try(not self.best)
        else:
            self._compare()

    def _try(self, drafts: bool) -> None:
        self.next_drafts, self._left = drafts, self._trial

    def _compare(self) -> None:
        """End the trial, and go on with the faster one."""
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

    give_way : ends a transfer of pages, which a request needs; False where none is in progress
    settle : called with an admitted request that has nothing to compute, and the time
    """

    def __init__(
        self,
        config: EngineConfig,
        tuning: Tuning,
        requests: Lifecycle,
        drafter: Drafter,
        give_way: Callable[[], bool],
        settle: Callable[[Request, float], None],
    ) -> None:
        assert config.max_running is not None
        assert config.chunk_tokens is not None
        target = None if config.itl_target_ms is None else config.itl_target_ms / 1e3
        self._requests = requests
        self._pages = requests.pages
        self._drafter = drafter
        self._give_way = give_way
        self._settle = settle
        self._precedence = Precedence(drafter.cost, tuning)
        self._chunks = ChunkSize(config.chunk_tokens, target, drafter.cost)
        policy = POLICIES[config.policy](requests.programs)
        self._admission = Admission(
            requests.pages, policy, config.max_running, requests.retract, give_way, tuning.window
        )
        self._alternation = Alternation(tuning) if config.overlap and config.speculation else None

    @property
    def turn(self) -> Turn:
        """The turn of the current step, without its requests."""
        return self._precedence.turn

    def schedule(self, now: float) -> list[ScheduledRequest]:
        """Plan the step that runs now, and take its pages. Running requests that take part go on, highest
        rank and oldest first, and waiting ones are admitted."""
        requests, precedence = self._requests, self._precedence
        requests.judge_flows()
        turn = precedence.begin_turn(requests.running, requests.waiting, requests.flows.share)
        plan = self._schedule(turn, now)
        if not plan and turn.leaves_out:
            plan = self._schedule(precedence.begin_all(requests.running), now)
        return plan

    def ahead(self, requests: Sequence[Request]) -> list[ScheduledRequest] | None:
        """The chunks of prompts in the next step, which goes on with `requests` and one more token of each.
        None where it will leave some of these out, or have draft tokens: then nothing is to be launched."""
        if self._alternation is not None and self._alternation.next_drafts:
            return None
        lists = self._requests
        turn = self._precedence.next_turn(lists.running, lists.waiting, lists.flows.share)
        if turn.leaves_out and not set(requests).issubset(turn.first):
            return None
        prefilling = [request for request in turn.first if request.prefilling]
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
        """End a step that took `seconds`; an `empty` one computed nothing."""
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
            joining = (turn.least, turn.most)
            for request in self._admission.admit(requests.waiting, requests.running, budget, now, joining):
                requests.start(request, now)
                if request.extend_len == 0:
                    self._settle(request, now)
                elif budget > 0:
                    budget -= self._take(request, budget, plan)
        self._share_out(turn.last, budget, plan, self._make_room)
        if self._pages.states.present:  # requests that were admitted may have marked those before them
            cut = self._pages.states.cut
            plan = [ScheduledRequest(request, cut(request, stop)) for request, stop in plan]
        if requests.counters.retractions > retractions:
            return [scheduled for scheduled in plan if scheduled.request.pages.lock is not None]
        return plan

    def _share_out(
        self,
        running: Sequence[Request],
        budget: int,
        plan: list[ScheduledRequest],
        make_room: Callable[[Request], bool],
    ) -> tuple[int, bool]:
        """Add to `plan` what each of `running` computes: a decoding request all of its tokens, one that
        prefills a chunk out of `budget`. Returns the budget that is left, and whether one of them got no
        pages.

        make_room : finds pages for all tokens of a request; False where it has given up its own
        """
        short_of_pages, page_size = False, self._pages.page_size
        for request in running:
            pages = request.pages
            if pages.lock is None:
                continue  # retracted in this step, for another one
            if request.target_len > len(pages.ids) * page_size and not make_room(request):
                short_of_pages = True
            elif request.decoding:
                plan.append(ScheduledRequest(request, request.length + request.computed_ahead))
            elif budget > 0:
                budget -= self._take(request, budget, plan)
        return budget, short_of_pages

    def _take(self, request: Request, budget: int, plan: list[ScheduledRequest]) -> int:
        """Add a chunk of `request` to `plan`, at most `budget` tokens, and return their number."""
        stop = self._pages.states.cut(request, request.chunk_stop(budget))
        plan.append(ScheduledRequest(request, stop))
        return stop - request.computed_len

    def _make_room(self, request: Request) -> bool:
        """Find pages for all tokens of `request`, if need be by retracting the newest requests of the lowest
        rank. False where `request` itself was retracted."""
        while not self._pages.grow(request):
            if request.drop_draft() or self._give_way():
                continue
            last = self._requests.running[-1]
            self._requests.retract(last)
            if last is request:
                return False
        return True
