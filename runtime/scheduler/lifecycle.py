"""The states of requests from arrival to end, and the moves between states.

On arrival a request is checked against the model's limits, and its prompt may be healed.

arrival ──▶ compiling ──▶ waiting ──▶ running ──▶ end
                              ▲           │
                              └─ retract ─┘
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import logging
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from ramify.engine_messages import Abort, Failed, GrammarFailed, GrammarReady, Reply, Submit
from ramify.errors import EngineError, InvalidConstraint, InvalidRequest, RamifyError
from ramify.messages import Finish
from ramify.runtime.model.lora.adapters import Adapters
from ramify.runtime.model.tokenizer.end_tokens import no_end_token
from ramify.runtime.scheduler.holds import check_pin
from ramify.runtime.scheduler.outputs import OutputAppender, StepOutputs
from ramify.runtime.scheduler.requests.accounts import Budgets, Counters
from ramify.runtime.scheduler.requests.choices import ChoiceTree, ScoringState
from ramify.runtime.scheduler.requests.constrained import MAX_TOKENS, ConstrainedOutput, Healer, Healing
from ramify.runtime.scheduler.requests.decisions import Decisions
from ramify.runtime.scheduler.requests.flows import Flows
from ramify.runtime.scheduler.requests.limits import Limits
from ramify.runtime.scheduler.requests.pages import RequestPages
from ramify.runtime.scheduler.requests.programs import Programs
from ramify.runtime.scheduler.requests.request import Request
from ramify.runtime.scheduler.speculation.drafter import Drafter

if TYPE_CHECKING:
    from ramify.grammar.matcher import Grammar
    from ramify.grammar.retokenize import Retokenizer
    from ramify.runtime.scheduler.grammars import GrammarStore
    from ramify.runtime.scheduler.results import Scorer

log = logging.getLogger("ramify")

ORDER = operator.attrgetter("order")


@dataclasses.dataclass(eq=False)
class Lifecycle:
    """All requests by state. Requests that compute spans of choices are in `waiting` and `running` only."""

    pages: RequestPages
    grammars: GrammarStore
    drafter: Drafter
    counters: Counters
    flows: Flows
    reply: Callable[[Reply | Failed], None]
    clock: Callable[[], float]
    programs: Programs = dataclasses.field(default_factory=Programs)
    outputs: StepOutputs = dataclasses.field(default_factory=StepOutputs)
    compiling: dict[str, Request] = dataclasses.field(default_factory=dict)
    waiting: list[Request] = dataclasses.field(default_factory=list)
    """Waiting requests, sorted by `Request.order`. `running` is sorted in the same way."""
    running: list[Request] = dataclasses.field(default_factory=list)
    open: dict[str, Request] = dataclasses.field(default_factory=dict)
    """Requests that were submitted and have not ended, by id."""
    budgets: Budgets = dataclasses.field(default_factory=Budgets)

    def arrive(self, request: Request) -> None:
        self.open[request.rid] = request
        self.programs.join(request)
        self.flows.join(request)
        self.budgets.join(request)
        self.pages.leases.arrived(request)

    def enqueue(self, request: Request, *, hold: bool = True) -> None:
        """Queue `request`; with `hold`, after its pages in the cold tier have been read."""
        if hold and self.pages.cold is not None and self.pages.cold.hold(request):
            return
        found = self.pages.match(request).length
        if request.stats.first_pass is None:
            found = max(found, request.share_prefix())
        request.count_uncached(found)
        request.take_rank()
        bisect.insort(self.waiting, request, key=ORDER)
        self.flows.settled = False

    def judge_flows(self) -> None:
        """Decide which flows yield. If that changes ranks, sort `running` and `waiting` anew."""
        if not self.flows.settled and self.flows.judge(self.running, self.waiting):
            self.running.sort(key=ORDER)
            self.waiting.sort(key=ORDER)

    def start(self, request: Request, now: float) -> None:
        """Move `request`, which has been admitted, from `waiting` to `running`."""
        self.waiting.remove(request)
        bisect.insort(self.running, request, key=ORDER)
        self.flows.settled = False
        request.find_plain()
        request.count_uncached(request.computed_len)
        stats = request.stats
        if stats.first_pass is None:
            stats.first_pass = now
            self.programs.started(request)
            stats.cached_tokens = min(request.computed_len, request.prompt_len)
            self.counters.prompt_tokens += request.prompt_tokens
            self.counters.cached_tokens += stats.cached_tokens

    def stop(self, request: Request) -> None:
        if request in self.running:
            self.running.remove(request)
            self.flows.settled = False

    def retract(self, request: Request) -> None:
        """Move `request` from `running` back to `waiting`. The request keeps its tokens, matcher and random
        numbers."""
        request.drop_draft()
        self.pages.retract(request)
        self.running.remove(request)
        if not request.report.announced:
            request.report.prompt_logprobs = []
        request.stats.retractions += 1
        self.counters.retractions += 1
        self.enqueue(request)

    def abort(self, message: Abort) -> None:
        request = self.open.get(message.rid)
        if request is None:
            return
        if message.silent:
            self._end(request)
        else:
            self.finish(request, Finish(reason="abort"))

    def end_exceeding(self, now: float) -> None:
        """End the requests that exceed a token or time limit of their program."""
        for request, limit in self.budgets.exceeding(now, self.running):
            self.finish(request, Finish(reason="abort", limit=limit))

    def finish(self, request: Request, finish: Finish) -> None:
        self.outputs.finish(request, finish)
        self._end(request)

    def fail(self, request: Request, error: RamifyError) -> None:
        request = request.head
        if request.rid not in self.open:
            return  # it has ended already, when another of its spans failed
        self.outputs.drop(request)
        if isinstance(error, InvalidConstraint) and error.field is None and request.constraint is not None:
            error.field = request.constraint.kind  # a matcher does not know of which kind its grammar is
        self.refuse(request.rid, error)
        self._end(request)

    def refuse(self, rid: str, error: RamifyError) -> None:
        """Reply to `rid` with `error`. Ends no request: `rid` has not arrived, or the caller ends it."""
        self.reply(Failed(rid=rid, error=error.to_info()))

    @contextlib.contextmanager
    def failing_alone(self, request: Request) -> Iterator[None]:
        """A context in which an exception fails `request` alone, and does not leave the context."""
        try:
            yield
        except Exception as error:
            self.fail_alone(request, error)

    def fail_alone(self, request: Request, error: Exception) -> None:
        """Fail `request` with `error`, inside the `except` block that handles `error`. For loops over
        requests in which a `failing_alone` context for each request would cost too much."""
        if not isinstance(error, RamifyError):
            log.exception("request %s failed", request.rid)
            error = EngineError(f"The request failed: {error}")
        self.fail(request, error)

    def _end(self, request: Request) -> None:
        """End `request`. Its computed pages stay in the tree until evicted."""
        del self.open[request.rid]
        choices = None if request.scoring is None else request.scoring.choices
        parts = [request]
        if choices is not None:
            parts += [span for span in choices.open if span is not request]
        for part in parts:  # done first, so that no step goes on with them if something below raises
            self.stop(part)
            if part in self.waiting:
                self.waiting.remove(part)
            elif self.pages.cold is not None:
                self.pages.cold.drop(part)
        self.drafter.ended(request)
        self.programs.leave(request)
        self.flows.leave(request)
        self.budgets.leave(request)
        if self.compiling.pop(request.rid, None) is not None:
            self.grammars.forget(request.rid)
            return
        if choices is not None:
            for span in choices.resting:
                self.pages.leases.end_own(span)
        for part in parts:
            self.pages.rest(part, self.clock())


@dataclasses.dataclass(eq=False)
class Arrivals:
    """Turns `Submit` messages into requests. A request with a constraint is enqueued when its grammar is
    compiled.

    retokenizer : spells forced text as the tokenizer does; if None, only single tokens are forced
    healer : has the masks for token healing; if None, prompts are not healed
    pinned_share : `EngineConfig.max_pinned_share`
    """

    limits: Limits
    adapters: Adapters
    retokenizer: Retokenizer | None
    healer: Healer | None
    requests: Lifecycle
    appender: OutputAppender
    scorer: Scorer
    pinned_share: float

    def submit(self, message: Submit) -> None:
        choices = adapter = decisions = None
        try:
            if message.lora:
                adapter = self.adapters.find(message.lora, message.lora_revision)
            max_tokens = self.limits.max_tokens(message)
            if message.constraint is not None and not self.limits.eos_token_ids:
                raise no_end_token("constraint")
            if message.decide is not None and message.decide.end == "turn":
                if not self.limits.eos_token_ids:
                    raise no_end_token("decide.end")
                decide = msgspec.structs.replace(message.decide, ends=self.limits.eos_token_ids)
                message = msgspec.structs.replace(message, decide=decide)
            if message.choices:
                choices = ChoiceTree(message)
                self.limits.check_choices(choices.longest, choices.tokens)
                message = msgspec.structs.replace(message, ids=choices.ids)
            if message.decide is not None:
                decisions = Decisions(message, message.decide)
                self.requests.pages.check_decisions(decisions, self.limits)
                message, max_tokens = msgspec.structs.replace(message, ids=decisions.ids), 0
        except RamifyError as error:
            self.requests.refuse(message.rid, error)
            return
        request = Request(
            message,
            arrival=self.requests.clock(),
            max_tokens=max_tokens,
            adapter=adapter,
            decisions=decisions,
        )
        if message.hint is not None and message.hint.pinned:
            try:
                check_pin(self.requests.pages.cache, request, self.requests.open.values(), self.pinned_share)
            except RamifyError as error:
                self.requests.refuse(message.rid, error)
                return
        if message.open_end:
            self._heal(request)
        if choices is not None:
            request.scoring = ScoringState(choices, choices.first, request)
        self.requests.arrive(request)
        if choices is not None:
            with self.requests.failing_alone(request):
                self.scorer.begin_scoring(request, choices)
        elif request.constraint is not None:
            sampling = request.sampling
            found = self.requests.grammars.request(
                request.rid, request.constraint, sampling.stop, sampling.stop_token_ids
            )
            if found is None:
                self.requests.compiling[request.rid] = request
                request.stats.queued = None
            else:
                self._begin(request, found)
        else:
            self._begin(request, None)

    def grammar_answered(self, message: GrammarReady | GrammarFailed) -> None:
        self._begin_all(self.requests.grammars.deliver(message))

    def compiler_died(self) -> None:
        self._begin_all(self.requests.grammars.compiler_died())

    def _heal(self, request: Request) -> None:
        sampling = request.sampling
        if self.healer is None or not sampling.token_healing or sampling.prompt_logprobs_start is not None:
            return
        if request.max_tokens > 0 and (end := self.healer.open_end(request.ids[-MAX_TOKENS - 1 :].tolist())):
            request.heal(Healing(self.healer, end.text), end.tokens)

    def _begin_all(self, outcomes: Sequence[tuple[str, Grammar | RamifyError]]) -> None:
        for rid, outcome in outcomes:
            request = self.requests.compiling.pop(rid, None)
            if request is not None:
                request.stats.queued = self.requests.clock()
                self._begin(request, outcome)

    def _begin(self, request: Request, grammar: Grammar | RamifyError | None) -> None:
        with self.requests.failing_alone(request):
            if isinstance(grammar, RamifyError):
                raise grammar
            if grammar is not None or request.preambles:
                self._constrain(request, grammar)
            if request.continues is not None:
                self.appender.replay(request, request.continues)
            if request.constrained is not None and request.max_tokens > 0 and request.healing is None:
                self.appender.jump(request, loose=0)
            begun = request.output_len > 0 and not request.wants_prompt_logprobs
            if not (begun and self.appender.end_if_done(request)):
                self.requests.enqueue(request)

    def _constrain(self, request: Request, grammar: Grammar | None) -> None:
        """Give `request` a matcher. Raises `InvalidRequest` if `max_tokens` is too small for the
        constraint."""
        request.report.enforcement = None if grammar is None else grammar.enforcement
        prefix = b"" if request.healing is None else request.healing.rest
        matcher = self.requests.grammars.matcher(grammar, request.preambles, prefix)
        request.grammar = grammar
        request.constrained = constrained = ConstrainedOutput(
            matcher, self.limits.vocab_size, self.limits.eos_token_ids, self.retokenizer
        )
        needed, most = constrained.needed - request.known_len, request.max_tokens
        if request.answer_tokens is not None:
            ends = sum(len(one.end_ids) for one in request.preambles if one.uncounted)
            needed, most = needed - ends, min(request.answer_tokens, most - ends)
        if request.sampling.max_tokens != 0 and most < needed:
            what = _NAMES["" if request.constraint is None else request.constraint.kind]
            raise InvalidRequest(
                f"The shortest answer that fits {what} has {needed} tokens; max_tokens is {most}.",
                field="max_tokens",
                remedy=f"Allow at least {needed} tokens.",
            )


_NAMES = {
    "": "the preambles",
    "json_schema": "the schema",
    "json_object": "a JSON object",
    "regex": "the regular expression",
    "ebnf": "the grammar",
    "lark": "the grammar",
    "choices": "the choices",
    "structural_tag": "the tools or the structural tag",
}
"""Names of constraints in error messages, by kind of constraint; "" for preambles alone."""
