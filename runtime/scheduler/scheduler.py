"""The scheduler: schedule, run, postprocess.

Continuous batching with one kind of work: a request's known tokens beyond its computed ones are
computed, and when a step reaches the last of them the next token is sampled. Prefill chunks, decoding
and resumption after a retraction are the same thing with different lengths (Orca, OSDI 22;
Sarathi-Serve, OSDI 24), so one packed batch mixes them.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import torch

from ramify.constraint import Constraint
from ramify.errors import EngineError, InvalidRequest, RamifyError
from ramify.messages import (
    Abort,
    Failed,
    Finish,
    GrammarFailed,
    GrammarReady,
    Reply,
    SchedulerStats,
    StepOutput,
    Submit,
)
from ramify.radix.cache import PrefixCache
from ramify.runtime.config import EngineConfig
from ramify.runtime.executor.attention import picked
from ramify.runtime.executor.batch import Extension, pack
from ramify.runtime.executor.runner import Runner
from ramify.runtime.processes.worker_process import log
from ramify.runtime.scheduler.admission import Admission
from ramify.runtime.scheduler.appending import Growth
from ramify.runtime.scheduler.constraints.constrained import ConstrainedOutput
from ramify.runtime.scheduler.constraints.healing import MAX_TOKENS, Healer, Healing
from ramify.runtime.scheduler.constraints.masks import MaskFiller
from ramify.runtime.scheduler.control import Control
from ramify.runtime.scheduler.counters import Ledger
from ramify.runtime.scheduler.limits import Limits
from ramify.runtime.scheduler.next_tokens import RequestSampler, Sampled
from ramify.runtime.scheduler.output import Logprob, StepOutputs
from ramify.runtime.scheduler.overlap import Lookahead
from ramify.runtime.scheduler.pages import RequestPages
from ramify.runtime.scheduler.policy import POLICIES
from ramify.runtime.scheduler.programs.programs import Programs
from ramify.runtime.scheduler.request import Request
from ramify.runtime.scheduler.scoring import Computed, Scorer, Scoring
from ramify.runtime.scheduler.speculation.drafter import Drafter

if TYPE_CHECKING:
    from ramify.grammar.matcher import Grammar
    from ramify.grammar.retokenize import Retokenizer
    from ramify.runtime.scheduler.constraints.grammars import GrammarStore

FORCED_RUN = 16
"""A decoding request's forced tokens up to this number do not wait for the budget of prefill."""
PAGES_FOR_GUESSES = 4
"""Free pages a request below which nothing is guessed: a guess is not worth a retraction."""


@dataclasses.dataclass(frozen=True, slots=True)
class Planned:
    """One request's share of a step: its tokens up to `stop` will have been computed, a draft included."""

    request: Request
    stop: int

    @property
    def samples(self) -> bool:
        request = self.request
        return self.stop == request.target_len and request.budget_left > 0


class Scheduler:
    """Owns the requests of one engine. `reply` takes what goes to the detokenizer beside step outputs."""

    def __init__(
        self,
        config: EngineConfig,
        limits: Limits,
        runner: Runner,
        cache: PrefixCache,
        grammars: GrammarStore,
        reply: Callable[[Reply | Failed], None],
        clock: Callable[[], float] = time.monotonic,
        retokenizer: Retokenizer | None = None,
        healer: Healer | None = None,
    ) -> None:
        self._config = config
        self._limits = limits
        self._runner = runner
        self._cache = cache
        self._grammars = grammars
        self._reply = reply
        self._clock = clock
        self._pages = RequestPages(cache, config.page_size)
        self._programs = Programs()
        self._admission = Admission(self._pages, POLICIES[config.policy](self._programs), config.max_running)
        self._outputs = StepOutputs()
        self._sampler = RequestSampler(runner, limits)
        self._lookahead = Lookahead(runner, self._pages)
        self._masks = MaskFiller()
        self._retokenizer = retokenizer
        self._healer = healer
        self._seeds = random.Random(config.seed)
        self._requests: dict[str, Request] = {}
        self._compiling: dict[str, Request] = {}
        self._waiting: list[Request] = []  # both in the order of arrival
        self._running: list[Request] = []
        self.ledger = Ledger()
        self._growth = Growth(
            limits,
            self._outputs,
            self._sampler,
            self.ledger,
            self._finish,
            jump_forward=config.jump_forward,
        )
        self._drafter = Drafter(cache) if config.speculation else None
        self._scorer = Scorer(runner, self._pages, self._enqueue, self._stop_running, self._finish)
        self._control = Control(
            cache,
            self._pages.leases,
            self._programs,
            self.ledger,
            reply,
            running=self._running,
            waiting=self._waiting,
            compiling=self._compiling,
        )
        self._handlers: dict[type, Callable[..., None]] = {
            Submit: self._submit,
            Abort: self._abort,
            **self._control.handlers,
            GrammarReady: lambda message: self._settle(self._grammars.deliver(message)),
            GrammarFailed: lambda message: self._settle(self._grammars.deliver(message)),
        }

    @property
    def busy(self) -> bool:
        """Whether a step would do something."""
        return bool(self._running or self._waiting)

    def receive(self, message: object) -> None:
        self._handlers[type(message)](message)

    def stats(self) -> SchedulerStats:
        return self._control.stats()

    def compiler_died(self) -> None:
        self._settle(self._grammars.compiler_died())

    # --- the three verbs --------------------------------------------------------------------------

    def step(self) -> StepOutput | None:
        """One step; None when it had nothing to tell."""
        began = self._clock()
        plan = self.schedule(began)
        if plan:
            decoding = all(_decoding(planned.request) for planned in plan)
            try:
                hidden = self.run(plan)
            except Exception as error:  # the pass as a whole failed: its requests end, the engine goes on
                log.exception("a forward pass failed")
                self._runner.check_device()  # a lost one ends this process, and a new one gets it back
                for planned in plan:
                    self._fail(planned.request, EngineError(f"The forward pass failed: {error}"))
            else:
                self.postprocess(plan, hidden)
                if self._drafter is not None and decoding:
                    self._drafter.cost.learn(len(hidden), self._clock() - began)
            self.ledger.steps += 1
        output = self._outputs.take(self._clock())
        self.ledger.step_s += self._clock() - began
        if self._config.check_pages:
            self._cache.check()
        return output

    def schedule(self, now: float) -> list[Planned]:
        """Give the running requests, oldest first, what they need, then admit waiting ones."""
        budget = self._config.chunk_tokens
        plan: list[Planned] = []
        short_of_pages = False
        if self._drafter is not None:
            self._speculate(self._drafter)
        for request in list(self._running):
            if request.lock is None:
                continue  # retracted in this loop, for an older one
            if not self._make_room(request):
                short_of_pages = True
                continue
            if _decoding(request):
                plan.append(Planned(request, request.target_len))
            elif budget > 0:
                budget -= self._take(request, budget, plan)
        if not short_of_pages:
            for request in self._admission.next(self._waiting, self._running, budget, now):
                self._start(request, now)
                if request.extend_len == 0 and request.stretch is not None:
                    self._scorer.go_on(request, now)
                elif request.extend_len == 0:
                    self._finish(request, Finish(reason="length"))  # nothing to compute, nothing to sample
                elif budget > 0:
                    budget -= self._take(request, budget, plan)
        return plan

    def _speculate(self, drafter: Drafter) -> None:
        decoding = [request for request in self._running if _decoding(request)]
        guessing = [request for request in decoding if request.may_guess]
        if self._cache.available() <= PAGES_FOR_GUESSES * len(guessing):
            return
        try:
            drafter.propose(guessing, sum(request.target_len - request.computed_len for request in decoding))
        except Exception:  # nobody needs a guess
            log.exception("guessing failed, and is off from now on")
            self._drafter = None

    def _take(self, request: Request, budget: int, plan: list[Planned]) -> int:
        """Plan as many tokens of `request` as `budget` allows, and return how many."""
        stop = min(request.target_len, request.computed_len + budget)
        if request.length <= stop < request.target_len:
            stop = request.target_len  # a draft is verified in the step that reaches it
        plan.append(Planned(request, stop))
        return stop - request.computed_len

    def run(self, plan: Sequence[Planned]) -> torch.Tensor:
        """One forward pass: (tokens, hidden size), the states of the planned tokens in their order.

        What was computed ahead is taken from there. The masks of the tokens to come are computed beside it.
        """
        began = self._clock()
        ahead = self._lookahead.take(plan)
        rest = [planned for planned, row in zip(plan, ahead.rows, strict=True) if row is None]
        copies = []
        for planned in rest:
            if planned.request.copy is not None:
                copies.append(planned.request.copy)
                planned.request.copy = None
        extensions = [
            Extension(request.known_and_draft, request.computed_len, planned.stop, request.pages)
            for planned in rest
            for request in (planned.request,)
        ]
        self._masks.begin([planned.request for planned in plan if planned.samples])
        try:
            fresh = self._runner.forward(pack(extensions, self._config.page_size, copies)) if rest else None
        finally:
            self._masks.wait()
        hidden = ahead.joined(fresh, [planned.stop - planned.request.computed_len for planned in plan])
        self.ledger.computed_tokens += len(hidden)
        self.ledger.guessed_tokens += sum(planned.request.guessed_len for planned in plan)
        self.ledger.model_s += self._clock() - began
        return hidden

    def postprocess(self, plan: Sequence[Planned], hidden: torch.Tensor) -> None:
        """Record what was computed, choose and append tokens, and end what is done."""
        now = self._clock()
        next_row = 0
        sampling: list[tuple[Request, int]] = []  # with the row of the state that predicts the next token
        scored: list[Computed] = []
        for planned in plan:
            request = planned.request
            start, stop = request.computed_len, planned.stop
            first_row, next_row = next_row, next_row + stop - start
            if request.lock is None:
                continue  # another part of its choices has failed in this step
            with self._failing_alone(request):
                samples = planned.samples
                if request.wants_logprobs:
                    self._growth.report_computed(request, hidden[first_row:next_row], start, stop)
                prefilled = request.prefilling
                request.computed_len = min(stop, request.length)
                self._programs.serve(request, stop - start)
                if prefilled:
                    self._pages.commit(request)
                if samples:
                    sampling.append((request, first_row + request.length - 1 - start))
                elif request.stretch is not None:
                    scored.append(Computed(request, start, stop, first_row))
                elif request.extend_len == 0:
                    self._finish(request, Finish(reason="length"))
        if scored:
            self._score(scored, hidden, now)
        if sampling:
            began = self._clock()
            # A draft's rows are computed with the first: most are kept, and the head's weights are read once.
            # They come behind the first of all requests, so that what is chosen from at a time is a slice.
            longest = max(request.draft_len for request, _ in sampling)
            needed = [
                row + i for i in range(longest + 1) for request, row in sampling if i <= request.draft_len
            ]
            states = hidden if needed == list(range(len(hidden))) else picked(hidden, needed)
            logits = self._runner.logits(states, self._sampler.masks([request for request, _ in sampling]))
            self.ledger.model_s += self._clock() - began
            place = {row: i for i, row in enumerate(needed)}
            while sampling:
                sampling = self._choose(sampling, logits, place, now)

    def _score(self, computed: Sequence[Computed], hidden: torch.Tensor, now: float) -> None:
        """Read off what scores choices, and go on to what follows."""
        began = self._clock()
        try:
            self._scorer.read(computed, hidden)
        except Exception as error:
            log.exception("scoring failed")
            for entry in computed:
                self._fail(entry.request, EngineError(f"Scoring failed: {error}"))
            return
        self.ledger.model_s += self._clock() - began
        for request, *_ in computed:
            if request.lock is not None and request.extend_len == 0:
                with self._failing_alone(request):
                    self._scorer.go_on(request, now)

    def _choose(
        self, choices: list[tuple[Request, int]], logits: torch.Tensor, place: Mapping[int, int], now: float
    ) -> list[tuple[Request, int]]:
        """Choose a token for each request from the logits of its state, which are in row ``place[state]``.
        Returns those whose draft was chosen, so that the next state predicts one more token."""
        ready: list[tuple[Request, int]] = []
        for request, row in choices:
            error = self._masks.error(request)
            if error is None:
                ready.append((request, row))
            else:
                self._fail(request, error)
        if not ready:
            return []
        requests = [request for request, _ in ready]
        counts = [self._sampler.at_once(request) for request in requests]
        # In the order of the logits.
        wanted = [(i, ahead) for ahead in range(max(counts)) for i in range(len(ready)) if ahead < counts[i]]
        rows = [place[ready[i][1] + ahead] for i, ahead in wanted]
        first, last = rows[0], rows[0] + len(rows)
        chosen = self._sampler.next_tokens(
            [(requests[i], ahead) for i, ahead in wanted],
            logits[first:last] if rows == list(range(first, last)) else picked(logits, rows),
            self._next_pass(requests) if len(rows) == len(requests) else None,
        )
        self._lookahead.settle([sampled.token for sampled in chosen])
        tokens: list[list[Sampled]] = [[] for _ in ready]
        for (i, _), sampled in zip(wanted, chosen, strict=True):
            tokens[i].append(sampled)
        more: list[tuple[Request, int]] = []
        for (request, row), some in zip(ready, tokens, strict=True):
            with self._failing_alone(request):
                on = 0
                for token, logprob in some:
                    following = self._append(request, token, logprob, now)
                    on += following
                    if not following:
                        break
                else:
                    more.append((request, row + on))
        self._masks.fill_now([request for request, _ in more])
        return more

    def _append(self, request: Request, token: int, logprob: Logprob | None, now: float) -> int:
        """Append a chosen token. Returns how many states on the next one is predicted, 0 if none does yet."""
        if token != request.next_draft:
            self._growth.accept(request, token, logprob, now)
            return 0
        if request.next_is_guess:
            self.ledger.accepted_tokens += 1
            return self._growth.accept_guess(request, token, logprob, now)
        return int(self._growth.keep_draft(request, token, logprob))

    def _next_pass(self, requests: Sequence[Request]) -> Callable[[torch.Tensor], None] | None:
        """Launches the pass over the tokens being chosen, where the next step will want nothing else."""
        if not self._config.overlap or self._waiting or len(requests) < len(self._running):
            return None

        def launch(tokens: torch.Tensor) -> None:
            began = self._clock()
            self._lookahead.launch(requests, tokens)
            self.ledger.model_s += self._clock() - began

        return launch

    @contextlib.contextmanager
    def _failing_alone(self, request: Request) -> Iterator[None]:
        """What goes wrong with one request ends that request."""
        try:
            yield
        except RamifyError as error:
            self._fail(request, error)
        except Exception as error:
            log.exception("request %s failed", request.rid)
            self._fail(request, EngineError(f"The request failed: {error}"))

    # --- messages ---------------------------------------------------------------------------------

    def _submit(self, message: Submit) -> None:
        scoring = None
        try:
            max_tokens = self._limits.max_tokens(message)
            if message.choices:
                scoring = Scoring(message)
                self._limits.check_choices(scoring.longest, scoring.tokens)
                message = msgspec.structs.replace(message, ids=scoring.ids)
        except RamifyError as error:
            self._reply(Failed(rid=message.rid, error=error.to_info()))
            return
        request = Request(
            message,
            arrival=self._clock(),
            max_tokens=max_tokens,
            default_seed=self._seeds.getrandbits(63),
        )
        self._requests[request.rid] = request
        if message.open_end:
            self._heal(request)
        if scoring is not None:
            request.scoring, request.stretch = scoring, scoring.first
        self.ledger.prompt_tokens += request.prompt_tokens
        self._programs.join(request)
        self._pages.leases.arrived(request)
        if scoring is not None:
            with self._failing_alone(request):
                self._scorer.begin(request, request.arrival)
        elif request.constraint is None:
            if request.preambles:
                self._constrain(request, None)
            else:
                self._enqueue(request)
        else:
            self._compile(request, request.constraint)

    def _compile(self, request: Request, constraint: Constraint) -> None:
        found = self._grammars.request(request.rid, constraint)
        if found is None:
            self._compiling[request.rid] = request
        elif isinstance(found, RamifyError):
            self._fail(request, found)
        else:
            self._constrain(request, found)

    def _heal(self, request: Request) -> None:
        sampling = request.sampling
        if self._healer is None or not sampling.token_healing or sampling.prompt_logprobs_start is not None:
            return
        if request.max_tokens > 0 and (end := self._healer.open_end(request.ids[-MAX_TOKENS - 1 :].tolist())):
            request.heal(Healing(self._healer, end.text), end.tokens)

    def _enqueue(self, request: Request) -> None:
        bisect.insort(self._waiting, request, key=lambda other: other.arrival)

    def _abort(self, message: Abort) -> None:
        request = self._requests.get(message.rid)
        if request is None:
            return
        if message.silent:
            self._retire(request)
        else:
            self._finish(request, Finish(reason="abort"))

    def _settle(self, settled: Sequence[tuple[str, Grammar | RamifyError]]) -> None:
        """Requests whose grammar has come, or has failed."""
        for rid, outcome in settled:
            request = self._compiling.pop(rid, None)
            if request is None:
                continue
            if isinstance(outcome, RamifyError):
                self._fail(request, outcome)
            else:
                self._constrain(request, outcome)

    def _constrain(self, request: Request, grammar: Grammar | None) -> None:
        with self._failing_alone(request):
            request.unenforced = () if grammar is None else grammar.unenforced
            prefix = b"" if request.healing is None else request.healing.rest
            matcher = self._grammars.matcher(grammar, request.preambles, prefix)
            request.constrained = constrained = ConstrainedOutput(
                matcher, self._limits.vocab_size, self._limits.eos_token_ids, self._retokenizer
            )
            needed = constrained.needed - request.draft_len
            if 0 < request.max_tokens < needed:
                raise InvalidRequest(
                    f"The shortest text that satisfies the constraint has {needed} tokens; "
                    f"max_tokens is {request.max_tokens}.",
                    field="max_tokens",
                    remedy=f"Allow at least {needed} tokens.",
                )
            if request.max_tokens > 0 and request.healing is None:
                self._growth.jump(request, loose=0)
                if (
                    request.output_len
                    and not request.wants_prompt_logprobs
                    and self._growth.end_if_done(request)
                ):
                    return
            self._enqueue(request)

    # --- pages ------------------------------------------------------------------------------------

    def _start(self, request: Request, now: float) -> None:
        self._waiting.remove(request)
        bisect.insort(self._running, request, key=lambda other: other.arrival)
        if request.first_pass is None:
            request.first_pass = now
            self._programs.started(request)
            request.cached_len = min(request.computed_len, request.prompt_len)
            self.ledger.cached_tokens += request.cached_len

    def _make_room(self, request: Request) -> bool:
        """Pages for all known tokens of `request`, taken from the newest request if need be."""
        while not self._pages.grow(request):
            if request.drop_guesses():
                continue
            newest = self._running[-1]
            self._retract(newest)
            if newest is request:
                return False
        return True

    def _retract(self, request: Request) -> None:
        """Back to the waiting requests; its tokens, matcher and random numbers stay as they are."""
        request.drop_guesses()
        self._pages.retract(request)
        self._running.remove(request)
        if not request.announced:
            request.prompt_logprobs = []
        request.retractions += 1
        self.ledger.retractions += 1
        self._enqueue(request)

    # --- ends -------------------------------------------------------------------------------------

    def _finish(self, request: Request, finish: Finish) -> None:
        self._outputs.finish(request, finish)
        self._retire(request)

    def _fail(self, request: Request, error: RamifyError) -> None:
        request = request.head
        if request.rid not in self._requests:
            return  # another part of its choices has failed before
        self._outputs.drop(request)
        self._reply(Failed(rid=request.rid, error=error.to_info()))
        self._retire(request)

    def _retire(self, request: Request) -> None:
        """Forget the request; its pages go to the tree."""
        del self._requests[request.rid]
        if self._drafter is not None:
            self._drafter.ended(request)
        self._programs.leave(request)
        if self._compiling.pop(request.rid, None) is not None:
            self._grammars.forget(request.rid)
            return
        for part in (request, *self._scorer.end(request)):
            self._pages.release(part, self._clock())
            self._stop_running(part)
            if part in self._waiting:
                self._waiting.remove(part)

    def _stop_running(self, request: Request) -> None:
        if request in self._running:
            self._running.remove(request)


def _decoding(request: Request) -> bool:
    """Its tokens do not wait for the budget of prefill."""
    return not request.prefilling and request.extend_len <= FORCED_RUN
